//! Whether a loader can load a library into a program depends on the ELF headers of both files.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// The header of an ELF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elf {
    /// 1: 32 bits, 2: 64 bits.
    pub class: u8,
    /// Of which architecture it is (EM_*).
    pub machine: u16,
    /// Path of the loader; `None`: a statically linked program, or a library.
    pub interpreter: Option<String>,
}

const PT_INTERP: u32 = 3;
/// Maximum number of program headers that are read, and maximum length of the loader's path.
const HEADERS_MAX: u16 = 512;
const NAME_MAX: u64 = 4096;

/// Reads the header; `None`: the file cannot be read, or is no ELF file of this byte order.
pub fn read(path: &Path) -> Option<Elf> {
    let mut f = std::fs::File::open(path).ok()?;
    let mut head = [0u8; 64];
    f.read_exact(&mut head).ok()?;
    if head[..4] != *b"\x7fELF" || head[5] != 1 {
        return None;
    }
    let class = head[4];
    let (offset, size, count) = match class {
        2 => (u64_at(&head, 32)?, u16_at(&head, 54)?, u16_at(&head, 56)?),
        1 => (
            u32_at(&head, 28)?.into(),
            u16_at(&head, 42)?,
            u16_at(&head, 44)?,
        ),
        _ => return None,
    };
    let mut elf = Elf {
        class,
        machine: u16_at(&head, 18)?,
        interpreter: None,
    };
    for i in 0..count.min(HEADERS_MAX) {
        let mut p = [0u8; 56];
        f.seek(SeekFrom::Start(
            offset.checked_add(u64::from(i) * u64::from(size))?,
        ))
        .ok()?;
        f.read_exact(&mut p[..usize::from(size).min(56)]).ok()?;
        if u32_at(&p, 0)? != PT_INTERP {
            continue;
        }
        let (at, len) = match class {
            2 => (u64_at(&p, 8)?, u64_at(&p, 32)?),
            _ => (u32_at(&p, 4)?.into(), u32_at(&p, 16)?.into()),
        };
        let mut name = Vec::new();
        f.seek(SeekFrom::Start(at)).ok()?;
        f.by_ref()
            .take(len.min(NAME_MAX))
            .read_to_end(&mut name)
            .ok()?;
        let name = String::from_utf8_lossy(&name);
        elf.interpreter = Some(name.trim_end_matches('\0').to_owned());
    }
    Some(elf)
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_program_names_its_loader() {
        let e = read(Path::new("/proc/self/exe")).unwrap();
        assert_eq!(e.class, 2);
        assert!(e.interpreter.unwrap().contains("ld"));
        assert_eq!(read(Path::new("/proc/self/status")), None);
    }
}
