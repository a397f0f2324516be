//! The rows of `/metrics/cadvisor` of the node's file systems, with the counters of their devices (cAdvisor:
//! `fs/fs.go`, `metrics/prometheus.go`). They have `id="/"`, as in a kubelet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use quintlet_kit::file_system::FileSystemUsage;
use quintlet_kit::mount_table::Mount;

use super::families::device_name;
use super::prometheus::{Text, escape, whole};

/// Types of the file systems that have a row. Those of memory and overlays have none: they belong to pods, or
/// repeat the usage of another row.
const TYPES: [&str; 4] = ["ext2", "ext3", "ext4", "xfs"];
/// Fields of a line of `/proc/diskstats` before the counters: device numbers and name.
const NAMES: usize = 3;
/// Time units of `/proc/diskstats` in a second.
const MILLIS: f64 = 1000.0;

/// Writes the rows of all file systems on block devices. `row` has the labels of the root cgroup, `stats` is
/// `/proc/diskstats`.
pub(super) fn write(
    out: &mut Text,
    row: &str,
    mounts: &[Mount],
    stats: &str,
    space: &dyn Fn(&Path) -> Option<FileSystemUsage>,
    now: i64,
) {
    for (number, places) in file_systems(mounts) {
        let device = device_name(number);
        let labels = format!("{row},device=\"{}\"", escape(&device));
        let mut sample = |name, kind, value| out.sample(name, kind, &labels, value, Some(now));
        if let Some(space) = places.iter().find_map(|place| space(place)) {
            sample("container_fs_limit_bytes", "gauge", whole(space.capacity_bytes));
            sample("container_fs_usage_bytes", "gauge", whole(space.used_bytes));
            sample("container_fs_inodes_total", "gauge", whole(space.inodes));
            sample("container_fs_inodes_free", "gauge", whole(space.free_inodes));
        }
        let Some(counters) = counters(stats, number) else { continue };
        let count = |index: usize| counters.get(index).copied().map_or(0.0, whole);
        let seconds = |index: usize| count(index) / MILLIS;
        sample("container_fs_reads_total", "counter", count(0));
        sample("container_fs_reads_merged_total", "counter", count(1));
        sample("container_fs_sector_reads_total", "counter", count(2));
        sample("container_fs_read_seconds_total", "counter", seconds(3));
        sample("container_fs_writes_total", "counter", count(4));
        sample("container_fs_writes_merged_total", "counter", count(5));
        sample("container_fs_sector_writes_total", "counter", count(6));
        sample("container_fs_write_seconds_total", "counter", seconds(7));
        sample("container_fs_io_current", "gauge", count(8));
        sample("container_fs_io_time_seconds_total", "counter", seconds(9));
        sample("container_fs_io_time_weighted_seconds_total", "counter", seconds(10));
    }
}

/// Returns the mount points of each file system by its device number, shortest path first.
fn file_systems(mounts: &[Mount]) -> BTreeMap<&str, Vec<PathBuf>> {
    let mut found: BTreeMap<&str, Vec<PathBuf>> = BTreeMap::new();
    for mount in mounts.iter().filter(|mount| TYPES.contains(&mount.fs_type.as_str())) {
        found.entry(&mount.device).or_default().push(mount.path.clone());
    }
    for places in found.values_mut() {
        places.sort_by_key(|place| place.as_os_str().len());
    }
    found
}

/// Returns the counters of a device in `/proc/diskstats`.
fn counters(stats: &str, number: &str) -> Option<Vec<u64>> {
    let (major, minor) = number.split_once(':')?;
    let line = stats.lines().find(|line| line.split_whitespace().take(2).eq([major, minor]))?;
    Some(line.split_whitespace().skip(NAMES).map_while(|figure| figure.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_system_of_the_node_has_its_space_and_the_counters_of_its_device() {
        let mount = |device: &str, path: &str, fs_type: &str| Mount {
            device: device.to_owned(),
            root: "/".into(),
            path: path.into(),
            fs_type: fs_type.to_owned(),
            options: String::new(),
            is_shared: false,
        };
        let mounts = [
            mount("0:900", "/closed/volume", "xfs"),
            mount("0:900", "/", "xfs"),
            mount("0:901", "/boot", "ext4"),
            mount("0:902", "/dev/shm", "tmpfs"),
            mount("0:903", "/run/rootfs", "overlay"),
        ];
        let stats = "   0     900 vda 2660565 144236 152649674 15389431 1755778 1804762 482884240 7104153 2 1472580 23295304 1 2 3\n   \
            0     9 vdb 1 1 1 1 1 1 1 1 1 1 1\n";
        let space = |path: &Path| {
            let usage = FileSystemUsage {
                capacity_bytes: 1000,
                available_bytes: 500,
                used_bytes: 400,
                inodes: 90,
                free_inodes: 60,
            };
            (path == Path::new("/")).then_some(usage)
        };
        let mut out = Text::default();
        write(&mut out, "id=\"/\"", &mounts, stats, &space, 7);
        let text = out.finish();
        let rows: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let want = [
            ("inodes_free", "60"),
            ("inodes_total", "90"),
            ("io_current", "2"),
            ("io_time_seconds_total", "1472.58"),
            ("io_time_weighted_seconds_total", "23295.304"),
            ("limit_bytes", "1000"),
            ("read_seconds_total", "15389.431"),
            ("reads_merged_total", "144236"),
            ("reads_total", "2660565"),
            ("sector_reads_total", "152649674"),
            ("sector_writes_total", "482884240"),
            ("usage_bytes", "400"),
            ("write_seconds_total", "7104.153"),
            ("writes_merged_total", "1804762"),
            ("writes_total", "1755778"),
        ];
        let want =
            want.map(|(name, value)| format!("container_fs_{name}{{id=\"/\",device=\"0:900\"}} {value} 7"));
        assert_eq!(rows, want, "one device, of which one mount point may be entered");
    }
}
