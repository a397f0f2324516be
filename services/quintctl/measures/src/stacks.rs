//! Stacks as texts: the folded form, which other tools read, too.

use std::collections::{BTreeMap, HashMap};

use quintlet_profile::format::{Location, Profile};

/// Samples by the names of a stack: the thread, then the functions, outermost first.
pub type Folded = BTreeMap<Vec<String>, i64>;

/// Names the frames of all samples, and adds up those with the same names.
#[must_use]
pub fn fold(profile: &Profile) -> Folded {
    let locations: HashMap<u64, &Location> = profile.location.iter().map(|l| (l.id, l)).collect();
    let functions: HashMap<u64, i64> = profile.function.iter().map(|f| (f.id, f.name)).collect();
    let name = |id: &u64| -> String {
        let Some(location) = locations.get(id) else { return "?".to_owned() };
        match location.line.first().and_then(|line| functions.get(&line.function_id)) {
            Some(name) => profile.text(*name).to_owned(),
            None => address(profile, location),
        }
    };
    let mut folded = Folded::new();
    for sample in &profile.sample {
        let thread = sample.label.first().map_or("", |label| profile.text(label.str));
        let frames = sample.location_id.iter().rev().map(name);
        let stack = std::iter::once(thread.to_owned()).chain(frames).map(|frame| one_line(&frame)).collect();
        let samples = folded.entry(stack).or_default();
        *samples = samples.saturating_add(sample.value.first().copied().unwrap_or_default());
    }
    folded
}

/// Returns an address without a name as the file and the offset in it, such as `quintlet+0x1f00`.
fn address(profile: &Profile, location: &Location) -> String {
    let mapping = profile.mapping.iter().find(|mapping| mapping.id == location.mapping_id);
    let Some(mapping) = mapping else { return format!("{:#x}", location.address) };
    let path = profile.text(mapping.filename);
    let file = path.rsplit('/').next().unwrap_or(path);
    let offset = location.address.wrapping_sub(mapping.memory_start).wrapping_add(mapping.file_offset);
    format!("{file}+{offset:#x}")
}

/// Frames are separated by semicolons, which types of Rust have, too.
fn one_line(frame: &str) -> String {
    frame.replace(';', ",").replace(char::is_control, " ")
}

/// Returns a line per stack, such as `main;run;poll 12`.
#[must_use]
pub fn lines(folded: &Folded) -> String {
    folded.iter().map(|(stack, count)| format!("{} {count}\n", stack.join(";"))).collect()
}

#[cfg(test)]
mod tests {
    use quintlet_profile::format::{Function, Label, Line, Mapping, Sample, Strings};

    use super::*;

    #[test]
    fn stacks_are_folded_by_name_and_an_address_without_a_name_is_that_of_its_file() {
        let mut strings = Strings::default();
        let [thread, outer, inner, file] =
            ["main", "outer", "inner<[u8; 4]>", "/usr/bin/quintlet"].map(|text| strings.index(text));
        let location = |id, function_id: u64| Location {
            id,
            mapping_id: 1,
            address: 0x40_1000 + id,
            line: if function_id == 0 { Vec::new() } else { vec![Line { function_id, line: 0 }] },
        };
        let sample = |location_id: &[u64], count| Sample {
            location_id: location_id.to_vec(),
            value: vec![count, 0],
            label: vec![Label { str: thread, ..Label::default() }],
        };
        let profile = Profile {
            sample: vec![sample(&[2, 1], 3), sample(&[3, 1], 4), sample(&[4, 9], 1)],
            mapping: vec![Mapping {
                id: 1,
                memory_start: 0x40_0000,
                file_offset: 0x10,
                filename: file,
                ..Mapping::default()
            }],
            // Two addresses of one function.
            location: vec![location(1, 1), location(2, 2), location(3, 2), location(4, 0)],
            function: vec![
                Function { id: 1, name: outer, system_name: 0 },
                Function { id: 2, name: inner, system_name: 0 },
            ],
            string_table: strings.into_table(),
            ..Profile::default()
        };
        assert_eq!(lines(&fold(&profile)), "main;?;quintlet+0x1014 1\nmain;outer;inner<[u8, 4]> 7\n");
    }
}
