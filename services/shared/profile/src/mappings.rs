//! The executable mappings of this process, with the build IDs of their files.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;

use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ReadCache};

/// A range of addresses and the file whose code is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    /// Path of the file, or a name in brackets such as `[vdso]`.
    pub path: String,
    /// Hexadecimal; empty if the file has none or cannot be read.
    pub build_id: String,
}

/// The path that the kernel reports for a file that was removed or replaced ends so.
const DELETED: &str = " (deleted)";

/// Reads the executable mappings, in the order of addresses.
pub(crate) fn read() -> io::Result<Vec<Mapping>> {
    let mut mappings = parse(&std::fs::read_to_string("/proc/self/maps")?);
    let own = own_path()?;
    let mut known: HashMap<String, String> = HashMap::new();
    for mapping in &mut mappings {
        let id = known.entry(mapping.path.clone()).or_insert_with_key(|path| {
            // The running file, also if another one has its path now.
            let file = if *path == own { Path::new("/proc/self/exe") } else { Path::new(path) };
            build_id(file).unwrap_or_default()
        });
        mapping.build_id.clone_from(id);
        if let Some(path) = mapping.path.strip_suffix(DELETED) {
            mapping.path = path.to_owned();
        }
    }
    Ok(mappings)
}

/// Returns the path of the program's file, as the mappings have it without its mark for a removed file.
pub(crate) fn own_path() -> io::Result<String> {
    Ok(std::fs::read_link("/proc/self/exe")?.to_string_lossy().into_owned())
}

/// Returns the path of the program's file in what [`read`] returns.
pub(crate) fn own_file() -> io::Result<String> {
    let path = own_path()?;
    Ok(path.strip_suffix(DELETED).map_or(path.clone(), str::to_owned))
}

fn parse(maps: &str) -> Vec<Mapping> {
    maps.lines().filter_map(line).collect()
}

/// Parses a line of `/proc/PID/maps` if its range is executable and has a name.
fn line(line: &str) -> Option<Mapping> {
    // The path may contain spaces.
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let is_executable = fields.next()?.contains('x');
    let offset = fields.next()?;
    let path = fields.nth(2)?.trim_start();
    if !is_executable || path.is_empty() {
        return None;
    }
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(Mapping {
        start: number(start)?,
        end: number(end)?,
        offset: number(offset)?,
        path: path.to_owned(),
        build_id: String::new(),
    })
}

/// Returns the build ID of an ELF file in hexadecimal. It reads the headers, not the whole file.
fn build_id(path: &Path) -> Option<String> {
    let file = ReadCache::new(File::open(path).ok()?);
    let elf = ElfFile64::<Endianness, _>::parse(&file).ok()?;
    let id = elf.build_id().ok()??;
    Some(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_lines_with_a_name_are_mappings() {
        let maps = "\
00400000-00401000 r--p 00000000 fe:01 12  /usr/bin/quintlet
00401000-00500000 r-xp 00001000 fe:01 12                         /usr/bin/a file (deleted)
7f0000000000-7f0000001000 r-xp 00000000 00:00 0
7fff00000000-7fff00002000 r-xp 00000000 00:00 0                          [vdso]
nonsense
";
        let mapping = |start, end, offset, path: &str| Mapping {
            start,
            end,
            offset,
            path: path.to_owned(),
            build_id: String::new(),
        };
        assert_eq!(
            parse(maps),
            [
                mapping(0x40_1000, 0x50_0000, 0x1000, "/usr/bin/a file (deleted)"),
                mapping(0x7fff_0000_0000, 0x7fff_0000_2000, 0, "[vdso]"),
            ]
        );
    }

    #[test]
    fn this_program_is_among_its_mappings() {
        let own = own_file().unwrap();
        let mappings = read().unwrap();
        assert!(mappings.iter().any(|mapping| mapping.path == own), "{own}: {mappings:?}");
        // libc of every distribution has a build ID.
        assert!(mappings.iter().any(|mapping| mapping.build_id.len() == 40), "{mappings:?}");
    }
}
