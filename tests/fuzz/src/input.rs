//! Values out of a target's bytes. Behind their end there are zeros.

/// What is left of the bytes.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    /// The next `n` bytes, or as many as there are.
    pub(crate) fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut all = [0; N];
        let some = self.bytes(N);
        all[..some.len()].copy_from_slice(some);
        all
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

/// Bytes as a stream brings them: the first byte says in pieces of how many.
pub(crate) fn pieces(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (size, rest) = data.split_first().unwrap_or((&0, &[]));
    rest.chunks(match size {
        0 => usize::MAX,
        n => usize::from(*n),
    })
}
