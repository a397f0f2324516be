//! What cAdvisor tells of a group beyond what it uses: throttling, kinds of memory, disks, processes, limits
//! (google/cadvisor, metrics/prometheus.go, for the meaning of each figure).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Group, NO_LIMIT, figures, number};

const NANOS_PER_TICK: u64 = 10_000_000;
/// Groups inside a pod's: containers, and what these make for themselves.
const DEEPEST: usize = 3;

/// Figures of a group. What the kernel does not count is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Detail {
    /// CPU time of processes.
    pub user_nanos: Option<u64>,
    /// CPU time of the kernel for them.
    pub system_nanos: Option<u64>,
    /// What the quota did; none without one.
    pub throttling: Option<Throttling>,
    /// Memory by its kind.
    pub memory: Memory,
    /// What was read and written, by device.
    pub devices: BTreeMap<String, Device>,
    /// Processes, those of groups inside this one too.
    pub processes: u64,
    /// Threads of them.
    pub threads: Option<u64>,
    /// How many there may be; none: no limit.
    pub threads_max: Option<u64>,
    /// CPU shares, as of version 1.
    pub shares: Option<u64>,
    /// CPU period, microseconds.
    pub period: Option<u64>,
    /// CPU time in a period, microseconds; none: no limit.
    pub quota: Option<u64>,
}

/// Periods of a CPU quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Throttling {
    /// All in which something wanted to run.
    pub periods: u64,
    /// Those in which it had to wait.
    pub throttled: u64,
    /// How long it waited.
    pub nanos: u64,
}

/// Bytes of memory, and how often it was not enough.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Page cache.
    pub cache: Option<u64>,
    /// Files that are mapped.
    pub mapped: Option<u64>,
    /// The kernel's own for this group.
    pub kernel: Option<u64>,
    /// Swap in use.
    pub swap: Option<u64>,
    /// Cache in use.
    pub active_file: Option<u64>,
    /// Cache that can go.
    pub inactive_file: Option<u64>,
    /// The most there ever was.
    pub max: Option<u64>,
    /// How often the limit was met.
    pub failures: Option<u64>,
    /// Processes that were killed for it.
    pub oom_kills: Option<u64>,
    /// The limit; none: no limit.
    pub limit: Option<u64>,
}

/// Reads and writes of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Device {
    /// Times it was read.
    pub reads: u64,
    /// Bytes.
    pub read_bytes: u64,
    /// Times it was written.
    pub writes: u64,
    /// Bytes.
    pub written_bytes: u64,
}

impl Group {
    /// All that is counted of it.
    #[must_use]
    pub fn detail(&self) -> Detail {
        if self.is_v2 { self.detail_v2() } else { self.detail_v1() }
    }

    /// As cAdvisor names it: its place below the mount.
    #[must_use]
    pub fn id(&self) -> String {
        format!("/{}", self.place.display())
    }

    /// A process in it or in one inside it.
    #[must_use]
    pub fn any_process(&self) -> Option<u32> {
        processes(&self.dir("memory"), DEEPEST).first().copied()
    }

    fn detail_v2(&self) -> Detail {
        let dir = self.dir("");
        let (cpu, memory) = (figures(&dir.join("cpu.stat")), figures(&dir.join("memory.stat")));
        let events = figures(&dir.join("memory.events"));
        let micros = |name: &str| cpu.get(name).map(|us| us.saturating_mul(1000));
        let of = |name: &str| memory.get(name).copied();
        let maximum = text(&dir.join("cpu.max"));
        let mut maximum = maximum.split_whitespace();
        let quota = maximum.next().and_then(|n| n.parse().ok());
        let throttling = || {
            Some(Throttling {
                periods: *cpu.get("nr_periods")?,
                throttled: *cpu.get("nr_throttled")?,
                nanos: micros("throttled_usec")?,
            })
        };
        Detail {
            user_nanos: micros("user_usec"),
            system_nanos: micros("system_usec"),
            throttling: quota.and_then(|_| throttling()),
            memory: Memory {
                cache: of("file"),
                mapped: of("file_mapped"),
                kernel: of("kernel"),
                swap: number(&dir.join("memory.swap.current")),
                active_file: of("active_file"),
                inactive_file: of("inactive_file"),
                max: number(&dir.join("memory.peak")),
                failures: events.get("max").copied(),
                oom_kills: events.get("oom_kill").copied(),
                limit: number(&dir.join("memory.max")),
            },
            devices: devices_v2(&text(&dir.join("io.stat"))),
            processes: count(processes(&dir, DEEPEST)),
            threads: number(&dir.join("pids.current")),
            threads_max: number(&dir.join("pids.max")),
            shares: number(&dir.join("cpu.weight")).map(shares),
            period: maximum.next().and_then(|n| n.parse().ok()),
            quota,
        }
    }

    fn detail_v1(&self) -> Detail {
        let at = |controller: &str, file: &str| self.dir(controller).join(file);
        let memory = figures(&at("memory", "memory.stat"));
        let cpu = figures(&at("cpu", "cpu.stat"));
        let used = figures(&at("cpuacct", "cpuacct.stat"));
        let ticks = |name: &str| used.get(name).map(|ticks| ticks.saturating_mul(NANOS_PER_TICK));
        let of = |name: &str| memory.get(name).copied();
        let limit = |controller, file: &str| number(&at(controller, file)).filter(|n| *n < NO_LIMIT);
        let quota = number(&at("cpu", "cpu.cfs_quota_us"));
        let throttling = || {
            Some(Throttling {
                periods: *cpu.get("nr_periods")?,
                throttled: *cpu.get("nr_throttled")?,
                nanos: *cpu.get("throttled_time")?,
            })
        };
        let blkio = |file: &str| {
            let all = text(&at("blkio", &format!("blkio.throttle.{file}_recursive")));
            if all.is_empty() { text(&at("blkio", &format!("blkio.throttle.{file}"))) } else { all }
        };
        Detail {
            user_nanos: ticks("user"),
            system_nanos: ticks("system"),
            throttling: quota.and_then(|_| throttling()),
            memory: Memory {
                cache: of("total_cache"),
                mapped: of("total_mapped_file"),
                kernel: number(&at("memory", "memory.kmem.usage_in_bytes")),
                swap: of("total_swap"),
                active_file: of("total_active_file"),
                inactive_file: of("total_inactive_file"),
                max: number(&at("memory", "memory.max_usage_in_bytes")),
                failures: number(&at("memory", "memory.failcnt")),
                oom_kills: figures(&at("memory", "memory.oom_control")).get("oom_kill").copied(),
                limit: limit("memory", "memory.limit_in_bytes"),
            },
            devices: devices_v1(&blkio("io_serviced"), &blkio("io_service_bytes")),
            processes: count(processes(&self.dir("memory"), DEEPEST)),
            threads: number(&at("pids", "pids.current")),
            threads_max: number(&at("pids", "pids.max")),
            shares: number(&at("cpu", "cpu.shares")),
            period: number(&at("cpu", "cpu.cfs_period_us")),
            quota,
        }
    }
}

fn text(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
}

fn count(pids: Vec<u32>) -> u64 {
    u64::try_from(pids.len()).unwrap_or(u64::MAX)
}

/// Processes of a group and of those inside it.
fn processes(dir: &Path, depth: usize) -> Vec<u32> {
    let mut pids: Vec<u32> =
        text(&dir.join("cgroup.procs")).lines().filter_map(|line| line.trim().parse().ok()).collect();
    if depth > 0 {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let inside: Vec<PathBuf> =
            entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect();
        pids.extend(inside.iter().flat_map(|dir| processes(dir, depth.saturating_sub(1))));
    }
    pids
}

/// Shares that make this weight, back from the runtime's linear rule.
fn shares(weight: u64) -> u64 {
    (weight.saturating_sub(1).saturating_mul(262_142) / 9_999).saturating_add(2)
}

/// `8:0 rbytes=1 wbytes=2 rios=3 wios=4 …`
fn devices_v2(stat: &str) -> BTreeMap<String, Device> {
    let device = |line: &str| {
        let (number, figures) = line.split_once(' ')?;
        let mut device = Device::default();
        for (name, value) in figures.split_whitespace().filter_map(|figure| figure.split_once('=')) {
            let Ok(value) = value.parse() else { continue };
            match name {
                "rios" => device.reads = value,
                "rbytes" => device.read_bytes = value,
                "wios" => device.writes = value,
                "wbytes" => device.written_bytes = value,
                _ => {}
            }
        }
        Some((number.to_owned(), device))
    };
    stat.lines().filter_map(device).collect()
}

/// `8:0 Read 1` lines, of times and of bytes.
fn devices_v1(times: &str, bytes: &str) -> BTreeMap<String, Device> {
    let mut devices: BTreeMap<String, Device> = BTreeMap::new();
    for (text, is_bytes) in [(times, false), (bytes, true)] {
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [number, what, value] = words[..] else { continue };
            let Ok(value) = value.parse() else { continue };
            let device = devices.entry(number.to_owned()).or_default();
            match (what, is_bytes) {
                ("Read", false) => device.reads = value,
                ("Read", true) => device.read_bytes = value,
                ("Write", false) => device.writes = value,
                ("Write", true) => device.written_bytes = value,
                _ => {}
            }
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = dir.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    fn wanted() -> Detail {
        let device = Device { reads: 3, read_bytes: 4096, writes: 4, written_bytes: 8192 };
        Detail {
            user_nanos: Some(70_000_000),
            system_nanos: Some(30_000_000),
            throttling: Some(Throttling { periods: 9, throttled: 2, nanos: 5_000 }),
            memory: Memory {
                cache: Some(1),
                mapped: Some(2),
                kernel: Some(3),
                swap: Some(4),
                active_file: Some(5),
                inactive_file: Some(6),
                max: Some(7),
                failures: Some(8),
                oom_kills: Some(1),
                limit: Some(1000),
            },
            devices: BTreeMap::from([("8:0".to_owned(), device)]),
            processes: 3,
            threads: Some(11),
            threads_max: None,
            shares: Some(1024),
            period: Some(100_000),
            quota: Some(20_000),
        }
    }

    #[test]
    fn both_versions_tell_the_same() {
        let dir = tempfile::tempdir().unwrap();
        write(
            &dir.path().join("kubepods"),
            &[
                ("../cgroup.controllers", "cpu memory"),
                (
                    "cpu.stat",
                    "usage_usec 1\nuser_usec 70000\nsystem_usec 30000\nnr_periods 9\nnr_throttled 2\nthrottled_usec 5\n",
                ),
                ("memory.stat", "file 1\nfile_mapped 2\nkernel 3\nactive_file 5\ninactive_file 6\n"),
                ("memory.swap.current", "4\n"),
                ("memory.peak", "7\n"),
                ("memory.events", "low 0\nmax 8\noom 1\noom_kill 1\n"),
                ("memory.max", "1000\n"),
                ("io.stat", "8:0 rbytes=4096 wbytes=8192 rios=3 wios=4 dbytes=0 dios=0\n"),
                ("pids.current", "11\n"),
                ("pids.max", "max\n"),
                ("cpu.weight", "39\n"),
                ("cpu.max", "20000 100000\n"),
                ("cgroup.procs", "10\n"),
                ("pod1/main/cgroup.procs", "12\n13\n"),
            ],
        );
        let group = Group::of_pods(dir.path(), "").unwrap();
        // 1024 shares are 39, and 39 is what 998 would be as well.
        assert_eq!(group.detail(), Detail { shares: Some(998), ..wanted() });
        assert_eq!((group.id().as_str(), group.any_process()), ("/kubepods", Some(10)));
        write(&dir.path().join("kubepods"), &[("cpu.max", "max 100000\n"), ("memory.max", "max\n")]);
        let free = group.detail();
        assert_eq!((free.quota, free.throttling, free.memory.limit), (None, None, None));

        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            &[
                ("cpuacct/kubepods/cpuacct.stat", "user 7\nsystem 3\n"),
                ("cpu/kubepods/cpu.stat", "nr_periods 9\nnr_throttled 2\nthrottled_time 5000\n"),
                ("cpu/kubepods/cpu.shares", "1024\n"),
                ("cpu/kubepods/cpu.cfs_period_us", "100000\n"),
                ("cpu/kubepods/cpu.cfs_quota_us", "20000\n"),
                (
                    "memory/kubepods/memory.stat",
                    "cache 0\ntotal_cache 1\ntotal_mapped_file 2\ntotal_swap 4\ntotal_active_file 5\ntotal_inactive_file 6\n",
                ),
                ("memory/kubepods/memory.kmem.usage_in_bytes", "3\n"),
                ("memory/kubepods/memory.max_usage_in_bytes", "7\n"),
                ("memory/kubepods/memory.failcnt", "8\n"),
                ("memory/kubepods/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
                ("memory/kubepods/memory.limit_in_bytes", "1000\n"),
                ("memory/kubepods/cgroup.procs", "10\n"),
                ("memory/kubepods/pod1/main/cgroup.procs", "12\n13\n"),
                ("blkio/kubepods/blkio.throttle.io_serviced", "8:0 Read 9\n"),
                (
                    "blkio/kubepods/blkio.throttle.io_serviced_recursive",
                    "8:0 Read 3\n8:0 Write 4\n8:0 Total 7\nTotal 7\n",
                ),
                (
                    "blkio/kubepods/blkio.throttle.io_service_bytes_recursive",
                    "8:0 Read 4096\n8:0 Write 8192\n",
                ),
                ("pids/kubepods/pids.current", "11\n"),
                ("pids/kubepods/pids.max", "max\n"),
            ],
        );
        assert_eq!(Group::of_pods(dir.path(), "/").unwrap().detail(), wanted());
        write(dir.path(), &[("cpu/kubepods/cpu.cfs_quota_us", "-1\n")]);
        assert_eq!(Group::of_pods(dir.path(), "/").unwrap().detail().throttling, None);
    }
}
