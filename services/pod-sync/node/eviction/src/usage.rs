//! Observations of the node and usage of pods, as the decisions need them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::qos;
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use quintlet_model::quantity::{Format, Quantity};

use crate::layout::Files;
use crate::signal::{Resource, Signal};

/// Available amount of a signal's resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// Amount that may still be used: bytes, inodes or process IDs.
    pub available: Quantity,
    /// Total amount, in the same unit.
    pub capacity: Quantity,
    /// When it was measured, on `CLOCK_BOOTTIME`.
    pub at: Duration,
}

/// The last observation of each signal; signals that could not be measured are absent.
pub type Observations = BTreeMap<Signal, Observation>;

impl Observation {
    /// Returns an observation, or `None` if the values are implausible: no pod is evicted for a negative
    /// amount, a capacity of zero, or an available amount above the capacity. The kubelet checks none of
    /// these.
    #[must_use]
    pub fn new(signal: Signal, available: i64, capacity: i64, at: Duration) -> Option<Self> {
        if capacity <= 0 || !(0..=capacity).contains(&available) {
            return None;
        }
        let format = match signal.resource() {
            Resource::Memory | Resource::EphemeralStorage => Format::Binary,
            Resource::Inodes | Resource::Pids => Format::Decimal,
        };
        let quantity = |units| Quantity::from_units(units, format);
        Some(Self { available: quantity(available), capacity: quantity(capacity), at })
    }
}

/// Bytes and inodes of a part of a file system. `None`: not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileUsage {
    /// Bytes on disk.
    pub bytes: Option<i64>,
    /// Inodes, directories included.
    pub inodes: Option<i64>,
}

impl FileUsage {
    fn of(self, resource: Resource) -> i64 {
        let used = match resource {
            Resource::EphemeralStorage => self.bytes,
            Resource::Inodes => self.inodes,
            Resource::Memory | Resource::Pids => None,
        };
        used.unwrap_or(0).max(0)
    }
}

/// Usage of a running container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerUsage {
    /// Name in the pod.
    pub name: String,
    /// Working set of its memory, in bytes.
    pub working_set: Option<i64>,
    /// Files that the container wrote over its image.
    pub writable_layer: FileUsage,
    /// The container's log with its rotated files.
    pub logs: FileUsage,
}

/// Usage of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodUsage {
    /// Working set of its memory, in bytes.
    pub working_set: Option<i64>,
    /// Number of its processes.
    pub processes: Option<i64>,
    /// Bytes of writable layers, logs, local volumes, the pod's hosts file and termination logs.
    pub ephemeral_storage: Option<i64>,
    /// The pod's hosts file and termination logs, which its containers may write.
    pub own_files: FileUsage,
    /// Usage of each running container.
    pub containers: Vec<ContainerUsage>,
    /// Volumes of the pod with statistics, by name.
    pub volumes: BTreeMap<String, FileUsage>,
}

/// Usage by pod. A pod without an entry has no statistics.
pub type PodUsages = HashMap<PodUid, PodUsage>;

/// A pod that may be evicted.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// UID, that of the manifest for a static pod.
    pub uid: PodUid,
    /// The pod with the resources that it was given.
    pub pod: Arc<Pod>,
}

/// Returns the request of a pod that the kubelet compares its usage with: with overhead if the request is not
/// zero (`pkg/api/v1/resource: GetResourceRequestQuantity`).
#[must_use]
pub fn request(pod: &Pod, resource: Resource) -> Quantity {
    let name = resource.as_str();
    let requested = qos::pod_requests_without_overhead(pod).get(name).copied().unwrap_or_default();
    let overhead = pod::spec(pod).overhead.as_ref().and_then(|o| o.get(name)).map(Quantity::of);
    match overhead {
        Some(overhead) if !requested.is_zero() => requested + overhead,
        Some(_) | None => requested,
    }
}

/// Returns the bytes or inodes that a pod has in some of its files (`podDiskUsage`). Its hosts file and
/// termination logs, which the kubelet leaves out, are where its logs are.
#[must_use]
pub fn disk_usage(pod: &Pod, usage: &PodUsage, files: &[Files], resource: Resource) -> i64 {
    let sum = |parts: &mut dyn Iterator<Item = FileUsage>| {
        parts.map(|part| part.of(resource)).fold(0_i64, i64::saturating_add)
    };
    let measured = |files: &Files| match files {
        Files::WritableLayers => sum(&mut usage.containers.iter().map(|c| c.writable_layer)),
        Files::Logs => sum(&mut usage.containers.iter().map(|c| c.logs).chain([usage.own_files])),
        Files::LocalVolumes => {
            let local = pod::spec(pod).volumes.iter().flatten().filter(|v| is_local(v));
            sum(&mut local.filter_map(|v| usage.volumes.get(&v.name).copied()))
        }
    };
    files.iter().map(measured).fold(0_i64, i64::saturating_add)
}

/// Returns whether a volume is on the node's disk (`localVolumeNames`). The kubelet counts host paths, too,
/// which have no statistics.
fn is_local(volume: &k8s_openapi::api::core::v1::Volume) -> bool {
    let is_on_disk =
        volume.empty_dir.as_ref().is_some_and(|dir| dir.medium.as_deref().unwrap_or_default().is_empty());
    is_on_disk || volume.config_map.is_some() || volume.git_repo.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn implausible_figures_are_no_observation() {
        for (available, capacity, want) in [
            (0, 100, Some("0 of 100")),
            (100, 100, Some("100 of 100")),
            (101, 100, None),
            (-1, 100, None),
            (0, 0, None),
            (-5, -1, None),
            (i64::MAX, i64::MAX, Some("9223372036854775807 of 9223372036854775807")),
            (i64::MIN, i64::MAX, None),
        ] {
            let observation = Observation::new(Signal::PidAvailable, available, capacity, Duration::ZERO);
            let shown = observation.map(|o| format!("{} of {}", o.available, o.capacity));
            assert_eq!(shown.as_deref(), want, "{available} of {capacity}");
        }
        let mib = Observation::new(Signal::MemoryAvailable, 1 << 20, 1 << 30, Duration::ZERO).unwrap();
        assert_eq!((mib.available.to_string(), mib.capacity.to_string()), ("1Mi".into(), "1Gi".into()));
    }
}
