//! System containers in `/stats/summary`: the cgroups of the services, of the runtime, of other processes and
//! of all pods (`pkg/kubelet/server/stats: GetSystemContainersStats`).

use std::path::Path;

use jiff::Timestamp;
use quintlet_cgroups::stats::{CgroupStats, Usage};
use serde_json::{Value, json};

use super::cri_stats::{io, object};
use super::gather::Pressure;
use super::paths::StatsPaths;
use super::rates::SystemRates;

/// Prefix and suffix of the units of the services under systemd. Each has a cgroup of its own.
const UNITS: (&str, &str) = ("quintlet-", ".service");

/// The statistics of system containers.
#[derive(Debug)]
pub(super) struct SystemContainers {
    paths: StatsPaths,
    /// Start of this process.
    started: Timestamp,
    /// Previous CPU times.
    last: SystemRates,
}

impl SystemContainers {
    pub(super) fn new(paths: StatsPaths, started: Timestamp) -> Self {
        Self { paths, started, last: SystemRates::default() }
    }

    /// Returns the system containers that exist, with CPU and memory only if `light`.
    pub(super) fn all(&self, time: Timestamp, light: bool) -> Vec<Value> {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        self.of_process(&own, time, light)
    }

    /// `own` is `/proc/self/cgroup`.
    fn of_process(&self, own: &str, time: Timestamp, light: bool) -> Vec<Value> {
        let mount = &self.paths.cgroups;
        let named = |name: &str| match name {
            "" => Vec::new(),
            name => CgroupStats::named(mount, name).into_iter().collect(),
        };
        let cgroups = &self.paths.system;
        let kubelet = match cgroups.kubelet.as_str() {
            "" => services(mount, own),
            name => named(name),
        };
        let pods = CgroupStats::of_pods(mount, &self.paths.cgroup_root).into_iter().collect();
        let all = [
            ("kubelet", kubelet),
            ("runtime", named(&cgroups.runtime)),
            ("misc", named(&cgroups.system)),
            ("pods", pods),
        ];
        all.into_iter().filter_map(|(name, groups)| self.container(name, &groups, time, light)).collect()
    }

    fn container(
        &self,
        name: &'static str,
        groups: &[CgroupStats],
        time: Timestamp,
        light: bool,
    ) -> Option<Value> {
        let u = groups.iter().filter_map(CgroupStats::usage).reduce(|sum, one| sum.plus(&one))?;
        let nano_cores = self.last.nano_cores(name, time, u.cpu_nanos);
        // Pressures of several cgroups cannot be added.
        let pressure = match groups {
            [one] => Pressure::of(one),
            _ => Pressure::default(),
        };
        let created = match name {
            "kubelet" => Some(self.started),
            _ => groups.first().and_then(CgroupStats::created).and_then(|at| at.try_into().ok()),
        };
        Some(container(name, &u, (time, nano_cores), &pressure, created, light))
    }
}

/// Returns the cgroup of this process. With a systemd unit per service, returns those of all units.
fn services(mount: &Path, own: &str) -> Vec<CgroupStats> {
    let Some(own) = own_cgroup(own) else { return Vec::new() };
    let is_unit = |name: &str| name.starts_with(UNITS.0) && name.ends_with(UNITS.1);
    let units = match own.rsplit_once('/') {
        Some((slice, name)) if is_unit(name) => {
            CgroupStats::named(mount, slice).map(|slice| slice.below(&is_unit)).unwrap_or_default()
        }
        Some(_) | None => Vec::new(),
    };
    if units.is_empty() { CgroupStats::named(mount, own).into_iter().collect() } else { units }
}

/// Returns the path of a process's cgroup from its `/proc/PID/cgroup`: v2, or the one of the memory
/// controller. None for the root cgroup, whose statistics are those of the machine.
fn own_cgroup(text: &str) -> Option<&str> {
    let path_of = |controller: &str| {
        text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|c| c == controller).then_some(path)
        })
    };
    path_of("memory").or_else(|| path_of("")).filter(|path| *path != "/")
}

fn container(
    name: &str,
    u: &Usage,
    (time, nano_cores): (Timestamp, Option<u64>),
    pressure: &Pressure,
    created: Option<Timestamp>,
    light: bool,
) -> Value {
    let at = time.to_string();
    let free = |limit: Option<u64>, used: u64| json!(limit.map(|limit| limit.saturating_sub(used)));
    object([
        ("name", json!(name)),
        ("startTime", json!(created.map(|at| at.to_string()))),
        (
            "cpu",
            object([
                ("time", json!(at)),
                ("usageNanoCores", json!(nano_cores)),
                ("usageCoreNanoSeconds", json!(u.cpu_nanos)),
                ("psi", pressure.cpu.clone()),
            ]),
        ),
        (
            "memory",
            object([
                ("time", json!(at)),
                ("availableBytes", free(u.limit, u.working_set)),
                ("usageBytes", json!(u.usage)),
                ("workingSetBytes", json!(u.working_set)),
                ("rssBytes", json!(u.rss)),
                ("pageFaults", json!(u.page_faults)),
                ("majorPageFaults", json!(u.major_page_faults)),
                ("psi", pressure.memory.clone()),
            ]),
        ),
        ("io", if light { Value::Null } else { io(&at, &pressure.io) }),
        (
            "swap",
            u.swap.map_or(Value::Null, |used| {
                object([
                    ("time", json!(at)),
                    ("swapAvailableBytes", free(u.swap_limit, used)),
                    ("swapUsageBytes", json!(used)),
                ])
            }),
        ),
    ])
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use quintlet_kit::clock::Clock;

    use super::super::paths::SystemCgroups;
    use super::*;

    /// Makes a cgroup v2 with this CPU time and memory.
    fn group(root: &Path, name: &str, seconds: u64, memory: u64) {
        let dir = root.join(name);
        fs::create_dir_all(&dir).unwrap();
        for (file, text) in [
            ("cpu.stat", format!("usage_usec {}\n", seconds * 1_000_000)),
            ("memory.current", memory.to_string()),
            ("memory.stat", "inactive_file 1\nanon 2\n".to_owned()),
            ("memory.max", "max\n".to_owned()),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
    }

    fn stats(root: &Path, system: SystemCgroups) -> SystemContainers {
        let paths = StatsPaths {
            root_dir: PathBuf::new(),
            pod_logs_dir: PathBuf::new(),
            cgroups: root.to_owned(),
            cgroup_root: "/".to_owned(),
            system,
            subtracts_huge_pages: true,
        };
        SystemContainers::new(paths, Clock::system().wall())
    }

    /// Returns name, CPU time in seconds and memory of each container.
    fn seen(stats: &SystemContainers, own: &str) -> Vec<(String, u64, u64)> {
        let all = stats.of_process(own, Timestamp::UNIX_EPOCH, false);
        let show = |c: &Value| {
            let cpu = c["cpu"]["usageCoreNanoSeconds"].as_u64().unwrap() / 1_000_000_000;
            assert!(c["startTime"].is_string(), "{c}");
            (c["name"].as_str().unwrap().to_owned(), cpu, c["memory"]["usageBytes"].as_u64().unwrap())
        };
        all.iter().map(show).collect()
    }

    #[test]
    fn system_containers_are_the_configured_cgroups_that_exist() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        for (name, seconds) in [("kubepods", 1), ("agents", 2), ("runtime", 3), ("rest/of", 4), ("user", 5)] {
            group(root.path(), name, seconds, seconds * 10);
        }
        let row = |name: &str, seconds: u64| (name.to_owned(), seconds, seconds * 10);
        let none = stats(root.path(), SystemCgroups::default());
        assert_eq!(seen(&none, "0::/user\n"), [row("kubelet", 5), row("pods", 1)]);
        assert_eq!(seen(&none, "0::/\n"), [row("pods", 1)], "the root cgroup is the whole machine");
        let all = SystemCgroups {
            kubelet: "/agents".to_owned(),
            runtime: "runtime".to_owned(),
            system: "/rest/of".to_owned(),
        };
        let want = [row("kubelet", 2), row("runtime", 3), row("misc", 4), row("pods", 1)];
        assert_eq!(seen(&stats(root.path(), all.clone()), "0::/user\n"), want);
        let gone = SystemCgroups { runtime: "/gone".to_owned(), ..all };
        let want = [row("kubelet", 2), row("misc", 4), row("pods", 1)];
        assert_eq!(seen(&stats(root.path(), gone), "0::/user\n"), want);
    }

    #[test]
    fn the_units_of_all_services_are_one_system_container() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        for (name, seconds) in [("quintlet-node-api", 1), ("quintlet-pod-sync", 2), ("sshd", 50)] {
            group(root.path(), &format!("system.slice/{name}.service"), seconds, seconds * 10);
        }
        let stats = stats(root.path(), SystemCgroups::default());
        let own = "0::/system.slice/quintlet-node-api.service\n";
        assert_eq!(seen(&stats, own), [("kubelet".to_owned(), 3, 30)]);
        assert_eq!(seen(&stats, "0::/system.slice/sshd.service\n"), [("kubelet".to_owned(), 50, 500)]);
    }

    #[test]
    fn the_cgroup_of_a_process_is_that_of_the_memory_controller_or_of_v2() {
        for (text, want) in [
            ("0::/a/b\n", Some("/a/b")),
            ("12:cpu,cpuacct:/c\n9:memory:/m\n1:name=systemd:/s\n0::/u\n", Some("/m")),
            ("0::/\n", None),
            ("", None),
            ("0::/a:b\n", Some("/a:b")),
        ] {
            assert_eq!(own_cgroup(text), want, "{text}");
        }
    }
}
