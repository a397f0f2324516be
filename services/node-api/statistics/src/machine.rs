//! Statistics of the machine, from `/proc` and the root cgroup.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use quintlet_cgroups::stats::{CgroupStats, RootMemory};
use quintlet_kit::clock::Clock;

use crate::rates::Rate;

/// Ticks per second in /proc/stat: USER_HZ, which is 100 on all supported platforms.
const NANOS_PER_TICK: u64 = 10_000_000;

/// Reads the statistics of the machine.
#[derive(Debug)]
pub(super) struct MachineStatistics {
    /// Mount point of the cgroups.
    cgroups: PathBuf,
    clock: Clock,
    /// Previous CPU time.
    last: Rate,
}

impl MachineStatistics {
    pub(super) fn new(cgroups: &Path, clock: Clock) -> Self {
        Self { cgroups: cgroups.to_owned(), clock, last: Rate::default() }
    }

    /// Reads the statistics.
    pub(super) fn read(&self) -> Machine {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let time = self.clock.wall();
        let cpu_nanos = busy_ticks(&text("/proc/stat")).saturating_mul(NANOS_PER_TICK);
        let vmstat = numbers(&text("/proc/vmstat"), 1);
        let nano_cores = self.last.nano_cores(time, cpu_nanos);
        Machine {
            time,
            cpu_nanos,
            nano_cores,
            memory: numbers(&text("/proc/meminfo"), 1024),
            root: CgroupStats::root_memory(&self.cgroups),
            page_faults: vmstat.get("pgfault").copied().unwrap_or(0),
            major_page_faults: vmstat.get("pgmajfault").copied().unwrap_or(0),
        }
    }
}

/// Statistics of the machine.
#[derive(Debug, Default)]
pub(super) struct Machine {
    pub(super) time: Timestamp,
    pub(super) cpu_nanos: u64,
    pub(super) nano_cores: Option<u64>,
    pub(super) memory: BTreeMap<String, u64>,
    /// Memory of the root cgroup, as evictions see it; none if it cannot be read.
    pub(super) root: Option<RootMemory>,
    pub(super) page_faults: u64,
    pub(super) major_page_faults: u64,
}

impl Machine {
    pub(super) fn of(&self, name: &str) -> u64 {
        self.memory.get(name).copied().unwrap_or(0)
    }

    pub(super) fn used(&self) -> u64 {
        self.root.map_or_else(|| self.of("MemTotal").saturating_sub(self.of("MemFree")), |root| root.usage)
    }

    pub(super) fn working_set(&self) -> u64 {
        self.root
            .map_or_else(|| self.used().saturating_sub(self.of("Inactive(file)")), |root| root.working_set)
    }

    /// Returns the memory that is not in the working set, and not reserved for huge pages if
    /// `subtracts_huge_pages`.
    pub(super) fn available(&self, subtracts_huge_pages: bool) -> u64 {
        let huge_pages = if subtracts_huge_pages { self.of("Hugetlb") } else { 0 };
        self.of("MemTotal").saturating_sub(self.working_set()).saturating_sub(huge_pages)
    }

    pub(super) fn rss(&self) -> u64 {
        self.root.and_then(|root| root.rss).unwrap_or_else(|| self.of("AnonPages"))
    }
}

/// Returns the ticks in which a CPU was busy: all but idle and iowait.
fn busy_ticks(stat: &str) -> u64 {
    let Some(line) = stat.lines().find_map(|l| l.strip_prefix("cpu ")) else { return 0 };
    let ticks = line.split_whitespace().map(|n| n.parse::<u64>().unwrap_or(0));
    // The time of guests is included in user time.
    ticks.enumerate().filter(|(i, _)| ![3, 4, 8, 9].contains(i)).map(|(_, n)| n).sum()
}

/// Parses lines `name: 12 kB` and `name 12`.
fn numbers(text: &str, unit: u64) -> BTreeMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next()?.trim_end_matches(':').to_owned();
            Some((name, words.next()?.parse::<u64>().ok()?.saturating_mul(unit)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_the_node_is_that_of_the_root_cgroup_as_for_evictions() {
        let machine = |root| {
            let memory =
                numbers("MemTotal: 1000 kB\nMemFree: 200 kB\nInactive(file): 100 kB\nAnonPages: 50 kB\n", 1);
            let time = Timestamp::UNIX_EPOCH;
            let m = Machine {
                time,
                cpu_nanos: 0,
                nano_cores: None,
                memory,
                root,
                page_faults: 0,
                major_page_faults: 0,
            };
            (m.used(), m.working_set(), m.rss())
        };
        // Memory of the kernel is in use, too, and belongs to no process.
        assert_eq!(machine(Some(RootMemory { usage: 500, working_set: 400, rss: Some(40) })), (500, 400, 40));
        assert_eq!(machine(None), (800, 700, 50), "the root cgroup cannot be read");
    }

    #[test]
    fn huge_pages_are_not_available_memory_unless_the_feature_gate_is_off() {
        for (huge_pages, subtracts, available) in [
            ("Hugetlb: 100 kB\n", true, 500),
            ("Hugetlb: 100 kB\n", false, 600),
            ("", true, 600),
            ("Hugetlb: 700 kB\n", true, 0),
        ] {
            let machine = Machine {
                time: Timestamp::UNIX_EPOCH,
                cpu_nanos: 0,
                nano_cores: None,
                memory: numbers(&format!("MemTotal: 1000 kB\n{huge_pages}"), 1),
                root: Some(RootMemory { usage: 500, working_set: 400, rss: None }),
                page_faults: 0,
                major_page_faults: 0,
            };
            assert_eq!(machine.available(subtracts), available, "{huge_pages:?} {subtracts}");
        }
    }

    #[test]
    fn statistics_of_the_machine_come_from_proc() {
        assert_eq!(busy_ticks("cpu  10 1 5 1000 50 2 3 4 7 0\ncpu0 1 1 1 1\n"), 25);
        let memory = numbers("MemTotal:       1000 kB\nInactive(file):  10 kB\n", 1024);
        assert_eq!(memory.get("Inactive(file)"), Some(&10_240));
        assert_eq!(numbers("pgfault 7\n", 1).get("pgfault"), Some(&7));
    }
}
