//! `/metrics/cadvisor`: the metric families that the kubelet takes from cAdvisor (google/cadvisor, metrics/prometheus.go). The sources are the
//! pods' cgroups and network namespaces; CPU, memory in use and disk usage come from the runtime.

use std::path::Path;

use http::StatusCode;
use k8s_cri::v1;
use quintlet_cgroups::stats::{CgroupStats, Detail};
use quintlet_kit::task;

use super::gather::{Pod, group_of, network_devices, newest};
use super::machine_info::MachineInfo;
use super::prometheus::{Text, escape, labels, seconds, started, whole};
use super::{Machine, Stats};
use crate::answer::{Answer, error, with_type};
use crate::metrics::CONTENT_TYPE;
use crate::services::Services;
use crate::{host, pod_lookup};

type Figure = (&'static str, &'static str, Option<f64>);

/// Statistics of one pod.
struct Counted {
    /// Name and statistics of the pod's cgroup.
    own: Option<(String, Detail)>,
    /// Names and statistics of the containers' cgroups, by container ID.
    containers: Vec<(String, String, Detail)>,
    /// `/proc/PID/net/dev` in its network namespace; none for a pod in the host's.
    network: Option<String>,
}

impl Stats {
    /// Responds to `/metrics/cadvisor`.
    pub async fn cadvisor(&self, node: &Services) -> Answer {
        let pods = match self.pods(node, false).await {
            Ok(pods) => pods,
            Err(status) => return error(StatusCode::INTERNAL_SERVER_ERROR, status.message()),
        };
        let (paths, machine, now) = (self.paths.clone(), self.machine(), self.clock.wall().as_millisecond());
        // A full node has thousands of files in cgroupfs, so this reads on a blocking thread.
        let written = task::blocking(move || {
            let mut out = Text::default();
            of_machine(&mut out, &machine, now);
            for pod in &pods {
                let counted = counted(pod, group_of(&paths, &pod.object, &pod.uid), Path::new("/proc"));
                write(&mut out, pod, &counted, now);
            }
            out.finish()
        });
        with_type(StatusCode::OK, CONTENT_TYPE, written.await)
    }
}

fn of_machine(out: &mut Text, machine: &Machine, now: i64) {
    for name in ["container_scrape_error", "machine_scrape_error"] {
        out.sample(name, "gauge", "", 0.0, None);
    }
    let info = MachineInfo::read(Path::new("/"));
    info.write(out, machine.of("MemTotal"), machine.of("SwapTotal"), now);
}

fn counted(pod: &Pod, group: Option<CgroupStats>, proc: &Path) -> Counted {
    let containers = newest(&pod.stats.containers).into_values().filter_map(|c| {
        let id = c.attributes.as_ref()?.id.clone();
        let group = pod.container_cgroup(group.as_ref(), &id)?;
        Some((id, group))
    });
    let containers: Vec<_> = containers.collect();
    let groups = group.iter().chain(containers.iter().map(|(_, group)| group));
    Counted {
        network: network_devices(pod, groups, proc),
        own: group.map(|group| (group.id(), group.detail())),
        containers: containers.into_iter().map(|(id, group)| (id, group.id(), group.detail())).collect(),
    }
}

fn write(out: &mut Text, pod: &Pod, counted: &Counted, now: i64) {
    let row = |container: &str, name: &str, id: &str, image: &str| {
        labels([
            ("container", container),
            ("id", id),
            ("image", image),
            ("name", name),
            ("namespace", &pod.namespace),
            ("pod", &pod.name),
        ])
    };
    let own = counted.own.as_ref();
    let of_pod = row("", "", own.map_or("", |(id, _)| id), "");
    used(out, &of_pod, pod.stats.cpu.as_ref(), pod.stats.memory.as_ref());
    if let Some((_, detail)) = own {
        render(out, &of_pod, detail, now);
    }
    match &counted.network {
        Some(dev) => interfaces(out, &of_pod, dev, now),
        None => runtimes_interfaces(out, &of_pod, pod.stats.network.as_ref()),
    }
    for (name, c) in newest(&pod.stats.containers) {
        let id = c.attributes.as_ref().map_or("", |a| a.id.as_str());
        let image =
            pod_lookup::status(&pod.object, name).and_then(|s| s["image"].as_str()).unwrap_or_default();
        let counted = counted.containers.iter().find(|(of, ..)| of == id);
        let labels = row(name, id, counted.map_or("", |(_, place, _)| place), image);
        used(out, &labels, c.cpu.as_ref(), c.memory.as_ref());
        if let Some((.., detail)) = counted {
            render(out, &labels, detail, now);
        }
        on_disk(out, &labels, c.writable_layer.as_ref(), now);
        if let Some(started) = started(&pod.object, name) {
            out.sample("container_start_time_seconds", "gauge", &labels, started, None);
        }
    }
}

fn used(out: &mut Text, labels: &str, cpu: Option<&v1::CpuUsage>, memory: Option<&v1::MemoryUsage>) {
    if let Some((value, at)) = cpu.and_then(|c| Some((c.usage_core_nano_seconds?.value, c.timestamp))) {
        let labels = format!("{labels},cpu=\"total\"");
        let name = "container_cpu_usage_seconds_total";
        out.sample(name, "counter", &labels, seconds(value), Some(at / 1_000_000));
    }
    let Some(memory) = memory else { return };
    let at = Some(memory.timestamp / 1_000_000);
    for (name, value) in [
        ("container_memory_rss", memory.rss_bytes),
        ("container_memory_usage_bytes", memory.usage_bytes),
        ("container_memory_working_set_bytes", memory.working_set_bytes),
    ] {
        if let Some(value) = value {
            out.sample(name, "gauge", labels, whole(value.value), at);
        }
    }
    for (kind, value) in [("pgfault", memory.page_faults), ("pgmajfault", memory.major_page_faults)] {
        if let Some(value) = value {
            let labels = format!("{labels},failure_type=\"{kind}\",scope=\"container\"");
            out.sample("container_memory_failures_total", "counter", &labels, whole(value.value), at);
        }
    }
}

/// Resources whose pressure is counted, each with the metrics for the time in which a process waits and in which all wait.
const PRESSURE: [(&str, &str, &str); 3] = [
    ("cpu", "container_pressure_cpu_waiting_seconds_total", "container_pressure_cpu_stalled_seconds_total"),
    (
        "memory",
        "container_pressure_memory_waiting_seconds_total",
        "container_pressure_memory_stalled_seconds_total",
    ),
    ("io", "container_pressure_io_waiting_seconds_total", "container_pressure_io_stalled_seconds_total"),
];

/// A missing limit is reported as 0. A missing quota is not reported.
fn render(out: &mut Text, labels: &str, detail: &Detail, now: i64) {
    let memory = &detail.memory;
    let throttling = detail.throttling;
    let bytes = |value: Option<u64>| value.map(whole);
    let cri_stats: [Figure; 24] = [
        ("container_cpu_user_seconds_total", "counter", detail.user_nanos.map(seconds)),
        ("container_cpu_system_seconds_total", "counter", detail.system_nanos.map(seconds)),
        ("container_cpu_cfs_periods_total", "counter", throttling.map(|t| whole(t.periods))),
        ("container_cpu_cfs_throttled_periods_total", "counter", throttling.map(|t| whole(t.throttled))),
        ("container_cpu_cfs_throttled_seconds_total", "counter", throttling.map(|t| seconds(t.nanos))),
        ("container_last_seen", "gauge", Some(seconds(now.unsigned_abs().saturating_mul(1_000_000)).floor())),
        ("container_memory_cache", "gauge", bytes(memory.cache)),
        ("container_memory_failcnt", "counter", bytes(memory.failures)),
        ("container_memory_kernel_usage", "gauge", bytes(memory.kernel)),
        ("container_memory_mapped_file", "gauge", bytes(memory.mapped)),
        ("container_memory_max_usage_bytes", "gauge", bytes(memory.max)),
        ("container_memory_swap", "gauge", bytes(memory.swap)),
        ("container_memory_total_active_file_bytes", "gauge", bytes(memory.active_file)),
        ("container_memory_total_inactive_file_bytes", "gauge", bytes(memory.inactive_file)),
        ("container_oom_events_total", "counter", bytes(memory.oom_kills)),
        ("container_processes", "gauge", Some(whole(detail.processes))),
        ("container_threads", "gauge", bytes(detail.threads)),
        ("container_threads_max", "gauge", Some(bytes(detail.threads_max).unwrap_or(0.0))),
        ("container_spec_cpu_period", "gauge", bytes(detail.period)),
        ("container_spec_cpu_quota", "gauge", bytes(detail.quota)),
        ("container_spec_cpu_shares", "gauge", bytes(detail.shares)),
        ("container_spec_memory_limit_bytes", "gauge", Some(bytes(memory.limit).unwrap_or(0.0))),
        (
            "container_spec_memory_reservation_limit_bytes",
            "gauge",
            Some(bytes(memory.reservation).unwrap_or(0.0)),
        ),
        ("container_spec_memory_swap_limit_bytes", "gauge", Some(bytes(memory.swap_limit).unwrap_or(0.0))),
    ];
    for (name, kind, value) in cri_stats {
        if let Some(value) = value {
            out.sample(name, kind, labels, value, Some(now));
        }
    }
    for (resource, waiting, stalled) in PRESSURE {
        let Some(stalls) = detail.pressure.get(resource) else { continue };
        let micros = |us: u64| seconds(us.saturating_mul(1000));
        out.sample(waiting, "counter", labels, micros(stalls.waiting_us), Some(now));
        // As in cAdvisor, 0 where the kernel does not count it.
        out.sample(stalled, "counter", labels, micros(stalls.stalled_us.unwrap_or(0)), Some(now));
    }
    for (number, device) in &detail.devices {
        let labels = format!("{labels},device=\"{}\"", escape(&device_name(number)));
        for (name, value) in [
            ("container_fs_reads_bytes_total", device.read_bytes),
            ("container_fs_reads_total", device.reads),
            ("container_fs_writes_bytes_total", device.written_bytes),
            ("container_fs_writes_total", device.writes),
        ] {
            out.sample(name, "counter", &labels, whole(value), Some(now));
        }
    }
}

/// Returns `/dev/sda` for `8:0`, or the number if the kernel has no name.
fn device_name(number: &str) -> String {
    let about = std::fs::read_to_string(format!("/sys/dev/block/{number}/uevent")).unwrap_or_default();
    let name = about.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    name.map_or_else(|| number.to_owned(), |name| format!("/dev/{name}"))
}

fn interfaces(out: &mut Text, labels: &str, dev: &str, now: i64) {
    for interface in host::interfaces(dev) {
        let labels = format!("{labels},interface=\"{}\"", escape(&interface.name));
        let (received, sent) = (interface.received, interface.sent);
        for (name, value) in [
            ("container_network_receive_bytes_total", received.bytes),
            ("container_network_receive_errors_total", received.errors),
            ("container_network_receive_packets_dropped_total", received.dropped),
            ("container_network_receive_packets_total", received.packets),
            ("container_network_transmit_bytes_total", sent.bytes),
            ("container_network_transmit_errors_total", sent.errors),
            ("container_network_transmit_packets_dropped_total", sent.dropped),
            ("container_network_transmit_packets_total", sent.packets),
        ] {
            out.sample(name, "counter", &labels, whole(value), Some(now));
        }
    }
}

fn runtimes_interfaces(out: &mut Text, labels: &str, network: Option<&v1::NetworkUsage>) {
    for i in network.iter().flat_map(|n| n.default_interface.iter().chain(&n.interfaces)) {
        let labels = format!("{labels},interface=\"{}\"", escape(&i.name));
        for (name, value) in [
            ("container_network_receive_bytes_total", i.rx_bytes),
            ("container_network_receive_errors_total", i.rx_errors),
            ("container_network_transmit_bytes_total", i.tx_bytes),
            ("container_network_transmit_errors_total", i.tx_errors),
        ] {
            if let Some(value) = value {
                out.sample(name, "counter", &labels, whole(value.value), None);
            }
        }
    }
}

fn on_disk(out: &mut Text, labels: &str, layer: Option<&v1::FilesystemUsage>, now: i64) {
    let Some(layer) = layer else { return };
    let labels = format!("{labels},device=\"\"");
    if let Some(used) = layer.used_bytes {
        out.sample("container_fs_usage_bytes", "gauge", &labels, whole(used.value), Some(now));
    }
}

#[cfg(test)]
mod tests {
    use quintlet_cgroups::stats::{DeviceIo, Memory, Stalls, Throttling};
    use quintlet_model::qos::QosClass;
    use serde_json::json;

    use super::*;

    #[test]
    fn metrics_of_a_container_come_from_its_cgroup_its_network_namespace_and_the_runtime() {
        let number = |value| Some(v1::UInt64Value { value });
        let metadata = Some(v1::ContainerMetadata { name: "main".into(), attempt: 0 });
        let container = v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes { id: "c1".into(), metadata, ..Default::default() }),
            memory: Some(v1::MemoryUsage {
                timestamp: 5_000_000,
                working_set_bytes: number(7),
                major_page_faults: number(2),
                ..Default::default()
            }),
            ..Default::default()
        };
        let mut pod = Pod {
            name: "p".into(),
            namespace: "n".into(),
            uid: "u".into(),
            object: json!({"status": {"containerStatuses": [{"name": "main", "image": "i:1"}]}}),
            stats: v1::LinuxPodSandboxStats { containers: vec![container], ..Default::default() },
            ..Pod::default()
        };
        let detail = Detail {
            throttling: Some(Throttling { periods: 9, throttled: 2, nanos: 1_500_000_000 }),
            memory: Memory { oom_kills: Some(1), limit: None, swap_limit: Some(9), ..Memory::default() },
            devices: [("0:0".to_owned(), DeviceIo { reads: 3, read_bytes: 4, writes: 5, written_bytes: 6 })]
                .into(),
            processes: 2,
            pressure: [("io", Stalls { waiting_us: 2_500_000, stalled_us: Some(500_000) })].into(),
            ..Detail::default()
        };
        let dev = "head\nhead\n  lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\neth0: 100 10 1 2 0 0 0 0 200 20 3 4 0 0 0 0\n";
        let counted = Counted {
            own: Some(("/kubepods/podu".into(), Detail::default())),
            containers: vec![("c1".into(), "/kubepods/podu/c1".into(), detail)],
            network: Some(dev.into()),
        };
        let render = |pod: &Pod, counted: &Counted| {
            let mut out = Text::default();
            write(&mut out, pod, counted, 1_700_000_000_123);
            out.finish()
        };
        let text = render(&pod, &counted);
        let of_container =
            r#"container="main",id="/kubepods/podu/c1",image="i:1",name="c1",namespace="n",pod="p""#;
        let of_pod = r#"container="",id="/kubepods/podu",image="",name="",namespace="n",pod="p""#;
        for line in [
            format!("container_memory_working_set_bytes{{{of_container}}} 7 5"),
            format!(
                "container_memory_failures_total{{{of_container},failure_type=\"pgmajfault\",scope=\"container\"}} 2 5"
            ),
            format!("container_cpu_cfs_throttled_periods_total{{{of_container}}} 2 1700000000123"),
            format!("container_cpu_cfs_throttled_seconds_total{{{of_container}}} 1.5 1700000000123"),
            format!("container_oom_events_total{{{of_container}}} 1 1700000000123"),
            format!("container_spec_memory_limit_bytes{{{of_container}}} 0 1700000000123"),
            format!("container_spec_memory_swap_limit_bytes{{{of_container}}} 9 1700000000123"),
            format!("container_spec_memory_reservation_limit_bytes{{{of_container}}} 0 1700000000123"),
            format!("container_pressure_io_waiting_seconds_total{{{of_container}}} 2.5 1700000000123"),
            format!("container_pressure_io_stalled_seconds_total{{{of_container}}} 0.5 1700000000123"),
            format!("container_processes{{{of_container}}} 2 1700000000123"),
            format!("container_last_seen{{{of_container}}} 1700000000 1700000000123"),
            format!("container_fs_reads_bytes_total{{{of_container},device=\"0:0\"}} 4 1700000000123"),
            format!("container_fs_writes_total{{{of_container},device=\"0:0\"}} 5 1700000000123"),
            format!(
                "container_network_receive_packets_total{{{of_pod},interface=\"eth0\"}} 10 1700000000123"
            ),
            format!(
                "container_network_transmit_packets_dropped_total{{{of_pod},interface=\"eth0\"}} 4 1700000000123"
            ),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(!text.contains("interface=\"lo\""), "{text}");
        assert!(
            !text.contains("container_cpu_cfs_periods_total{container=\"\""),
            "the pod has no quota: {text}"
        );

        // Without cgroups, the runtime's statistics remain.
        let default_interface = Some(v1::NetworkUsage {
            default_interface: Some(v1::NetworkInterfaceUsage {
                name: "eth0".into(),
                rx_bytes: number(50),
                ..Default::default()
            }),
            ..Default::default()
        });
        pod.stats.network = default_interface;
        let bare = render(&pod, &Counted { own: None, containers: Vec::new(), network: None });
        assert!(bare.contains(r#"interface="eth0"} 50"#), "{bare}");
        assert!(
            bare.contains("container_memory_working_set_bytes") && !bare.contains("container_processes"),
            "{bare}"
        );
    }

    #[test]
    fn a_pod_with_host_network_has_no_network_metrics() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("kubepods/podu/c1");
        std::fs::create_dir_all(&group).unwrap();
        std::fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
        std::fs::write(group.join("cgroup.procs"), "12\n").unwrap();
        std::fs::create_dir_all(dir.path().join("12/net")).unwrap();
        std::fs::write(dir.path().join("12/net/dev"), "cri_stats").unwrap();
        let pod = |host: bool| Pod { object: json!({"spec": {"hostNetwork": host}}), ..Pod::default() };
        let of = |host| {
            counted(&pod(host), CgroupStats::of_pod(dir.path(), "", QosClass::Guaranteed, "u"), dir.path())
                .network
        };
        assert_eq!((of(false).as_deref(), of(true)), (Some("cri_stats"), None));
    }

    /// The families of containers in the sets that a kubelet 1.36 enables in cAdvisor: CPU, memory, disk usage, disk I/O, network, processes,
    /// OOM kills, pressure.
    const FAMILIES: [&str; 74] = [
        "container_blkio_device_usage_total",
        "container_cpu_cfs_burst_periods_total",
        "container_cpu_cfs_burst_seconds_total",
        "container_cpu_cfs_periods_total",
        "container_cpu_cfs_throttled_periods_total",
        "container_cpu_cfs_throttled_seconds_total",
        "container_cpu_system_seconds_total",
        "container_cpu_usage_seconds_total",
        "container_cpu_user_seconds_total",
        "container_file_descriptors",
        "container_fs_inodes_free",
        "container_fs_inodes_total",
        "container_fs_io_cost_indebt_seconds_total",
        "container_fs_io_cost_indelay_seconds_total",
        "container_fs_io_cost_usage_seconds_total",
        "container_fs_io_cost_wait_seconds_total",
        "container_fs_io_current",
        "container_fs_io_time_seconds_total",
        "container_fs_io_time_weighted_seconds_total",
        "container_fs_limit_bytes",
        "container_fs_read_seconds_total",
        "container_fs_reads_bytes_total",
        "container_fs_reads_merged_total",
        "container_fs_reads_total",
        "container_fs_sector_reads_total",
        "container_fs_sector_writes_total",
        "container_fs_usage_bytes",
        "container_fs_write_seconds_total",
        "container_fs_writes_bytes_total",
        "container_fs_writes_merged_total",
        "container_fs_writes_total",
        "container_health_state",
        "container_last_seen",
        "container_memory_cache",
        "container_memory_failcnt",
        "container_memory_failures_total",
        "container_memory_kernel_usage",
        "container_memory_mapped_file",
        "container_memory_max_usage_bytes",
        "container_memory_rss",
        "container_memory_swap",
        "container_memory_total_active_file_bytes",
        "container_memory_total_inactive_file_bytes",
        "container_memory_usage_bytes",
        "container_memory_working_set_bytes",
        "container_network_receive_bytes_total",
        "container_network_receive_errors_total",
        "container_network_receive_packets_dropped_total",
        "container_network_receive_packets_total",
        "container_network_transmit_bytes_total",
        "container_network_transmit_errors_total",
        "container_network_transmit_packets_dropped_total",
        "container_network_transmit_packets_total",
        "container_oom_events_total",
        "container_pressure_cpu_stalled_seconds_total",
        "container_pressure_cpu_waiting_seconds_total",
        "container_pressure_io_stalled_seconds_total",
        "container_pressure_io_waiting_seconds_total",
        "container_pressure_memory_stalled_seconds_total",
        "container_pressure_memory_waiting_seconds_total",
        "container_processes",
        "container_scrape_error",
        "container_sockets",
        "container_spec_cpu_period",
        "container_spec_cpu_quota",
        "container_spec_cpu_shares",
        "container_spec_memory_limit_bytes",
        "container_spec_memory_reservation_limit_bytes",
        "container_spec_memory_swap_limit_bytes",
        "container_start_time_seconds",
        "container_threads",
        "container_threads_max",
        "container_ulimits_soft",
        "machine_scrape_error",
    ];

    #[test]
    fn each_family_of_the_kubelet_is_served_or_has_a_reason_in_the_documentation() {
        let (served, _tests) = include_str!("cadvisor.rs").split_once("#[cfg(test)]").unwrap();
        let page = include_str!("../../../../docs/node-api.md");
        let (_, reasons) = page.split_once("\n## Metrics of cAdvisor\n").unwrap();
        let (reasons, _) = reasons.split_once("\n## ").unwrap();
        for family in FAMILIES {
            let is_served = served.contains(&format!("\"{family}\""));
            // The first column of the table.
            let has_reason = reasons
                .lines()
                .filter_map(|line| line.strip_prefix("| ")?.split_once(" | "))
                .any(|(families, _)| families.contains(&format!("`{family}`")));
            assert_ne!(is_served, has_reason, "{family}: served {is_served}, has a reason {has_reason}");
        }
    }
}
