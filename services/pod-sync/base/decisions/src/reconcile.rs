//! Decides when a status that another client changed in the API server is written again
//! (`pkg/kubelet/status: needsReconcile`).
//!
//! The kubelet compares every 10 s. Here a watch delivers the change, and the first correction follows at
//! once. The pause between further corrections of one pod grows to 10 s, so that two writers do not loop. A
//! correction that the API server has accepted without an effect is repeated every 10 min: the server drops a
//! field that it does not know, or a webhook removes it.

use std::time::Duration;

use k8s_openapi::api::core::v1::PodStatus;
use quintlet_model::pod_status::{OWNED, SHARED, equal, is_terminal, list, text};
use serde_json::Value;

/// Longest pause between corrections of one pod, and pause between attempts if the object has not changed
/// since (`pkg/kubelet/status: syncPeriod`).
pub const SYNC_PERIOD: Duration = Duration::from_secs(10);
/// Pause after the first correction.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a status that the API server has accepted and that has not changed the object.
pub const NO_EFFECT_PERIOD: Duration = Duration::from_secs(600);
/// Time without a correction after which the pause starts over.
const RESET_AFTER: Duration = Duration::from_secs(60);

/// Time of the next correction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CorrectionDue {
    /// No earlier correction delays it.
    Now,
    /// The correction is due at this CLOCK_BOOTTIME, if the status still differs.
    At(Duration),
}

/// Status corrections of one pod. Times are CLOCK_BOOTTIME.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StatusCorrections {
    // resourceVersion of the object that the last report was based on, and time of the report.
    reported: Option<(String, Duration)>,
    // Time of the last correction, and the pause after it.
    last: Option<(Duration, Duration)>,
}

impl StatusCorrections {
    /// Records a status that was reported on top of the object at version `base`.
    pub fn record_report(&mut self, base: &str, now: Duration) {
        self.reported = Some((base.to_owned(), now));
    }

    /// Records a correction, which is a report as well.
    pub fn record_correction(&mut self, base: &str, now: Duration) {
        let pause = match self.last {
            Some((at, pause)) if now < at.saturating_add(RESET_AFTER) => {
                pause.saturating_mul(2).min(SYNC_PERIOD)
            }
            Some(_) | None => FIRST_PAUSE,
        };
        self.last = Some((now, pause));
        self.record_report(base, now);
    }

    /// Returns when to correct an object at version `base` whose status differs from the reported one.
    /// `was_accepted`: the API server has accepted the last report, and `base` is not older than its answer.
    #[must_use]
    pub fn due(&self, base: &str, was_accepted: bool, now: Duration) -> CorrectionDue {
        let calm = self.last.map_or(Duration::ZERO, |(at, pause)| at.saturating_add(pause));
        let again = match &self.reported {
            // The report had no effect, or the watch has not delivered its result yet.
            Some((version, at)) if version == base => {
                at.saturating_add(if was_accepted { NO_EFFECT_PERIOD } else { SYNC_PERIOD })
            }
            Some(_) | None => Duration::ZERO,
        };
        let due = calm.max(again);
        if now >= due { CorrectionDue::Now } else { CorrectionDue::At(due) }
    }
}

/// Returns whether an object at version `base` is older than the last write of its status, at version
/// `written`.
#[must_use]
pub fn is_older(base: &str, written: &str) -> bool {
    match (base.parse::<u64>(), written.parse::<u64>()) {
        (Ok(base), Ok(written)) => base < written,
        (Err(_), _) | (_, Err(_)) => false,
    }
}

/// Returns whether writing `desired` would change a field of `base`, the status in the API server, that the
/// kubelet owns (`pkg/kubelet/status: needsReconcile`).
///
/// While containers `could_run`, a terminal phase is not written, and DisruptionTarget is written with a
/// terminal phase only: these do not count as differences.
#[must_use]
pub fn needs_reconcile(base: Option<&PodStatus>, desired: &PodStatus, could_run: bool) -> bool {
    if base.is_some_and(|base| are_evidently_equal(base, desired)) {
        return false;
    }
    let json = |s: &PodStatus| serde_json::to_value(s).unwrap_or_default();
    let mut base = base.map_or_else(|| Value::Object(serde_json::Map::new()), json);
    let mut desired = json(desired);
    if could_run && is_terminal(text(&desired, "phase")) && !is_terminal(text(&base, "phase")) {
        for field in ["phase", "reason", "message"] {
            desired[field] = base.get(field).cloned().unwrap_or(Value::Null);
        }
    }
    for status in [&mut base, &mut desired] {
        let others = list(status, "conditions").iter().filter(|c| text(c, "type") != SHARED).cloned();
        status["conditions"] = Value::Array(others.collect());
    }
    !equal(&base, &desired)
}

/// Returns whether two statuses have the same values, apart from the times of conditions and the conditions
/// of other components. This is so after most writes, and costs far less than [`equal`], which also knows
/// different texts of a value.
fn are_evidently_equal(a: &PodStatus, b: &PodStatus) -> bool {
    fn conditions(status: &PodStatus) -> Vec<(&str, &str, Option<&str>, Option<&str>)> {
        let own = status.conditions.iter().flatten().filter(|c| OWNED.contains(&c.type_.as_str()));
        let mut own: Vec<_> = own
            .map(|c| (c.type_.as_str(), c.status.as_str(), c.reason.as_deref(), c.message.as_deref()))
            .collect();
        own.sort_unstable();
        own
    }
    // Without `..`, so that a field of a later version is not forgotten.
    let PodStatus {
        allocated_resources,
        conditions: _,
        container_statuses,
        ephemeral_container_statuses,
        extended_resource_claim_status,
        host_ip,
        host_ips,
        init_container_statuses,
        message,
        node_allocatable_resource_claim_statuses,
        nominated_node_name,
        observed_generation,
        phase,
        pod_ip,
        pod_ips,
        qos_class,
        reason,
        resize,
        resource_claim_statuses,
        resources,
        start_time,
        volume_health,
    } = a;
    *phase == b.phase
        && *reason == b.reason
        && *message == b.message
        && *observed_generation == b.observed_generation
        && *container_statuses == b.container_statuses
        && *init_container_statuses == b.init_container_statuses
        && *ephemeral_container_statuses == b.ephemeral_container_statuses
        && *pod_ip == b.pod_ip
        && *pod_ips == b.pod_ips
        && *host_ip == b.host_ip
        && *host_ips == b.host_ips
        && *start_time == b.start_time
        && *qos_class == b.qos_class
        && *resize == b.resize
        && *resources == b.resources
        && *allocated_resources == b.allocated_resources
        && *nominated_node_name == b.nominated_node_name
        && *extended_resource_claim_status == b.extended_resource_claim_status
        && *node_allocatable_resource_claim_statuses == b.node_allocatable_resource_claim_statuses
        && *resource_claim_statuses == b.resource_claim_statuses
        && *volume_health == b.volume_health
        && conditions(a) == conditions(b)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(value: Value) -> PodStatus {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn only_fields_that_a_write_would_change_are_differences() {
        let ready = |status: &str| json!({"type": "Ready", "status": status, "lastTransitionTime": null});
        let running = |conditions: Value| json!({"phase": "Running", "conditions": conditions});
        let foreign = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": null});
        let mine = running(json!([ready("True")]));
        let with = |field: &str, value: Value| {
            let mut other = mine.clone();
            other[field] = value;
            other
        };
        for (name, base, want) in [
            ("the same", mine.clone(), false),
            ("Ready flipped", running(json!([ready("False")])), true),
            ("Ready removed", running(json!([])), true),
            (
                "a readiness gate beside it",
                running(json!([ready("True"), foreign("example.com/gate")])),
                false,
            ),
            ("a disruption announced", running(json!([ready("True"), foreign(SHARED)])), false),
            ("phase", with("phase", json!("Pending")), true),
            ("an address", with("podIP", json!("10.0.0.9")), true),
            ("a message", with("message", json!("hello")), true),
            ("a quantity in other words", with("allocatedResources", json!({})), false),
            // They are the controller's (kubernetes/kubernetes#138408).
            ("a claim", with("resourceClaimStatuses", json!([{"name": "c"}])), false),
        ] {
            assert_eq!(needs_reconcile(Some(&status(base)), &status(mine.clone()), true), want, "{name}");
        }
        assert!(needs_reconcile(None, &status(mine), true));
    }

    #[test]
    fn quantities_and_times_compare_by_value() {
        let container_status = |cpu: &str, started: &str| {
            let state = json!({"running": {"startedAt": started}});
            status(json!({"containerStatuses": [{"name": "a", "image": "", "imageID": "", "ready": true,
                "restartCount": 0, "allocatedResources": {"cpu": cpu}, "state": state}]}))
        };
        let base = container_status("100m", "2026-01-01T00:00:00Z");
        assert!(!needs_reconcile(Some(&base), &container_status("0.1", "2026-01-01T00:00:00Z"), true));
        assert!(needs_reconcile(Some(&base), &container_status("200m", "2026-01-01T00:00:00Z"), true));
        assert!(needs_reconcile(Some(&base), &container_status("100m", "2026-01-01T00:00:01Z"), true));
    }

    #[test]
    fn a_terminal_phase_that_may_not_be_written_yet_is_no_difference() {
        let base = status(json!({"phase": "Running"}));
        let desired = status(json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}));
        assert!(!needs_reconcile(Some(&base), &desired, true));
        assert!(needs_reconcile(Some(&base), &desired, false));
        let ended = status(json!({"phase": "Succeeded"}));
        assert!(needs_reconcile(Some(&ended), &desired, true));
    }

    #[test]
    fn the_first_correction_is_immediate_and_later_ones_slow_down_to_one_in_ten_seconds() {
        let secs = Duration::from_secs;
        let mut corrections = StatusCorrections::default();
        corrections.record_report("1", secs(100));
        // Another client changes the object as soon as it is corrected.
        let (mut now, mut made) = (secs(100), Vec::new());
        for version in 2..100_u64 {
            let base = version.to_string();
            if let CorrectionDue::At(at) = corrections.due(&base, true, now) {
                assert!(at > now, "{at:?} {now:?}");
                now = at;
            }
            assert_eq!(corrections.due(&base, true, now), CorrectionDue::Now);
            corrections.record_correction(&base, now);
            made.push(now.as_secs() - 100);
        }
        assert_eq!(made[..6], [0, 1, 3, 7, 15, 25]);
        assert!(made.windows(2).skip(4).all(|w| w[1] - w[0] == 10), "{made:?}");
        // After a minute without corrections, the pause starts over.
        now = now.saturating_add(RESET_AFTER);
        assert_eq!(corrections.due("100", true, now), CorrectionDue::Now);
        corrections.record_correction("100", now);
        assert_eq!(corrections.due("101", true, now), CorrectionDue::At(now.saturating_add(FIRST_PAUSE)));
    }

    #[test]
    fn an_object_unchanged_since_the_report_is_compared_every_ten_seconds() {
        let secs = Duration::from_secs;
        let mut corrections = StatusCorrections::default();
        corrections.record_report("1", secs(100));
        assert_eq!(
            corrections.due("1", false, secs(101)),
            CorrectionDue::At(secs(110)),
            "the watch is behind"
        );
        assert_eq!(corrections.due("2", false, secs(101)), CorrectionDue::Now);
        assert_eq!(corrections.due("1", false, secs(110)), CorrectionDue::Now);
        corrections.record_correction("1", secs(110));
        assert_eq!(corrections.due("1", false, secs(111)), CorrectionDue::At(secs(120)));
    }

    #[test]
    fn a_status_that_is_accepted_without_an_effect_is_repeated_every_ten_minutes() {
        let secs = Duration::from_secs;
        let mut corrections = StatusCorrections::default();
        corrections.record_report("1", secs(100));
        // The API server has stored the status without a field.
        assert_eq!(corrections.due("2", true, secs(101)), CorrectionDue::Now);
        corrections.record_correction("2", secs(101));
        assert_eq!(corrections.due("2", true, secs(102)), CorrectionDue::At(secs(701)));
        assert_eq!(corrections.due("2", true, secs(701)), CorrectionDue::Now);
        // Another client has changed the object.
        assert_eq!(corrections.due("3", true, secs(110)), CorrectionDue::Now);
    }

    #[test]
    fn an_object_is_older_than_a_write_by_its_version() {
        for (base, written, want) in
            [("9", "10", true), ("10", "10", false), ("11", "10", false), ("", "10", false), ("9", "", false)]
        {
            assert_eq!(is_older(base, written), want, "{base} {written}");
        }
    }
}
