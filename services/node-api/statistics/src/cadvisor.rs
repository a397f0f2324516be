//! `/metrics/cadvisor`: the metric families that the kubelet takes from cAdvisor (google/cadvisor,
//! metrics/prometheus.go). The sources are the pods' cgroups and network namespaces; CPU, memory in use and
//! disk usage come from the runtime.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

use http::StatusCode;
use jiff::Timestamp;
use node_api_base::answer::{Answer, METRICS_TEXT, error, with_type};
use node_api_base::pod_lookup;
use node_api_base::services::Services;
use quintlet_cgroups::stats::{CgroupStats, Detail};
use quintlet_cri_api::v1;
use quintlet_kit::{lists, task};

use super::Stats;
use super::families::{interfaces, limits, on_disk, render, runtimes_interfaces, start, used};
use super::gather::{Pod, fill, group_of, network_devices, newest};
use super::machine::Machine;
use super::machine_info::MachineInfo;
use super::node_cgroups;
use super::prometheus::{Text, labels, started, whole};

/// Most open files of a container whose sockets are counted: a link is read for each.
const MOST_LINKS: usize = 16_384;

/// Statistics of one pod.
#[derive(Default)]
struct Counted {
    /// Name and statistics of the pod's cgroup.
    own: Option<(String, Detail)>,
    /// Names and statistics of the containers' cgroups, by container ID.
    containers: Vec<(String, String, Detail)>,
    /// ID, name and statistics of the sandbox's cgroup.
    sandbox: Option<(String, String, Detail)>,
    /// `/proc/PID/net/dev` in its network namespace; none for a pod in the host's.
    network: Option<String>,
    /// `/proc/PID/limits` of a process of each container, by container ID.
    limits: BTreeMap<String, String>,
    /// Number of open files of the processes of each container, by container ID.
    open_files: BTreeMap<String, u64>,
    /// Number of open sockets of the processes of each container, by container ID.
    sockets: BTreeMap<String, u64>,
}

impl Stats {
    /// Responds to `/metrics/cadvisor`.
    pub async fn cadvisor(self: &Arc<Self>, node: &Services) -> Answer {
        let mut pods = match self.pods.all(node, false).await {
            Ok(pods) => pods,
            Err(status) => return error(StatusCode::INTERNAL_SERVER_ERROR, status.message()),
        };
        add_sandboxes(node, &mut pods).await;
        let stats = Arc::clone(self);
        // A full node has thousands of files in cgroupfs.
        let written = task::blocking(move || {
            let paths = &stats.paths;
            let machine = stats.machine.read();
            let time = stats.clock.wall();
            let mut out = Text::default();
            of_machine(&mut out, &machine, time.as_millisecond());
            node_cgroups::write(&mut out, paths, &machine, time);
            for pod in &pods {
                let group = group_of(paths, &pod.object, &pod.uid);
                let counted = counted(pod, group.clone(), Path::new("/proc"));
                write(&mut out, pod, &counted, time.as_millisecond());
                let of_pause = group.and_then(|group| group.container(&pod.sandbox));
                of_sandbox(&mut out, pod, of_pause, &counted, time);
            }
            out.finish()
        });
        with_type(StatusCode::OK, METRICS_TEXT, written.await)
    }
}

/// Lists the sandboxes if the statistics of the runtime do not have that of each pod: if containerd before
/// 1.6.22 has statistics of containers only, or omits a pod.
async fn add_sandboxes(node: &Services, pods: &mut [Pod]) {
    if pods.iter().all(|pod| !pod.sandbox.is_empty()) {
        return;
    }
    let mut sandboxes = sandboxes(node).await;
    for pod in pods.iter_mut().filter(|pod| pod.sandbox.is_empty()) {
        pod.sandbox = sandboxes.remove(&pod.uid).unwrap_or_default();
    }
}

/// Returns the IDs of the ready sandboxes by the UIDs of their pods, none if the runtime does not answer.
async fn sandboxes(node: &Services) -> BTreeMap<String, String> {
    let mut found: BTreeMap<String, (i64, String)> = BTreeMap::new();
    let take = |message: v1::ListPodSandboxResponse| {
        for sandbox in message.items {
            let uid = sandbox.metadata.map(|metadata| metadata.uid).unwrap_or_default();
            let known = found.entry(uid).or_default();
            if known.1.is_empty() || known.0 < sandbox.created_at {
                *known = (sandbox.created_at, sandbox.id);
            }
        }
    };
    let state = v1::PodSandboxStateValue { state: v1::PodSandboxState::SandboxReady.into() };
    let filter = v1::PodSandboxFilter { state: Some(state), ..Default::default() };
    let request = tonic::Request::new(v1::ListPodSandboxRequest { filter: Some(filter) });
    if let Err(status) = lists::SANDBOXES.each(node.cri(), request, take).await {
        tracing::debug!(error = status.message(), "failed to list sandboxes");
    }
    found.into_iter().map(|(uid, (_, id))| (uid, id)).collect()
}

fn of_machine(out: &mut Text, machine: &Machine, now: i64) {
    for name in ["container_scrape_error", "machine_scrape_error"] {
        out.sample(name, "gauge", "", 0.0, None);
    }
    let info = MachineInfo::read(Path::new("/"));
    info.write(out, machine.of("MemTotal"), machine.of("SwapTotal"), now);
}

fn counted(pod: &Pod, group: Option<CgroupStats>, proc: &Path) -> Counted {
    let sandbox = pod.sandbox.as_str();
    let containers = newest(&pod.stats.containers).into_values().filter_map(|c| {
        let id = c.attributes.as_ref()?.id.clone();
        let group = pod.container_cgroup(group.as_ref(), &id)?;
        Some((id, group))
    });
    let containers: Vec<_> = containers.collect();
    // Each cgroup is walked once.
    let processes: BTreeMap<&str, Vec<u32>> =
        containers.iter().map(|(id, group)| (id.as_str(), group.processes())).collect();
    let groups = containers.iter().map(|(_, group)| group);
    let of_sandbox =
        group.as_ref().filter(|_| !sandbox.is_empty()).and_then(|group| group.container(sandbox));
    let limits = processes.iter().filter_map(|(id, pids)| {
        let limits = proc.join(pids.first()?.to_string()).join("limits");
        Some(((*id).to_owned(), std::fs::read_to_string(limits).ok()?))
    });
    let files = processes.iter().filter_map(|(id, pids)| Some(((*id).to_owned(), open_files(pids, proc)?)));
    let sockets = processes.iter().filter_map(|(id, pids)| Some(((*id).to_owned(), sockets(pids, proc)?)));
    let details = containers.iter().map(|(id, group)| {
        // With the processes in cgroups that the container has created.
        let processes = processes.get(id.as_str()).map_or(&[][..], Vec::as_slice);
        (id.clone(), group.id(), group.detail_with(processes))
    });
    Counted {
        open_files: files.collect(),
        sockets: sockets.collect(),
        network: network_devices(pod, group.as_ref(), groups, proc),
        limits: limits.collect(),
        sandbox: of_sandbox
            .map(|group| (sandbox.to_owned(), group.id(), group.detail_with(&group.processes()))),
        own: group.map(|group| (group.id(), group.detail())),
        containers: details.collect(),
    }
}

/// Returns the number of open files of processes: the size of `/proc/PID/fd`, which any user may read. Its
/// entries are for `CAP_SYS_PTRACE`. Returns `None` if no process has any, as with a kernel before Linux 6.2,
/// which reports no size.
fn open_files(pids: &[u32], proc: &Path) -> Option<u64> {
    let directories = pids.iter().map(|pid| proc.join(pid.to_string()).join("fd"));
    let sizes = directories.filter_map(|directory| Some(std::fs::metadata(directory).ok()?.len()));
    Some(sizes.fold(0, u64::saturating_add)).filter(|files| *files > 0)
}

/// Returns the number of open sockets of processes
/// (`cadvisor/container/libcontainer: processStatsFromProcs`). Returns `None` if the files of a process may
/// not be listed, which needs `CAP_SYS_PTRACE`, if there are more than [`MOST_LINKS`], or if no process was
/// found. A process of another PID namespace has the PID 0 in `cgroup.procs`, or is not in it.
fn sockets(pids: &[u32], proc: &Path) -> Option<u64> {
    let (mut sockets, mut links) = (0_u64, 0_usize);
    let mut is_listed = false;
    for pid in pids {
        if *pid == 0 {
            return None;
        }
        let files = match std::fs::read_dir(proc.join(pid.to_string()).join("fd")) {
            Ok(files) => files,
            Err(error) if is_gone(&error) => continue,
            Err(_) => return None,
        };
        is_listed = true;
        for file in files {
            links = links.saturating_add(1);
            if links > MOST_LINKS {
                return None;
            }
            match file.and_then(|file| std::fs::read_link(file.path())) {
                Ok(target) if target.as_os_str().as_bytes().starts_with(b"socket:") => {
                    sockets = sockets.saturating_add(1);
                }
                Ok(_) => {}
                Err(error) if is_gone(&error) => {}
                Err(_) => return None,
            }
        }
    }
    is_listed.then_some(sockets)
}

/// Returns whether a process has ended, or has closed a file, since it was listed.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
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
    // The network belongs to the sandbox, as in cAdvisor.
    let of_network = counted.sandbox.as_ref().map_or(of_pod, |(name, id, _)| row("", name, id, ""));
    match &counted.network {
        Some(dev) => interfaces(out, &of_network, dev, now),
        None => runtimes_interfaces(out, &of_network, pod.stats.network.as_ref()),
    }
    let Counted { limits: counted_limits, open_files, sockets, .. } = counted;
    for (name, c) in newest(&pod.stats.containers) {
        let id = c.attributes.as_ref().map_or("", |a| a.id.as_str());
        let image =
            pod_lookup::status(&pod.object, name).and_then(|s| s["image"].as_str()).unwrap_or_default();
        let counted = counted.containers.iter().find(|(counted_id, ..)| counted_id == id);
        let labels = row(name, id, counted.map_or("", |(_, place, _)| place), image);
        used(out, &labels, c.cpu.as_ref(), c.memory.as_ref());
        if let Some((.., detail)) = counted {
            render(out, &labels, detail, now);
        }
        on_disk(out, &labels, c.writable_layer.as_ref(), now);
        if let Some(of_process) = counted_limits.get(id) {
            limits(out, &labels, of_process, now);
        }
        if let Some(files) = open_files.get(id) {
            out.sample("container_file_descriptors", "gauge", &labels, whole(*files), Some(now));
        }
        if let Some(sockets) = sockets.get(id) {
            out.sample("container_sockets", "gauge", &labels, whole(*sockets), Some(now));
        }
        if let Some(started) = started(&pod.object, name) {
            out.sample("container_start_time_seconds", "gauge", &labels, started, None);
        }
    }
}

/// Writes the row of a sandbox, whose container is the one of the pause image. Its label `image` is empty:
/// the list of the runtime has no image of a sandbox.
fn of_sandbox(out: &mut Text, pod: &Pod, group: Option<CgroupStats>, counted: &Counted, time: Timestamp) {
    let (Some(group), Some((name, id, detail))) = (group, &counted.sandbox) else { return };
    let row = labels([
        ("container", ""),
        ("id", id),
        ("image", ""),
        ("name", name),
        ("namespace", &pod.namespace),
        ("pod", &pod.name),
    ]);
    let (mut cpu, mut memory) = (None, None);
    if let Some(usage) = group.usage() {
        fill(&usage, time, &mut cpu, &mut memory, &mut None);
    }
    start(out, &row, &group);
    used(out, &row, cpu.as_ref(), memory.as_ref());
    render(out, &row, detail, time.as_millisecond());
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
            processes: Some(2),
            pressure: [("io", Stalls { waiting_us: 2_500_000, stalled_us: Some(500_000) })].into(),
            ..Detail::default()
        };
        let dev = "head\nhead\n  lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\neth0: 100 10 1 2 0 0 0 0 200 20 3 4 0 0 0 0\n";
        let counted = Counted {
            own: Some(("/kubepods/podu".into(), Detail::default())),
            containers: vec![("c1".into(), "/kubepods/podu/c1".into(), detail)],
            network: Some(dev.into()),
            limits: [(
                "c1".into(),
                "Limit Soft Hard\nMax open files            1024      4096     files\n".into(),
            )]
            .into(),
            sandbox: None,
            open_files: [("c1".into(), 12)].into(),
            sockets: [("c1".into(), 3)].into(),
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
                "container_blkio_device_usage_total{{{of_container},device=\"0:0\",major=\"0\",minor=\"0\",operation=\"Write\"}} 6 1700000000123"
            ),
            format!("container_file_descriptors{{{of_container}}} 12 1700000000123"),
            format!("container_sockets{{{of_container}}} 3 1700000000123"),
            format!("container_ulimits_soft{{{of_container},ulimit=\"max_open_files\"}} 1024 1700000000123"),
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
        let bare = render(&pod, &Counted::default());
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
        let network = |host| {
            let group = CgroupStats::of_pod(dir.path(), "", QosClass::Guaranteed, "u");
            counted(&pod(host), group, dir.path()).network
        };
        assert_eq!((network(false).as_deref(), network(true)), (Some("cri_stats"), None));
    }

    #[test]
    fn open_files_are_counted_without_access_to_the_files() {
        let mount = tempfile::tempdir().unwrap();
        std::fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        let inner = mount.path().join("kubepods/podu/c1/inner");
        std::fs::create_dir_all(&inner).unwrap();
        let group = CgroupStats::of_pod(mount.path(), "", QosClass::Guaranteed, "u").unwrap();
        assert_eq!(open_files(&group.processes(), Path::new("/proc")), None, "no process");
        std::fs::write(inner.join("cgroup.procs"), format!("{}\n", std::process::id())).unwrap();
        let has_sizes = std::fs::metadata("/proc/self/fd").unwrap().len() > 0;
        let before = open_files(&group.processes(), Path::new("/proc"));
        assert_eq!(before.is_some(), has_sizes, "{before:?}");
        let more: Vec<_> = (0..100).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let after = open_files(&group.processes(), Path::new("/proc"));
        // Other tests of this process open and close files at the same time.
        assert!(!has_sizes || after > before.map(|files| files + 50), "{before:?} {after:?} {}", more.len());
    }

    #[test]
    fn sockets_are_counted_only_if_all_files_of_a_container_may_be_listed_and_are_not_too_many() {
        let dir = tempfile::tempdir().unwrap();
        let counted = |pids: &[u32]| sockets(pids, dir.path());
        let sockets = || counted(&[12, 13, 14]);
        let link = |pid: u32, number: usize, target: &str| {
            let files = dir.path().join(pid.to_string()).join("fd");
            std::fs::create_dir_all(&files).unwrap();
            std::os::unix::fs::symlink(target, files.join(number.to_string())).unwrap();
        };
        link(12, 0, "/dev/null");
        link(12, 1, "socket:[7]");
        link(13, 0, "pipe:[8]");
        link(13, 1, "socket:[9]");
        assert_eq!(sockets(), Some(2), "process 14 has ended");
        assert_eq!(counted(&[14]), None, "the only process has ended");
        assert_eq!(counted(&[0]), None, "a process of another PID namespace");
        assert_eq!(counted(&[12, 0]), None, "one process of another PID namespace");
        assert_eq!(counted(&[]), None, "no process");
        link(15, 0, "/dev/null");
        assert_eq!(counted(&[15]), Some(0));
        std::fs::create_dir(dir.path().join("14")).unwrap();
        // Stands for a directory that may not be listed; the tests run as root.
        std::fs::write(dir.path().join("14/fd"), "").unwrap();
        assert_eq!(sockets(), None);
        std::fs::remove_dir_all(dir.path().join("14")).unwrap();
        (2..MOST_LINKS).for_each(|number| link(13, number, "socket:[9]"));
        assert_eq!(sockets(), None, "too many");
    }

    #[test]
    fn a_sandbox_has_a_row_and_the_network_of_its_pod() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
        let group = dir.path().join("kubepods/podu/s1");
        std::fs::create_dir_all(&group).unwrap();
        for (file, text) in [
            ("cgroup.procs", "12\n"),
            ("memory.current", "500\n"),
            ("memory.stat", "inactive_file 100\n"),
            ("cpu.stat", "usage_usec 1500000\n"),
        ] {
            std::fs::write(group.join(file), text).unwrap();
        }
        std::fs::create_dir_all(dir.path().join("12/net")).unwrap();
        let dev = "head\nhead\neth0: 100 10 1 2 0 0 0 0 200 20 3 4 0 0 0 0\n";
        std::fs::write(dir.path().join("12/net/dev"), dev).unwrap();
        let pod = Pod {
            name: "p".into(),
            namespace: "n".into(),
            uid: "u".into(),
            sandbox: "s1".into(),
            ..Pod::default()
        };
        let group = CgroupStats::of_pod(dir.path(), "", QosClass::Guaranteed, "u");
        let counted = counted(&pod, group.clone(), dir.path());
        let (mut out, time) = (Text::default(), Timestamp::from_second(1_700_000_000).unwrap());
        write(&mut out, &pod, &counted, time.as_millisecond());
        of_sandbox(&mut out, &pod, group.and_then(|group| group.container("s1")), &counted, time);
        let text = out.finish();
        let row = r#"container="",id="/kubepods/podu/s1",image="",name="s1",namespace="n",pod="p""#;
        for line in [
            format!("container_network_receive_bytes_total{{{row},interface=\"eth0\"}} 100 1700000000000"),
            format!("container_cpu_usage_seconds_total{{{row},cpu=\"total\"}} 1.5 1700000000000"),
            format!("container_memory_working_set_bytes{{{row}}} 400 1700000000000"),
            format!("container_processes{{{row}}} 1 1700000000000"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert_eq!(text.matches("\ncontainer_network_receive_bytes_total{").count(), 1, "{text}");
        assert!(text.contains(&format!("\ncontainer_start_time_seconds{{{row}}} 1")), "{text}");
    }

    /// The families of containers in the sets that a kubelet 1.36 enables in cAdvisor: CPU, memory, disk
    /// usage, disk I/O, network, processes, OOM kills, pressure.
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
        let (pods, _tests) = include_str!("cadvisor.rs").split_once("#[cfg(test)]").unwrap();
        let served = [pods, include_str!("families.rs"), include_str!("node_disks.rs")].concat();
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
