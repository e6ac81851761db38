//! What client and server of a measurement say to each other: messages of 16 bytes, little-endian, before the bytes
//! that are measured. Neither side trusts the other: everything is checked, and everything ends.

/// Length of every message.
pub const LENGTH: usize = 16;
/// Nothing that speaks first, and no request of HTTP or TLS, begins like this.
const MAGIC: [u8; 8] = *b"UPmeter\0";
const VERSION: u8 = 1;

/// Bounds of what a client may ask for.
pub const PING_BYTES: usize = 64;
pub const BLOCK_MIN: u32 = 4096;
pub const BLOCK_MAX: u32 = 1 << 20;
pub const TIME_MS_MAX: u32 = 10_000;

pub type Message = [u8; LENGTH];

/// Which way the bytes of a connection are to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    Tcp,
    Lane,
}

impl Path {
    pub fn named(name: &str) -> Option<Self> {
        [Path::Tcp, Path::Lane]
            .into_iter()
            .find(|p| p.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Path::Tcp => "tcp",
            Path::Lane => "lane",
        }
    }
}

/// What the server says to a client that it understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Ready,
    /// It has as many clients as it takes.
    Busy,
}

/// One test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// The server sends back what it gets, 64 bytes at a time.
    Ping,
    /// Blocks to the server, which says what it got in which time.
    Up { block: u32 },
    /// Blocks from the server, for as long as the request says.
    Down { block: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub test: Test,
    pub time_ms: u32,
}

/// First byte of a ping or a block: more will follow, or this is the last one.
pub const MORE: u8 = 1;
pub const LAST: u8 = 2;

fn greeting(what: u8) -> Message {
    let mut m = [0; LENGTH];
    m[..8].copy_from_slice(&MAGIC);
    (m[8], m[9]) = (VERSION, what);
    m
}

/// The last byte of a greeting, if it is one of this version.
fn greeted(m: &Message) -> Option<u8> {
    (m[..8] == MAGIC && m[8] == VERSION && m[10..] == [0; 6]).then_some(m[9])
}

/// Is it a greeting of another version? That is worth another message than a service that speaks HTTP.
pub fn is_other_version(m: &Message) -> bool {
    m[..8] == MAGIC && m[8] != VERSION
}

pub fn hello(path: Path) -> Message {
    greeting(match path {
        Path::Tcp => 1,
        Path::Lane => 2,
    })
}

pub fn path_of(m: &Message) -> Option<Path> {
    match greeted(m)? {
        1 => Some(Path::Tcp),
        2 => Some(Path::Lane),
        _ => None,
    }
}

pub fn answer(a: Answer) -> Message {
    greeting(match a {
        Answer::Ready => 16,
        Answer::Busy => 17,
    })
}

pub fn answer_of(m: &Message) -> Option<Answer> {
    match greeted(m)? {
        16 => Some(Answer::Ready),
        17 => Some(Answer::Busy),
        _ => None,
    }
}

pub fn request(r: Request) -> Message {
    let (kind, block) = match r.test {
        Test::Ping => (1, 0),
        Test::Up { block } => (2, block),
        Test::Down { block } => (3, block),
    };
    let mut m = [0; LENGTH];
    m[0] = kind;
    m[4..8].copy_from_slice(&block.to_le_bytes());
    m[8..12].copy_from_slice(&r.time_ms.to_le_bytes());
    m
}

pub fn request_of(m: &Message) -> Option<Request> {
    let block = u32_at(m, 4);
    let time_ms = u32_at(m, 8);
    let padding = m[1..4] == [0; 3] && m[12..] == [0; 4];
    let whole = (BLOCK_MIN..=BLOCK_MAX).contains(&block);
    let test = match m[0] {
        1 if block == 0 => Test::Ping,
        2 if whole => Test::Up { block },
        3 if whole => Test::Down { block },
        _ => return None,
    };
    (padding && (1..=TIME_MS_MAX).contains(&time_ms)).then_some(Request { test, time_ms })
}

/// What arrived, and in how many nanoseconds.
pub fn tally(bytes: u64, ns: u64) -> Message {
    let mut m = [0; LENGTH];
    m[..8].copy_from_slice(&bytes.to_le_bytes());
    m[8..].copy_from_slice(&ns.to_le_bytes());
    m
}

pub fn tally_of(m: &Message) -> (u64, u64) {
    let (low, high) = (u128::from_le_bytes(*m), u128::from(u64::MAX));
    let part = |v: u128| u64::try_from(v & high).unwrap_or_default();
    (part(low), part(low >> 64))
}

fn u32_at(m: &Message, at: usize) -> u32 {
    u32::from_le_bytes([m[at], m[at + 1], m[at + 2], m[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        for p in [Path::Tcp, Path::Lane] {
            assert_eq!(path_of(&hello(p)), Some(p));
            assert_eq!(Path::named(p.name()), Some(p));
            assert_eq!(answer_of(&hello(p)), None, "an echo service is no server");
        }
        for a in [Answer::Ready, Answer::Busy] {
            assert_eq!(answer_of(&answer(a)), Some(a));
        }
        for test in [
            Test::Ping,
            Test::Up { block: BLOCK_MIN },
            Test::Down { block: BLOCK_MAX },
        ] {
            let r = Request { test, time_ms: 7 };
            assert_eq!(request_of(&request(r)), Some(r));
        }
        assert_eq!(tally_of(&tally(u64::MAX, 5)), (u64::MAX, 5));
    }

    #[test]
    fn what_is_out_of_bounds_is_no_request() {
        let bad = |test, time_ms| request_of(&request(Request { test, time_ms })).is_none();
        assert!(bad(Test::Ping, 0) && bad(Test::Ping, TIME_MS_MAX + 1));
        for block in [0, BLOCK_MIN - 1, BLOCK_MAX + 1, u32::MAX] {
            assert!(bad(Test::Up { block }, 1) && bad(Test::Down { block }, 1));
        }
        let good = request(Request {
            test: Test::Ping,
            time_ms: 1,
        });
        for at in [0, 1, 3, 4, 7, 11, 12, 15] {
            let mut m = good;
            m[at] ^= 0x80;
            assert_eq!(request_of(&m), None, "byte {at}");
        }
    }

    #[test]
    fn one_wrong_byte_is_no_greeting() {
        for at in 0..LENGTH {
            let mut m = hello(Path::Lane);
            m[at] ^= 0x40;
            assert_eq!((path_of(&m), answer_of(&m)), (None, None), "byte {at}");
            assert_eq!(is_other_version(&m), at == 8);
        }
        assert_eq!(answer_of(b"HTTP/1.1 400 Bad"), None);
    }
}
