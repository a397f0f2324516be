//! Stacks of addresses, and their encoding as a profile.

use std::collections::HashMap;

use crate::format::{Label, Location, Profile, Sample, Strings, ValueType};
use crate::mappings::Mapping;

/// A stack and how often it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stack {
    /// Name of the thread.
    pub thread: String,
    /// Addresses, innermost first. The first is that of an instruction, the others are return addresses.
    pub addresses: Vec<u64>,
    pub count: i64,
}

/// Times of a recording.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Nanoseconds since the epoch at its start.
    pub start_ns: i64,
    pub duration_ns: i64,
    /// CPU time that one sample stands for, in nanoseconds.
    pub period_ns: i64,
}

/// Returns the part of a stack that belongs to the interrupted code. The innermost addresses are those of the
/// signal handler, which is part of the program `own`, and of the frame that the kernel returns to after it,
/// which is in libc or in the vdso.
pub(crate) fn without_handler(addresses: &[u64], mappings: &[Mapping], own: &str) -> Vec<u64> {
    let in_program = |address: &&u64| mapping_of(**address, mappings).is_some_and(|m| m.path == own);
    let handler = addresses.iter().take_while(in_program).count();
    let interrupted = addresses.get(handler.saturating_add(1)..).unwrap_or_default();
    // The return address of the first frame of a thread is zero.
    interrupted.iter().copied().filter(|address| *address != 0).collect()
}

fn mapping_of(address: u64, mappings: &[Mapping]) -> Option<&Mapping> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    mappings.get(after.checked_sub(1)?).filter(|mapping| address < mapping.end)
}

/// Returns a profile with the number of samples and the CPU time of each stack.
pub(crate) fn profile(stacks: &[Stack], mappings: &[Mapping], times: Times) -> Profile {
    let mut strings = Strings::default();
    let samples = ValueType { r#type: strings.index("samples"), unit: strings.index("count") };
    let cpu = ValueType { r#type: strings.index("cpu"), unit: strings.index("nanoseconds") };
    let thread = strings.index("thread");
    let mut locations: Vec<Location> = Vec::new();
    let mut known: HashMap<u64, u64> = HashMap::new();
    let sample = stacks
        .iter()
        .map(|stack| {
            let location_id = stack.addresses.iter().enumerate().map(|(depth, address)| {
                // A return address may be the first one of another function.
                let address = if depth == 0 { *address } else { address.saturating_sub(1) };
                *known.entry(address).or_insert_with(|| {
                    let id = next_id(locations.len());
                    let mapping_id = mapping_of(address, mappings)
                        .and_then(|found| mappings.iter().position(|mapping| mapping == found))
                        .map_or(0, next_id);
                    locations.push(Location { id, mapping_id, address, ..Location::default() });
                    id
                })
            });
            Sample {
                location_id: location_id.collect(),
                value: vec![stack.count, stack.count.saturating_mul(times.period_ns)],
                label: vec![Label { key: thread, str: strings.index(&stack.thread), ..Label::default() }],
            }
        })
        .collect();
    let mapping = mappings.iter().enumerate().map(|(at, mapping)| crate::format::Mapping {
        id: next_id(at),
        memory_start: mapping.start,
        memory_limit: mapping.end,
        file_offset: mapping.offset,
        filename: strings.index(&mapping.path),
        build_id: strings.index(&mapping.build_id),
        ..crate::format::Mapping::default()
    });
    Profile {
        mapping: mapping.collect(),
        sample_type: vec![samples, cpu],
        sample,
        location: locations,
        time_nanos: times.start_ns,
        duration_nanos: times.duration_ns,
        period_type: Some(cpu),
        period: times.period_ns,
        string_table: strings.into_table(),
        ..Profile::default()
    }
}

/// Returns the id of the object at a position: ids begin at 1.
fn next_id(position: usize) -> u64 {
    u64::try_from(position).unwrap_or(u64::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mappings() -> Vec<Mapping> {
        let mapping = |start, end, path: &str| Mapping {
            start,
            end,
            offset: 0x10,
            path: path.to_owned(),
            build_id: "ab".to_owned(),
        };
        vec![mapping(100, 200, "/own"), mapping(300, 400, "/libc"), mapping(500, 600, "/own")]
    }

    #[test]
    fn the_frames_of_the_signal_handler_are_no_part_of_a_stack() {
        for (seen, want) in [
            (&[101, 501, 301, 150, 160, 0][..], &[150, 160][..]),
            // The interrupted code is libc's.
            (&[101, 301, 302, 150], &[302, 150]),
            // The unwinder did not pass the handler.
            (&[101, 102], &[]),
            (&[101, 301], &[]),
            (&[], &[]),
        ] {
            assert_eq!(without_handler(seen, &mappings(), "/own"), want, "{seen:?}");
        }
    }

    #[test]
    fn a_profile_has_each_address_once_and_its_mapping() {
        let stack = |thread: &str, addresses: &[u64], count| Stack {
            thread: thread.to_owned(),
            addresses: addresses.to_vec(),
            count,
        };
        let times = Times { start_ns: 7, duration_ns: 8, period_ns: 10 };
        let stacks = [stack("main", &[150, 161], 3), stack("other", &[160, 700], 1)];
        let profile = profile(&stacks, &mappings(), times);
        let text = |index: i64| profile.string_table[usize::try_from(index).unwrap()].as_str();
        let locations: Vec<(u64, u64, u64)> =
            profile.location.iter().map(|l| (l.id, l.mapping_id, l.address)).collect();
        // The return address 161 is that of the call at 160.
        assert_eq!(locations, [(1, 1, 150), (2, 1, 160), (3, 0, 699)]);
        let samples: Vec<(&[u64], &[i64], &str)> =
            profile.sample.iter().map(|s| (&s.location_id[..], &s.value[..], text(s.label[0].str))).collect();
        assert_eq!(samples, [(&[1, 2][..], &[3, 30][..], "main"), (&[2, 3], &[1, 10], "other")]);
        let kinds: Vec<(&str, &str)> =
            profile.sample_type.iter().map(|kind| (text(kind.r#type), text(kind.unit))).collect();
        assert_eq!(kinds, [("samples", "count"), ("cpu", "nanoseconds")]);
        assert_eq!((profile.string_table[0].as_str(), text(profile.mapping[1].filename)), ("", "/libc"));
        assert_eq!((profile.period, profile.time_nanos, profile.duration_nanos), (10, 7, 8));
    }
}
