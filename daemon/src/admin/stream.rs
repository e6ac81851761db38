//! The answer to `ss`, written in pieces: a node may have a hundred thousand rows, and a caller read as slowly as it likes.
//!
//! Rows are cut out of what all callers share, and made to text, by a helper, a piece at a time; so a caller costs one piece
//! and its hold on what it reads from. Of that there are only so many versions: whoever still reads the oldest one is cut off.

use crate::admin::caller::Caller;
use crate::admin::rail_view;
use crate::clients::view::Entry;
use std::cell::RefCell;
use std::io::{Error, ErrorKind};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::{Notify, Semaphore};
use underpass_admin::Row;

/// A piece has so many bytes, and what its last row has beyond them.
const PIECE: usize = 64 << 10;
/// Versions of all rows that callers may be reading.
const VERSIONS: usize = 4;
/// Pieces that are made at a time, so that looks at processes get their share of the processors.
const AT_ONCE: usize = 2;

/// All rows, as of one look.
pub(super) type Rows = Arc<Vec<Entry>>;

/// A version that somebody reads, and what ends that.
struct Version {
    rows: Weak<Vec<Entry>>,
    end: Arc<Notify>,
}

/// What callers read from, the oldest first.
pub(super) struct Versions {
    all: RefCell<Vec<Version>>,
    /// Callers make their pieces in turn.
    making: Semaphore,
}

impl Default for Versions {
    fn default() -> Self {
        Versions {
            all: RefCell::default(),
            making: Semaphore::new(AT_ONCE),
        }
    }
}

impl Versions {
    /// Somebody reads these rows: until when he may.
    fn read(&self, rows: &Rows) -> Arc<Notify> {
        let mut all = self.all.borrow_mut();
        all.retain(|v| v.rows.strong_count() > 0);
        let is = |v: &&Version| std::ptr::eq(v.rows.as_ptr(), Arc::as_ptr(rows));
        if let Some(known) = all.iter().find(is) {
            return known.end.clone();
        }
        if all.len() >= VERSIONS {
            all.remove(0).end.notify_waiters();
        }
        let end = Arc::new(Notify::new());
        all.push(Version {
            rows: Arc::downgrade(rows),
            end: end.clone(),
        });
        end
    }
}

/// The row of an entry as this caller may see it.
pub(super) fn seen(e: &Entry, all: &[Entry], caller: &Caller) -> Row {
    let mut row = e.row.clone();
    if row.peer_pid != 0 && !caller.sees_peer(e, all) {
        (row.peer_pid, row.peer_comm) = (0, String::new());
    }
    if !caller.all {
        rail_view::hide_addresses(&mut row);
    }
    row
}

/// Writes the answer. The caller must read each piece within `time`.
pub(super) async fn write(
    stream: &mut UnixStream,
    (all, caller): (Rows, Caller),
    versions: &Versions,
    time: Duration,
) -> std::io::Result<()> {
    let end = versions.read(&all);
    let end = end.notified();
    tokio::pin!(end);
    // (From now on, not only once it is polled.)
    end.as_mut().enable();
    tokio::select! {
        biased;
        () = end => Err(Error::new(ErrorKind::TimedOut, "what it reads is too old")),
        done = pieces(stream, (all, Arc::new(caller)), versions, time) => done,
    }
}

async fn pieces(
    stream: &mut UnixStream,
    (all, caller): (Rows, Arc<Caller>),
    versions: &Versions,
    time: Duration,
) -> std::io::Result<()> {
    let mut text = Text {
        piece: b"{\"ss\":{\"rows\":[".to_vec(),
        next: 0,
        begun: false,
    };
    while text.next < all.len() {
        let (rows, caller) = (all.clone(), caller.clone());
        let made = {
            let _turn = versions.making.acquire().await;
            tokio::task::spawn_blocking(move || text.go_on(&rows, &caller)).await
        };
        text = made??;
        tokio::time::timeout(time, stream.write_all(&text.piece)).await??;
        text.piece.clear();
    }
    text.piece.extend_from_slice(b"]}}\n");
    tokio::time::timeout(time, stream.write_all(&text.piece)).await??;
    Ok(())
}

/// The answer's text, up to a piece of it.
struct Text {
    piece: Vec<u8>,
    /// Index of the first entry that is not in it.
    next: usize,
    /// Has there been a row?
    begun: bool,
}

impl Text {
    fn go_on(mut self, all: &[Entry], caller: &Caller) -> std::io::Result<Text> {
        for e in &all[self.next..] {
            self.next += 1;
            if !caller.sees_row(e) {
                continue;
            }
            if self.begun {
                self.piece.push(b',');
            }
            self.begun = true;
            serde_json::to_writer(&mut self.piece, &seen(e, all, caller))?;
            if self.piece.len() >= PIECE {
                break;
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::caller::tests::root;
    use std::net::SocketAddr;
    use tokio::io::AsyncReadExt;
    use underpass_admin::Response;

    fn entry(n: u64) -> Entry {
        let row = Row {
            inode: n,
            netns: n % 2,
            comm: "a \"program\"".into(),
            ..Row::default()
        };
        Entry::untracked(row, SocketAddr::from(([127, 0, 0, 1], 1)), None)
    }

    async fn text(all: &Rows, caller: &Caller) -> String {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let versions = Versions::default();
        let time = Duration::from_secs(60);
        let write = write(&mut ours, (all.clone(), caller.clone()), &versions, time);
        let mut text = String::new();
        let read = async {
            let mut buf = [0; 8192];
            while !text.ends_with('\n') {
                let n = theirs.read(&mut buf).await.unwrap();
                assert!(n > 0);
                text += std::str::from_utf8(&buf[..n]).unwrap();
            }
        };
        let (done, ()) = tokio::join!(write, read);
        done.unwrap();
        text
    }

    /// In pieces it is the same text.
    #[tokio::test(flavor = "current_thread")]
    async fn pieces_are_one_answer() {
        let one = Caller {
            all: false,
            netns: 1,
            ..root()
        };
        for (n, caller) in [(0, root()), (1, root()), (2000, root()), (2000, one)] {
            let all: Rows = Arc::new((0..n).map(entry).collect());
            let mine = all.iter().filter(|e| caller.sees_row(e));
            let rows = mine.map(|e| seen(e, &all, &caller)).collect();
            let mut whole = serde_json::to_string(&Response::Ss { rows }).unwrap();
            assert!(n < 2000 || whole.len() > 4 * PIECE);
            whole.push('\n');
            assert!(text(&all, &caller).await == whole, "{n} rows");
        }
    }

    /// Who reads what is too old is cut off; who reads on is not, nor who reads the same.
    #[tokio::test(flavor = "current_thread")]
    async fn only_so_many_versions() {
        let versions = Versions::default();
        let rows = || -> Rows { Arc::new((0..4000).map(entry).collect()) };
        let old = rows();
        let long = Duration::from_secs(600);
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        let slow = write(&mut ours, (old.clone(), root()), &versions, long);
        tokio::pin!(slow);
        let mut held = Vec::new();
        for n in 0..VERSIONS {
            let cut = tokio::select! {
                biased;
                r = &mut slow => r.is_err(),
                () = tokio::time::sleep(Duration::from_millis(20)) => false,
            };
            assert!(!cut, "{n} others are read");
            held.push(rows());
            versions.read(&held[n]);
            versions.read(&held[n]);
        }
        assert!(slow.await.is_err());
        assert_eq!(versions.all.borrow().len(), VERSIONS);
        drop(held);
        versions.read(&old);
        assert_eq!(versions.all.borrow().len(), 1);
    }
}
