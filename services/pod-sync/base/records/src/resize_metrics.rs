//! Metrics of resizes, from the resize conditions of pods.

use pod_sync_decisions::resize::conditions::ResizeConditions;
use pod_sync_decisions::resize::feasibility::PendingReason;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_telemetry::metrics::{self, Buckets};

/// Numbers of resizes, under the names of the kubelet.
#[derive(Debug)]
pub(crate) struct ResizeMetrics {
    pub(crate) pending: Family<[(&'static str, &'static str); 2], Gauge>,
    pub(crate) in_progress: Gauge,
    deferred: Family<[(&'static str, &'static str); 2], Histogram, Buckets>,
}

/// Buckets of the time for which a resize is deferred, in seconds: up to half a day.
const DEFERRED: &[f64] = &[1.0, 5.0, 15.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10_800.0, 43_200.0];

/// The end of the time for which a resize is deferred: the label `resolution`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeferralEnd {
    /// The resources of the resize are allocated.
    Accepted,
    /// The spec has the allocated resources again.
    Reverted,
    /// The pod has ended.
    Terminated,
}

impl DeferralEnd {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Reverted => "reverted",
            Self::Terminated => "terminated",
        }
    }
}

/// Values of the label `priority_bucket`.
pub(crate) const PRIORITY_BUCKETS: [&str; 4] = ["system", "high", "default", "low"];

/// The smallest priority of the classes that begin with `system-`
/// (`pkg/apis/scheduling: SystemCriticalPriority`).
const SYSTEM_PRIORITY: i32 = 2_000_000_000;

fn priority_bucket(priority: i32) -> &'static str {
    let [system, high, default, low] = PRIORITY_BUCKETS;
    match priority {
        SYSTEM_PRIORITY.. => system,
        1.. => high,
        0 => default,
        ..0 => low,
    }
}

/// Label `reason` of pending resizes, by the reason of the condition.
const PENDING: [(&str, PendingReason); 2] =
    [("deferred", PendingReason::Deferred), ("infeasible", PendingReason::Infeasible)];

/// Reason of the pending resize of a pod with its priority bucket, and whether a resize is in progress.
pub(crate) type Counted = (Option<(PendingReason, &'static str)>, bool);

/// A pod without a resize.
pub(crate) const NOT_COUNTED: Counted = (None, false);

/// Returns what the gauges count of a pod.
pub(crate) fn counted(conditions: &ResizeConditions) -> Counted {
    let pending = conditions.pending_reason();
    let reason = PENDING.iter().map(|(_, reason)| *reason).find(|reason| pending == Some(reason.as_str()));
    (reason.map(|reason| (reason, priority_bucket(conditions.priority()))), conditions.is_in_progress())
}

impl ResizeMetrics {
    pub(crate) fn registered() -> Self {
        Self {
            pending: metrics::gauge_family(
                "kubelet_pod_pending_resizes",
                "Number of pending resizes that are not allocated, by reason and priority of the pod: system (the classes system-*), high (above 0), default (0) or low",
            ),
            deferred: metrics::histogram_family_of(
                "kubelet_pod_deferred_resize_duration_seconds",
                "Duration in seconds for which a resize was deferred, by priority of the pod and resolution: accepted, reverted (the spec has the allocated resources again) or terminated (the pod has ended)",
                DEFERRED,
            ),
            in_progress: metrics::gauge("kubelet_pod_in_progress_resizes", "Number of resizes in progress"),
        }
    }

    /// Sets the gauges from the conditions of all pods.
    pub(crate) fn set<'a>(&self, all: impl Iterator<Item = &'a ResizeConditions> + Clone) {
        let count = |wanted: &dyn Fn(&ResizeConditions) -> bool| {
            i64::try_from(all.clone().filter(|c| wanted(c)).count()).unwrap_or(i64::MAX)
        };
        for (label, reason) in PENDING {
            for bucket in PRIORITY_BUCKETS {
                let n = count(&|c| counted(c).0 == Some((reason, bucket)));
                self.pending.get_or_create(&[("reason", label), ("priority_bucket", bucket)]).set(n);
            }
        }
        self.in_progress.set(count(&ResizeConditions::is_in_progress));
    }

    /// Records for how long a resize was deferred. Does nothing if it is not deferred.
    pub(crate) fn deferral_ended(
        &self,
        conditions: &ResizeConditions,
        end: DeferralEnd,
        now: jiff::Timestamp,
    ) {
        let (Some((PendingReason::Deferred, bucket)), _) = counted(conditions) else { return };
        let Some(since) = conditions.pending_since() else { return };
        let labels = [("priority_bucket", bucket), ("resolution", end.as_str())];
        let seconds = now.duration_since(since).as_secs_f64().max(0.0);
        self.deferred.get_or_create(&labels).observe(seconds);
    }
}
