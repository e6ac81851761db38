//! Changes a finished shared object where no linker option does it.

use object::elf::{FileHeader64, DT_VERNEEDNUM, SHT_DYNSYM, STB_WEAK, VER_NDX_GLOBAL};
use object::read::elf::{Dyn, FileHeader, SectionHeader, Sym};
use object::LittleEndian as LE;
use std::fs;
use std::path::Path;

/// Makes the references to `symbols` weak and without a version, and takes `library` from the list of
/// libraries whose versions the dynamic linker checks before it starts a program.
pub fn make_weak(file: &Path, symbols: &[&str], library: &str) -> Result<(), String> {
    let failed = |e: String| format!("{}: {symbols:?} of {library}: {e}", file.display());
    let mut data = fs::read(file).map_err(|e| failed(e.to_string()))?;
    let weak = symbols.iter().map(|symbol| weak(&data, symbol));
    let changes: Vec<_> = weak.chain([unlisted(&data, library)]).collect();
    for change in changes {
        for (at, bytes) in change.map_err(failed)? {
            data[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }
    fs::write(file, data).map_err(|e| failed(e.to_string()))
}

/// Bytes for offsets in the file.
type Change = Vec<(usize, Vec<u8>)>;

/// Where `part`, a part of `data`, begins.
fn offset<T>(data: &[u8], part: &T) -> usize {
    core::ptr::from_ref(part).addr() - data.as_ptr().addr()
}

fn weak(data: &[u8], symbol: &str) -> Result<Change, String> {
    let parsed = |e: object::Error| e.to_string();
    let header = FileHeader64::<LE>::parse(data).map_err(parsed)?;
    let sections = header.sections(LE, data).map_err(parsed)?;
    let symbols = sections.symbols(LE, data, SHT_DYNSYM).map_err(parsed)?;
    let named = |s| symbols.symbol_name(LE, s) == Ok(symbol.as_bytes());
    let (index, found) = symbols
        .enumerate()
        .find(|&(_, s)| s.is_undefined(LE) && named(s))
        .ok_or("no such reference")?;
    let versions = sections.gnu_versym(LE, data).map_err(parsed)?;
    let version = versions
        .and_then(|(all, _)| all.get(index.0))
        .ok_or("no version")?;
    Ok(vec![
        (
            offset(data, &found.st_info),
            vec![(STB_WEAK << 4) | found.st_type()],
        ),
        (offset(data, version), VER_NDX_GLOBAL.to_le_bytes().to_vec()),
    ])
}

fn unlisted(data: &[u8], library: &str) -> Result<Change, String> {
    let parsed = |e: object::Error| e.to_string();
    let header = FileHeader64::<LE>::parse(data).map_err(parsed)?;
    let sections = header.sections(LE, data).map_err(parsed)?;
    let (mut needs, link) = sections
        .gnu_verneed(LE, data)
        .map_err(parsed)?
        .ok_or("no versions")?;
    let names = sections.strings(LE, data, link).map_err(parsed)?;
    let mut before = None;
    while let Some((need, _)) = needs.next().map_err(parsed)? {
        if need.file(LE, names) != Ok(library.as_bytes()) {
            before = Some(need);
            continue;
        }
        // The one before it leads to the one after it; the first cannot be left out in this way.
        let before = before.ok_or("is the first library")?;
        let next = match need.vn_next.get(LE) {
            0 => 0,
            n => before.vn_next.get(LE) + n,
        };
        let (entries, _) = sections
            .dynamic(LE, data)
            .map_err(parsed)?
            .ok_or("not dynamic")?;
        let count = entries
            .iter()
            .find(|d| d.d_tag(LE) == DT_VERNEEDNUM)
            .ok_or("no count of versions")?;
        let section = sections
            .iter()
            .find(|s| matches!(s.gnu_verneed(LE, data), Ok(Some(_))))
            .ok_or("no versions")?;
        return Ok(vec![
            (offset(data, &before.vn_next), next.to_le_bytes().to_vec()),
            (
                offset(data, &count.d_val),
                (count.d_val(LE) - 1).to_le_bytes().to_vec(),
            ),
            (
                offset(data, &section.sh_info),
                (section.sh_info(LE) - 1).to_le_bytes().to_vec(),
            ),
        ]);
    }
    Err("no versions of it".to_owned())
}
