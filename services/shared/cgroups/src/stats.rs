//! Reads the statistics of cgroups: of all pods, of a pod, of a container, v1 and v2, with either driver.
//! Needs no privileges.
//!
//! A file that cannot be read counts as a missing value, since a cgroup may be removed at any time.

mod detail;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use quintlet_model::qos::QosClass;

use crate::files::{UNLIMITED, is_v2};
use crate::names::{self, CgroupDriver};

pub use detail::{Detail, DeviceIo, Memory, Stalls, Throttling};

/// Namespace of the CRI in containerd.
const CONTAINERD_NAMESPACE: &str = "k8s.io";

/// CPU and memory usage of a cgroup.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time since the creation of the cgroup.
    pub cpu_nanos: u64,
    /// Bytes of memory, caches included.
    pub usage: u64,
    /// Bytes of memory without inactive file caches.
    pub working_set: u64,
    /// Bytes of anonymous memory.
    pub rss: u64,
    /// Number of page faults, major ones included.
    pub page_faults: u64,
    /// Number of page faults that waited for a disk.
    pub major_page_faults: u64,
    /// Memory limit in bytes; `None` means no limit.
    pub limit: Option<u64>,
    /// Bytes of swap; `None` if swap is not counted, as with v1 without `swapaccount`.
    pub swap: Option<u64>,
    /// Swap limit in bytes; `None` means no limit.
    pub swap_limit: Option<u64>,
}

/// Memory of all processes of the machine, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootMemory {
    /// Memory in use, caches included.
    pub usage: u64,
    /// Memory without inactive file caches.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: Option<u64>,
}

/// An existing cgroup whose statistics are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupStats {
    mount: PathBuf,
    // Below the mount point of a hierarchy.
    path: PathBuf,
    is_v2: bool,
}

impl CgroupStats {
    /// Returns the cgroup of all pods below `root` (`--cgroup-root`) of the hierarchies mounted at `mount`.
    #[must_use]
    pub fn of_pods(mount: &Path, root: &str) -> Option<Self> {
        Self::find(mount, &names::below_root(root, &[names::KUBEPODS]))
    }

    /// Returns the cgroup of a pod.
    #[must_use]
    pub fn of_pod(mount: &Path, root: &str, class: QosClass, uid: &str) -> Option<Self> {
        Self::find(mount, &names::components(root, class, uid))
    }

    /// Returns the cgroup with this path from the root of the hierarchies, as in `/proc/PID/cgroup`.
    #[must_use]
    pub fn named(mount: &Path, name: &str) -> Option<Self> {
        let path = names::path(CgroupDriver::Cgroupfs, &names::below_root(name, &[]));
        Some(Self { mount: mount.to_owned(), path, is_v2: is_v2(mount) }).filter(Self::exists)
    }

    /// Returns the memory of all processes of the machine.
    #[must_use]
    pub fn root_memory(mount: &Path) -> Option<RootMemory> {
        let is_v2 = is_v2(mount);
        let (dir, inactive, anonymous) = if is_v2 {
            (mount.to_owned(), "inactive_file", "anon")
        } else {
            (mount.join("memory"), "total_inactive_file", "total_rss")
        };
        let stat = counters(&dir.join("memory.stat"));
        // The root cgroup of v2 does not count its usage.
        let usage = if is_v2 {
            stat.get("anon")?.saturating_add(*stat.get("file")?)
        } else {
            number(&dir.join("memory.usage_in_bytes"))?
        };
        let working_set = usage.saturating_sub(*stat.get(inactive)?);
        Some(RootMemory { usage, working_set, rss: stat.get(anonymous).copied() })
    }

    /// Returns the cgroups of containers by their IDs, for containers that are below no cgroup of a pod, as
    /// with `cgroupsPerQOS: false`. containerd creates them below a cgroup with the name of its namespace.
    /// Others are found by the processes in `proc` that this process sees.
    #[must_use]
    pub fn of_containers(mount: &Path, proc: &Path, ids: &BTreeSet<&str>) -> BTreeMap<String, Self> {
        let of_containerd = |id: &&str| {
            Some(((*id).to_owned(), Self::named(mount, &format!("{CONTAINERD_NAMESPACE}/{id}"))?))
        };
        let mut found: BTreeMap<_, _> = ids.iter().filter_map(of_containerd).collect();
        if found.len() == ids.len() {
            return found;
        }
        let is_v2 = is_v2(mount);
        let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
        for process in fs::read_dir(proc).into_iter().flatten().flatten() {
            if !process.file_name().to_str().is_some_and(is_process) {
                continue;
            }
            let Some(path) = memory_cgroup(&text(&process.path().join("cgroup")), is_v2) else { continue };
            let Some((id, path)) = of_container(&path, ids) else { continue };
            let group = Self { mount: mount.to_owned(), path, is_v2 };
            if !found.contains_key(id) && group.exists() {
                found.insert(id.to_owned(), group);
            }
        }
        found
    }

    fn find(mount: &Path, parts: &[String]) -> Option<Self> {
        let drivers = [CgroupDriver::Cgroupfs, CgroupDriver::Systemd];
        let candidates = drivers.map(|driver| Self {
            mount: mount.to_owned(),
            path: names::path(driver, parts),
            is_v2: is_v2(mount),
        });
        candidates.into_iter().find(Self::exists)
    }

    /// Returns the cgroup of a container of this pod, by the names that containerd and CRI-O use.
    #[must_use]
    pub fn container(&self, id: &str) -> Option<Self> {
        let names = [id.to_owned(), format!("cri-containerd-{id}.scope"), format!("crio-{id}.scope")];
        names.into_iter().map(|name| Self { path: self.path.join(name), ..self.clone() }).find(Self::exists)
    }

    /// Returns whether the cgroup is of v2, which also counts pressure.
    #[must_use]
    pub fn is_v2(&self) -> bool {
        self.is_v2
    }

    fn exists(&self) -> bool {
        self.dir("memory").is_dir()
    }

    fn dir(&self, controller: &str) -> PathBuf {
        let hierarchy = if self.is_v2 { self.mount.clone() } else { self.mount.join(controller) };
        hierarchy.join(&self.path)
    }

    /// Returns the directory with the files of the memory controller.
    #[must_use]
    pub fn memory_dir(&self) -> PathBuf {
        self.dir("memory")
    }

    /// Returns the cgroups directly below this one whose name `is_wanted`, in the order of their names.
    #[must_use]
    pub fn below(&self, is_wanted: &dyn Fn(&str) -> bool) -> Vec<Self> {
        let entries = fs::read_dir(self.dir("memory")).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| is_wanted(name)).collect();
        names.sort();
        let child = |name: String| Self { path: self.path.join(name), ..self.clone() };
        names.into_iter().map(child).filter(Self::exists).collect()
    }

    /// Returns when the cgroup was created, as cAdvisor takes it: the time of its directory.
    #[must_use]
    pub fn created(&self) -> Option<std::time::SystemTime> {
        fs::metadata(self.dir("memory")).and_then(|dir| dir.modified()).ok()
    }

    /// Returns the usage, or `None` if the cgroup was removed.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        if self.is_v2 { usage_v2(&self.dir("")) } else { usage_v1(&self.dir("memory"), &self.dir("cpuacct")) }
    }

    /// Returns the bytes of memory without inactive file caches. Returns `None` if the usage or the size of
    /// these caches is unknown: caches that are counted as used make a usage too high.
    #[must_use]
    pub fn working_set(&self) -> Option<u64> {
        let dir = self.memory_dir();
        let (usage, inactive) = if self.is_v2 {
            ("memory.current", "inactive_file")
        } else {
            ("memory.usage_in_bytes", "total_inactive_file")
        };
        let caches = *counters(&dir.join("memory.stat")).get(inactive)?;
        Some(number(&dir.join(usage))?.saturating_sub(caches))
    }

    /// Returns the memory limit in bytes, or `None` without a limit.
    #[must_use]
    pub fn memory_limit(&self) -> Option<u64> {
        limit(&self.memory_dir().join(if self.is_v2 { "memory.max" } else { "memory.limit_in_bytes" }))
    }

    /// Returns the number of processes and threads in the cgroup and below it.
    #[must_use]
    pub fn tasks(&self) -> Option<u64> {
        number(&self.dir("pids").join("pids.current"))
    }

    /// Returns the text of the pressure file of `cpu`, `memory` or `io`; empty if the kernel has none, as
    /// with v1.
    #[must_use]
    pub fn pressure(&self, resource: &str) -> String {
        if self.is_v2 { text(&self.dir("").join(format!("{resource}.pressure"))) } else { String::new() }
    }
}

impl Usage {
    /// Returns the usage of two cgroups together. A limit is that of none if one of them has no limit.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        let both = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
        Self {
            cpu_nanos: self.cpu_nanos.saturating_add(other.cpu_nanos),
            usage: self.usage.saturating_add(other.usage),
            working_set: self.working_set.saturating_add(other.working_set),
            rss: self.rss.saturating_add(other.rss),
            page_faults: self.page_faults.saturating_add(other.page_faults),
            major_page_faults: self.major_page_faults.saturating_add(other.major_page_faults),
            limit: both(self.limit, other.limit),
            swap: both(self.swap, other.swap),
            swap_limit: both(self.swap_limit, other.swap_limit),
        }
    }
}

fn usage_v2(dir: &Path) -> Option<Usage> {
    let stat = counters(&dir.join("memory.stat"));
    let cpu = counters(&dir.join("cpu.stat"));
    let value = |name: &str| stat.get(name).copied().unwrap_or(0);
    let usage = number(&dir.join("memory.current"))?;
    Some(Usage {
        cpu_nanos: cpu.get("usage_usec")?.saturating_mul(1000),
        usage,
        working_set: usage.saturating_sub(value("inactive_file")),
        rss: value("anon"),
        page_faults: value("pgfault"),
        major_page_faults: value("pgmajfault"),
        limit: limit(&dir.join("memory.max")),
        swap: number(&dir.join("memory.swap.current")),
        swap_limit: limit(&dir.join("memory.swap.max")),
    })
}

fn usage_v1(memory: &Path, cpuacct: &Path) -> Option<Usage> {
    let stat = counters(&memory.join("memory.stat"));
    let value = |name: &str| stat.get(name).copied().unwrap_or(0);
    let usage = number(&memory.join("memory.usage_in_bytes"))?;
    let memory_limit = limit(&memory.join("memory.limit_in_bytes"));
    // The limit of memory and swap together.
    let both = limit(&memory.join("memory.memsw.limit_in_bytes"));
    Some(Usage {
        cpu_nanos: number(&cpuacct.join("cpuacct.usage"))?,
        usage,
        working_set: usage.saturating_sub(value("total_inactive_file")),
        rss: value("total_rss"),
        page_faults: value("total_pgfault"),
        major_page_faults: value("total_pgmajfault"),
        limit: memory_limit,
        swap: stat.get("total_swap").copied(),
        swap_limit: both.map(|both| both.saturating_sub(memory_limit.unwrap_or(both))),
    })
}

/// Returns the path of a process in the hierarchy of memory, from the text of `/proc/PID/cgroup`.
fn memory_cgroup(text: &str, is_v2: bool) -> Option<PathBuf> {
    text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let is_memory =
            if is_v2 { controllers.is_empty() } else { controllers.split(',').any(|name| name == "memory") };
        is_memory.then(|| PathBuf::from(path.trim_start_matches('/')))
    })
}

/// Returns the container's ID and the cgroup that is named by it, by the names that containerd and CRI-O use.
fn of_container<'a>(path: &Path, ids: &BTreeSet<&'a str>) -> Option<(&'a str, PathBuf)> {
    path.ancestors().find_map(|group| {
        let name = group.file_name()?.to_str()?;
        let name = name.strip_suffix(".scope").unwrap_or(name);
        let id = ids.get(name.rsplit('-').next()?)?;
        Some((*id, group.to_owned()))
    })
}

fn text(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

// `max` is no number.
fn number(file: &Path) -> Option<u64> {
    text(file).trim().parse().ok()
}

fn limit(file: &Path) -> Option<u64> {
    number(file).filter(|limit| *limit < UNLIMITED.unsigned_abs())
}

/// Parses a file of lines `NAME NUMBER`.
fn counters(file: &Path) -> BTreeMap<String, u64> {
    let counter = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    text(file).lines().filter_map(counter).collect()
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

    #[test]
    fn a_cgroup_is_found_in_both_versions_and_with_both_drivers() {
        let want = Usage {
            cpu_nanos: 7_000,
            usage: 100,
            working_set: 70,
            rss: 20,
            page_faults: 5,
            major_page_faults: 1,
            limit: Some(1000),
            swap: None,
            swap_limit: None,
        };
        let read = |mount: &Path, root: &str| CgroupStats::of_pods(mount, root)?.usage();
        let v2 = |group: &str| {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path(), &[("cgroup.controllers", "cpu memory")]);
            write(
                &dir.path().join(group),
                &[
                    ("memory.current", "100\n"),
                    ("memory.max", "1000\n"),
                    ("memory.stat", "anon 20\ninactive_file 30\npgfault 5\npgmajfault 1\n"),
                    ("cpu.stat", "usage_usec 7\nuser_usec 1\n"),
                ],
            );
            dir
        };
        for (group, root) in [
            ("kubepods", "/"),
            ("a-b/kubepods", "/a-b"),
            ("kubepods.slice", ""),
            ("a_b.slice/a_b-kubepods.slice", "/a-b"),
        ] {
            let dir = v2(group);
            assert_eq!(read(dir.path(), root), Some(want.clone()), "{group}");
            assert_eq!(read(dir.path(), "/other"), None);
            std::fs::write(dir.path().join(group).join("memory.max"), "max\n").unwrap();
            assert_eq!(read(dir.path(), root).unwrap().limit, None);
        }
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            &[
                ("memory/q/kubepods/memory.usage_in_bytes", "100\n"),
                ("memory/q/kubepods/memory.limit_in_bytes", "1000\n"),
                (
                    "memory/q/kubepods/memory.stat",
                    "inactive_file 1\ntotal_rss 20\ntotal_inactive_file 30\ntotal_pgfault 5\ntotal_pgmajfault 1\n",
                ),
                ("cpuacct/q/kubepods/cpuacct.usage", "7000\n"),
            ],
        );
        assert_eq!(read(dir.path(), "/q"), Some(want));
        write(dir.path(), &[("memory/q/kubepods/memory.limit_in_bytes", "9223372036854771712\n")]);
        assert_eq!(read(dir.path(), "/q").unwrap().limit, None);
    }

    #[test]
    fn cgroups_of_pods_and_containers_are_found_by_class_and_runtime() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[("cgroup.controllers", "cpu memory")]);
        let made = [
            "kubepods/podu-1/abc",
            "kubepods/burstable/podu-2/cri-containerd-abc.scope",
            "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podu_3.slice/crio-abc.scope",
        ];
        for group in made {
            std::fs::create_dir_all(dir.path().join(group)).unwrap();
        }
        for ((class, uid), group) in
            [(QosClass::Guaranteed, "u-1"), (QosClass::Burstable, "u-2"), (QosClass::BestEffort, "u-3")]
                .into_iter()
                .zip(made)
        {
            let pod = CgroupStats::of_pod(dir.path(), "/", class, uid).unwrap();
            assert_eq!(pod.container("abc").unwrap().path, Path::new(group));
            assert_eq!(pod.container("other"), None);
            assert_eq!(CgroupStats::of_pod(dir.path(), "/", class, "u-9"), None);
        }
    }

    #[test]
    fn a_working_set_needs_the_usage_and_its_caches_and_nothing_else() {
        let v2 = [("kubepods/memory.current", "100"), ("kubepods/memory.stat", "anon 1\ninactive_file 30\n")];
        let v1 = [
            ("memory/kubepods/memory.usage_in_bytes", "100"),
            ("memory/kubepods/memory.stat", "inactive_file 1\ntotal_inactive_file 30\n"),
        ];
        for files in [v2, v1] {
            let dir = tempfile::tempdir().unwrap();
            if files == v2 {
                write(dir.path(), &[("cgroup.controllers", "cpu memory")]);
            }
            write(dir.path(), &files);
            let group = CgroupStats::of_pods(dir.path(), "").unwrap();
            assert_eq!((group.working_set(), group.memory_limit()), (Some(70), None), "CPU time is missing");
            for (file, text) in files {
                std::fs::remove_file(dir.path().join(file)).unwrap();
                assert_eq!(group.working_set(), None, "without {file}");
                write(dir.path(), &[(file, "anon 1\n")]);
                assert_eq!(group.working_set(), None, "{file} without its number");
                write(dir.path(), &[(file, text)]);
            }
        }
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[("memory/memory.usage_in_bytes", "100"), ("memory/memory.stat", "cache 90\n")]);
        assert_eq!(CgroupStats::root_memory(dir.path()), None, "the size of the caches is unknown");
        write(dir.path(), &[("cgroup.controllers", "memory"), ("memory.stat", "anon 10\nfile 90\n")]);
        assert_eq!(CgroupStats::root_memory(dir.path()), None, "the size of the caches is unknown");
    }

    #[test]
    fn the_memory_of_the_machine_is_that_of_the_root_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            &[
                ("memory/memory.usage_in_bytes", "100"),
                ("memory/memory.stat", "rss 1\ninactive_file 2\ntotal_rss 60\ntotal_inactive_file 30\n"),
            ],
        );
        let memory = |usage, working_set, rss| Some(RootMemory { usage, working_set, rss: Some(rss) });
        assert_eq!(CgroupStats::root_memory(dir.path()), memory(100, 70, 60));
        let stat = "anon 50\nfile 40\nkernel 500\ninactive_file 20\n";
        write(dir.path(), &[("cgroup.controllers", "memory"), ("memory.stat", stat)]);
        assert_eq!(
            CgroupStats::root_memory(dir.path()),
            memory(90, 70, 50),
            "without the memory of the kernel"
        );
    }

    #[test]
    fn containers_without_a_cgroup_of_their_pod_are_found_where_containerd_creates_them_or_by_their_processes()
     {
        let ids = ["a1", "b2", "c3", "d4", "e5"].into();
        let v1 =
            |path: &str| format!("12:pids:/other\n4:cpu,memory:{path}\n1:name=systemd:/other\n0::/other\n");
        let v2 = |path: &str| format!("0::{path}\n");
        for is_v2 in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let (mount, proc) = (dir.path().join("cgroup"), dir.path().join("proc"));
            std::fs::create_dir_all(&mount).unwrap();
            if is_v2 {
                write(&mount, &[("cgroup.controllers", "cpu memory")]);
            }
            let below = if is_v2 { mount.clone() } else { mount.join("memory") };
            for (pid, path) in [
                ("10", "/a1"),
                ("11", "/a1/own/below"),
                ("20", "/system.slice/cri-containerd-b2.scope"),
                ("30", "/k8s.io/gone/c3"),
                ("40", "/user.slice"),
            ] {
                if pid != "30" {
                    std::fs::create_dir_all(below.join(path.trim_start_matches('/'))).unwrap();
                }
                let cgroup = if is_v2 { v2(path) } else { v1(path) };
                write(&proc, &[(format!("{pid}/cgroup").as_str(), cgroup.as_str())]);
            }
            write(&proc, &[("meminfo", "MemTotal: 1 kB\n")]);
            // Its processes are hidden.
            std::fs::create_dir_all(below.join("k8s.io/e5")).unwrap();
            let found = CgroupStats::of_containers(&mount, &proc, &ids);
            let found: Vec<_> =
                found.iter().map(|(id, group)| (id.as_str(), group.path.to_str().unwrap())).collect();
            let want = [("a1", "a1"), ("b2", "system.slice/cri-containerd-b2.scope"), ("e5", "k8s.io/e5")];
            assert_eq!(found, want, "v2: {is_v2}");
            assert!(CgroupStats::of_containers(&mount, &proc, &BTreeSet::new()).is_empty());
        }
    }

    #[test]
    fn a_v1_cgroup_has_swap_if_the_kernel_counts_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = dir.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        for (file, text) in [
            ("memory/kubepods/memory.usage_in_bytes", "100\n"),
            ("memory/kubepods/memory.limit_in_bytes", "1000\n"),
            ("memory/kubepods/memory.memsw.limit_in_bytes", "1500\n"),
            ("memory/kubepods/memory.stat", "swap 1\ntotal_swap 40\n"),
            ("cpuacct/kubepods/cpuacct.usage", "7\n"),
        ] {
            write(file, text);
        }
        let usage = || CgroupStats::of_pods(dir.path(), "").unwrap().usage().unwrap();
        assert_eq!((usage().swap, usage().swap_limit), (Some(40), Some(500)));
        write("memory/kubepods/memory.stat", "total_rss 1\n");
        std::fs::remove_file(dir.path().join("memory/kubepods/memory.memsw.limit_in_bytes")).unwrap();
        assert_eq!((usage().swap, usage().swap_limit), (None, None));
    }

    #[test]
    fn a_v2_cgroup_has_swap_and_pressure() {
        let dir = tempfile::tempdir().unwrap();
        let some = "some avg10=1.00 avg60=0.00 avg300=0.00 total=2\n";
        write(
            dir.path(),
            &[
                ("cgroup.controllers", "cpu memory"),
                ("kubepods/memory.current", "1"),
                ("kubepods/cpu.stat", "usage_usec 1\n"),
                ("kubepods/memory.swap.current", "50\n"),
                ("kubepods/memory.swap.max", "80\n"),
                ("kubepods/cpu.pressure", some),
                ("kubepods/io.pressure", some),
            ],
        );
        let group = CgroupStats::of_pods(dir.path(), "").unwrap();
        let usage = group.usage().unwrap();
        assert_eq!((usage.swap, usage.swap_limit), (Some(50), Some(80)));
        assert_eq!(["cpu", "io", "memory"].map(|resource| group.pressure(resource)), [some, some, ""]);
        std::fs::write(dir.path().join("kubepods/memory.swap.max"), "max\n").unwrap();
        assert_eq!(group.usage().unwrap().swap_limit, None);
    }
}
