//! Writes the families of cAdvisor for one row: a container, a pod, or another cgroup of the node.

use std::time::UNIX_EPOCH;

use quintlet_cgroups::stats::{CgroupStats, Detail};
use quintlet_cri_api::v1;

use super::prometheus::{Text, escape, seconds, whole};
use crate::host;

type Figure = (&'static str, &'static str, Option<f64>);

pub(super) fn used(
    out: &mut Text,
    labels: &str,
    cpu: Option<&v1::CpuUsage>,
    memory: Option<&v1::MemoryUsage>,
) {
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

/// Resources whose pressure is counted, each with the metrics for the time in which a process waits and in
/// which all wait.
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
pub(super) fn render(out: &mut Text, labels: &str, detail: &Detail, now: i64) {
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
        ("container_processes", "gauge", bytes(detail.processes)),
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
        let (major, minor) = number.split_once(':').unwrap_or_default();
        for (operation, value) in [("Read", device.read_bytes), ("Write", device.written_bytes)] {
            let labels = format!("{labels},major=\"{major}\",minor=\"{minor}\",operation=\"{operation}\"");
            out.sample("container_blkio_device_usage_total", "counter", &labels, whole(value), Some(now));
        }
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
pub(super) fn device_name(number: &str) -> String {
    let about = std::fs::read_to_string(format!("/sys/dev/block/{number}/uevent")).unwrap_or_default();
    let name = about.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    name.map_or_else(|| number.to_owned(), |name| format!("/dev/{name}"))
}

pub(super) fn interfaces(out: &mut Text, labels: &str, dev: &str, now: i64) {
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

pub(super) fn runtimes_interfaces(out: &mut Text, labels: &str, network: Option<&v1::NetworkUsage>) {
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

pub(super) fn on_disk(out: &mut Text, labels: &str, layer: Option<&v1::FilesystemUsage>, now: i64) {
    let Some(layer) = layer else { return };
    let labels = format!("{labels},device=\"\"");
    if let Some(used) = layer.used_bytes {
        out.sample("container_fs_usage_bytes", "gauge", &labels, whole(used.value), Some(now));
    }
}

/// Writes when a cgroup was created, in whole seconds as in cAdvisor.
pub(super) fn start(out: &mut Text, labels: &str, group: &CgroupStats) {
    if let Some(age) = group.created().and_then(|created| created.duration_since(UNIX_EPOCH).ok()) {
        out.sample("container_start_time_seconds", "gauge", labels, whole(age.as_secs()), None);
    }
}

/// Writes the limit of open files of a container, from `/proc/PID/limits` of one of its processes; -1 is
/// unlimited.
pub(super) fn limits(out: &mut Text, labels: &str, limits: &str, now: i64) {
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
    let soft = match soft {
        Some("unlimited") => Some(-1.0),
        Some(number) => number.parse().ok().map(whole),
        None => None,
    };
    if let Some(soft) = soft {
        let labels = format!("{labels},ulimit=\"max_open_files\"");
        out.sample("container_ulimits_soft", "gauge", &labels, soft, Some(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_the_names_that_dashboards_select() {
        let devices = std::fs::read_dir("/sys/dev/block").into_iter().flatten().flatten();
        for number in devices.map(|device| device.file_name().to_string_lossy().into_owned()) {
            assert!(device_name(&number).starts_with("/dev/"), "{number}");
        }
        assert_eq!(device_name("0:0"), "0:0", "no device");
    }
}
