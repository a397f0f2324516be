//! The rows of `/metrics/cadvisor` that belong to no pod: the root cgroup, the cgroups of all pods and of QoS
//! classes, and those of the kubelet, of the runtime and of other processes (`pkg/kubelet/cadvisor: New`, the
//! prefixes of raw cgroups).

use jiff::Timestamp;
use quintlet_cgroups::stats::CgroupStats;
use quintlet_cri_api::v1;
use quintlet_kit::{file_system::FileSystemUsage, mount_table};

use super::families::{interfaces, render, start, used};
use super::gather::fill;
use super::machine::Machine;
use super::node_disks;
use super::paths::StatsPaths;
use super::prometheus::{Text, labels};

/// Name of the root cgroup.
const ROOT: &str = "/";

/// Writes a row for the root cgroup, the cgroups of QoS classes, and those of the system.
pub(super) fn write(out: &mut Text, paths: &StatsPaths, machine: &Machine, time: Timestamp) {
    for group in groups(paths) {
        let id = group.id();
        let row = labels([
            ("container", ""),
            ("id", &id),
            ("image", ""),
            ("name", ""),
            ("namespace", ""),
            ("pod", ""),
        ]);
        let (mut cpu, mut memory) = (None, None);
        start(out, &row, &group);
        if id == ROOT {
            (cpu, memory) = of_machine(machine, time);
            let network = std::fs::read_to_string("/proc/net/dev").unwrap_or_default();
            interfaces(out, &row, &network, time.as_millisecond());
            let mounts = mount_table::read().unwrap_or_default();
            let disks = std::fs::read_to_string("/proc/diskstats").unwrap_or_default();
            node_disks::write(out, &row, &mounts, &disks, &FileSystemUsage::read, time.as_millisecond());
        } else if let Some(usage) = group.usage() {
            fill(&usage, time, &mut cpu, &mut memory, &mut None);
        }
        used(out, &row, cpu.as_ref(), memory.as_ref());
        render(out, &row, &group.detail(), time.as_millisecond());
    }
}

fn groups(paths: &StatsPaths) -> Vec<CgroupStats> {
    let named = |name: &str| match name {
        "" => None,
        name => CgroupStats::named(&paths.cgroups, name),
    };
    let pods = CgroupStats::of_pods(&paths.cgroups, &paths.cgroup_root);
    let is_class = |name: &str| {
        let name = name.strip_suffix(".slice").unwrap_or(name);
        ["burstable", "besteffort"].iter().any(|class| name.ends_with(class))
    };
    let classes = pods.iter().flat_map(|pods| pods.below(&is_class));
    let system = [&paths.system.kubelet, &paths.system.runtime, &paths.system.system];
    let mut all: Vec<CgroupStats> = named(ROOT).into_iter().collect();
    all.extend(pods.clone());
    all.extend(classes);
    for group in system.into_iter().filter_map(|name| named(name)) {
        // Two settings may name one cgroup, and a series must not occur twice.
        if !all.contains(&group) {
            all.push(group);
        }
    }
    all
}

/// The root cgroup of v2 counts neither its memory nor its page faults: they are those of the machine, as in
/// `/stats/summary`.
fn of_machine(machine: &Machine, time: Timestamp) -> (Option<v1::CpuUsage>, Option<v1::MemoryUsage>) {
    let number = |value| Some(v1::UInt64Value { value });
    let timestamp = i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX);
    let cpu = v1::CpuUsage {
        timestamp,
        usage_core_nano_seconds: number(machine.cpu_nanos),
        usage_nano_cores: None,
        ..Default::default()
    };
    let memory = v1::MemoryUsage {
        timestamp,
        working_set_bytes: number(machine.working_set()),
        available_bytes: None,
        usage_bytes: number(machine.used()),
        rss_bytes: number(machine.rss()),
        page_faults: number(machine.page_faults),
        major_page_faults: number(machine.major_page_faults),
        ..Default::default()
    };
    (Some(cpu), Some(memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cgroup_of_the_node_has_one_row() {
        let mount = tempfile::tempdir().unwrap();
        let path = |name: &str| mount.path().join(name);
        std::fs::write(path("cgroup.controllers"), "cpu memory").unwrap();
        for group in [
            "kubepods",
            "kubepods/burstable",
            "kubepods/besteffort",
            "kubepods/podu1",
            "system.slice/node.service",
            "runtime",
            "unrelated",
        ] {
            std::fs::create_dir_all(path(group)).unwrap();
            std::fs::write(path(group).join("memory.current"), "4096\n").unwrap();
            std::fs::write(path(group).join("memory.stat"), "inactive_file 96\nanon 7\n").unwrap();
            std::fs::write(path(group).join("cpu.stat"), "usage_usec 1500000\n").unwrap();
        }
        let paths = StatsPaths {
            cgroups: mount.path().to_owned(),
            cgroup_root: "/".to_owned(),
            system: super::super::SystemCgroups {
                kubelet: "/system.slice/node.service".to_owned(),
                runtime: "/runtime".to_owned(),
                system: "/runtime".to_owned(),
            },
            ..StatsPaths::default()
        };
        let mut out = Text::default();
        let time = Timestamp::from_second(1_700_000_000).unwrap();
        let machine = Machine { cpu_nanos: 9_000_000_000, ..Machine::default() };
        write(&mut out, &paths, &machine, time);
        let text = out.finish();
        let rows = |family: &str| -> Vec<(String, String)> {
            let rows = text.lines().filter(|l| l.starts_with(&format!("{family}{{")));
            rows.map(|row| {
                assert!(row.contains(r#"container="","#) && row.contains(r#"namespace="""#), "{row}");
                let id = row.split_once("id=\"").unwrap().1.split('"').next().unwrap();
                (id.to_owned(), row.rsplit(' ').nth(1).unwrap().to_owned())
            })
            .collect()
        };
        let ids = [
            "/",
            "/kubepods",
            "/kubepods/besteffort",
            "/kubepods/burstable",
            "/system.slice/node.service",
            "/runtime",
        ];
        let starts: Vec<String> =
            rows("container_start_time_seconds").into_iter().map(|(id, _)| id).collect();
        assert_eq!(starts, ids);
        let interfaces = rows("container_network_receive_bytes_total");
        let has_network = crate::host::interfaces(&std::fs::read_to_string("/proc/net/dev").unwrap()).count();
        assert!(interfaces.len() == has_network && interfaces.iter().all(|(id, _)| id == "/"), "{text}");
        let row = |id: &str, value: &str| (id.to_owned(), value.to_owned());
        let cpu: Vec<_> = ids.iter().map(|id| row(id, if *id == "/" { "9" } else { "1.5" })).collect();
        assert_eq!(rows("container_cpu_usage_seconds_total"), cpu);
        let memory: Vec<_> = ids.iter().map(|id| row(id, if *id == "/" { "0" } else { "4000" })).collect();
        assert_eq!(rows("container_memory_working_set_bytes"), memory);
    }
}
