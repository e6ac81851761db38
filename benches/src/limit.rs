//! The raw limit: two processes and a piece of shared memory, no sockets, no security, no sleep.
//! What `underpass` reaches is judged against it.

use anyhow::{bail, Result};
use nix::sys::mman::{mmap_anonymous, MapFlags, ProtFlags};
use nix::sys::signal::{kill, Signal};
use nix::unistd::{fork, ForkResult, Pid};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

const RING: usize = 1 << 20;
const MESSAGE: usize = 64;
/// What iperf3 writes at once.
const BLOCK: usize = 128 << 10;
/// Bytes between two publications inside a block, so that both copies overlap.
const PIECE: usize = 16 << 10;

#[repr(C, align(128))]
struct Line(AtomicU64);

#[repr(C)]
struct Shared {
    /// Bytes published by the parent, bytes consumed by the child.
    head: Line,
    tail: Line,
    /// Same for the other direction of the ping-pong.
    back: Line,
    ring: [u8; RING],
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    /// Microseconds for one round trip of 64 bytes, both sides spinning.
    PingPong,
    /// Messages of 64 bytes per second, one direction.
    Messages,
    /// Gigabits per second in blocks of 128 KiB, one direction.
    Bulk,
}

/// The child process, which ends with this handle.
struct Peer(Pid);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = nix::sys::wait::waitpid(self.0, None);
    }
}

/// Measures for about `time`. Call from a process with one thread.
pub fn measure(what: What, time: Duration) -> Result<f64> {
    let Some(len) = NonZeroUsize::new(std::mem::size_of::<Shared>()) else {
        bail!("size")
    };
    // SAFETY: a fresh anonymous mapping; nothing else refers to this address range.
    let map = unsafe {
        mmap_anonymous(
            None,
            len,
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_SHARED,
        )?
    };
    let shared: *mut Shared = map.as_ptr().cast();
    // SAFETY: the caller's process has one thread, so that the child may do anything.
    let child = match unsafe { fork()? } {
        ForkResult::Child => {
            let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
            // SAFETY: `shared` is mapped, zeroed and big enough; its lifetime is the process's.
            unsafe { answer(what, shared) }
        }
        ForkResult::Parent { child } => Peer(child),
    };
    // SAFETY: as above; the parent is the only producer, the child the only consumer.
    let result = unsafe { drive(what, shared, time) };
    drop(child);
    // SAFETY: unmaps exactly what was mapped; no reference to it is left.
    unsafe { nix::sys::mman::munmap(map, len.get())? };
    Ok(result)
}

/// Waits for a word to differ from `old`. Gives way after a while: the other process may have been
/// put on this very processor.
fn spin(word: &AtomicU64, old: u64) -> u64 {
    loop {
        for _ in 0..300 {
            let v = word.load(Acquire);
            if v != old {
                return v;
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
    }
}

/// # Safety
/// `s` is mapped; this process is the only consumer.
unsafe fn answer(what: What, s: *mut Shared) -> ! {
    let mut sink = vec![0u8; BLOCK];
    let mut at = 0u64;
    // SAFETY: by the contract; the two words are only ever used as atomics.
    let (head, tail, back) = unsafe { (&(*s).head.0, &(*s).tail.0, &(*s).back.0) };
    // SAFETY: by the contract.
    let ring = unsafe { (&raw mut (*s).ring).cast::<u8>() };
    loop {
        let h = spin(head, at);
        match what {
            What::PingPong => {
                // SAFETY: the message lies inside the ring, and the producer waits for `back`.
                unsafe {
                    std::ptr::copy_nonoverlapping(ring, sink.as_mut_ptr(), MESSAGE);
                    std::ptr::copy_nonoverlapping(sink.as_ptr(), ring.add(4096), MESSAGE);
                }
                back.store(h, Release);
                at = h;
            }
            What::Messages | What::Bulk => {
                let unit = if what == What::Messages {
                    MESSAGE
                } else {
                    PIECE
                };
                while at < h {
                    let i = at as usize % RING;
                    let n = unit.min((h - at) as usize);
                    let to = at as usize % (BLOCK - PIECE + 1);
                    let to = if what == What::Bulk {
                        to / PIECE * PIECE
                    } else {
                        0
                    };
                    // SAFETY: units divide the ring, so that a unit never wraps; `to + n` fits.
                    unsafe {
                        std::ptr::copy_nonoverlapping(ring.add(i), sink.as_mut_ptr().add(to), n)
                    };
                    std::hint::black_box(&mut sink);
                    at += n as u64;
                }
                tail.store(at, Release);
            }
        }
    }
}

/// # Safety
/// `s` is mapped; this process is the only producer.
unsafe fn drive(what: What, s: *mut Shared, time: Duration) -> f64 {
    let source = vec![7u8; BLOCK];
    let mut got = [0u8; MESSAGE];
    // SAFETY: by the contract.
    let (head, tail, back) = unsafe { (&(*s).head.0, &(*s).tail.0, &(*s).back.0) };
    // SAFETY: by the contract.
    let ring = unsafe { (&raw mut (*s).ring).cast::<u8>() };
    let mut at = 0u64;
    let mut known = 0u64;
    let mut rounds = 0u64;
    let start = Instant::now();
    loop {
        // A look at the clock now and then: it costs as much as a message.
        for _ in 0..if what == What::Bulk { 1 } else { 1024 } {
            match what {
                What::PingPong => {
                    // SAFETY: inside the ring; the consumer reads only after the store below.
                    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), ring, MESSAGE) };
                    head.store(at + 1, Release);
                    spin(back, at);
                    // SAFETY: inside the ring; the consumer has published it.
                    unsafe {
                        std::ptr::copy_nonoverlapping(ring.add(4096), got.as_mut_ptr(), MESSAGE)
                    };
                    std::hint::black_box(&mut got);
                    at += 1;
                }
                What::Messages => {
                    while at + MESSAGE as u64 - known > RING as u64 {
                        known = spin(tail, known);
                    }
                    // SAFETY: 64 divides the ring; there is space by the check above.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            source.as_ptr(),
                            ring.add(at as usize % RING),
                            MESSAGE,
                        )
                    };
                    at += MESSAGE as u64;
                    head.store(at, Release);
                }
                What::Bulk => {
                    for piece in source.chunks(PIECE) {
                        while at + PIECE as u64 - known > RING as u64 {
                            known = spin(tail, known);
                        }
                        // SAFETY: pieces divide the ring; there is space by the check above.
                        unsafe {
                            std::ptr::copy_nonoverlapping(
                                piece.as_ptr(),
                                ring.add(at as usize % RING),
                                PIECE,
                            );
                        }
                        at += PIECE as u64;
                        head.store(at, Release);
                    }
                }
            }
            rounds += 1;
        }
        let took = start.elapsed();
        if took >= time {
            let s = took.as_secs_f64();
            return match what {
                What::PingPong => s * 1e6 / rounds as f64,
                What::Messages => rounds as f64 / s,
                What::Bulk => (rounds * BLOCK as u64 * 8) as f64 / s / 1e9,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_something() {
        for what in [What::PingPong, What::Messages, What::Bulk] {
            let n = measure(what, Duration::from_millis(50)).unwrap();
            assert!(n.is_finite() && n > 0.0, "{what:?}: {n}");
        }
    }
}
