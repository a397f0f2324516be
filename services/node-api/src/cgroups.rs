//! What cgroups use: that of all pods together (`kubepods`), of a pod, of a container; of either version and by either driver.
//! Anybody may read them.

mod detail;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::host;

pub use detail::{Detail, Device, Memory, Throttling};

const KUBEPODS: &str = "kubepods";
/// A limit above this is none.
const NO_LIMIT: u64 = 1 << 62;

/// Figures of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time since the group was made.
    pub cpu_nanos: u64,
    /// Memory in use, caches included.
    pub usage: u64,
    /// The same without caches that can go at once.
    pub working_set: u64,
    /// Memory of processes alone.
    pub rss: u64,
    /// Page faults.
    pub page_faults: u64,
    /// Those that went to a disk.
    pub major_page_faults: u64,
    /// Memory the group may use; none: no limit.
    pub limit: Option<u64>,
    /// Swap in use; none where swap is not counted, as with version 1.
    pub swap: Option<u64>,
    /// Swap the group may use; none: no limit.
    pub swap_limit: Option<u64>,
}

/// Pressure stall figures as the summary has them; null where there are none, as with version 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pressure {
    /// For a CPU.
    pub cpu: Value,
    /// For memory.
    pub memory: Value,
    /// For disks.
    pub io: Value,
}

/// A group that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    mount: PathBuf,
    place: PathBuf,
    is_v2: bool,
}

impl Group {
    /// That of all pods, below `root` (`--cgroup-root`) of the hierarchies mounted at `mount`.
    #[must_use]
    pub fn of_pods(mount: &Path, root: &str) -> Option<Self> {
        Self::find(mount, root, &[KUBEPODS])
    }

    /// That of a pod, by its `status.qosClass`.
    #[must_use]
    pub fn of_pod(mount: &Path, root: &str, class: &str, uid: &str) -> Option<Self> {
        let (pod, class) = (format!("pod{uid}"), class.to_lowercase());
        match class.as_str() {
            "burstable" | "besteffort" => Self::find(mount, root, &[KUBEPODS, &class, &pod]),
            _ => Self::find(mount, root, &[KUBEPODS, &pod]),
        }
    }

    fn find(mount: &Path, root: &str, below: &[&str]) -> Option<Self> {
        let parts: Vec<&str> =
            root.split('/').filter(|p| !p.is_empty()).chain(below.iter().copied()).collect();
        let is_v2 = mount.join("cgroup.controllers").exists();
        let places = [parts.iter().collect::<PathBuf>(), slices(&parts)];
        places.into_iter().map(|place| Self { mount: mount.to_owned(), place, is_v2 }).find(Self::exists)
    }

    /// That of a container in this one, as the runtimes name it.
    #[must_use]
    pub fn container(&self, id: &str) -> Option<Self> {
        let names = [id.to_owned(), format!("cri-containerd-{id}.scope"), format!("crio-{id}.scope")];
        names.into_iter().map(|name| Self { place: self.place.join(name), ..self.clone() }).find(Self::exists)
    }

    /// It has what version 1 lacks: pressure and swap.
    #[must_use]
    pub fn is_v2(&self) -> bool {
        self.is_v2
    }

    fn exists(&self) -> bool {
        self.dir("memory").is_dir()
    }

    fn dir(&self, controller: &str) -> PathBuf {
        let hierarchy = if self.is_v2 { self.mount.clone() } else { self.mount.join(controller) };
        hierarchy.join(&self.place)
    }

    /// What it uses; none where it is gone.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        if self.is_v2 { v2(&self.dir("")) } else { v1(&self.dir("memory"), &self.dir("cpuacct")) }
    }

    /// How long it had to wait.
    #[must_use]
    pub fn pressure(&self) -> Pressure {
        let read = |of: &str| {
            let file = self.dir("").join(format!("{of}.pressure"));
            host::pressure(&std::fs::read_to_string(file).unwrap_or_default())
        };
        if self.is_v2 {
            Pressure { cpu: read("cpu"), memory: read("memory"), io: read("io") }
        } else {
            Pressure::default()
        }
    }
}

/// As systemd names it: each slice bears the names of those that it lies in.
fn slices(parts: &[&str]) -> PathBuf {
    let slice = |n: usize| {
        let names: Vec<String> = parts[..n].iter().map(|p| p.replace('-', "_")).collect();
        format!("{}.slice", names.join("-"))
    };
    (1..=parts.len()).map(slice).collect()
}

fn v2(dir: &Path) -> Option<Usage> {
    let stat = figures(&dir.join("memory.stat"));
    let cpu = figures(&dir.join("cpu.stat"));
    let of = |name: &str| stat.get(name).copied().unwrap_or(0);
    let limit = |file: &str| number(&dir.join(file)).filter(|limit| *limit < NO_LIMIT);
    let usage = number(&dir.join("memory.current"))?;
    Some(Usage {
        cpu_nanos: cpu.get("usage_usec")?.saturating_mul(1000),
        usage,
        working_set: usage.saturating_sub(of("inactive_file")),
        rss: of("anon"),
        page_faults: of("pgfault"),
        major_page_faults: of("pgmajfault"),
        limit: limit("memory.max"),
        swap: number(&dir.join("memory.swap.current")),
        swap_limit: limit("memory.swap.max"),
    })
}

fn v1(memory: &Path, cpuacct: &Path) -> Option<Usage> {
    let stat = figures(&memory.join("memory.stat"));
    let of = |name: &str| stat.get(name).copied().unwrap_or(0);
    let usage = number(&memory.join("memory.usage_in_bytes"))?;
    Some(Usage {
        cpu_nanos: number(&cpuacct.join("cpuacct.usage"))?,
        usage,
        working_set: usage.saturating_sub(of("total_inactive_file")),
        rss: of("total_rss"),
        page_faults: of("total_pgfault"),
        major_page_faults: of("total_pgmajfault"),
        limit: number(&memory.join("memory.limit_in_bytes")).filter(|limit| *limit < NO_LIMIT),
        swap: None,
        swap_limit: None,
    })
}

fn number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// `name 12` lines.
fn figures(file: &Path) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let figure = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    text.lines().filter_map(figure).collect()
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
    fn the_group_is_found_in_both_versions_and_by_both_drivers() {
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
        let read = |mount: &Path, root: &str| Group::of_pods(mount, root)?.usage();
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
    fn pods_and_containers_have_groups_by_class_and_runtime() {
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
            [("Guaranteed", "u-1"), ("Burstable", "u-2"), ("BestEffort", "u-3")].into_iter().zip(made)
        {
            let pod = Group::of_pod(dir.path(), "/", class, uid).unwrap();
            assert_eq!(pod.container("abc").unwrap().place, Path::new(group));
            assert_eq!(pod.container("other"), None);
            assert_eq!(Group::of_pod(dir.path(), "/", class, "u-9"), None);
        }
    }

    #[test]
    fn a_group_of_version_2_tells_of_swap_and_pressure() {
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
        let group = Group::of_pods(dir.path(), "").unwrap();
        let usage = group.usage().unwrap();
        assert_eq!((usage.swap, usage.swap_limit), (Some(50), Some(80)));
        let pressure = group.pressure();
        assert_eq!(pressure.cpu["some"]["avg10"], 1.0);
        assert_eq!(pressure.io["some"]["total"], 2000);
        assert_eq!(pressure.memory, Value::Null, "the kernel has none");
        std::fs::write(dir.path().join("kubepods/memory.swap.max"), "max\n").unwrap();
        assert_eq!(group.usage().unwrap().swap_limit, None);
    }
}
