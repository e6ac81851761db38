//! Takes bytes from TCP, up to where its bytes end, and off the ring.

use super::{How, Received, RxState, PIECE};
use crate::abi::{loc_index, Cursor, LocWord, SpaceWord};
use crate::half::mem::{copy_out, Iov, Memory, Ring};
use crate::half::Port;
use crate::num;
use crate::prim::fence;
use crate::proto::reason::Reason;
use core::sync::atomic::Ordering::*;

impl RxState {
    /// Takes at most `limit` bytes from TCP.
    pub(super) fn take_tcp(
        &self,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
        limit: usize,
    ) -> Received {
        if how.peek {
            return self.peek_tcp(port, iov, how, limit);
        }
        let mut total = 0;
        while total < limit {
            let Some((p, n)) = iov.take(limit - total) else {
                break;
            };
            // (For the port, a null pointer means that the bytes are discarded.)
            let got = match how.discard {
                true => port.tcp_recv(core::ptr::null_mut(), n, false),
                false if p.is_null() => Err(libc::EFAULT),
                false => port.tcp_recv(p, n, false),
            };
            match got {
                Ok(k) => {
                    self.tcp_pos.add(k as u64, Relaxed);
                    total += k;
                    iov.untake(n - k); // the caller may continue with the rest of the buffer
                    if k == 0 && total == 0 {
                        return Received::Eof;
                    }
                    if k < n {
                        break;
                    }
                }
                Err(e) => {
                    iov.untake(n);
                    match e {
                        _ if total > 0 => {
                            self.error.put(e); // the kernel reports it only once
                            break;
                        }
                        libc::EAGAIN => return Received::Empty,
                        e => return Received::Error(e),
                    }
                }
            }
        }
        Received::Bytes(total)
    }

    /// After the last bytes of the prefix: takes what the ring has for the same receive, because the kernel would not
    /// stop there either. (The next receive reports anything wrong.)
    pub(super) fn take_more(
        &self,
        m: &Memory,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
    ) -> usize {
        match self.head(m) {
            Ok(head) if head != self.cursor.load(Relaxed) => {
                match self.take(m, port, iov, how, head) {
                    Ok(Received::Bytes(n)) => {
                        self.taken(m, port, head);
                        n
                    }
                    _ => 0,
                }
            }
            _ => 0,
        }
    }

    /// Takes bytes off the ring. `head` is ahead of the cursor.
    #[inline(always)]
    pub(super) fn take(
        &self,
        m: &Memory,
        port: &impl Port,
        iov: &mut Iov<'_>,
        how: How,
        head: Cursor,
    ) -> Result<Received, Reason> {
        let mut cursor = self.cursor.load(Relaxed);
        let begin = cursor;
        let mut published = cursor;
        let mut size = 0;
        let room = num::size(head - cursor);
        if !how.discard && iov.proven(room, |p, n| port.writable(p, n)).is_none() {
            return Ok(Received::Error(libc::EFAULT));
        }
        while cursor != head {
            let source = self.source(m, cursor, head, !how.peek);
            let (ring, end) = match source.filter(|(ring, end)| *end - cursor <= ring.size()) {
                Some(s) => s,
                None if cursor != begin => break, // what was taken counts; the next receive reports this
                None => return Err(Reason::Hostile),
            };
            size = ring.size();
            let Some((p, n)) = iov.take((end - cursor).min(PIECE) as usize) else {
                break;
            };
            if !how.discard {
                // SAFETY: the application promises `p` writable for `n`; `n <= size`, just checked.
                unsafe { copy_out(ring, cursor, p, n) };
            }
            cursor += n as u64;
            if !how.peek {
                self.cursor.store(cursor, Relaxed);
                if cursor - published >= PIECE {
                    published = cursor;
                    // Release: pairs with the Acquire in `TxState::refresh`; our copy is done.
                    m.own_cursor().store(cursor, Release);
                }
            }
        }
        let n = cursor - begin;
        if !how.peek {
            m.own_cursor().store(cursor, Release); // as above
            self.ring_bytes.fetch_add(n, Relaxed);
            // A sender that waits has filled three quarters of the ring, or of what may be unread. The take that
            // brings this down to one half therefore begins above one half, or takes more than a quarter (if `head`
            // was loaded before the ring was filled). Other takes need not look.
            if m.is_remote() {
                // The remote side learns of it through two daemons: in few steps while there is more to read; when the
                // ring is empty, at once if the remote side waits, otherwise with our next message.
                let told = self.told.load(Relaxed);
                if cursor == head || cursor.since(told) >= size / 4 {
                    // SYNC space: the cursor is stored, now we look; the daemon stores the request, then looks at the
                    // cursor.
                    fence(SeqCst);
                    if m.peer_tx().want_space.load(Relaxed) != SpaceWord::NONE {
                        self.told.store(cursor, Relaxed);
                        m.publish(port);
                    }
                }
            } else {
                let full = size.min(Self::unread_max(m));
                if head - begin > full / 2 || n > full / 4 {
                    self.consumed(m, port, head - cursor, full);
                }
            }
        }
        Ok(Received::Bytes(num::size(n)))
    }

    /// The sender may be waiting for space: wake it when half of it is free.
    #[cold]
    fn consumed(&self, m: &Memory, port: &impl Port, unread: u64, full: u64) {
        // SYNC space: pairs with the fence in `TxState::want_space`.
        fence(SeqCst);
        if unread <= full / 2 && m.peer_tx().want_space.load(Relaxed).waits() {
            m.publish(port);
        }
    }

    /// Maximum number of bytes that the sender leaves unread; the sender computes the same value.
    #[inline(always)]
    fn unread_max(m: &Memory) -> u64 {
        let word = m.peer_tx().want_space.load(Relaxed);
        word.unread_max(|| m.own_rx().room.load(Relaxed))
    }

    /// The ring that holds byte `cursor`, and the cursor up to which it does. `keep`: `cursor` is our real one, not
    /// one that only a peek has reached. `None`: what the sender says of its ring is impossible.
    #[inline(always)]
    fn source(
        &self,
        m: &Memory,
        cursor: Cursor,
        head: Cursor,
        keep: bool,
    ) -> Option<(Ring, Cursor)> {
        let w = m.peer_tx();
        let mut end = head;
        // Acquire: pairs with the Release in `TxState::move_to`. Loaded after the head: a head beyond a move makes
        // the move visible, too. The sender moves again only when our cursor has reached the last move, so neither
        // location changes while we need it.
        let seq = w.loc_seq.load(Acquire);
        let mut loc = self.loc.load(Relaxed);
        if seq != self.loc_seq.load(Relaxed) || loc == LocWord::NONE {
            let new = loc_index(seq);
            let from = w.loc_from[new].load(Relaxed);
            if from <= cursor {
                loc = w.loc[new].load(Relaxed);
                if keep {
                    self.loc.store(loc, Relaxed);
                    self.loc_seq.store(seq, Relaxed);
                }
            } else {
                loc = w.loc[new ^ 1].load(Relaxed);
                end = from.min(head);
            }
        }
        loc.loc().and_then(|l| m.peer.ring(l)).map(|r| (r, end))
    }
}
