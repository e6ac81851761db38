//! Qemu's monitor (QMP) of one machine.

use anyhow::{bail, Result};
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longest that qemu, whose main loop may be busy, may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Monitor {
    lines: BufReader<UnixStream>,
}

impl Monitor {
    pub fn new(socket: UnixStream) -> Result<Self> {
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut m = Monitor {
            lines: BufReader::new(socket),
        };
        m.line()?; // the greeting
        m.ask("qmp_capabilities", json!({}))?;
        Ok(m)
    }

    /// Carries out a command.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({"execute": command, "arguments": arguments});
        self.lines
            .get_mut()
            .write_all(format!("{line}\n").as_bytes())?;
        loop {
            let mut answer = self.line()?;
            if let Some(e) = answer.get("error") {
                bail!("qemu's answer to {line}: {e}");
            }
            // Events come in between.
            if let Some(v) = answer.get_mut("return") {
                return Ok(v.take());
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.lines.read_line(&mut line)? == 0 {
            bail!("qemu hung up its monitor");
        }
        Ok(serde_json::from_str(&line)?)
    }
}
