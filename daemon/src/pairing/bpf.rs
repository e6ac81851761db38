//! The BPF proof: loads the sockops program, keeps it beyond the daemon's life, and reads its records. If anything
//! fails here, the daemon runs without this proof.
//!
//! Program and map are pinned, so that connections made while no daemon runs are recorded, too.
//! Several daemons of one node share them. A daemon that finds an older program than its own puts its own into that one's
//! place, from one event to the next: the map stays, and with it the records of the connections that there are. Of two
//! daemons with different programs, the newer one's stays; the older daemon reads what it records.

use crate::os::bpf::replace_program;
use crate::os::cgroup2;
use crate::pairing::proof::{NoProof, Proof, Record, Role};
use aya::maps::{Map, MapData, SkStorage};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{loaded_programs, CgroupAttachMode, SockOps};
use aya::{Ebpf, EbpfLoader};
use rustix::fs::Mode;
use rustix::io::Errno;
use serde::Deserialize;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Whether and where, from the configuration.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct ProofConfig {
    /// Record initial sequence numbers by BPF. Needs privileges; without, ends are paired inside
    /// one network namespace only.
    pub bpf: bool,
    /// Where program and records are pinned, so that they outlive the daemon.
    pub pin: PathBuf,
    /// Root of the cgroup v2 hierarchy; found by itself where not set.
    pub cgroup: Option<PathBuf>,
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

static PROGRAM: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sockops.o"));

/// Version of `RawRecord`; part of the pins' path, so that daemons of two versions do not read
/// each other's records.
const LAYOUT: u32 = 1;

/// Version of the program, which its name tells. The first one had none.
const VERSION: u32 = 2;
const NAME: &str = "underpass_2";

/// Of a program with this name; 0: it is none of ours.
fn version_of(name: &str) -> u32 {
    match name.strip_prefix("underpass") {
        Some("") => 1,
        Some(v) => v
            .strip_prefix('_')
            .and_then(|v| v.parse().ok())
            .unwrap_or(0),
        None => 0,
    }
}

/// As in `sockops.bpf.c`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawRecord {
    snd: u32,
    rcv: u32,
    at_ns: u64,
    role: u32,
    layout: u32,
}
// SAFETY: integers without padding.
unsafe impl aya::Pod for RawRecord {}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Load(#[from] aya::EbpfError),
    #[error("{0}")]
    Program(#[from] aya::programs::ProgramError),
    #[error("{0}")]
    Map(#[from] aya::maps::MapError),
    #[error("{0}")]
    Link(#[from] aya::programs::links::LinkError),
    #[error("no cgroup v2 hierarchy: {0}")]
    Cgroup(Errno),
    #[error("it cannot be replaced: {0}")]
    Replace(Errno),
    #[error("the program has not the parts it was built with")]
    Parts,
}

struct Bpf {
    records: SkStorage<MapData, RawRecord>,
    /// Detaches when dropped, unless it is pinned.
    _link: FdLink,
}

/// Starts recording, or takes over what an earlier daemon pinned; without privileges there is no recording.
pub(crate) fn open(config: &ProofConfig) -> Arc<dyn Proof> {
    if !config.bpf {
        return Arc::new(NoProof);
    }
    match start(config) {
        Ok(b) => Arc::new(b),
        Err(e) => {
            let e = causes(&e);
            tracing::info!("no BPF proof, pairing inside one network namespace only: {e}");
            Arc::new(NoProof)
        }
    }
}

/// An error with its causes.
fn causes(e: &dyn std::error::Error) -> String {
    let mut s = e.to_string();
    let mut cause = e.source();
    while let Some(c) = cause {
        let c_text = c.to_string();
        if !s.contains(&c_text) {
            s = format!("{s}: {c_text}");
        }
        cause = c.source();
    }
    s
}

fn start(config: &ProofConfig) -> Result<Bpf, Error> {
    let cgroup = cgroup2::root(config.cgroup.as_deref()).map_err(Error::Cgroup)?;
    // A link to a part of the hierarchy ends with that part, and its pin stays.
    let pins = pin_dir(&config.pin).filter(|_| cgroup.whole);
    if let Some(b) = pins.as_deref().and_then(reuse) {
        return Ok(b);
    }
    let mut bpf = EbpfLoader::new().load(PROGRAM)?;
    let map = bpf.take_map("records").ok_or(Error::Parts)?;
    let program = load(&mut bpf)?;
    let id = program.attach(&cgroup.dir, CgroupAttachMode::Single)?;
    let link: FdLink = program.take_link(id)?.try_into()?;
    let Map::SkStorage(data) = map else {
        return Err(Error::Parts);
    };
    let mut link = Some(link);
    if let Some(dir) = &pins {
        match pin(dir, &data, &mut link) {
            Ok(()) => {}
            // Another daemon was quicker: its pins are as good as ours. If they cannot be used, ours take their places.
            Err(e) => match reuse(dir) {
                Some(b) => return Ok(b),
                None => {
                    let replaced = replace(dir, &data, &mut link);
                    if let Err(again) = replaced {
                        tracing::info!("records will not outlive the daemon: {e}; {again}");
                    }
                }
            },
        }
    }
    if pins.is_none() {
        tracing::info!(
            "records will not outlive the daemon: no BPF file system, or not the node's cgroups"
        );
    }
    let records = SkStorage::try_from(Map::SkStorage(data))?;
    Ok(Bpf {
        records,
        _link: link.ok_or(Error::Parts)?,
    })
}

fn load(bpf: &mut Ebpf) -> Result<&mut SockOps, Error> {
    let program: &mut SockOps = bpf.program_mut(NAME).ok_or(Error::Parts)?.try_into()?;
    program.load()?;
    Ok(program)
}

const LINK: &str = "link";
const RECORDS: &str = "records";

/// Pins the map, then the link: the records of a pinned link without a pinned map could be read by nobody.
fn pin(dir: &Path, map: &MapData, link: &mut Option<FdLink>) -> Result<(), String> {
    if dir.join(LINK).exists() {
        return Err("there are pins that cannot be used".into());
    }
    // A map without its link, otherwise `reuse` would have taken both.
    let _ = std::fs::remove_file(dir.join(RECORDS));
    pin_as(dir, (RECORDS, LINK), map, link)
}

fn pin_as(
    dir: &Path,
    (records, of): (&str, &str),
    map: &MapData,
    link: &mut Option<FdLink>,
) -> Result<(), String> {
    map.pin(dir.join(records)).map_err(|e| causes(&e))?;
    let free = link.take().ok_or("no link")?;
    let pinned = free.pin(dir.join(of)).map_err(|e| causes(&e))?;
    *link = Some(pinned.into());
    Ok(())
}

/// Pins both beside the pins that there are, and puts them into their places, each at once.
fn replace(dir: &Path, map: &MapData, link: &mut Option<FdLink>) -> Result<(), String> {
    // (Names with a dot are the file system's own.)
    const NEW: (&str, &str) = ("records-new", "link-new");
    for left in [NEW.0, NEW.1] {
        let _ = std::fs::remove_file(dir.join(left)); // of a daemon that was killed here
    }
    pin_as(dir, NEW, map, link)?;
    for (new, old) in [(NEW.0, RECORDS), (NEW.1, LINK)] {
        std::fs::rename(dir.join(new), dir.join(old)).map_err(|e| e.to_string())?;
    }
    tracing::info!("pins of the BPF proof that could not be used were replaced");
    Ok(())
}

/// Opens the map and the link that an earlier daemon has pinned. `None`: they cannot be used.
fn reuse(dir: &Path) -> Option<Bpf> {
    let link = PinnedLink::from_pin(dir.join(LINK)).ok()?;
    let link = FdLink::from(link);
    let map = MapData::from_pin(dir.join(RECORDS)).ok()?;
    let info = map.info().ok()?;
    if info.value_size() as usize != std::mem::size_of::<RawRecord>() {
        return None;
    }
    let records = SkStorage::try_from(Map::from_map_data(map).ok()?).ok()?;
    if running(&link) < VERSION {
        match upgrade(dir) {
            Ok(()) => tracing::info!("an older program of the BPF proof was replaced"),
            Err(e) => tracing::warn!("an older program of the BPF proof stays: {}", causes(&e)),
        }
    }
    Some(Bpf {
        records,
        _link: link,
    })
}

/// Version of the program that this link runs; 0: none of ours, or it cannot be told.
fn running(link: &FdLink) -> u32 {
    let Ok(info) = link.info() else { return 0 };
    let mut all = loaded_programs().filter_map(Result::ok);
    let program = all.find(|p| p.id() == info.program_id());
    program.map_or(0, |p| version_of(p.name_as_str().unwrap_or_default()))
}

/// Puts our program, with the map that is pinned, into the place of the one that runs.
fn upgrade(dir: &Path) -> Result<(), Error> {
    let mut loader = EbpfLoader::new();
    let mut bpf = loader
        .map_pin_path(RECORDS, dir.join(RECORDS))
        .load(PROGRAM)?;
    let program = load(&mut bpf)?;
    replace_program(&dir.join(LINK), program.fd()?.as_fd()).map_err(Error::Replace)
}

/// The directory for the pins, on a BPF file system; mounts one if there is none.
fn pin_dir(path: &Path) -> Option<PathBuf> {
    const BPF_FS: i64 = 0xcafe_4a11;
    let parent = path.parent()?;
    let is_bpf = |p: &Path| rustix::fs::statfs(p).is_ok_and(|s| s.f_type == BPF_FS);
    if !is_bpf(parent) && parent == Path::new("/sys/fs/bpf") {
        let flags = rustix::mount::MountFlags::NOSUID
            | rustix::mount::MountFlags::NODEV
            | rustix::mount::MountFlags::NOEXEC;
        if let Err(e) = rustix::mount::mount("bpf", parent, "bpf", flags, None) {
            tracing::debug!("cannot mount the BPF file system: {e}");
        }
    }
    if !is_bpf(parent) {
        tracing::debug!("{} is no BPF file system", parent.display());
        return None;
    }
    // (`vN`, without a word, may be a daemon's that attached the program to its own cgroup.)
    let dir = path.join(format!("v{LAYOUT}-node"));
    for d in [path, &dir] {
        match rustix::fs::mkdir(d, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => {
                tracing::debug!("{}: {e}", d.display());
                return None;
            }
        }
    }
    Some(dir)
}

impl Proof for Bpf {
    fn record(&self, socket: BorrowedFd<'_>) -> Option<Record> {
        let r = self.records.get(&socket, 0).ok()?;
        let role = match (r.layout, r.role) {
            (LAYOUT, 1) => Role::Active,
            (LAYOUT, 2) => Role::Passive,
            _ => return None,
        };
        Some(Record {
            snd: r.snd,
            rcv: r.rcv,
            role,
            at_ns: r.at_ns,
        })
    }

    fn active(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version_of(NAME), VERSION);
        assert_eq!(
            ["underpass", "underpass_7", "underpass_", "other", ""].map(version_of),
            [1, 7, 0, 0, 0]
        );
        assert!(NAME.len() < 16, "the kernel cuts it");
    }

    /// Who changes the program without another version leaves the old one in place on every node that is upgraded.
    #[test]
    fn a_changed_program_has_another_version() {
        let source = include_str!("../../bpf/sockops.bpf.c");
        let hash = source.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        });
        let known = (2, 0x9ddd_e5cf_0eb1_c2a1);
        assert_eq!((VERSION, hash), known, "raise VERSION, and enter both here");
    }
}
