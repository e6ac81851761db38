//! The areas of two clients, mapped as they are in life: the owner's mapping is writable, the
//! peer's is read-only, and both have guard pages around them. A store to the wrong side or an
//! access out of bounds kills the test.

use lane::abi::{Control, Epoch, Loc, Shared, TxPhase, TxWord, Word, CONTROL_BYTES};
use lane::half::Area;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

pub const CHUNK: usize = 256 << 10;
pub const CHUNKS: usize = 2;
/// What unused ring memory holds.
pub const POISON: u8 = 0xee;

/// One mapping of one memfd.
struct Map {
    p: *mut u8,
}

fn map(fd: i32, len: usize, prot: i32) -> Map {
    // SAFETY: a fresh reservation, into the middle of which the file is mapped; never unmapped.
    unsafe {
        let all = libc::mmap(
            std::ptr::null_mut(),
            len + 8192,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(all, libc::MAP_FAILED);
        let at = all.cast::<u8>().add(4096);
        let p = libc::mmap(
            at.cast(),
            len,
            prot,
            libc::MAP_SHARED | libc::MAP_FIXED,
            fd,
            0,
        );
        assert_eq!(p, at.cast());
        Map { p: at }
    }
}

/// A client's memory and the two views of it. Lives as long as the test's thread.
pub struct Client {
    control: [Map; 2],
    data: [[Map; 2]; CHUNKS],
    free: std::cell::RefCell<Vec<(u32, u32)>>,
}

impl Client {
    pub fn new() -> Self {
        let make = |len: usize| {
            // SAFETY: plain calls; the descriptor is closed after both mappings exist.
            unsafe {
                let fd = libc::memfd_create(c"area".as_ptr(), libc::MFD_CLOEXEC);
                assert!(fd >= 0);
                assert_eq!(libc::ftruncate(fd, len as libc::off_t), 0);
                let maps = [
                    map(fd, len, libc::PROT_READ | libc::PROT_WRITE),
                    map(fd, len, libc::PROT_READ),
                ];
                libc::close(fd);
                maps
            }
        };
        let p = Client {
            control: make(CONTROL_BYTES),
            data: std::array::from_fn(|_| make(CHUNK)),
            free: Default::default(),
        };
        p.clear(lane::VERSION);
        p
    }

    /// Back to zeroed control words, as a daemon of this version makes them, poisoned rings, all memory free.
    pub fn clear(&self, version: u16) {
        // SAFETY: our own writable mappings, of these lengths; nobody holds references into them.
        unsafe {
            std::ptr::write_bytes(self.control[0].p, 0, CONTROL_BYTES);
            for d in &self.data {
                std::ptr::write_bytes(d[0].p, POISON, CHUNK);
            }
        }
        // SAFETY: the mapping is that long, and never unmapped; `Control` is all atomics.
        let control = unsafe { &*self.control[0].p.cast::<Control>() };
        control.header.version.store(version.into(), SeqCst);
        let pages = (CHUNK / 4096) as u32;
        *self.free.borrow_mut() = (1..=CHUNKS as u32)
            .flat_map(|c| (0..pages / 4).map(move |i| (c, i * 4)))
            .collect();
    }

    /// The area as its owner (`true`) or as the peer sees it.
    pub fn area(&self, owner: bool) -> Area {
        let side = usize::from(!owner);
        let a = Area::new();
        // SAFETY: the mappings have these lengths and are never unmapped.
        unsafe {
            a.set_control(self.control[side].p.cast());
            for (i, d) in self.data.iter().enumerate() {
                a.set_chunk(i + 1, d[side].p, CHUNK);
            }
        }
        a
    }

    /// A ring of 4, 8 or 16 KiB.
    pub fn alloc(&self, log2: u32) -> Loc {
        assert!(log2 <= 14);
        let (chunk, page) = self.free.borrow_mut().pop().expect("rings are given back");
        Loc { chunk, page, log2 }
    }

    /// Takes a ring back and spoils it: whoever still reads there is found out.
    pub fn release(&self, loc: Loc) {
        let base = self.data[loc.chunk as usize - 1][0].p;
        // SAFETY: inside the chunk; `alloc` made the location.
        unsafe { std::ptr::write_bytes(base.add(loc.page as usize * 4096), POISON, loc.bytes()) };
        self.free.borrow_mut().insert(0, (loc.chunk, loc.page));
    }

    /// Writes anywhere in this client's own memory, as a hostile owner may.
    pub fn scribble(&self, at: usize, bytes: &[u8]) {
        let (base, len, at) = if at < CONTROL_BYTES {
            (self.control[0].p, CONTROL_BYTES, at)
        } else {
            let at = at - CONTROL_BYTES;
            (self.data[at / CHUNK % CHUNKS][0].p, CHUNK, at % CHUNK)
        };
        let n = bytes.len().min(len - at);
        // SAFETY: `at + n <= len`, the length of the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.add(at), n) };
    }
}

/// A word without its type: a hostile client stores anything there.
pub fn raw<W: Word>(word: &Shared<W>) -> &AtomicU64 {
    // SAFETY: `Shared` is transparent over such an atomic, and any bits are a value of every kind of word.
    unsafe { &*std::ptr::from_ref(word).cast() }
}

/// What a hostile client stores if it knows how a word of any kind is packed: an epoch and a byte.
pub fn packed((epoch, byte): (u32, u8)) -> u64 {
    TxWord::new(Epoch::new(epoch), TxPhase::from_raw(byte)).raw()
}
