//! The measuring program of `make bench-lab`, one for all ways that bytes can go between two
//! machines. It makes the same calls in the same order whatever the layer below is, so that a
//! difference between two rows of the table is one between layers.
//!
//! It never spins: the machines of the lab have one processor each, which the layer needs.

pub mod calls;
pub mod client;
pub mod machine;
pub mod server;
pub mod smc;

/// Bytes of a message, of a request and of an answer.
pub const MESSAGE: usize = 64;
/// Most bytes given to one `send` or asked of one `recv`. iperf3's.
pub const BLOCK: usize = 128 << 10;

/// What a request asks for, in its first byte.
pub mod op {
    /// The same message back.
    pub const ECHO: u8 = b'e';
    /// An answer after so many bytes more (eight bytes at 8).
    pub const SWALLOW: u8 = b's';
    /// The processor time of the server's machine (eight bytes at 8 of the answer).
    pub const BUSY: u8 = b'b';
}

pub type Message = [u8; MESSAGE];

/// A message with an operation and a number.
pub fn message(op: u8, number: u64) -> Message {
    let mut m = [op; MESSAGE];
    m[8..16].copy_from_slice(&number.to_le_bytes());
    m
}

/// The number in a message.
pub fn number(m: &Message) -> u64 {
    let mut b = [0; 8];
    b.copy_from_slice(&m[8..16]);
    u64::from_le_bytes(b)
}
