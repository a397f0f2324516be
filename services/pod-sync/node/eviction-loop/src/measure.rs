//! Measures the node and its pods: cgroups, file systems, process IDs.
//!
//! A figure that cannot be read is missing. A signal without a figure crosses no threshold.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_decisions::qos;
use pod_sync_eviction::Signal;
use pod_sync_eviction::layout::Layout;
use pod_sync_eviction::usage::{
    Candidate, ContainerUsage, FileUsage, Observation, Observations, PodUsage, PodUsages,
};
use pod_sync_layout::paths;
use quintlet_cgroups::stats::CgroupStats;
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::pod;
use quintlet_model::runtime::PodRuntime;
use quintlet_proto::podsync::v1 as wire;

/// Directories that are measured.
#[derive(Debug, Clone)]
pub struct Paths {
    /// Root directory of the agent.
    pub root_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// Mount point of the cgroup hierarchies.
    pub cgroups: PathBuf,
    /// `--cgroup-root`.
    pub cgroup_root: String,
    /// `/proc`.
    pub proc: PathBuf,
    /// Huge pages are not available memory.
    pub subtracts_huge_pages: bool,
}

/// Mount points of the runtime's file systems.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeMounts {
    /// Read-only layers.
    pub images: Option<PathBuf>,
    /// Writable layers.
    pub containers: Option<PathBuf>,
}

/// Returns which file systems are shared, or `None` if one of them cannot be read
/// (`pkg/kubelet/stats: HasDedicatedImageFs`, `HasDedicatedContainerFs`).
#[must_use]
pub fn layout(paths: &Paths, mounts: &RuntimeMounts) -> Option<Layout> {
    let device = |path: &Path| Some(fs::metadata(path).ok()?.dev());
    let images = mounts.images.as_deref()?;
    let has_image_fs = device(images)? != device(&paths.root_dir)?;
    let has_container_fs = match mounts.containers.as_deref() {
        Some(containers) => device(containers)? != device(images)?,
        None => false,
    };
    Some(Layout::of(has_image_fs, has_container_fs))
}

/// Measures the node at `now`, on `CLOCK_BOOTTIME`.
#[must_use]
pub fn node(paths: &Paths, mounts: &RuntimeMounts, now: Duration) -> Observations {
    let mut all = memory_and_processes(paths, now);
    let mut add = |signal, figures| add(&mut all, signal, figures, now);
    let images = mounts.images.as_ref();
    // A runtime without a file system for writable layers has them on the one of images.
    let containers = mounts.containers.as_ref().or(images);
    for (dir, bytes, inodes) in [
        (Some(&paths.root_dir), Signal::NodeFsAvailable, Signal::NodeFsInodesFree),
        (images, Signal::ImageFsAvailable, Signal::ImageFsInodesFree),
        (containers, Signal::ContainerFsAvailable, Signal::ContainerFsInodesFree),
    ] {
        let Some(stat) = dir.and_then(|dir| rustix::fs::statvfs(dir).ok()) else { continue };
        let scaled = |blocks: u64| units(blocks.saturating_mul(stat.f_frsize));
        add(bytes, Some((scaled(stat.f_bavail), scaled(stat.f_blocks))));
        // File systems without inodes, such as btrfs, have 0 of 0, which is no observation.
        add(inodes, Some((units(stat.f_ffree), units(stat.f_files))));
    }
    all
}

/// Measures what does not depend on a file system that may hang.
#[must_use]
pub fn memory_and_processes(paths: &Paths, now: Duration) -> Observations {
    let mut all = Observations::new();
    add(&mut all, Signal::MemoryAvailable, memory(paths), now);
    add(&mut all, Signal::AllocatableMemoryAvailable, allocatable_memory(paths), now);
    add(&mut all, Signal::PidAvailable, process_ids(&paths.proc), now);
    all
}

/// Adds available amount and capacity of a signal.
fn add(all: &mut Observations, signal: Signal, figures: Option<(i64, i64)>, now: Duration) {
    let observed =
        figures.and_then(|(available, capacity)| Observation::new(signal, available, capacity, now));
    all.extend(observed.map(|observation| (signal, observation)));
}

fn units(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Returns available memory and memory of the machine: what is not in the working set of all processes. A
/// working set above the memory of the machine is implausible.
fn memory(paths: &Paths) -> Option<(i64, i64)> {
    let meminfo = fs::read_to_string(paths.proc.join("meminfo")).ok()?;
    let total = meminfo_bytes(&meminfo, "MemTotal:")?;
    let working_set = CgroupStats::root_memory(&paths.cgroups)?.working_set;
    let available = total.checked_sub(i64::try_from(working_set).ok()?)?;
    // Kernels before 4.20 do not have the line.
    let huge_pages = meminfo_bytes(&meminfo, "Hugetlb:").filter(|_| paths.subtracts_huge_pages);
    Some((without_huge_pages(available, huge_pages.unwrap_or(0)), total))
}

/// Returns the available memory that is not reserved for huge pages, in use or not: no working set contains
/// them (`pkg/kubelet/server/stats/summary.go: adjustForHugePages`). A negative amount stays as it is.
fn without_huge_pages(available: i64, huge_pages: i64) -> i64 {
    available.saturating_sub(huge_pages).max(available.min(0))
}

fn meminfo_bytes(meminfo: &str, name: &str) -> Option<i64> {
    meminfo.lines().find_map(|line| {
        let kibibytes = line.strip_prefix(name)?.trim().strip_suffix(" kB")?;
        kibibytes.trim().parse::<i64>().ok()?.checked_mul(1024)
    })
}

/// Returns available memory and memory limit of all pods together. Without a limit the signal does not exist.
/// A working set above the limit is implausible: the kernel does not allow it.
fn allocatable_memory(paths: &Paths) -> Option<(i64, i64)> {
    let pods = CgroupStats::of_pods(&paths.cgroups, &paths.cgroup_root)?;
    let limit = pods.memory_limit()?;
    Some((units(limit.checked_sub(pods.working_set()?)?), units(limit)))
}

/// Returns free process IDs and their number (`pkg/kubelet/util/pidlimit: Stats`).
fn process_ids(proc: &Path) -> Option<(i64, i64)> {
    let number = |file: &str| fs::read_to_string(proc.join(file)).ok()?.trim().parse::<i64>().ok();
    // The smaller one limits.
    let most = number("sys/kernel/pid_max")?.min(number("sys/kernel/threads-max").unwrap_or(i64::MAX));
    let load = fs::read_to_string(proc.join("loadavg")).ok()?;
    let running = load.split_whitespace().nth(3)?.split_once('/')?.1.parse::<i64>().ok()?;
    Some((most.saturating_sub(running), most))
}

/// Facts about pods that do not come from their files and cgroups.
#[derive(Debug, Clone, Default)]
pub struct PodSources {
    /// Pods that may be evicted.
    pub candidates: Vec<Candidate>,
    /// Running containers by pod.
    pub runtime: HashMap<PodUid, Vec<(String, ContainerId)>>,
    /// Writable layers by container.
    pub writable_layers: HashMap<ContainerId, FileUsage>,
    /// The last measurement of volumes.
    pub volumes: Vec<wire::PodStorage>,
    /// Capacity of the file system of writable layers in bytes, if it is known.
    pub layers_capacity: Option<i64>,
    /// Whether files are counted. Without them a pod has memory and processes only.
    pub has_files: bool,
}

/// Returns a usage, or `None` if it is above the capacity or does not fit: a negative one is a very large
/// unsigned number.
fn plausible(bytes: impl TryInto<i64>, capacity: Option<i64>) -> Option<i64> {
    let bytes = bytes.try_into().ok()?;
    capacity.is_none_or(|most| bytes <= most).then_some(bytes)
}

/// Returns name and ID of each running container of a pod.
#[must_use]
pub fn running_containers(runtime: &PodRuntime) -> Vec<(String, ContainerId)> {
    let running =
        runtime.containers.iter().filter(|c| c.state == quintlet_model::runtime::ContainerState::Running);
    running.map(|c| (c.name.clone(), c.id.clone())).collect()
}

/// Measures pods. A pod without a cgroup has the memory and processes of its containers: none if none is
/// running.
#[must_use]
pub fn pods(paths: &Paths, sources: &PodSources) -> PodUsages {
    let volumes: HashMap<&str, &wire::PodStorage> =
        sources.volumes.iter().map(|storage| (storage.uid.as_str(), storage)).collect();
    let cgroup = |candidate: &Candidate| {
        let class = qos::qos_class(&candidate.pod);
        CgroupStats::of_pod(&paths.cgroups, &paths.cgroup_root, class, candidate.uid.as_str())
    };
    let cgroups: Vec<_> = sources.candidates.iter().map(|candidate| (candidate, cgroup(candidate))).collect();
    let without = cgroups.iter().filter(|(_, cgroup)| cgroup.is_none()).map(|(candidate, _)| &candidate.uid);
    let ids: BTreeSet<&str> =
        without.filter_map(|uid| sources.runtime.get(uid)).flatten().map(|(_, id)| id.as_str()).collect();
    let outside = CgroupStats::of_containers(&paths.cgroups, &paths.proc, &ids);
    let usage = |(candidate, cgroup): (&Candidate, Option<CgroupStats>)| {
        let cgroups = PodCgroups { pod: cgroup, outside: &outside };
        let storage = volumes.get(candidate.uid.as_str()).copied();
        (candidate.uid.clone(), pod_usage(paths, candidate, &cgroups, sources, storage))
    };
    cgroups.into_iter().map(usage).collect()
}

/// Cgroups of a pod and its containers.
struct PodCgroups<'a> {
    /// `None` before the pod's first start, and with `cgroupsPerQOS: false`.
    pod: Option<CgroupStats>,
    /// Containers that are below no cgroup of a pod, by ID.
    outside: &'a BTreeMap<String, CgroupStats>,
}

impl PodCgroups<'_> {
    fn container(&self, id: &str) -> Option<CgroupStats> {
        self.pod.as_ref().map_or_else(|| self.outside.get(id).cloned(), |pod| pod.container(id))
    }

    /// Returns a figure of the pod, or the sum of those of its containers. Returns `None` if one of them is
    /// unknown.
    fn sum(
        &self,
        containers: &[(String, ContainerId)],
        figure: impl Fn(&CgroupStats) -> Option<u64>,
    ) -> Option<i64> {
        let all = match &self.pod {
            Some(pod) => figure(pod)?,
            None => containers
                .iter()
                .map(|(_, id)| figure(&self.container(id.as_str())?))
                .try_fold(0_u64, |sum, more| Some(sum.saturating_add(more?)))?,
        };
        Some(units(all))
    }
}

fn pod_usage(
    paths: &Paths,
    candidate: &Candidate,
    cgroups: &PodCgroups<'_>,
    sources: &PodSources,
    storage: Option<&wire::PodStorage>,
) -> PodUsage {
    let running = sources.runtime.get(&candidate.uid).map(Vec::as_slice).unwrap_or_default();
    let log_dir =
        pod::pod_ref(&candidate.pod).ok().map(|pod_ref| paths::pod_log_dir(&paths.pod_logs_dir, &pod_ref));
    let container = |(name, id): &(String, ContainerId)| ContainerUsage {
        name: name.clone(),
        working_set: cgroups.container(id.as_str()).and_then(|c| c.working_set()).map(units),
        writable_layer: sources.writable_layers.get(id).map_or_else(FileUsage::default, |layer| FileUsage {
            bytes: layer.bytes.and_then(|bytes| plausible(bytes, sources.layers_capacity)),
            ..*layer
        }),
        logs: log_dir
            .as_ref()
            .filter(|_| sources.has_files)
            .map(|dir| files_in(&dir.join(name)))
            .unwrap_or_default(),
    };
    let containers: Vec<_> = running.iter().map(container).collect();
    let bytes = |volume: &wire::VolumeStorage| plausible(volume.usage?.used_bytes, None);
    let volume = |volume: &wire::VolumeStorage| {
        let inodes = plausible(volume.usage?.inodes_used, None);
        Some((volume.name.clone(), FileUsage { bytes: bytes(volume), inodes }))
    };
    let volumes: BTreeMap<_, _> = storage.into_iter().flat_map(|s| &s.volumes).filter_map(volume).collect();
    let own_files = own_files(storage);
    let of_volumes =
        storage.into_iter().flat_map(|s| &s.volumes).filter(|v| v.is_ephemeral).filter_map(bytes);
    let ephemeral = ephemeral_storage(&containers, own_files, of_volumes);
    PodUsage {
        working_set: cgroups.sum(running, CgroupStats::working_set),
        processes: cgroups.sum(running, CgroupStats::tasks),
        ephemeral_storage: sources.has_files.then_some(ephemeral),
        own_files,
        containers,
        volumes,
    }
}

/// Measures the hosts file and the termination logs.
fn own_files(storage: Option<&wire::PodStorage>) -> FileUsage {
    let measured = storage.into_iter().flat_map(|s| [s.hosts, s.termination_logs]).flatten();
    measured.fold(FileUsage::default(), |sum, usage| FileUsage {
        bytes: Some(sum.bytes.unwrap_or(0).saturating_add(units(usage.used_bytes))),
        inodes: Some(sum.inodes.unwrap_or(0).saturating_add(units(usage.inodes_used))),
    })
}

// Writable layers, logs, volumes on the node's disk and the pod's own files.
fn ephemeral_storage(
    containers: &[ContainerUsage],
    own_files: FileUsage,
    of_volumes: impl Iterator<Item = i64>,
) -> i64 {
    let of_containers = containers.iter().flat_map(|c| [c.writable_layer.bytes, c.logs.bytes]).flatten();
    of_containers.chain(of_volumes).chain(own_files.bytes).fold(0_i64, i64::saturating_add)
}

// The runtime writes the logs of a container into one directory, without subdirectories.
fn files_in(dir: &Path) -> FileUsage {
    let mut usage = FileUsage { bytes: Some(0), inodes: Some(0) };
    let add = |sum: Option<i64>, more: i64| sum.map(|sum| sum.saturating_add(more));
    for file in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(metadata) = file.metadata() else { continue };
        usage.bytes = add(usage.bytes, units(metadata.blocks().saturating_mul(512)));
        usage.inodes = add(usage.inodes, 1);
    }
    usage
}

#[cfg(test)]
mod tests;
