//! What this process, under the shim, has of a connection and its lane.

use super::{await_or_die, SIZE};
use std::io::{Read, Write};
use std::net::TcpStream;

/// Sends one message and takes its echo.
pub fn ping(mut c: &TcpStream, first: u8) {
    let mut b = [first; SIZE];
    c.write_all(&b).expect("send");
    c.read_exact(&mut b).expect("echo");
    assert_eq!(b, [first; SIZE]);
}

/// Mappings that this process shares and writes: address, bytes, name.
pub fn shared() -> Vec<(usize, usize, String)> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    maps.lines()
        .filter_map(|l| {
            let (range, rest) = l.split_once(' ')?;
            let (a, b) = range.split_once('-')?;
            let at = usize::from_str_radix(a, 16).ok()?;
            let bytes = usize::from_str_radix(b, 16).ok()? - at;
            rest.starts_with("rw-s").then(|| (at, bytes, rest.into()))
        })
        .collect()
}

/// The family table of this process.
pub fn family() -> &'static lane::family::Table {
    let t = shared()
        .into_iter()
        .find(|(_, n, name)| *n >= lane::family::TABLE_BYTES && name.contains("family"))
        .expect("a family table");
    // SAFETY: the shim's own mapping, as long as its table, never unmapped; it consists of atomics.
    unsafe { &*(t.0 as *const lane::family::Table) }
}

/// The entry of a connection, if it is on its lane in both directions.
pub fn entry(c: &TcpStream) -> Option<&'static lane::family::Conn> {
    let port = c.local_addr().expect("address").port();
    family()
        .conns
        .iter()
        .take(1024)
        .find(|k| k.local.load().port == port && k.tx.is_up() && k.rx.is_up())
}

/// The same, waiting for that.
pub fn promoted(c: &TcpStream) -> &'static lane::family::Conn {
    let mut found = None;
    await_or_die("a lane", || {
        ping(c, 1);
        found = entry(c);
        found.is_some()
    });
    found.expect("found")
}
