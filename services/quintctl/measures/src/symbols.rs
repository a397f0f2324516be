//! Names of functions, from the symbols of the files that a process has mapped.
//!
//! A file is used only if its build ID is that of the profile. Where the file has no symbols, as the one of a
//! package, those of a debug package are used, which are below `/usr/lib/debug`.

use std::collections::HashMap;
use std::path::PathBuf;

use object::read::elf::{ElfFile64, ProgramHeader as _};
use object::{Endianness, Object as _, ObjectSymbol as _, SymbolKind};
use quintlet_profile::format::{Function, Line, Profile, Strings};

/// Directory of the files of debug packages by build ID.
const DEBUG: &str = "/usr/lib/debug/.build-id";

/// Adds the functions of all locations whose names are found. `pid` is the process, in this PID namespace.
pub fn name_functions(profile: &mut Profile, pid: Option<u32>) {
    let mut strings = Strings::from_table(std::mem::take(&mut profile.string_table));
    let texts = strings.table().to_vec();
    let mut functions: HashMap<String, u64> = HashMap::new();
    for mapping in &mut profile.mapping {
        let text = |index: i64| {
            usize::try_from(index).ok().and_then(|index| texts.get(index)).cloned().unwrap_or_default()
        };
        let Some(symbols) = Symbols::find(&text(mapping.filename), &text(mapping.build_id), pid) else {
            continue;
        };
        mapping.has_functions = true;
        for location in profile.location.iter_mut().filter(|location| location.mapping_id == mapping.id) {
            let offset =
                location.address.wrapping_sub(mapping.memory_start).wrapping_add(mapping.file_offset);
            let Some(symbol) = symbols.at(offset) else { continue };
            let function_id = *functions.entry(symbol.to_owned()).or_insert_with(|| {
                let id = u64::try_from(profile.function.len()).unwrap_or(u64::MAX).saturating_add(1);
                let name = format!("{:#}", rustc_demangle::demangle(symbol));
                let function =
                    Function { id, name: strings.index(&name), system_name: strings.index(symbol) };
                profile.function.push(function);
                id
            });
            location.line = vec![Line { function_id, line: 0 }];
        }
    }
    profile.string_table = strings.into_table();
}

/// The functions of a file.
#[derive(Debug)]
struct Symbols {
    /// Offset in the file, its number of bytes, and the address that the file's symbols have there.
    segments: Vec<(u64, u64, u64)>,
    /// Address, size and name, sorted.
    functions: Vec<(u64, u64, String)>,
}

impl Symbols {
    /// Finds symbols for a file that a process has mapped.
    fn find(path: &str, build_id: &str, pid: Option<u32>) -> Option<Self> {
        if build_id.is_empty() {
            return None;
        }
        let files = files(path, build_id, pid);
        let mut found: Vec<Self> = files.iter().filter_map(|file| Self::read(file, build_id)).collect();
        // The exported functions of a stripped library are few.
        found.sort_by_key(|symbols| symbols.functions.len());
        found.pop().filter(|symbols| !symbols.functions.is_empty())
    }

    fn read(file: &PathBuf, build_id: &str) -> Option<Self> {
        let bytes = std::fs::read(file).ok()?;
        let elf = ElfFile64::<Endianness>::parse(&*bytes).ok()?;
        let own: String = elf.build_id().ok()??.iter().map(|byte| format!("{byte:02x}")).collect();
        if own != build_id {
            return None;
        }
        let endian = elf.endian();
        let segments = elf
            .elf_program_headers()
            .iter()
            .filter(|segment| segment.p_type(endian) == object::elf::PT_LOAD)
            .map(|segment| (segment.p_offset(endian), segment.p_memsz(endian), segment.p_vaddr(endian)))
            .collect();
        let mut functions: Vec<(u64, u64, String)> = elf
            .symbols()
            .chain(elf.dynamic_symbols())
            .filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.is_definition())
            .filter_map(|symbol| Some((symbol.address(), symbol.size(), symbol.name().ok()?.to_owned())))
            .collect();
        functions.sort();
        Some(Self { segments, functions })
    }

    /// Returns the function at an offset in the file.
    fn at(&self, offset: u64) -> Option<&str> {
        let (start, _, address) = self
            .segments
            .iter()
            .find(|(start, size, _)| offset.checked_sub(*start).is_some_and(|within| within < *size))?;
        let address = offset.wrapping_sub(*start).wrapping_add(*address);
        let after = self.functions.partition_point(|(begin, ..)| *begin <= address);
        let (begin, size, name) = self.functions.get(after.checked_sub(1)?)?;
        // A label in assembly without a size names nothing: another function without a symbol may follow.
        (address < begin.wrapping_add(*size)).then_some(name)
    }
}

/// Returns the files that may have the symbols: the mapped file as its process sees it, and those of this
/// machine.
fn files(path: &str, build_id: &str, pid: Option<u32>) -> Vec<PathBuf> {
    let (first, rest) = build_id.split_at_checked(2).unwrap_or_default();
    let own = pid.map(|pid| PathBuf::from(format!("/proc/{pid}/exe")));
    let seen = pid.map(|pid| PathBuf::from(format!("/proc/{pid}/root{path}")));
    own.into_iter()
        .chain(seen)
        .chain([
            PathBuf::from(path),
            PathBuf::from("/proc/self/exe"),
            PathBuf::from(format!("{DEBUG}/{first}/{rest}.debug")),
        ])
        .collect()
}

#[cfg(test)]
mod tests {
    use quintlet_profile::format::{Location, Mapping};

    use super::*;

    #[test]
    fn an_offset_belongs_to_the_function_that_contains_its_address() {
        let function = |begin, size, name: &str| (begin, size, name.to_owned());
        let symbols = Symbols {
            segments: vec![(0, 0x100, 0x40_0000), (0x100, 0x100, 0x50_0100)],
            functions: vec![
                function(0x40_0010, 8, "a"),
                function(0x50_0110, 0x10, "b"),
                function(0x50_0140, 0, "label"),
            ],
        };
        for (offset, want) in [
            (0x0f, None),
            (0x10, Some("a")),
            (0x17, Some("a")),
            (0x18, None),
            (0x110, Some("b")),
            (0x120, None),
            (0x140, None),
            (0x150, None),
            (0x200, None),
        ] {
            assert_eq!(symbols.at(offset), want, "{offset:#x}");
        }
    }

    #[test]
    fn the_functions_of_this_program_are_named_and_those_of_another_build_are_not() {
        let own = std::env::current_exe().unwrap();
        let bytes = std::fs::read(&own).unwrap();
        let elf = ElfFile64::<Endianness>::parse(&*bytes).unwrap();
        let id: String = elf.build_id().unwrap().unwrap().iter().map(|b| format!("{b:02x}")).collect();
        let symbols = Symbols::find(&own.display().to_string(), &id, None).unwrap();
        let wanted = "an_offset_belongs_to_the_function_that_contains_its_address";
        let (address, ..) = symbols.functions.iter().find(|(.., name)| name.contains(wanted)).unwrap();
        let (start, _, base) = symbols
            .segments
            .iter()
            .find(|(_, size, base)| address.checked_sub(*base).is_some_and(|within| within < *size))
            .unwrap();
        let offset = address - base + start;
        let profile = |build_id: &str| {
            let mut strings = Strings::default();
            let mapping = Mapping {
                id: 1,
                memory_start: 0x1000,
                memory_limit: u64::MAX,
                filename: strings.index(&own.display().to_string()),
                build_id: strings.index(build_id),
                ..Mapping::default()
            };
            let location = Location { id: 1, mapping_id: 1, address: 0x1000 + offset, ..Location::default() };
            let mut profile = Profile {
                mapping: vec![mapping],
                location: vec![location],
                string_table: strings.into_table(),
                ..Profile::default()
            };
            name_functions(&mut profile, None);
            profile.function.first().map(|function| profile.text(function.name).to_owned())
        };
        assert!(profile(&id).unwrap().ends_with(wanted), "{:?}", profile(&id));
        assert_eq!(profile(&"0".repeat(40)), None);
    }
}
