//! Noise whose every eight bytes are a permutation of (stream, place): what belongs at a place is
//! known without the sender, and what stands at the wrong place says where it belongs.

/// Bits of a word's number in its stream.
const PLACE_BITS: u32 = 40;

/// Streams and places beyond these are taken for noise when wrong bytes are explained: few enough
/// that chance hardly hits one.
const STREAMS: u64 = 1 << 8;
const PLACES: u64 = 1 << 28;

#[derive(Clone, Copy)]
pub struct Pattern {
    seed: u64,
    stream: u64,
}

/// The finalizer of splitmix64, a permutation of all words.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Its inverse.
pub fn unmix(mut x: u64) -> u64 {
    x = (x ^ (x >> 31) ^ (x >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    x = (x ^ (x >> 27) ^ (x >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    x ^ (x >> 30) ^ (x >> 60)
}

impl Pattern {
    pub fn new(seed: u64, stream: u32) -> Self {
        let stream = u64::from(stream) << PLACE_BITS;
        Pattern {
            seed: mix(seed),
            stream,
        }
    }

    fn word(&self, place: u64) -> [u8; 8] {
        mix((self.stream | place) ^ self.seed).to_le_bytes()
    }

    /// What belongs at offset `at` and after.
    pub fn fill(&self, at: u64, out: &mut [u8]) {
        let mut place = at / 8;
        let within = (at % 8) as usize;
        let mut out = out;
        if within != 0 {
            let n = out.len().min(8 - within);
            out[..n].copy_from_slice(&self.word(place)[within..within + n]);
            out = &mut out[n..];
            place += 1;
        }
        let mut words = out.chunks_exact_mut(8);
        for w in &mut words {
            w.copy_from_slice(&self.word(place));
            place += 1;
        }
        let rest = words.into_remainder();
        let n = rest.len();
        rest.copy_from_slice(&self.word(place)[..n]);
    }

    /// `None`: these bytes belong at `at`. Else the first offset that has another byte, and an
    /// explanation. `scratch` is overwritten.
    pub fn wrong(&self, at: u64, got: &[u8], scratch: &mut Vec<u8>) -> Option<(u64, String)> {
        scratch.resize(got.len(), 0);
        self.fill(at, scratch);
        if got == scratch {
            return None;
        }
        let first = got.iter().zip(scratch.iter()).position(|(a, b)| a != b)?;
        let from = at + first as u64;
        let bytes = &got[first..];
        let text = match self.place_of(bytes) {
            Some((stream, place)) if (stream, place) == (self.number(), from) => {
                "changed, and what follows is right".into()
            }
            Some((stream, place)) if stream == self.number() => {
                format!("here stands what belongs at {place} of this stream")
            }
            Some((stream, place)) => {
                format!("here stands what belongs at {place} of stream {stream}")
            }
            None => format!(
                "of no stream: {:02x?} instead of {:02x?}",
                &bytes[..bytes.len().min(24)],
                &scratch[first..][..bytes.len().min(24)]
            ),
        };
        Some((from, text))
    }

    fn number(&self) -> u64 {
        self.stream >> PLACE_BITS
    }

    /// Where do these bytes belong? Stream and offset of the first of them.
    fn place_of(&self, bytes: &[u8]) -> Option<(u64, u64)> {
        (0..8).find_map(|skip| {
            let word = bytes.get(skip..skip + 8)?.try_into().ok()?;
            let named = unmix(u64::from_le_bytes(word)) ^ self.seed;
            let (stream, place) = (named >> PLACE_BITS, named & ((1 << PLACE_BITS) - 1));
            let known = stream < STREAMS && place < PLACES;
            known.then(|| (stream, (place * 8).saturating_sub(skip as u64)))
        })
    }
}
