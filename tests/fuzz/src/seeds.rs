//! Inputs to begin with: real messages, as our own code encodes them.

#[cfg(feature = "daemon")]
mod daemon;
mod node;
mod shim;

use std::path::Path;

/// The seeds of a target, none if there is no such target.
pub fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "admin" => node::admin(),
        "area" => shim::area(),
        "capture" => node::capture(),
        "control" => shim::control(),
        "engine" => node::engine(),
        "frame" => shim::frames(),
        "nri" => node::nri(),
        "queue" => node::queue(),
        "words" => shim::words(),
        #[cfg(feature = "daemon")]
        "config" => daemon::config(),
        #[cfg(feature = "daemon")]
        "csr" => daemon::csr(),
        #[cfg(feature = "daemon")]
        "groups" => daemon::groups(),
        #[cfg(feature = "daemon")]
        "peers" => daemon::peers(),
        #[cfg(feature = "daemon")]
        "proc" => daemon::proc(),
        #[cfg(feature = "daemon")]
        "review" => daemon::review(),
        #[cfg(feature = "daemon")]
        "rule" => daemon::rule(),
        #[cfg(feature = "daemon")]
        "table" => daemon::table(),
        _ => Vec::new(),
    }
}

/// Writes them to this directory, a file each.
pub fn write(target: &str, dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for (n, seed) in of(target).iter().enumerate() {
        std::fs::write(dir.join(format!("seed-{n}")), seed)?;
    }
    Ok(())
}

/// A stream's bytes, as the targets take it that get it in pieces of this many bytes.
fn in_pieces(size: u8, stream: &[u8]) -> Vec<u8> {
    [&[size], stream].concat()
}
