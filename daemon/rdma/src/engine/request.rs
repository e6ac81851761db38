//! Requests that are posted to a link (writes and messages), and what each was for.

use crate::verbs::Sge;

/// What a request was for.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Write {
        lane: u32,
        region: u32,
        bytes: u32,
    },
    /// Snapshot that announced the head, with `inlined` bytes after it.
    Cdc {
        lane: u32,
        head: lane::abi::Cursor,
        epoch: lane::abi::Epoch,
        inlined: u32,
    },
    Lane {
        lane: u32,
    },
    Llc,
}

pub(super) struct Write {
    pub local: Sge,
    pub remote: u64,
    pub rkey: u32,
    pub region: u32,
}

/// The bytes that a message announces: written before it, or carried in the message itself.
#[derive(Default)]
pub(super) struct Load {
    pub writes: Vec<Write>,
    pub data: Vec<u8>,
}

impl Load {
    pub(super) fn bytes(&self) -> u64 {
        let written: u64 = self.writes.iter().map(|w| u64::from(w.local.len)).sum();
        written + self.data.len() as u64
    }
}
