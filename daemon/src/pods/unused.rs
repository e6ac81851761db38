//! Containers that have the shim and cannot use it, because their programs are linked statically: no dynamic linker reads
//! `LD_PRELOAD` there. That is seen only when they run.

use super::known::Known;
use crate::clients::view;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use underpass_admin::{elf, proc, PodRow};

/// What is said of them.
pub(crate) const STATIC: &str =
    "it has the shim, but its programs are linked statically and cannot load it";

/// Says it in the rows of which it is true: all processes of the container that can be looked at are such programs. Reads
/// `/proc`.
pub(crate) fn mark(rows: &mut [PodRow], known: &Known) {
    let now = proc::now_ticks();
    let injected = rows.iter().filter(|r| r.injected);
    let injected: HashSet<String> = injected.map(|r| r.at.id.clone()).collect();
    if injected.is_empty() {
        return;
    }
    let mut all: HashMap<String, bool> = HashMap::new();
    for pid in proc::all() {
        let at = known.of_process(pid, now).map(|w| w.id);
        let Some(id) = at.filter(|id| injected.contains(id)) else {
            continue;
        };
        // (One without a program has ended, or is not ours to look at: it says nothing of the others.)
        let Some(cannot) = cannot_load(pid) else {
            continue;
        };
        *all.entry(id).or_insert(true) &= cannot;
    }
    for r in rows {
        if all.get(&r.at.id) == Some(&true) {
            r.why_not = STATIC.into();
        }
    }
}

/// Is its program one that no library can be preloaded into? `None`: its program cannot be read.
fn cannot_load(pid: u32) -> Option<bool> {
    let has_linker = has_interpreter(format!("/proc/{pid}/exe").as_ref())?;
    // (A dynamic linker that was started as a program names none itself.)
    Some(!has_linker && !view::may_have_shim(pid))
}

/// Does the program name a dynamic linker? `None`: it cannot be read, or is no ELF file of 64 bits.
fn has_interpreter(program: &Path) -> Option<bool> {
    let elf = elf::read(program).filter(|e| e.class == 2)?;
    Some(elf.interpreter.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn programs_with_a_dynamic_linker_and_without() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(has_interpreter(&own), Some(true));
        assert_eq!(cannot_load(std::process::id()), Some(false));
        // The same program without the header that names one.
        let bytes = std::fs::read(&own).unwrap();
        let at = usize::try_from(u64::from_le_bytes(bytes[32..40].try_into().unwrap())).unwrap();
        let headers = bytes[at..].chunks(56).take(usize::from(bytes[56]));
        let nth = headers
            .clone()
            .position(|h| h[..4] == [3, 0, 0, 0])
            .unwrap();
        let other = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(other.path(), &bytes).unwrap();
        let place = u64::try_from(at + nth * 56).unwrap();
        other.as_file().write_all_at(&[0; 4], place).unwrap();
        assert_eq!(has_interpreter(other.path()), Some(false));
        std::fs::write(other.path(), b"#!/bin/sh\n").unwrap();
        assert_eq!(has_interpreter(other.path()), None);
    }
}
