//! What host and agent say to each other over the virtio port: one JSON object per line.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::path::PathBuf;

/// Name of the port, as the machine sees it.
pub const PORT: &str = "lab.agent";

/// From the host.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Start a program in a process group of its own. When it ends, or after `limit_ms`, the whole
    /// group is killed.
    Run {
        id: u64,
        argv: Vec<String>,
        env: Vec<(String, String)>,
        stdin: Bytes,
        limit_ms: u64,
    },
    /// Send a line to a Unix socket, and report the line that comes back as output. No program is
    /// started: in a machine that is busy, that takes a second.
    Ask {
        id: u64,
        socket: PathBuf,
        line: String,
    },
    /// Report what is in a file as output.
    Read { id: u64, path: PathBuf },
    /// Make an empty file.
    Touch { id: u64, path: PathBuf },
    /// Send a signal to the group. One that has ended gets none.
    Signal { id: u64, signal: i32 },
}

/// From the machine.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The first line.
    Hello,
    Output {
        id: u64,
        stream: Stream,
        data: Bytes,
    },
    /// The last line of an `id`, except for output of processes that left the group.
    Exit { id: u64, end: End },
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    Out,
    Err,
}

/// How a program ended.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Code(i32),
    Signal(i32),
    /// Killed because its time was over.
    TimedOut,
    /// It did not even start.
    Failed(String),
}

/// Bytes as a JSON string in which every character stands for one byte: text stays readable, and
/// nothing is lost where output is cut in the middle of a character.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bytes(pub Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&self.0.iter().map(|&b| char::from(b)).collect::<String>())
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let bytes: Result<Vec<u8>, _> = text.chars().map(u8::try_from).collect();
        bytes.map(Bytes).map_err(serde::de::Error::custom)
    }
}
