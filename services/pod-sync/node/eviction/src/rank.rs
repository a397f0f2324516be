//! Order in which pods are evicted for a signal (`pkg/kubelet/eviction: rankMemoryPressure`,
//! `rankPIDPressure`, `rankDiskPressureFunc`).

use std::cmp::Reverse;

use quintlet_model::pod;
use quintlet_model::quantity::{Format, Quantity};

use crate::layout::Layout;
use crate::signal::{Resource, Signal};
use crate::usage::{Candidate, PodUsage, PodUsages, disk_usage, request};

// Evicted first is what compares as least.
type Key = (bool, bool, i32, Reverse<Quantity>);

/// Facts that determine the place of a pod in the order of evictions for a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankFacts {
    /// The pod has statistics. Without them, `used` and `request` are zero.
    pub is_measured: bool,
    /// Usage of the signal's resource.
    pub used: Quantity,
    /// The pod's request; zero for resources without requests.
    pub request: Quantity,
    /// `spec.priority`; pods with lower ones are evicted first.
    pub priority: i32,
    /// The pod uses more than it requested. Always true for process IDs.
    pub exceeds_request: bool,
}

/// Sorts pods: the one to evict first comes first. Pods that compare as equal keep their order.
///
/// Pods without statistics come first. Then pods that use more than they requested, then those of lower
/// priority, then those whose usage exceeds the request the most. For process IDs requests do not exist.
///
/// The kubelet compares inodes above the request of *bytes* of ephemeral storage, so that a pod with a large
/// request keeps its inodes. Here inodes are compared as they are.
pub fn rank(pods: &mut [Candidate], usages: &PodUsages, signal: Signal, layout: Layout) {
    pods.sort_by_cached_key(|candidate| facts(candidate, usages.get(&candidate.uid), signal, layout).key());
}

impl RankFacts {
    fn key(&self) -> Key {
        let excess = Reverse(self.used - self.request);
        (self.is_measured, self.is_measured && !self.exceeds_request, self.priority, excess)
    }
}

/// Returns the facts that determine the place of a pod in the order of [`rank`].
#[must_use]
pub fn facts(candidate: &Candidate, usage: Option<&PodUsage>, signal: Signal, layout: Layout) -> RankFacts {
    let pod = &*candidate.pod;
    let priority = pod::spec(pod).priority.unwrap_or(0);
    let Some(usage) = usage else {
        let none = Quantity::default();
        return RankFacts { is_measured: false, used: none, request: none, priority, exceeds_request: false };
    };
    let resource = signal.resource();
    let used = match resource {
        Resource::Memory => usage.working_set.unwrap_or(0),
        Resource::Pids => usage.processes.unwrap_or(0),
        Resource::EphemeralStorage | Resource::Inodes => {
            disk_usage(pod, usage, layout.measured(signal), resource)
        }
    };
    let used = Quantity::from_units(used.max(0), Format::Binary);
    let request = match resource {
        Resource::Memory | Resource::EphemeralStorage => request(pod, resource),
        Resource::Inodes | Resource::Pids => Quantity::default(),
    };
    let exceeds_request = match resource {
        Resource::Pids => true,
        Resource::Memory | Resource::EphemeralStorage | Resource::Inodes => used > request,
    };
    RankFacts { is_measured: true, used, request, priority, exceeds_request }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;
    use crate::support::{MIB, candidate};
    use crate::usage::{ContainerUsage, FileUsage};

    fn memory(request: &str, priority: i32) -> Value {
        let resources = json!({ "requests": { "memory": request } });
        json!({ "priority": priority, "containers": [{ "name": "c", "resources": resources }] })
    }

    fn order(pods: &[(&str, Value, Option<PodUsage>)], signal: Signal, layout: Layout) -> Vec<String> {
        let usages = pods.iter().filter_map(|(name, _, usage)| {
            Some((quintlet_model::ids::PodUid::parse(name).unwrap(), usage.clone()?))
        });
        let usages: PodUsages = usages.collect();
        let mut candidates: Vec<_> =
            pods.iter().map(|(name, spec, _)| candidate(name, spec.clone())).collect();
        rank(&mut candidates, &usages, signal, layout);
        candidates.iter().map(|c| c.uid.to_string()).collect()
    }

    fn uses(mib: i64) -> Option<PodUsage> {
        Some(PodUsage { working_set: Some(mib * MIB), ..PodUsage::default() })
    }

    #[test]
    fn memory_goes_to_pods_above_their_request_then_by_priority_then_by_excess() {
        let pods = [
            ("below-low", memory("500Mi", -10), uses(499)),
            ("above-high", memory("10Mi", 1000), uses(900)),
            ("above-little", memory("100Mi", 0), uses(150)),
            ("above-much", memory("10Mi", 0), uses(100)),
            ("unknown", memory("500Mi", 5000), None),
            ("below-much", memory("500Mi", -10), uses(1)),
            ("exact", memory("300Mi", -20), uses(300)),
        ];
        let want =
            ["unknown", "above-much", "above-little", "above-high", "exact", "below-low", "below-much"];
        for signal in [Signal::MemoryAvailable, Signal::AllocatableMemoryAvailable] {
            assert_eq!(order(&pods, signal, Layout::Single), want);
        }
    }

    #[test]
    fn the_request_includes_overhead_and_pod_level_resources() {
        let mut with_overhead = memory("100Mi", 0);
        with_overhead["overhead"] = json!({ "memory": "100Mi" });
        let only_overhead = json!({ "overhead": { "memory": "100Mi" } });
        let pod_level = json!({ "resources": { "requests": { "memory": "1Gi" } } });
        let pods = [
            ("pod-level", pod_level, uses(200)),
            ("with-overhead", with_overhead, uses(190)),
            ("only-overhead", only_overhead, uses(50)),
        ];
        let want = ["only-overhead", "with-overhead", "pod-level"];
        assert_eq!(order(&pods, Signal::MemoryAvailable, Layout::Single), want);
    }

    #[test]
    fn process_ids_go_by_priority_then_by_number() {
        let runs = |processes| Some(PodUsage { processes: Some(processes), ..PodUsage::default() });
        let pods = [
            ("high", json!({ "priority": 100 }), runs(5000)),
            ("few", json!({}), runs(3)),
            ("many", json!({}), runs(900)),
            ("low", json!({ "priority": -1 }), runs(1)),
        ];
        let want = ["low", "many", "few", "high"];
        assert_eq!(order(&pods, Signal::PidAvailable, Layout::Single), want);
    }

    fn files(layer: i64, logs: i64, volume: i64) -> Option<PodUsage> {
        let both = |n: i64| FileUsage { bytes: Some(n * MIB), inodes: Some(n) };
        let container = ContainerUsage {
            name: "c".into(),
            writable_layer: both(layer),
            logs: both(logs),
            ..Default::default()
        };
        let volumes = BTreeMap::from([("v".to_owned(), both(volume)), ("memory".to_owned(), both(5000))]);
        Some(PodUsage { containers: vec![container], volumes, ..PodUsage::default() })
    }

    #[test]
    fn disks_go_by_the_files_that_are_on_the_file_system_of_the_signal() {
        let spec = || {
            json!({ "volumes": [
                { "name": "v", "emptyDir": {} }, { "name": "memory", "emptyDir": { "medium": "Memory" } },
            ] })
        };
        let pods = [
            ("layers", spec(), files(100, 0, 10)),
            ("logs", spec(), files(0, 60, 0)),
            ("volumes", spec(), files(0, 5, 80)),
        ];
        for (layout, node, images) in [
            (Layout::Single, ["layers", "volumes", "logs"], ["layers", "volumes", "logs"]),
            // Pods without files on the disk of images keep their order.
            (Layout::SeparateImages, ["volumes", "logs", "layers"], ["layers", "logs", "volumes"]),
            (Layout::Split, ["layers", "volumes", "logs"], ["layers", "logs", "volumes"]),
        ] {
            for (signal, want) in [
                (Signal::NodeFsAvailable, node),
                (Signal::NodeFsInodesFree, node),
                (Signal::ImageFsAvailable, images),
                (Signal::ImageFsInodesFree, images),
            ] {
                assert_eq!(order(&pods, signal, layout), want, "{layout:?} {signal}");
            }
        }
    }

    #[test]
    fn a_termination_log_that_a_container_filled_counts_where_logs_are() {
        let own_files = FileUsage { bytes: Some(100 * MIB), inodes: Some(100) };
        let fills = Some(PodUsage { own_files, ..PodUsage::default() });
        let pods = [("logs", json!({}), files(0, 60, 0)), ("fills", json!({}), fills)];
        for (layout, signal, want) in [
            (Layout::Single, Signal::NodeFsAvailable, ["fills", "logs"]),
            (Layout::Single, Signal::NodeFsInodesFree, ["fills", "logs"]),
            (Layout::SeparateImages, Signal::NodeFsAvailable, ["fills", "logs"]),
            (Layout::SeparateImages, Signal::ImageFsAvailable, ["logs", "fills"]),
        ] {
            assert_eq!(order(&pods, signal, layout), want, "{layout:?} {signal}");
        }
    }

    #[test]
    fn a_request_of_storage_protects_bytes_but_not_inodes() {
        let requests = json!({ "requests": { "ephemeral-storage": "1Gi" } });
        let requested = json!({ "containers": [{ "name": "c", "resources": requests }] });
        let pods = [("small", json!({}), files(10, 0, 0)), ("large", requested, files(500, 0, 0))];
        assert_eq!(order(&pods, Signal::NodeFsAvailable, Layout::Single), ["small", "large"]);
        assert_eq!(order(&pods, Signal::NodeFsInodesFree, Layout::Single), ["large", "small"]);
    }
}
