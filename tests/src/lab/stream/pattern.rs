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
fn unmix(mut x: u64) -> u64 {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmix_inverts() {
        for i in 0..1000u64 {
            let x = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            assert_eq!(unmix(mix(x)), x);
        }
    }

    #[test]
    fn pieces_of_any_size_make_the_same_stream() {
        let p = Pattern::new(7, 3);
        let mut whole = vec![0; 1000];
        p.fill(0, &mut whole);
        for size in [1, 3, 7, 8, 9, 64, 333] {
            let mut at = 0;
            for piece in whole.chunks(size) {
                assert_eq!(p.wrong(at, piece, &mut Vec::new()), None);
                at += piece.len() as u64;
            }
        }
    }

    #[test]
    fn says_where_wrong_bytes_belong() {
        let (p, other) = (Pattern::new(7, 3), Pattern::new(7, 4));
        let mut got = vec![0; 4096];
        let at = |p: &Pattern, from, to: &mut [u8]| p.fill(from, to);
        // Ten bytes lost at 1003.
        at(&p, 0, &mut got[..1003]);
        at(&p, 1013, &mut got[1003..]);
        let (from, text) = p.wrong(0, &got, &mut Vec::new()).unwrap();
        assert_eq!(from, 1003);
        assert_eq!(text, "here stands what belongs at 1013 of this stream");
        // Another connection's bytes.
        at(&p, 0, &mut got[..17]);
        at(&other, 90, &mut got[17..]);
        let (from, text) = p.wrong(0, &got, &mut Vec::new()).unwrap();
        assert_eq!(
            (from, &*text),
            (17, "here stands what belongs at 90 of stream 4")
        );
        // Zeros.
        got.fill(0);
        assert!(p
            .wrong(0, &got, &mut Vec::new())
            .unwrap()
            .1
            .contains("no stream"));
    }
}
