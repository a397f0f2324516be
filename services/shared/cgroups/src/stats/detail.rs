//! Statistics of cAdvisor beyond usage: throttling, kinds of memory, devices, processes, limits (cAdvisor:
//! `metrics/prometheus.go`).

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use quintlet_model::qos::weight_to_shares;

use super::{CgroupStats, counters, limit, number, text};

// The clock ticks of the kernel's interfaces: 100 per second.
const NANOS_PER_TICK: u64 = 10_000_000;
/// Levels of cgroups below a pod's: containers, and the cgroups that they create themselves.
const MAX_DEPTH: usize = 3;
/// Most cgroups whose processes one call reads: a container may create any number of cgroups.
const MOST_CGROUPS: usize = 256;

/// Statistics of a cgroup. `None` means that the kernel does not count the value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Detail {
    /// CPU time in user mode since the creation of the cgroup.
    pub user_nanos: Option<u64>,
    /// CPU time in the kernel since the creation of the cgroup.
    pub system_nanos: Option<u64>,
    /// `None` without a CPU quota.
    pub throttling: Option<Throttling>,
    /// Usage and limits of memory.
    pub memory: Memory,
    /// By device number, `MAJOR:MINOR`.
    pub devices: BTreeMap<String, DeviceIo>,
    /// Number of processes, without those of descendants.
    pub processes: Option<u64>,
    /// Number of threads, including those of descendants.
    pub threads: Option<u64>,
    /// Maximum number of threads; `None` means no limit.
    pub threads_max: Option<u64>,
    /// cpu.shares; with v2, converted from cpu.weight.
    pub shares: Option<u64>,
    /// CPU period in microseconds.
    pub period: Option<u64>,
    /// CPU time per period in microseconds; `None` means no limit.
    pub quota: Option<u64>,
    /// Stalls by resource (`cpu`, `memory`, `io`); empty with v1, or if the kernel does not count them.
    pub pressure: BTreeMap<&'static str, Stalls>,
}

/// Time in which processes of a cgroup waited for a resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Microseconds in which a process waited.
    pub waiting_us: u64,
    /// Microseconds in which all processes waited; `None` if the kernel does not count them for this
    /// resource.
    pub stalled_us: Option<u64>,
}

/// Periods of a CPU quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Periods in which a process was runnable.
    pub periods: u64,
    /// Periods in which the quota was used up.
    pub throttled: u64,
    /// Throttled time.
    pub nanos: u64,
}

/// Bytes of memory by kind, and the events of its limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Page cache.
    pub cache: Option<u64>,
    /// Mapped files.
    pub mapped: Option<u64>,
    /// Memory of the kernel.
    pub kernel: Option<u64>,
    /// Memory on swap devices.
    pub swap: Option<u64>,
    /// Active file cache.
    pub active_file: Option<u64>,
    /// Inactive file cache.
    pub inactive_file: Option<u64>,
    /// Highest usage so far.
    pub max: Option<u64>,
    /// Number of allocations that reached the limit.
    pub failures: Option<u64>,
    /// Number of processes killed for lack of memory.
    pub oom_kills: Option<u64>,
    /// `None` means no limit.
    pub limit: Option<u64>,
    /// Limit of swap, with v1 of memory and swap together; `None` means no limit.
    pub swap_limit: Option<u64>,
    /// memory.min, with v1 the soft limit; `None` means none.
    pub reservation: Option<u64>,
}

/// Reads and writes of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceIo {
    /// Number of completed reads.
    pub reads: u64,
    /// Bytes of the completed reads.
    pub read_bytes: u64,
    /// Number of completed writes.
    pub writes: u64,
    /// Bytes of the completed writes.
    pub written_bytes: u64,
}

impl CgroupStats {
    /// Returns the statistics beyond [`CgroupStats::usage`], with the processes of the cgroup without those
    /// of its descendants.
    #[must_use]
    pub fn detail(&self) -> Detail {
        self.detail_of(Some(count(&own_processes(&self.dir("memory")))))
    }

    /// Returns the statistics beyond [`CgroupStats::usage`], with these processes, which the caller has read.
    #[must_use]
    pub fn detail_with(&self, processes: &[u32]) -> Detail {
        self.detail_of(self.count_of(processes))
    }

    fn detail_of(&self, processes: Option<u64>) -> Detail {
        if self.is_v2 { self.detail_v2(processes) } else { self.detail_v1(processes) }
    }

    /// Returns the name in cAdvisor's metrics: the path below the mount point.
    #[must_use]
    pub fn id(&self) -> String {
        format!("/{}", self.path.display())
    }

    /// Returns the PID of a process of the cgroup or of a descendant.
    #[must_use]
    pub fn any_process(&self) -> Option<u32> {
        processes(self.dir("memory"), |pids| !pids.is_empty()).first().copied()
    }

    /// Returns the PIDs of the processes of the cgroup and of its descendants, of 256 cgroups at most.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        processes(self.dir("memory"), |_| false)
    }

    /// Returns the number of processes of the cgroup and of its descendants, of 256 cgroups at most. Returns
    /// `None` if threads are counted and no process is seen: v1 lists none of another PID namespace.
    #[must_use]
    pub fn process_count(&self) -> Option<u64> {
        self.count_of(&self.processes())
    }

    /// Returns the number of these processes of the cgroup and of its descendants, as
    /// [`CgroupStats::process_count`].
    #[must_use]
    pub fn count_of(&self, processes: &[u32]) -> Option<u64> {
        Some(count(processes)).filter(|count| *count > 0 || self.tasks().unwrap_or_default() == 0)
    }

    fn detail_v2(&self, processes: Option<u64>) -> Detail {
        let dir = self.dir("");
        let (cpu, memory) = (counters(&dir.join("cpu.stat")), counters(&dir.join("memory.stat")));
        let events = counters(&dir.join("memory.events"));
        let micros = |name: &str| cpu.get(name).map(|us| us.saturating_mul(1000));
        let value = |name: &str| memory.get(name).copied();
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
                cache: value("file"),
                mapped: value("file_mapped"),
                kernel: value("kernel"),
                swap: number(&dir.join("memory.swap.current")),
                active_file: value("active_file"),
                inactive_file: value("inactive_file"),
                max: number(&dir.join("memory.peak")),
                failures: events.get("max").copied(),
                oom_kills: events.get("oom_kill").copied(),
                limit: number(&dir.join("memory.max")),
                swap_limit: number(&dir.join("memory.swap.max")),
                reservation: number(&dir.join("memory.min")),
            },
            devices: devices_v2(&text(&dir.join("io.stat"))),
            processes,
            threads: number(&dir.join("pids.current")),
            threads_max: number(&dir.join("pids.max")),
            shares: number(&dir.join("cpu.weight")).map(weight_to_shares),
            period: maximum.next().and_then(|n| n.parse().ok()),
            quota,
            pressure: RESOURCES
                .into_iter()
                .filter_map(|resource| Some((resource, stalls(&self.pressure(resource))?)))
                .collect(),
        }
    }

    fn detail_v1(&self, processes: Option<u64>) -> Detail {
        let at = |controller: &str, file: &str| self.dir(controller).join(file);
        let memory = counters(&at("memory", "memory.stat"));
        let cpu = counters(&at("cpu", "cpu.stat"));
        let used = counters(&at("cpuacct", "cpuacct.stat"));
        let ticks = |name: &str| used.get(name).map(|ticks| ticks.saturating_mul(NANOS_PER_TICK));
        let value = |name: &str| memory.get(name).copied();
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
                cache: value("total_cache"),
                mapped: value("total_mapped_file"),
                kernel: number(&at("memory", "memory.kmem.usage_in_bytes")),
                swap: value("total_swap"),
                active_file: value("total_active_file"),
                inactive_file: value("total_inactive_file"),
                max: number(&at("memory", "memory.max_usage_in_bytes")),
                failures: number(&at("memory", "memory.failcnt")),
                oom_kills: counters(&at("memory", "memory.oom_control")).get("oom_kill").copied(),
                limit: limit(&at("memory", "memory.limit_in_bytes")),
                swap_limit: limit(&at("memory", "memory.memsw.limit_in_bytes")),
                reservation: limit(&at("memory", "memory.soft_limit_in_bytes")),
            },
            devices: devices_v1(&blkio("io_serviced"), &blkio("io_service_bytes")),
            processes,
            threads: number(&at("pids", "pids.current")),
            threads_max: number(&at("pids", "pids.max")),
            shares: number(&at("cpu", "cpu.shares")),
            period: number(&at("cpu", "cpu.cfs_period_us")),
            quota,
            pressure: BTreeMap::new(),
        }
    }
}

/// Resources with pressure files.
const RESOURCES: [&str; 3] = ["cpu", "memory", "io"];

/// Parses `some avg10=0.00 avg60=0.00 avg300=0.00 total=1` and the line `full …`.
fn stalls(pressure: &str) -> Option<Stalls> {
    let total = |kind: &str| {
        let mut lines = pressure.lines().map(str::split_whitespace);
        let mut words = lines.find_map(|mut words| (words.next() == Some(kind)).then_some(words))?;
        words.find_map(|word| word.strip_prefix("total=")?.parse().ok())
    };
    Some(Stalls { waiting_us: total("some")?, stalled_us: total("full") })
}

fn count(pids: &[u32]) -> u64 {
    u64::try_from(pids.len()).unwrap_or(u64::MAX)
}

fn own_processes(dir: &Path) -> Vec<u32> {
    text(&dir.join("cgroup.procs")).lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// Returns the PIDs of a cgroup and of its descendants down to [`MAX_DEPTH`] levels, the upper levels first.
/// Reads no further cgroup once the PIDs are enough.
fn processes(dir: PathBuf, is_enough: impl Fn(&[u32]) -> bool) -> Vec<u32> {
    let mut pids = Vec::new();
    let mut pending = VecDeque::from([(dir, MAX_DEPTH)]);
    for _ in 0..MOST_CGROUPS {
        let Some((dir, depth)) = pending.pop_front() else { break };
        pids.extend(own_processes(&dir));
        if is_enough(&pids) {
            break;
        }
        let Some(depth) = depth.checked_sub(1) else { continue };
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        let inside = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        pending.extend(inside.take(MOST_CGROUPS).map(|entry| (entry.path(), depth)));
    }
    pids
}

/// Parses io.stat: `8:0 rbytes=1 wbytes=2 rios=3 wios=4 …`
fn devices_v2(stat: &str) -> BTreeMap<String, DeviceIo> {
    let device = |line: &str| {
        let (number, statistics) = line.split_once(' ')?;
        let mut device = DeviceIo::default();
        for (name, value) in statistics.split_whitespace().filter_map(|s| s.split_once('=')) {
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

/// Parses files of lines `8:0 Read 1`: numbers of operations, and bytes.
fn devices_v1(operations: &str, bytes: &str) -> BTreeMap<String, DeviceIo> {
    let mut devices: BTreeMap<String, DeviceIo> = BTreeMap::new();
    for (text, is_bytes) in [(operations, false), (bytes, true)] {
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
    use quintlet_model::qos::QosClass;

    use super::*;

    fn write(dir: &Path, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = dir.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    fn wanted() -> Detail {
        let device = DeviceIo { reads: 3, read_bytes: 4096, writes: 4, written_bytes: 8192 };
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
                swap_limit: Some(2000),
                reservation: Some(500),
            },
            devices: BTreeMap::from([("8:0".to_owned(), device)]),
            processes: Some(1),
            threads: Some(11),
            threads_max: None,
            shares: Some(1024),
            period: Some(100_000),
            quota: Some(20_000),
            pressure: BTreeMap::new(),
        }
    }

    #[test]
    fn both_versions_have_the_same_statistics() {
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
                ("memory.swap.max", "2000\n"),
                ("memory.min", "500\n"),
                ("cpu.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"),
                ("io.pressure", "some avg10=1.00 total=8\nfull avg10=0.00 total=9\n"),
                ("io.stat", "8:0 rbytes=4096 wbytes=8192 rios=3 wios=4 dbytes=0 dios=0\n"),
                ("pids.current", "11\n"),
                ("pids.max", "max\n"),
                ("cpu.weight", "39\n"),
                ("cpu.max", "20000 100000\n"),
                ("cgroup.procs", "10\n"),
                ("pod1/main/cgroup.procs", "12\n13\n"),
            ],
        );
        let group = CgroupStats::of_pods(dir.path(), "").unwrap();
        // 1024 shares have the weight 39, and so have 998.
        let pressure = BTreeMap::from([
            ("cpu", Stalls { waiting_us: 7, stalled_us: None }),
            ("io", Stalls { waiting_us: 8, stalled_us: Some(9) }),
        ]);
        assert_eq!(group.detail(), Detail { shares: Some(998), pressure, ..wanted() });
        assert_eq!((group.id().as_str(), group.any_process()), ("/kubepods", Some(10)));
        assert_eq!(group.processes(), [10, 12, 13]);
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
                ("memory/kubepods/memory.memsw.limit_in_bytes", "2000\n"),
                ("memory/kubepods/memory.soft_limit_in_bytes", "500\n"),
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
        assert_eq!(CgroupStats::of_pods(dir.path(), "/").unwrap().detail(), wanted());
        write(dir.path(), &[("cpu/kubepods/cpu.cfs_quota_us", "-1\n")]);
        assert_eq!(CgroupStats::of_pods(dir.path(), "/").unwrap().detail().throttling, None);
    }

    #[test]
    fn cgroups_that_a_container_creates_are_read_up_to_a_number_and_a_depth() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[("cgroup.controllers", ""), ("kubepods/podu/c1/cgroup.procs", "1\n")]);
        let container = dir.path().join("kubepods/podu/c1");
        write(&container, &[("a/b/c/cgroup.procs", "2\n"), ("a/b/c/d/cgroup.procs", "3\n")]);
        let pod = CgroupStats::of_pod(dir.path(), "", QosClass::Guaranteed, "u").unwrap();
        let group = pod.container("c1").unwrap();
        assert_eq!((group.processes(), group.process_count()), (vec![1, 2], Some(2)));
        for number in 0..2 * MOST_CGROUPS {
            write(&container, &[(&format!("n{number}/cgroup.procs"), "4\n")]);
        }
        // The cgroup of the container, and those that it has created.
        assert!(group.processes().len() <= MOST_CGROUPS, "{}", group.processes().len());
        assert_eq!((pod.any_process(), pod.detail().processes), (Some(1), Some(0)));
    }

    #[test]
    fn processes_of_another_pid_namespace_are_counted_with_v2_and_unknown_with_v1() {
        let count = |files: &[(&str, &str)]| {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), files);
            CgroupStats::of_pods(dir.path(), "").unwrap().process_count()
        };
        let v1 = |processes, threads| {
            count(&[
                ("memory/kubepods/cgroup.procs", processes),
                ("pids/kubepods/pids.current", threads),
                ("cpuacct/kubepods/cpuacct.usage", "1"),
            ])
        };
        assert_eq!(v1("", "3\n"), None, "v1 lists none of them");
        assert_eq!(v1("", "0\n"), Some(0));
        assert_eq!(v1("7\n", "3\n"), Some(1));
        let v2 = [
            ("cgroup.controllers", ""),
            ("kubepods/cgroup.procs", "0\n0\n"),
            ("kubepods/pids.current", "3\n"),
        ];
        assert_eq!(count(&v2), Some(2), "v2 lists them without their PIDs");
    }
}
