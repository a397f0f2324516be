//! Statistics: `/stats/summary`, `/metrics/resource`, `/metrics/cadvisor`.
//!
//! Pods and containers as the runtime's CRI statistics have them, what those leave out from cgroups (`gather`); the node from
//! `/proc`. Anybody may read both. Volumes belong to root: pod-sync measures them and tells the figures.

mod cadvisor;
mod disk;
mod figures;
mod gather;
mod prometheus;
mod summary;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;

use gather::Rates;

/// Ticks of /proc/stat in a second: USER_HZ, the same on every Linux this runs on.
const NANOS_PER_TICK: u64 = 10_000_000;

/// What statistics need.
#[derive(Debug)]
pub struct Stats {
    /// The node's name.
    pub node_name: String,
    /// Where what is measured lies.
    pub places: Places,
    /// Time.
    pub clock: Clock,
    /// The node's CPU time at the last look.
    last: Rate,
    /// The same of all pods together.
    last_of_pods: Rate,
    /// The same of pods and containers that the runtime does not tell of.
    rates: Arc<Rates>,
}

/// Where what is measured lies.
#[derive(Debug, Clone)]
pub struct Places {
    /// The root directory.
    pub root_dir: PathBuf,
    /// Where containers' logs are.
    pub pod_logs_dir: PathBuf,
    /// Where cgroups are mounted.
    pub cgroups: PathBuf,
    /// Cgroup under which `kubepods` stands.
    pub cgroup_root: String,
}

/// CPU time at the last look.
#[derive(Debug, Default)]
struct Rate(Mutex<Option<(Timestamp, u64)>>);

impl Rate {
    /// Cores in use since the last look, in nanocores; none at the first one.
    fn nano_cores(&self, time: Timestamp, cpu_nanos: u64) -> Option<u64> {
        let mut last = self.0.lock();
        let before = last.filter(|(at, _)| *at < time);
        // Too short a time would make the figure jump.
        let is_due = before.is_none_or(|(at, _)| time.duration_since(at).as_secs_f64() >= 1.0);
        if is_due {
            *last = Some((time, cpu_nanos));
        }
        before.and_then(|(at, nanos)| {
            let seconds = time.duration_since(at).as_secs_f64();
            let used = cpu_nanos.saturating_sub(nanos);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            (seconds > 0.0).then(|| (used as f64 / seconds) as u64)
        })
    }
}

/// The machine.
struct Machine {
    time: Timestamp,
    cpu_nanos: u64,
    nano_cores: Option<u64>,
    memory: BTreeMap<String, u64>,
    page_faults: u64,
    major_page_faults: u64,
}

impl Machine {
    fn of(&self, name: &str) -> u64 {
        self.memory.get(name).copied().unwrap_or(0)
    }

    fn working_set(&self) -> u64 {
        let used = self.of("MemTotal").saturating_sub(self.of("MemFree"));
        used.saturating_sub(self.of("Inactive(file)"))
    }
}

impl Stats {
    /// Statistics of a node.
    #[must_use]
    pub fn new(node_name: String, places: Places, clock: Clock) -> Self {
        let (last, last_of_pods) = (Rate::default(), Rate::default());
        Self { node_name, places, clock, last, last_of_pods, rates: Arc::default() }
    }

    fn machine(&self) -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let time = self.clock.wall();
        let cpu_nanos = busy_ticks(&read("/proc/stat")).saturating_mul(NANOS_PER_TICK);
        let vmstat = numbers(&read("/proc/vmstat"), 1);
        let nano_cores = self.last.nano_cores(time, cpu_nanos);
        Machine {
            time,
            cpu_nanos,
            nano_cores,
            memory: numbers(&read("/proc/meminfo"), 1024),
            page_faults: vmstat.get("pgfault").copied().unwrap_or(0),
            major_page_faults: vmstat.get("pgmajfault").copied().unwrap_or(0),
        }
    }
}

/// Ticks in which some CPU was busy: all but idle and waiting for disks.
fn busy_ticks(stat: &str) -> u64 {
    let Some(line) = stat.lines().find_map(|l| l.strip_prefix("cpu ")) else { return 0 };
    let ticks = line.split_whitespace().map(|n| n.parse::<u64>().unwrap_or(0));
    // Guests' time is in that of their user already.
    ticks.enumerate().filter(|(i, _)| ![3, 4, 8, 9].contains(i)).map(|(_, n)| n).sum()
}

/// `name: 12 kB` and `name 12` lines.
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
    fn the_machine_is_read_from_proc() {
        assert_eq!(busy_ticks("cpu  10 1 5 1000 50 2 3 4 7 0\ncpu0 1 1 1 1\n"), 25);
        let memory = numbers("MemTotal:       1000 kB\nInactive(file):  10 kB\n", 1024);
        assert_eq!(memory.get("Inactive(file)"), Some(&10_240));
        assert_eq!(numbers("pgfault 7\n", 1).get("pgfault"), Some(&7));
    }
}
