//! Collects statistics of pods from the runtime, and from cgroups what the runtime omits
//! (`pkg/kubelet/stats`).
//!
//! A pod that is missing in the runtime's list of pod statistics comes from its list of container statistics
//! if there is no list of pods, and from its cgroup if it runs nevertheless. A pod without a cgroup has the
//! sums of its containers. Network interfaces that the runtime omits are those of the network namespace.

use std::collections::{BTreeMap, HashSet};
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;
use node_api_base::pod_lookup;
use node_api_base::services::Services;
use quintlet_cgroups::stats::{CgroupStats, Usage};
use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use quintlet_model::qos::QosClass;
use quintlet_proto::podsync::v1::PodView;
use serde_json::Value;
use tonic::Status;

use super::paths::StatsPaths;
use super::rates::Rates;
use crate::host;
use crate::runtime_stats::{self, SandboxStats};

/// Network interfaces of a pod at most. A container may create any number of them, in a user namespace
/// without a capability, and the pages have up to eight rows for each.
const MOST_INTERFACES: usize = 64;
/// Bytes that are read of `/proc/PID/net/dev`, in which a line has about 130.
const MOST_NETWORK_BYTES: u64 = 64 << 10;

/// A pod with its containers.
#[derive(Debug, Default)]
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) uid: String,
    /// ID of the sandbox; empty if the statistics of the runtime do not have it.
    pub(super) sandbox: String,
    /// The part of the object that [`Services::pods_for_statistics`] returns; null for a pod of another
    /// agent.
    pub(super) object: Value,
    pub(super) stats: v1::LinuxPodSandboxStats,
    /// Statistics of the pod's cgroup, which the CRI lacks.
    pub(super) swap: Option<v1::SwapUsage>,
    pub(super) pressure: Pressure,
    /// Statistics of its containers' cgroups, by ID.
    pub(super) pressures: BTreeMap<String, Pressure>,
    /// Cgroups of its containers by ID, if the pod has none (`cgroupsPerQOS: false`).
    pub(super) outside: BTreeMap<String, CgroupStats>,
}

impl Pod {
    /// Returns the cgroup of a container. `own` is that of the pod.
    pub(super) fn container_cgroup(&self, own: Option<&CgroupStats>, id: &str) -> Option<CgroupStats> {
        own.map_or_else(|| self.outside.get(id).cloned(), |own| own.container(id))
    }
}

/// Pressure stall statistics as in the summary; null if the kernel has none, as with cgroups v1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pressure {
    pub(super) cpu: Value,
    pub(super) memory: Value,
    pub(super) io: Value,
}

impl Pressure {
    /// Reads the statistics of the machine. With cgroups v1 there are none, although the kernel may count
    /// them in `/proc/pressure`: the kubelet takes them from the root cgroup
    /// (`pkg/kubelet/stats: cadvisorStatsProvider`), and readers would compare them with pods that have none.
    pub(super) fn of_machine(cgroups: &Path, proc: &Path) -> Self {
        if !CgroupStats::named(cgroups, "/").is_some_and(|root| root.is_v2()) {
            return Self::default();
        }
        let [cpu, memory, io] = ["cpu", "memory", "io"].map(|resource| {
            let file = proc.join("pressure").join(resource);
            host::pressure(&std::fs::read_to_string(file).unwrap_or_default())
        });
        Self { cpu, memory, io }
    }

    /// Reads the statistics of a cgroup.
    pub(super) fn of(cgroup: &CgroupStats) -> Self {
        let [cpu, memory, io] =
            ["cpu", "memory", "io"].map(|resource| host::pressure(&cgroup.pressure(resource)));
        Self { cpu, memory, io }
    }
}

/// The statistics of pods, from the runtime and from cgroups.
#[derive(Debug)]
pub(super) struct PodStatistics {
    paths: StatsPaths,
    clock: Clock,
    /// Previous CPU times of pods and containers that the runtime omits.
    rates: Arc<Rates>,
}

impl PodStatistics {
    pub(super) fn new(paths: StatsPaths, clock: Clock) -> Self {
        Self { paths, clock, rates: Arc::default() }
    }

    /// Returns the pods by namespace and name, with statistics that only the summary has if `for_summary`:
    /// pressure, and what the runtime omits of network and processes.
    pub(super) async fn all(&self, node: &Services, for_summary: bool) -> Result<Vec<Pod>, Status> {
        let (stats, views) = tokio::join!(runtime_stats::all(node), node.pods_for_statistics());
        let (views, stats) = (views?, stats?);
        let paths = self.paths.clone();
        let rates = Arc::clone(&self.rates);
        let now = self.clock.wall();
        // A full node has thousands of files in cgroupfs.
        let completed = task::blocking(move || {
            let (mut pods, objects) = with_objects(stats, views);
            add_left_out(&mut pods, objects, &paths);
            find_outside(&mut pods, &paths, Path::new("/proc"));
            complete(&mut pods, &paths, &rates, now, for_summary);
            if for_summary {
                pods.iter_mut()
                    .for_each(|pod| add_network_and_processes(pod, &paths, Path::new("/proc"), now));
            }
            pods.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
            pods
        });
        Ok(completed.await)
    }
}

/// Returns the pods of the runtime, and the objects of pod-sync by UID.
fn with_objects(stats: Vec<SandboxStats>, views: Vec<PodView>) -> (Vec<Pod>, BTreeMap<String, Value>) {
    let objects: BTreeMap<String, Value> =
        views.into_iter().map(|v| (v.uid, serde_json::from_slice(&v.pod).unwrap_or_default())).collect();
    let pods = stats.into_iter().map(|found| Pod {
        object: objects.get(&found.metadata.uid).cloned().unwrap_or_default(),
        name: found.metadata.name,
        namespace: found.metadata.namespace,
        uid: found.metadata.uid,
        sandbox: found.sandbox,
        stats: limit_interfaces(found.stats),
        ..Pod::default()
    });
    (pods.collect(), objects)
}

pub(super) fn group_of(paths: &StatsPaths, object: &Value, uid: &str) -> Option<CgroupStats> {
    let class = QosClass::parse(object["status"]["qosClass"].as_str()?)?;
    CgroupStats::of_pod(&paths.cgroups, &paths.cgroup_root, class, uid)
}

/// Adds running pods that the runtime omits, by pod-sync and their cgroups.
fn add_left_out(pods: &mut Vec<Pod>, objects: BTreeMap<String, Value>, paths: &StatsPaths) {
    let listed: HashSet<String> = pods.iter().map(|p| p.uid.clone()).collect();
    for (uid, object) in objects {
        if listed.contains(&uid) || object["status"]["phase"] != "Running" {
            continue;
        }
        let Some(group) = group_of(paths, &object, &uid) else { continue };
        let containers = ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"]
            .iter()
            .filter_map(|list| object["status"][list].as_array())
            .flatten()
            .filter_map(|status| {
                let name = status["name"].as_str()?.to_owned();
                let id = pod_lookup::running(&object, &name)?;
                group.container(&id)?;
                let attempt =
                    status["restartCount"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
                let metadata = Some(v1::ContainerMetadata { name, attempt });
                let attributes = Some(v1::ContainerAttributes { id, metadata, ..Default::default() });
                Some(v1::ContainerStats { attributes, ..Default::default() })
            })
            .collect();
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        pods.push(Pod {
            name: text("name"),
            namespace: text("namespace"),
            uid,
            stats: v1::LinuxPodSandboxStats { containers, ..Default::default() },
            object,
            ..Pod::default()
        });
    }
}

/// Finds the cgroups of containers that are below no cgroup of a pod.
fn find_outside(pods: &mut [Pod], paths: &StatsPaths, proc: &Path) {
    let is_without = |pod: &&mut Pod| {
        pod.object["status"]["phase"] == "Running" && group_of(paths, &pod.object, &pod.uid).is_none()
    };
    let mut without: Vec<_> = pods.iter_mut().filter(is_without).collect();
    let ids: Vec<Vec<String>> = without.iter().map(|pod| container_ids(pod)).collect();
    let all = ids.iter().flatten().map(String::as_str).collect();
    let found = CgroupStats::of_containers(&paths.cgroups, proc, &all);
    for (pod, ids) in without.iter_mut().zip(&ids) {
        let of_pod = ids.iter().filter_map(|id| Some((id.clone(), found.get(id)?.clone())));
        pod.outside = of_pod.collect();
    }
}

fn container_ids(pod: &Pod) -> Vec<String> {
    let id = |stats: &v1::ContainerStats| Some(stats.attributes.as_ref()?.id.clone());
    pod.stats.containers.iter().filter_map(id).collect()
}

/// Adds statistics from cgroups that the runtime omits.
fn complete(pods: &mut [Pod], paths: &StatsPaths, rates: &Rates, now: Timestamp, pressure: bool) {
    let mut there = HashSet::new();
    for pod in pods {
        let group = group_of(paths, &pod.object, &pod.uid);
        if let Some(group) = &group {
            let (cpu, memory) = (&mut pod.stats.cpu, &mut pod.stats.memory);
            if let Some(usage) = group.usage() {
                fill(&usage, now, cpu, memory, &mut pod.swap);
            }
            if pressure {
                pod.pressure = Pressure::of(group);
            }
        }
        if let Some(cpu) = &mut pod.stats.cpu {
            rates.complete(&pod.uid, cpu);
            there.insert(pod.uid.clone());
        }
        let ids = container_ids(pod);
        let groups: BTreeMap<_, _> = ids
            .iter()
            .filter_map(|id| Some((id.clone(), pod.container_cgroup(group.as_ref(), id)?)))
            .collect();
        for container in &mut pod.stats.containers {
            let Some(id) = container.attributes.as_ref().map(|a| a.id.clone()) else { continue };
            if let Some(group) = groups.get(&id) {
                let (cpu, memory) = (&mut container.cpu, &mut container.memory);
                if let Some(usage) = group.usage() {
                    fill(&usage, now, cpu, memory, &mut container.swap);
                }
                if pressure {
                    pod.pressures.insert(id.clone(), Pressure::of(group));
                }
            }
            if let Some(cpu) = &mut container.cpu {
                rates.complete(&id, cpu);
                there.insert(id);
            }
        }
        pod.stats.containers.retain(runtime_stats::has_usage);
        if group.is_none() {
            add_up(&mut pod.stats);
        }
    }
    rates.keep(&there);
}

/// Adds the network interfaces and the number of processes that the runtime omits.
fn add_network_and_processes(pod: &mut Pod, paths: &StatsPaths, proc: &Path, now: Timestamp) {
    if pod.stats.network.is_some() && pod.stats.process.is_some() {
        return;
    }
    let timestamp = nanos(now);
    let own = group_of(paths, &pod.object, &pod.uid);
    let containers: Vec<_> = newest(&pod.stats.containers)
        .into_values()
        .filter_map(|c| pod.container_cgroup(own.as_ref(), &c.attributes.as_ref()?.id))
        .collect();
    if pod.stats.network.is_none()
        && let Some(dev) = network_devices(pod, own.as_ref(), containers.iter(), proc)
    {
        let mut interfaces: Vec<_> = host::interfaces(&dev).map(interface_usage).collect();
        let default = interfaces.iter().position(|i| i.name == host::DEFAULT_INTERFACE);
        let default_interface = default.map(|at| interfaces.remove(at));
        pod.stats.network = Some(v1::NetworkUsage { timestamp, default_interface, interfaces });
    }
    if pod.stats.process.is_none() && !containers.is_empty() {
        // Unknown if one of them is.
        let mut counts = containers.iter().map(CgroupStats::process_count);
        let count = counts.try_fold(0, |all, count| count.map(|count| u64::saturating_add(all, count)));
        let usage = |count| v1::ProcessUsage { timestamp, process_count: number(count) };
        pod.stats.process = count.map(usage);
    }
}

fn interface_usage(interface: host::Interface) -> v1::NetworkInterfaceUsage {
    let (received, sent) = (interface.received, interface.sent);
    v1::NetworkInterfaceUsage {
        name: interface.name,
        rx_bytes: number(received.bytes),
        rx_errors: number(received.errors),
        tx_bytes: number(sent.bytes),
        tx_errors: number(sent.errors),
    }
}

/// Returns the begin of `/proc/PID/net/dev` of a process in the network namespace of a pod, with at most
/// [`MOST_INTERFACES`]; none for a pod in the host's. `own` is the cgroup of the pod, `containers` are those
/// that may be outside of it.
pub(super) fn network_devices<'a>(
    pod: &Pod,
    own: Option<&CgroupStats>,
    mut containers: impl Iterator<Item = &'a CgroupStats>,
    proc: &Path,
) -> Option<String> {
    if pod.object["spec"]["hostNetwork"] == true {
        return None;
    }
    // A process of the pod may have moved into a network namespace of its own, that of the sandbox does not.
    let sandbox = own.filter(|_| !pod.sandbox.is_empty()).and_then(|own| own.container(&pod.sandbox));
    let of_pod = || sandbox.iter().chain(own).find_map(CgroupStats::any_process);
    let pid = of_pod().or_else(|| containers.find_map(CgroupStats::any_process))?;
    let file = std::fs::File::open(proc.join(format!("{pid}/net/dev"))).ok()?;
    let mut text = Vec::new();
    file.take(MOST_NETWORK_BYTES).read_to_end(&mut text).ok()?;
    // Two lines are the heading, and one is the loopback.
    let lines = text.split_inclusive(|byte| *byte == b'\n').take(MOST_INTERFACES.saturating_add(3));
    Some(String::from_utf8_lossy(&lines.collect::<Vec<_>>().concat()).into_owned())
}

/// Leaves out the interfaces of a pod after the first ones.
fn limit_interfaces(mut stats: v1::LinuxPodSandboxStats) -> v1::LinuxPodSandboxStats {
    if let Some(network) = &mut stats.network {
        network.interfaces.truncate(MOST_INTERFACES);
    }
    stats
}

/// Sets the CPU and memory of a pod without a cgroup: the sums of its containers, with the oldest timestamp
/// (`pkg/kubelet/stats: addPodCPUMemoryStats`). A figure that one of them lacks counts as zero.
fn add_up(stats: &mut v1::LinuxPodSandboxStats) {
    let containers: Vec<&v1::ContainerStats> = newest(&stats.containers).into_values().collect();
    let sum = |figures: &mut dyn Iterator<Item = Option<v1::UInt64Value>>| {
        let known = figures.flatten().map(|figure| figure.value);
        known.reduce(u64::saturating_add).map(|value| v1::UInt64Value { value })
    };
    let cpus: Vec<_> = containers.iter().filter_map(|container| container.cpu).collect();
    let memories: Vec<_> = containers.iter().filter_map(|container| container.memory).collect();
    let of_cpus = |figure: fn(&v1::CpuUsage) -> Option<v1::UInt64Value>| sum(&mut cpus.iter().map(figure));
    let of_memories =
        |figure: fn(&v1::MemoryUsage) -> Option<v1::UInt64Value>| sum(&mut memories.iter().map(figure));
    if let (None, Some(timestamp)) = (&stats.cpu, cpus.iter().map(|cpu| cpu.timestamp).min()) {
        stats.cpu = Some(v1::CpuUsage {
            timestamp,
            usage_core_nano_seconds: of_cpus(|cpu| cpu.usage_core_nano_seconds),
            usage_nano_cores: of_cpus(|cpu| cpu.usage_nano_cores),
            ..Default::default()
        });
    }
    if let (None, Some(timestamp)) = (&stats.memory, memories.iter().map(|memory| memory.timestamp).min()) {
        stats.memory = Some(v1::MemoryUsage {
            timestamp,
            working_set_bytes: of_memories(|memory| memory.working_set_bytes),
            available_bytes: of_memories(|memory| memory.available_bytes),
            usage_bytes: of_memories(|memory| memory.usage_bytes),
            rss_bytes: of_memories(|memory| memory.rss_bytes),
            page_faults: of_memories(|memory| memory.page_faults),
            major_page_faults: of_memories(|memory| memory.major_page_faults),
            ..Default::default()
        });
    }
}

/// Adds the statistics of a cgroup where there are none.
pub(super) fn fill(
    usage: &Usage,
    now: Timestamp,
    cpu: &mut Option<v1::CpuUsage>,
    memory: &mut Option<v1::MemoryUsage>,
    swap: &mut Option<v1::SwapUsage>,
) {
    let timestamp = nanos(now);
    cpu.get_or_insert_with(|| v1::CpuUsage {
        timestamp,
        usage_core_nano_seconds: number(usage.cpu_nanos),
        usage_nano_cores: None,
        ..Default::default()
    });
    memory.get_or_insert_with(|| v1::MemoryUsage {
        timestamp,
        working_set_bytes: number(usage.working_set),
        available_bytes: usage.limit.and_then(|limit| number(limit.saturating_sub(usage.working_set))),
        usage_bytes: number(usage.usage),
        rss_bytes: number(usage.rss),
        page_faults: number(usage.page_faults),
        major_page_faults: number(usage.major_page_faults),
        ..Default::default()
    });
    if let (None, Some(used)) = (&swap, usage.swap) {
        *swap = Some(v1::SwapUsage {
            timestamp,
            swap_available_bytes: usage.swap_limit.and_then(|limit| number(limit.saturating_sub(used))),
            swap_usage_bytes: number(used),
        });
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the fields of the CRI are optional")]
fn number(value: u64) -> Option<v1::UInt64Value> {
    Some(v1::UInt64Value { value })
}

fn nanos(time: Timestamp) -> i64 {
    i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX)
}

/// Returns the swap of a pod: of its cgroup, or else the sum of its containers with the oldest timestamp.
/// None if the runtime does not report all of them.
pub(super) fn pod_swap(pod: &Pod) -> Option<v1::SwapUsage> {
    if let Some(swap) = pod.swap {
        return Some(swap);
    }
    let all: Vec<&v1::SwapUsage> =
        newest(&pod.stats.containers).into_values().map(|c| c.swap.as_ref()).collect::<Option<_>>()?;
    let used = all.iter().map(|s| Some(s.swap_usage_bytes?.value)).sum::<Option<u64>>()?;
    Some(v1::SwapUsage {
        timestamp: all.iter().map(|s| s.timestamp).min()?,
        swap_usage_bytes: Some(v1::UInt64Value { value: used }),
        ..v1::SwapUsage::default()
    })
}

/// Keeps the newest instance of each container.
pub(super) fn newest(all: &[v1::ContainerStats]) -> BTreeMap<&str, &v1::ContainerStats> {
    let mut out: BTreeMap<&str, &v1::ContainerStats> = BTreeMap::new();
    let attempt =
        |c: &v1::ContainerStats| c.attributes.as_ref().and_then(|a| a.metadata.as_ref()).map(|m| m.attempt);
    for c in all {
        let Some(name) = c.attributes.as_ref().and_then(|a| a.metadata.as_ref()).map(|m| m.name.as_str())
        else {
            continue;
        };
        if out.get(name).is_none_or(|known| attempt(known) < attempt(c)) {
            out.insert(name, c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::SystemCgroups;
    use super::*;

    #[test]
    fn a_machine_has_pressure_with_cgroups_v2_only() {
        let dir = tempfile::tempdir().unwrap();
        let (cgroups, proc) = (dir.path().join("cgroup"), dir.path().join("proc"));
        for dir in [cgroups.join("memory"), proc.join("pressure")] {
            std::fs::create_dir_all(dir).unwrap();
        }
        for resource in ["cpu", "memory", "io"] {
            let text = "some avg10=2.00 avg60=0.00 avg300=0.00 total=1\n";
            std::fs::write(proc.join("pressure").join(resource), text).unwrap();
        }
        assert_eq!(Pressure::of_machine(&cgroups, &proc), Pressure::default(), "v1");
        std::fs::write(cgroups.join("cgroup.controllers"), "memory").unwrap();
        let pressure = Pressure::of_machine(&cgroups, &proc);
        for (resource, value) in [("cpu", &pressure.cpu), ("memory", &pressure.memory), ("io", &pressure.io)]
        {
            assert_eq!(value["some"]["avg10"], 2.0, "{resource}");
        }
    }

    #[test]
    fn only_the_newest_instance_of_a_container_counts() {
        let stats = |attempt| v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                metadata: Some(v1::ContainerMetadata { name: "c".into(), attempt }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let all = [stats(1), stats(3), stats(2)];
        let found = newest(&all)["c"].attributes.as_ref().unwrap().metadata.as_ref().unwrap().attempt;
        assert_eq!(found, 3);
    }

    fn make_group(mount: &Path, group: &str, usec: u64) {
        let dir = mount.join(group);
        std::fs::create_dir_all(&dir).unwrap();
        let pressure = "some avg10=2.00 avg60=0.00 avg300=0.00 total=1\n".to_owned();
        for (file, text) in [
            ("cpu.stat", format!("usage_usec {usec}\n")),
            ("memory.current", "500\n".to_owned()),
            ("memory.stat", "inactive_file 100\n".to_owned()),
            ("memory.max", "1000\n".to_owned()),
            ("memory.swap.current", "7\n".to_owned()),
            ("memory.swap.max", "10\n".to_owned()),
            ("memory.pressure", pressure.clone()),
        ] {
            std::fs::write(dir.join(file), text).unwrap();
        }
    }

    fn paths(mount: &Path) -> StatsPaths {
        std::fs::write(mount.join("cgroup.controllers"), "cpu memory").unwrap();
        let none = std::path::PathBuf::new();
        let (root_dir, pod_logs_dir) = (none.clone(), none);
        let system = SystemCgroups::default();
        StatsPaths {
            root_dir,
            pod_logs_dir,
            cgroups: mount.to_owned(),
            cgroup_root: "/".into(),
            system,
            subtracts_huge_pages: true,
        }
    }

    fn object(phase: &str) -> Value {
        json!({
            "metadata": {"name": "web", "namespace": "default"},
            "status": {"phase": phase, "qosClass": "Burstable", "containerStatuses": [
                {"name": "main", "containerID": "containerd://abc", "restartCount": 3, "state": {"running": {}}},
                {"name": "ended", "containerID": "containerd://old", "state": {"terminated": {}}},
            ]},
        })
    }

    #[test]
    fn a_pod_that_the_runtime_omits_is_reported_from_its_cgroups() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let at = |secs: i64| Timestamp::from_second(1_000_000 + secs).unwrap();
        let (mut pods, rates) = (Vec::new(), Rates::default());
        let running = || [("u1".to_owned(), object("Running"))].into();
        add_left_out(&mut pods, running(), &paths);
        assert!(pods.is_empty(), "nothing of it runs here");
        for (usec, secs) in [(1_000_000, 0), (3_000_000, 4)] {
            make_group(dir.path(), "kubepods/burstable/podu1", usec);
            make_group(dir.path(), "kubepods/burstable/podu1/abc", usec / 2);
            pods.clear();
            add_left_out(&mut pods, running(), &paths);
            complete(&mut pods, &paths, &rates, at(secs), true);
        }
        let [pod] = pods.as_slice() else { panic!("{pods:?}") };
        assert_eq!((pod.name.as_str(), pod.uid.as_str()), ("web", "u1"));
        let value = |n: Option<v1::UInt64Value>| n.map(|n| n.value);
        let cpu = pod.stats.cpu.unwrap();
        assert_eq!(value(cpu.usage_core_nano_seconds), Some(3_000_000_000));
        assert_eq!(value(cpu.usage_nano_cores), Some(500_000_000), "two seconds in four");
        let memory = pod.stats.memory.unwrap();
        assert_eq!((value(memory.working_set_bytes), value(memory.available_bytes)), (Some(400), Some(600)));
        let swap = pod_swap(pod).unwrap();
        assert_eq!((value(swap.swap_usage_bytes), value(swap.swap_available_bytes)), (Some(7), Some(3)));
        assert_eq!(pod.pressure.memory["some"]["avg10"], 2.0);
        let [container] = pod.stats.containers.as_slice() else { panic!("{pod:?}") };
        assert_eq!(container.attributes.as_ref().unwrap().metadata.as_ref().unwrap().attempt, 3);
        assert_eq!(value(container.cpu.unwrap().usage_core_nano_seconds), Some(1_500_000_000));
        assert_eq!(pod.pressures["abc"].memory["some"]["avg10"], 2.0);
        pods.clear();
        add_left_out(&mut pods, [("u1".to_owned(), object("Succeeded"))].into(), &paths);
        assert!(pods.is_empty(), "the container has terminated");
        complete(&mut pods, &paths, &rates, at(9), true);
        assert!(rates.0.lock().is_empty(), "what is gone is forgotten");
    }

    #[test]
    fn a_pod_without_a_cgroup_has_the_sums_of_its_containers() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        let number = |value| Some(v1::UInt64Value { value });
        let container = |id: &str, attempt| v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                id: id.into(),
                metadata: Some(v1::ContainerMetadata { name: id[..1].into(), attempt }),
                ..Default::default()
            }),
            ..Default::default()
        };
        // The runtime has figures of one container. Those of the other one are in its cgroup, of which a
        // process is a member.
        make_group(dir.path(), "k8s.io/b0", 3_000_000);
        let proc = dir.path().join("proc");
        std::fs::create_dir_all(proc.join("7")).unwrap();
        std::fs::write(proc.join("7/cgroup"), "0::/k8s.io/b0\n").unwrap();
        let mut a = container("a0", 1);
        a.cpu = Some(v1::CpuUsage {
            timestamp: 5,
            usage_core_nano_seconds: number(2_000_000_000),
            usage_nano_cores: number(10),
            ..Default::default()
        });
        a.memory =
            Some(v1::MemoryUsage { timestamp: 5, working_set_bytes: number(1000), ..Default::default() });
        // An earlier instance does not count.
        let old = v1::ContainerStats { cpu: a.cpu, memory: a.memory, ..container("a1", 0) };
        let pods_of = |object: Value| {
            let stats = v1::LinuxPodSandboxStats {
                containers: vec![a.clone(), old.clone(), container("b0", 0)],
                ..Default::default()
            };
            let mut pods = vec![Pod { uid: "u1".into(), object, stats, ..Pod::default() }];
            find_outside(&mut pods, &paths, &proc);
            complete(&mut pods, &paths, &Rates::default(), Timestamp::from_second(9).unwrap(), true);
            pods.remove(0)
        };
        let value = |n: Option<v1::UInt64Value>| n.map(|n| n.value);
        let pod = pods_of(object("Running"));
        let (cpu, memory) = (pod.stats.cpu.unwrap(), pod.stats.memory.unwrap());
        assert_eq!(value(cpu.usage_core_nano_seconds), Some(5_000_000_000));
        assert_eq!((value(cpu.usage_nano_cores), cpu.timestamp), (Some(10), 5));
        assert_eq!((value(memory.working_set_bytes), value(memory.available_bytes)), (Some(1400), Some(600)));
        assert_eq!(value(pod.stats.containers[2].memory.unwrap().working_set_bytes), Some(400));
        assert_eq!(pod.pressures["b0"].memory["some"]["avg10"], 2.0);
        assert_eq!(
            value(pod_swap(&pod).unwrap_or_default().swap_usage_bytes),
            None,
            "the runtime lacks that of a"
        );
        // Processes are searched for the containers of running pods only. A container without statistics is
        // not listed.
        let foreign = pods_of(Value::Null);
        assert_eq!(foreign.stats.containers.len(), 2);
        assert_eq!(value(foreign.stats.memory.unwrap().working_set_bytes), Some(1000));
    }

    #[test]
    fn network_and_processes_that_the_runtime_omits_come_from_the_pod_s_namespace_and_cgroups() {
        let dir = tempfile::tempdir().unwrap();
        let (paths, proc) = (paths(dir.path()), dir.path().join("proc"));
        for (group, processes) in [("podu1", ""), ("podu1/pause", "7\n"), ("podu1/abc", "8\n9\n")] {
            let group = format!("kubepods/burstable/{group}");
            make_group(dir.path(), &group, 1);
            std::fs::write(dir.path().join(group).join("cgroup.procs"), processes).unwrap();
        }
        let dev = "Inter-|   Receive   |  Transmit\n face |bytes packets\n    lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  \
             net1: 5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0\n  eth0: 1000 10 2 0 0 0 0 0 3000 30 4 0 0 0 0 0\n";
        for pid in ["7", "8", "9"] {
            std::fs::create_dir_all(proc.join(pid).join("net")).unwrap();
            std::fs::write(proc.join(pid).join("net/dev"), dev).unwrap();
        }
        let attributes = Some(v1::ContainerAttributes {
            id: "abc".into(),
            metadata: Some(v1::ContainerMetadata { name: "main".into(), attempt: 3 }),
            ..Default::default()
        });
        let add = |host_network: bool, stats: v1::LinuxPodSandboxStats| {
            let mut object = object("Running");
            object["spec"] = json!({"hostNetwork": host_network});
            let containers =
                vec![v1::ContainerStats { attributes: attributes.clone(), ..Default::default() }];
            let stats = v1::LinuxPodSandboxStats { containers, ..stats };
            let mut pod = Pod { uid: "u1".into(), object, stats, ..Pod::default() };
            add_network_and_processes(&mut pod, &paths, &proc, Timestamp::from_second(9).unwrap());
            pod.stats
        };
        let stats = add(false, v1::LinuxPodSandboxStats::default());
        let network = stats.network.as_ref().unwrap();
        let figures = |i: &v1::NetworkInterfaceUsage| {
            [i.rx_bytes, i.rx_errors, i.tx_bytes, i.tx_errors].map(|figure| figure.unwrap().value)
        };
        let eth0 = network.default_interface.as_ref().unwrap();
        assert_eq!((eth0.name.as_str(), figures(eth0)), ("eth0", [1000, 2, 3000, 4]));
        let [net1] = network.interfaces.as_slice() else { panic!("{network:?}") };
        assert_eq!((net1.name.as_str(), figures(net1)), ("net1", [5, 0, 6, 0]));
        assert_eq!(network.timestamp, 9_000_000_000);
        let count = |stats: &v1::LinuxPodSandboxStats| stats.process.unwrap().process_count.unwrap().value;
        assert_eq!(count(&stats), 2, "those of containers");
        let host = add(true, v1::LinuxPodSandboxStats::default());
        assert_eq!((&host.network, count(&host)), (&None, 2));
        // Processes of another PID namespace, which v1 counts as threads alone.
        let container = dir.path().join("kubepods/burstable/podu1/abc");
        std::fs::write(container.join("cgroup.procs"), "").unwrap();
        std::fs::write(container.join("pids.current"), "2\n").unwrap();
        assert_eq!(add(false, v1::LinuxPodSandboxStats::default()).process, None);
        // What the runtime reports is not replaced.
        let known = v1::LinuxPodSandboxStats {
            network: Some(v1::NetworkUsage { timestamp: 1, ..Default::default() }),
            process: Some(v1::ProcessUsage { timestamp: 1, process_count: number(5) }),
            ..Default::default()
        };
        let stats = add(false, known.clone());
        assert_eq!((stats.network, stats.process), (known.network, known.process));
    }

    #[test]
    fn a_container_adds_few_interfaces_and_none_of_a_namespace_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let (paths, proc) = (paths(dir.path()), dir.path().join("proc"));
        let line = |name: String| format!("{name}: 1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\n");
        let many: String = (0..1000).map(|n| line(format!("dummy{n}"))).collect();
        let heading = "Inter-|\n face |\n";
        for (group, pid, dev) in [
            ("podu1/abc", "8", format!("{heading}{}{many}", line("lo".into()))),
            ("podu1/pause", "7", format!("{heading}{}{}", line("lo".into()), line("eth0".into()))),
        ] {
            let group = format!("kubepods/burstable/{group}");
            make_group(dir.path(), &group, 1);
            std::fs::write(dir.path().join(group).join("cgroup.procs"), format!("{pid}\n")).unwrap();
            std::fs::create_dir_all(proc.join(pid).join("net")).unwrap();
            std::fs::write(proc.join(pid).join("net/dev"), dev).unwrap();
        }
        let own = group_of(&paths, &object("Running"), "u1").unwrap();
        let names = |sandbox: &str, first: Option<&CgroupStats>| -> Vec<String> {
            let pod = Pod { uid: "u1".into(), sandbox: sandbox.into(), ..Pod::default() };
            let container = own.container("abc").unwrap();
            let dev = network_devices(&pod, first, [&container].into_iter(), &proc).unwrap();
            host::interfaces(&dev).map(|interface| interface.name).collect()
        };
        assert_eq!(names("pause", Some(&own)), ["eth0"]);
        let of_container = names("", None);
        assert_eq!((of_container.len(), of_container[0].as_str()), (MOST_INTERFACES, "dummy0"));
        let interfaces = vec![v1::NetworkInterfaceUsage::default(); 1000];
        let network = Some(v1::NetworkUsage { interfaces, ..Default::default() });
        let stats = v1::LinuxPodSandboxStats { network, ..Default::default() };
        assert_eq!(limit_interfaces(stats).network.unwrap().interfaces.len(), MOST_INTERFACES);
    }

    #[test]
    fn values_of_the_runtime_are_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path());
        make_group(dir.path(), "kubepods/burstable/podu1", 9);
        let number = |value| Some(v1::UInt64Value { value });
        let cpu = v1::CpuUsage {
            timestamp: 1,
            usage_core_nano_seconds: number(5),
            usage_nano_cores: number(6),
            ..Default::default()
        };
        let stats = v1::LinuxPodSandboxStats { cpu: Some(cpu), ..Default::default() };
        let mut pods = vec![Pod { uid: "u1".into(), object: object("Running"), stats, ..Pod::default() }];
        add_left_out(&mut pods, [("u1".to_owned(), object("Running"))].into(), &paths);
        complete(&mut pods, &paths, &Rates::default(), Timestamp::UNIX_EPOCH, false);
        assert_eq!(pods.len(), 1);
        assert_eq!(pods[0].stats.cpu, Some(cpu));
        assert!(pods[0].stats.memory.is_some(), "missing values are those of the cgroup");
        assert_eq!(pods[0].pressure, Pressure::default(), "not asked for");
    }
}
