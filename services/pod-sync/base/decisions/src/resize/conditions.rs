//! The conditions PodResizePending and PodResizeInProgress. Each exists only while it is True.

use k8s_openapi::api::core::v1::{PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::feasibility::PendingResize;
use crate::conditions::{RESIZE_IN_PROGRESS, RESIZE_PENDING, condition};

/// Reason of PodResizeInProgress if the runtime, or a check before it, refuses the change.
pub const ERROR: &str = "Error";

/// The resize conditions of a pod.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ResizeConditions {
    pending: Option<PodCondition>,
    in_progress: Option<PodCondition>,
    priority: i32,
}

// The transition time follows the reason, since the status is always True.
fn next(
    old: Option<&PodCondition>,
    type_: &str,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: jiff::Timestamp,
) -> PodCondition {
    let mut new = condition(type_, true, reason, message);
    let since = old.filter(|o| o.reason == new.reason).and_then(|o| o.last_transition_time.clone());
    new.last_transition_time = since.or(Some(Time(now)));
    new.last_probe_time = Some(Time(now));
    new.observed_generation = generation.filter(|g| *g > 0);
    new
}

impl ResizeConditions {
    /// Reads the conditions of a status.
    #[must_use]
    pub fn of_status(status: &PodStatus) -> Self {
        let find = |t: &str| {
            status.conditions.iter().flatten().find(|c| c.type_ == t && c.status == "True").cloned()
        };
        Self { pending: find(RESIZE_PENDING), in_progress: find(RESIZE_IN_PROGRESS), priority: 0 }
    }

    /// Returns the conditions for a status.
    #[must_use]
    pub fn list(&self) -> Vec<PodCondition> {
        self.pending.iter().chain(&self.in_progress).cloned().collect()
    }

    /// Returns the reason of PodResizePending.
    #[must_use]
    pub fn pending_reason(&self) -> Option<&str> {
        self.pending.as_ref()?.reason.as_deref()
    }

    /// Returns whether PodResizeInProgress is set.
    #[must_use]
    pub fn is_in_progress(&self) -> bool {
        self.in_progress.is_some()
    }

    /// Returns the transition time of PodResizePending.
    #[must_use]
    pub fn pending_since(&self) -> Option<jiff::Timestamp> {
        Some(self.pending.as_ref()?.last_transition_time.as_ref()?.0)
    }

    /// Sets the priority of the pod, which the conditions of a status do not have.
    pub fn set_priority(&mut self, priority: i32) {
        self.priority = priority;
    }

    /// Returns the priority of the pod; 0 if it is not known yet.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Sets PodResizePending. Returns whether its reason or the pod's generation changed.
    pub fn set_pending(
        &mut self,
        why: &PendingResize,
        generation: Option<i64>,
        now: jiff::Timestamp,
    ) -> bool {
        let new =
            next(self.pending.as_ref(), RESIZE_PENDING, why.reason.as_str(), &why.message, generation, now);
        let news = self
            .pending
            .as_ref()
            .is_none_or(|old| old.reason != new.reason || old.observed_generation != new.observed_generation);
        self.pending = Some(new);
        news
    }

    /// Removes PodResizePending. Returns whether it was set.
    pub fn clear_pending(&mut self) -> bool {
        self.pending.take().is_some()
    }

    /// Sets PodResizeInProgress for a new allocation, without the error of an earlier one.
    pub fn set_in_progress(&mut self, generation: Option<i64>, now: jiff::Timestamp) {
        self.pending = None;
        self.in_progress = Some(next(None, RESIZE_IN_PROGRESS, "", "", generation, now));
    }

    /// Sets PodResizeInProgress unless it is set; an error and its generation stay.
    pub fn keep_in_progress(&mut self, generation: Option<i64>, now: jiff::Timestamp) {
        if self.in_progress.is_none() {
            self.in_progress = Some(next(None, RESIZE_IN_PROGRESS, "", "", generation, now));
        }
    }

    /// Sets PodResizeInProgress with reason Error. Returns whether its message or generation changed.
    pub fn set_error(&mut self, message: &str, generation: Option<i64>, now: jiff::Timestamp) -> bool {
        let old = self.in_progress.as_ref();
        let generation = old.and_then(|o| o.observed_generation).or(generation);
        let new = next(old, RESIZE_IN_PROGRESS, ERROR, message, generation, now);
        let news = old.is_none_or(|old| old.reason != new.reason || old.message != new.message);
        if news {
            self.in_progress = Some(new);
        }
        news
    }

    /// Removes PodResizeInProgress and returns it.
    pub fn clear_in_progress(&mut self) -> Option<PodCondition> {
        self.in_progress.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resize::feasibility::PendingReason;
    use quintlet_testkit::pods::{at, time};

    fn waits(reason: PendingReason, message: &str) -> PendingResize {
        PendingResize { reason, cause: String::new(), message: message.to_owned(), detail: "" }
    }

    #[test]
    fn a_pending_resize_is_reported_if_its_reason_or_generation_changes() {
        let mut c = ResizeConditions::default();
        assert!(c.set_pending(&waits(PendingReason::Deferred, "a"), Some(2), at(0)));
        assert!(
            !c.set_pending(&waits(PendingReason::Deferred, "b"), Some(2), at(5)),
            "another message is no news"
        );
        let [shown] = &c.list()[..] else { panic!("one") };
        assert_eq!((shown.type_.as_str(), shown.status.as_str()), ("PodResizePending", "True"));
        assert_eq!((shown.reason.as_deref(), shown.message.as_deref()), (Some("Deferred"), Some("b")));
        assert_eq!(shown.last_transition_time, Some(time(0)), "the reason is the same");
        assert_eq!((shown.last_probe_time.clone(), shown.observed_generation), (Some(time(5)), Some(2)));
        assert_eq!(c.pending_since(), Some(at(0)));

        assert!(c.set_pending(&waits(PendingReason::Deferred, "b"), Some(3), at(6)), "another generation");
        assert!(c.set_pending(&waits(PendingReason::Infeasible, "c"), Some(3), at(7)), "another reason");
        assert_eq!(c.pending_since(), Some(at(7)));
        assert!(c.clear_pending());
        assert!(!c.clear_pending());
        assert_eq!(c.list(), []);
    }

    #[test]
    fn a_resize_in_progress_keeps_its_generation_and_error_until_it_completes() {
        let mut c = ResizeConditions::default();
        c.set_pending(&waits(PendingReason::Deferred, ""), Some(2), at(0));
        c.set_in_progress(Some(2), at(1));
        let [shown] = &c.list()[..] else { panic!("the wait is over") };
        assert_eq!((shown.type_.as_str(), shown.reason.as_deref()), ("PodResizeInProgress", None));
        c.keep_in_progress(Some(3), at(2));
        assert_eq!(c.list()[0].observed_generation, Some(2));
        assert!(c.set_error("no", Some(3), at(3)));
        assert!(!c.set_error("no", Some(3), at(4)));
        c.keep_in_progress(Some(3), at(5));
        let shown = &c.list()[0];
        assert_eq!((shown.reason.as_deref(), shown.message.as_deref()), (Some("Error"), Some("no")));
        assert_eq!((shown.observed_generation, shown.last_transition_time.clone()), (Some(2), Some(time(3))));
        assert!(c.set_error("still no", Some(3), at(6)));
        assert_eq!(c.list()[0].last_transition_time, Some(time(3)), "the reason is the same");
        c.set_in_progress(Some(3), at(7));
        let shown = &c.list()[0];
        assert_eq!((shown.reason.as_deref(), shown.observed_generation), (None, Some(3)), "a new one");
        assert_eq!(c.clear_in_progress().and_then(|c| c.observed_generation), Some(3));
        assert!(c.clear_in_progress().is_none());
    }

    #[test]
    fn resize_conditions_are_restored_from_the_last_status() {
        let mut c = ResizeConditions::default();
        c.set_in_progress(Some(2), at(1));
        c.set_pending(&waits(PendingReason::Infeasible, "x"), Some(3), at(2));
        let status = PodStatus { conditions: Some(c.list()), ..PodStatus::default() };
        let mut again = ResizeConditions::of_status(&status);
        assert_eq!(again, c);
        assert!(
            !again.set_pending(&waits(PendingReason::Infeasible, "x"), Some(3), at(9)),
            "no event is repeated"
        );
    }
}
