//! Decides whether a resize is feasible now, deferred or infeasible
//! (`pkg/kubelet/allocation: handlePodResourcesResize`).

use std::cmp::Reverse;

use k8s_openapi::api::core::v1::{Container, Pod};
use quintlet_model::ids::PodUid;
use quintlet_model::pod;

use super::allocation::resizes_volumes;
use super::plan::{ResizePolicy, Resource, resize_policy};
use crate::qos::{self, QosClass, ResourceList};

/// Reason of PodResizePending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingReason {
    /// The resize does not fit now and is retried.
    Deferred,
    /// This node can never do it.
    Infeasible,
}

impl PendingReason {
    /// Returns the reason as in the condition.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deferred => "Deferred",
            Self::Infeasible => "Infeasible",
        }
    }

    /// Returns the reason of the event.
    #[must_use]
    pub fn event(self) -> &'static str {
        match self {
            Self::Deferred => "ResizeDeferred",
            Self::Infeasible => "ResizeInfeasible",
        }
    }
}

/// A resize that is not allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingResize {
    /// Whether the resize is retried.
    pub reason: PendingReason,
    /// Reason of the failed admission, or of the infeasibility, for the message of the event.
    pub cause: String,
    /// Message of the condition.
    pub message: String,
    /// The infeasibility as a label of metrics; empty for a deferred resize.
    pub detail: &'static str,
}

/// Node settings that make a resize infeasible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeResizePolicy {
    /// `memorySwap.swapBehavior` is `LimitedSwap`.
    pub limited_swap: bool,
    /// The CPU manager policy is `static`.
    pub static_cpu: bool,
    /// The memory manager policy is `Static`.
    pub static_memory: bool,
    /// The node has cgroup v1, where the content of memory-backed volumes is not charged as they are resized.
    pub cgroup_v1: bool,
    /// The scheduler alone preempts pods for a resize, also for that of a critical pod.
    pub scheduler_preempts: bool,
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod::init_containers(pod).iter().chain(&pod::spec(pod).containers)
}

/// Returns whether request or limit of one resource differ.
fn changes(a: &Container, b: &Container, name: &str) -> bool {
    let amount = |l: ResourceList| l.get(name).copied().unwrap_or_default();
    amount(qos::container_limits(a)) != amount(qos::container_limits(b))
        || amount(qos::container_requests(a)) != amount(qos::container_requests(b))
}

fn any_changes(desired: &Pod, allocated: &Pod, name: &str) -> bool {
    containers(desired).zip(containers(allocated)).any(|(d, a)| changes(d, a, name))
}

/// Returns why the node can never do a resize. Capacity is not checked: a resize beyond that of the node is
/// Deferred.
#[must_use]
pub fn infeasible(desired: &Pod, allocated: &Pod, rules: NodeResizePolicy) -> Option<PendingResize> {
    let swaps = || {
        rules.limited_swap
            && containers(desired).zip(containers(allocated)).any(|(d, a)| {
                changes(d, a, "memory")
                    && resize_policy(d, Resource::Memory) == ResizePolicy::NotRequired
                    && qos::may_swap(allocated, a)
            })
    };
    let guaranteed = || qos::qos_class(allocated) == QosClass::Guaranteed;
    let (detail, why) = if pod::is_static(desired) {
        ("static_pod", "In-place resize of static-pods is not supported")
    } else if swaps() {
        ("swap_limitation", "In-place resize of containers with swap is not supported.")
    } else if rules.static_cpu && guaranteed() && any_changes(desired, allocated, "cpu") {
        (
            "guaranteed_pod_cpu_manager_static_policy",
            "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"",
        )
    } else if rules.static_memory && guaranteed() && any_changes(desired, allocated, "memory") {
        (
            "guaranteed_pod_memory_manager_static_policy",
            "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"",
        )
    } else if rules.cgroup_v1 && resizes_volumes(desired, allocated) {
        ("memory_backed_volume_cgroup_v1", "In-place resize of memory-backed volumes requires cgroup v2")
    } else {
        return None;
    };
    let reason = PendingReason::Infeasible;
    Some(PendingResize { reason, cause: reason.as_str().to_owned(), message: why.to_owned(), detail })
}

/// A resize in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedResize {
    /// The resized pod.
    pub uid: PodUid,
    /// Whether the resize increases CPU or memory requests.
    pub increases: bool,
    /// `spec.priority`; higher ones are allocated first.
    pub priority: i32,
    /// Whether the QoS class is Guaranteed; such pods precede others of their priority.
    pub guaranteed: bool,
    /// Time at which the resize became pending; `None` if it has not been tried.
    pub since: Option<jiff::Timestamp>,
}

impl QueuedResize {
    /// Builds an entry for a pod that is pending `since`.
    #[must_use]
    pub fn of(uid: PodUid, desired: &Pod, allocated: &Pod, since: Option<jiff::Timestamp>) -> Self {
        let (old, new) = (qos::pod_requests(allocated), qos::pod_requests(desired));
        let amount = |l: &ResourceList, name: &str| l.get(name).copied().unwrap_or_default();
        Self {
            uid,
            increases: ["cpu", "memory"].iter().any(|name| amount(&new, name) > amount(&old, name)),
            priority: pod::spec(desired).priority.unwrap_or(0),
            guaranteed: qos::qos_class(desired) == QosClass::Guaranteed,
            since,
        }
    }
}

/// Sorts the queue: resizes without increases first, then by priority, QoS class Guaranteed, and time pending
/// (`pkg/kubelet/allocation: sortPendingResizes`).
pub fn sort_queue(queue: &mut [QueuedResize]) {
    queue.sort_by_key(|c| (c.increases, Reverse(c.priority), !c.guaranteed, c.since.is_none(), c.since));
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::{at, pod_json};
    use serde_json::{Value, json};

    fn pod(resources: Value) -> Pod {
        pod_json(json!({"containers": [{"name": "a", "image": "i", "resources": resources}]}))
    }

    fn both(cpu: &str, memory: &str) -> Value {
        json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
    }

    fn burstable(memory: &str) -> Value {
        json!({"requests": {"cpu": "1", "memory": "64Mi"}, "limits": {"memory": memory}})
    }

    #[test]
    fn unsupported_volumes_have_the_kubelets_message() {
        let swap = NodeResizePolicy { limited_swap: true, ..NodeResizePolicy::default() };
        let cpu = NodeResizePolicy { static_cpu: true, ..NodeResizePolicy::default() };
        let memory = NodeResizePolicy { static_memory: true, ..NodeResizePolicy::default() };
        let restarting = |memory: &str| {
            let mut p = pod(burstable(memory));
            let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
            p.spec.as_mut().unwrap().containers[0].resize_policy = serde_json::from_value(policy).unwrap();
            p
        };
        let static_pod = |memory: &str| {
            let mut p = pod(burstable(memory));
            let source = ("kubernetes.io/config.source".to_owned(), "file".to_owned());
            p.metadata.annotations = Some([source].into());
            p
        };
        let swap_text = "In-place resize of containers with swap is not supported.";
        let cpu_text = "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"";
        let memory_text =
            "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"";
        for (name, before, after, rules, want) in [
            (
                "nothing against it",
                pod(burstable("1Gi")),
                pod(burstable("2Gi")),
                NodeResizePolicy::default(),
                None,
            ),
            ("swap", pod(burstable("1Gi")), pod(burstable("2Gi")), swap, Some(swap_text)),
            ("swap, with a restart", restarting("1Gi"), restarting("2Gi"), swap, None),
            ("swap, only cpu", pod(both("1", "1Gi")), pod(both("2", "1Gi")), swap, None),
            ("no swap for Guaranteed", pod(both("1", "1Gi")), pod(both("1", "2Gi")), swap, None),
            ("static cpu", pod(both("1", "1Gi")), pod(both("2", "1Gi")), cpu, Some(cpu_text)),
            ("static cpu, only memory", pod(both("1", "1Gi")), pod(both("1", "2Gi")), cpu, None),
            ("static cpu, Burstable", pod(burstable("1Gi")), pod(burstable("2Gi")), cpu, None),
            ("static memory", pod(both("1", "1Gi")), pod(both("1", "2Gi")), memory, Some(memory_text)),
            ("static memory, only cpu", pod(both("1", "1Gi")), pod(both("2", "1Gi")), memory, None),
            (
                "static pod",
                static_pod("1Gi"),
                static_pod("2Gi"),
                NodeResizePolicy::default(),
                Some("In-place resize of static-pods is not supported"),
            ),
        ] {
            let got = infeasible(&after, &before, rules);
            assert!(got.as_ref().is_none_or(|p| p.reason == PendingReason::Infeasible));
            assert_eq!(got.map(|p| p.message).as_deref(), want, "{name}");
        }
    }

    #[test]
    fn memory_backed_volumes_are_not_resized_with_cgroup_v1() {
        let pod = |limit: &str| {
            pod_json(json!({"containers": [{"name": "a", "image": "i"}], "volumes": [
                {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}]}))
        };
        let why = |after: &str, cgroup_v1| {
            let rules = NodeResizePolicy { cgroup_v1, ..NodeResizePolicy::default() };
            infeasible(&pod(after), &pod("64Mi"), rules).map(|pending| pending.message)
        };
        let text = "In-place resize of memory-backed volumes requires cgroup v2";
        assert_eq!(why("128Mi", true).as_deref(), Some(text));
        assert_eq!(why("64Mi", true), None);
        assert_eq!(why("128Mi", false), None);
    }

    #[test]
    fn the_resize_queue_is_sorted_by_increase_priority_class_and_time() {
        let uid = |u: &str| PodUid::parse(u).unwrap();
        let base = QueuedResize {
            uid: uid("x"),
            increases: true,
            priority: 0,
            guaranteed: false,
            since: Some(at(5)),
        };
        let mut queue = vec![
            QueuedResize { uid: uid("new"), since: None, ..base.clone() },
            QueuedResize { uid: uid("late"), since: Some(at(9)), ..base.clone() },
            QueuedResize { uid: uid("early"), since: Some(at(1)), ..base.clone() },
            QueuedResize { uid: uid("guaranteed"), guaranteed: true, ..base.clone() },
            QueuedResize { uid: uid("high"), priority: 9, ..base.clone() },
            QueuedResize { uid: uid("shrinks"), increases: false, priority: -1, ..base },
        ];
        sort_queue(&mut queue);
        let order: Vec<_> = queue.iter().map(|c| c.uid.as_str()).collect();
        assert_eq!(order, ["shrinks", "high", "guaranteed", "early", "late", "new"]);
    }

    #[test]
    fn growth_is_of_requests_of_the_whole_pod() {
        let queued = |before: Value, after: Value| {
            QueuedResize::of(PodUid::parse("u").unwrap(), &pod(after), &pod(before), None)
        };
        for (name, before, after, want) in [
            ("more cpu", both("1", "1Gi"), both("2", "1Gi"), true),
            ("more memory, less cpu", both("2", "1Gi"), both("1", "2Gi"), true),
            ("less", both("2", "1Gi"), both("1", "1Gi"), false),
            ("only the limit", burstable("1Gi"), burstable("2Gi"), false),
        ] {
            assert_eq!(queued(before, after).increases, want, "{name}");
        }
    }
}
