//! Files that are replaced at once and whole.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Makes a file beside `to`, and renames it over that. What an earlier try has left is removed, and what this one leaves if
/// it fails.
pub(crate) fn put(to: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let new = to.with_extension("new");
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let made = make(&new).and_then(|()| fs::rename(&new, to));
    if made.is_err() {
        let _ = fs::remove_file(&new); // what is left of it, if anything
    }
    made
}

/// The same with this text, which is on the disk before it has its name. `mode`: as for `open`, subject to the umask.
pub fn put_text(to: &Path, text: &[u8], mode: u32) -> io::Result<()> {
    put(to, |new| {
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(mode).open(new)?;
        io::Write::write_all(&mut file, text)?;
        file.sync_all()
    })
}
