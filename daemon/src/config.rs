//! The daemon's configuration: a TOML file, over it the command line.

use crate::limits::Limits;
use link::layout::{RING_LOG2_MAX, RING_LOG2_MIN};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Everything that can be set. Unknown keys are errors: a misspelt limit is no limit.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// log2 of the first ring of a lane, and of the largest it may grow to.
    pub ring_log2: u8,
    pub ring_max_log2: u8,
    /// Registrations that one shim may have under way.
    pub credits: u32,
    pub limits: LimitsConfig,
    pub proof: ProofConfig,
    pub exclude: Exclude,
}

/// Per cgroup; in Kubernetes, per pod.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    pub lanes: u32,
    /// Address space reserved for rings. Pages cost memory only when used, and the process that
    /// uses them pays.
    pub memory_mib: u64,
    pub processes: u32,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct ProofConfig {
    /// Record initial sequence numbers by BPF. Needs privileges; without, ends are paired inside
    /// one network namespace only.
    pub bpf: bool,
    /// Where the records are kept beyond the daemon's life.
    pub pin: PathBuf,
    /// Root of the cgroup v2 hierarchy; found by itself where not set.
    pub cgroup: Option<PathBuf>,
}

/// Connections that stay on TCP.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Exclude {
    /// Either end's port.
    pub ports: Vec<u16>,
    /// Program names, as in `/proc/PID/comm`.
    pub programs: Vec<String>,
    /// Either end's address.
    pub addresses: Vec<std::net::IpAddr>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            ring_log2: 16,
            ring_max_log2: 20,
            credits: 16,
            limits: LimitsConfig::default(),
            proof: ProofConfig::default(),
            exclude: Exclude::default(),
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        LimitsConfig {
            lanes: 262_144,
            memory_mib: 1 << 20,
            processes: 16_384,
        }
    }
}

impl Default for ProofConfig {
    fn default() -> Self {
        ProofConfig {
            bpf: true,
            pin: "/sys/fs/bpf/underpass".into(),
            cgroup: None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}")]
    Read(PathBuf, std::io::Error),
    #[error("{0}: {1}")]
    Parse(PathBuf, toml::de::Error),
    #[error("ring sizes must be {RING_LOG2_MIN} to {RING_LOG2_MAX} (log2 of bytes), the first not above the largest")]
    Rings,
    #[error("credits must be 1 to 256")]
    Credits,
}

impl Config {
    pub fn load(path: &Path) -> Result<Config, Error> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::Read(path.into(), e))?;
        toml::from_str(&text).map_err(|e| Error::Parse(path.into(), e))
    }

    /// Checks what has been put together.
    pub fn check(&self) -> Result<(), Error> {
        let (first, most) = (u32::from(self.ring_log2), u32::from(self.ring_max_log2));
        if first < RING_LOG2_MIN || most > RING_LOG2_MAX || first > most {
            return Err(Error::Rings);
        }
        if !(1..=256).contains(&self.credits) {
            return Err(Error::Credits);
        }
        Ok(())
    }

    pub fn limits(&self) -> Limits {
        Limits {
            lanes: self.limits.lanes,
            memory: self.limits.memory_mib.saturating_mul(1 << 20),
            parties: self.limits.processes,
        }
    }
}

impl Exclude {
    /// Does a rule keep this connection on TCP?
    pub fn covers(&self, comm: &str, ends: [std::net::SocketAddr; 2]) -> bool {
        self.programs.iter().any(|p| p == comm)
            || ends
                .iter()
                .any(|e| self.ports.contains(&e.port()) || self.addresses.contains(&e.ip()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_files() {
        assert!(Config::default().check().is_ok());
        let c: Config = toml::from_str(
            "ring_log2 = 12\n[limits]\nlanes = 7\n[exclude]\nports = [22]\naddresses = ['10.0.0.1']",
        )
        .unwrap();
        assert_eq!((c.ring_log2, c.ring_max_log2, c.limits.lanes), (12, 20, 7));
        assert!(toml::from_str::<Config>("ring_lgo2 = 12").is_err());
        let a = |s: &str| s.parse().unwrap();
        assert!(c.exclude.covers("x", [a("1.1.1.1:5"), a("1.1.1.2:22")]));
        assert!(c.exclude.covers("x", [a("10.0.0.1:5"), a("1.1.1.2:23")]));
        assert!(!c.exclude.covers("x", [a("1.1.1.1:5"), a("1.1.1.2:23")]));
        assert!(Config {
            ring_log2: 21,
            ..Config::default()
        }
        .check()
        .is_err());
        assert!(Config {
            ring_max_log2: 23,
            ..Config::default()
        }
        .check()
        .is_err());
    }
}
