//! What all pods together use: the cgroup `kubepods`, of either version and by either driver. Anybody may read it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const KUBEPODS: &str = "kubepods";
/// A limit above this is none.
const NO_LIMIT: u64 = 1 << 62;

/// Figures of the group.
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
}

/// Reads the group below `root` (`--cgroup-root`) of the hierarchies mounted at `mount`; none where there is no such group.
#[must_use]
pub fn read(mount: &Path, root: &str) -> Option<Usage> {
    let parts: Vec<&str> = root.split('/').filter(|p| !p.is_empty()).chain([KUBEPODS]).collect();
    let places = [parts.iter().collect::<PathBuf>(), slices(&parts)];
    let is_v2 = mount.join("cgroup.controllers").exists();
    places.iter().find_map(|place| if is_v2 { v2(&mount.join(place)) } else { v1(mount, place) })
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
    let usage = number(&dir.join("memory.current"))?;
    Some(Usage {
        cpu_nanos: cpu.get("usage_usec")?.saturating_mul(1000),
        usage,
        working_set: usage.saturating_sub(of("inactive_file")),
        rss: of("anon"),
        page_faults: of("pgfault"),
        major_page_faults: of("pgmajfault"),
        limit: number(&dir.join("memory.max")).filter(|limit| *limit < NO_LIMIT),
    })
}

fn v1(mount: &Path, place: &Path) -> Option<Usage> {
    let dir = mount.join("memory").join(place);
    let stat = figures(&dir.join("memory.stat"));
    let of = |name: &str| stat.get(name).copied().unwrap_or(0);
    let usage = number(&dir.join("memory.usage_in_bytes"))?;
    Some(Usage {
        cpu_nanos: number(&mount.join("cpuacct").join(place).join("cpuacct.usage"))?,
        usage,
        working_set: usage.saturating_sub(of("total_inactive_file")),
        rss: of("total_rss"),
        page_faults: of("total_pgfault"),
        major_page_faults: of("total_pgmajfault"),
        limit: number(&dir.join("memory.limit_in_bytes")).filter(|limit| *limit < NO_LIMIT),
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
        };
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
}
