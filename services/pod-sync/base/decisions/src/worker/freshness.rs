//! Decides whether cached runtime state is newer than the last action on a pod (ARCHITECTURE.md, invariant
//! 2).

use std::time::Duration;

use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::runtime::{Known, PodRuntime};

#[cfg(not(test))]
use super::policy;
#[cfg(test)]
use super::tests::faulty_policy as policy;

/// The last action and the last inspection that a worker knows of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freshness {
    // CLOCK_BOOTTIME of the end of the last action. Older state is not decided on.
    acted: Duration,
    // The next inspection covers the whole runtime.
    full: bool,
    epoch: u64,
    // IDs created since the last inspection. State without them is older than the action.
    created: Known,
}

impl Default for Freshness {
    // The first inspection covers the whole runtime.
    fn default() -> Self {
        Self { acted: Duration::ZERO, full: true, epoch: 0, created: Known::default() }
    }
}

/// Source of the next observation of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextObservation {
    /// Use the cached state.
    UseCached,
    /// Inspect the pod.
    Inspect {
        /// List the whole runtime instead of the known IDs only.
        full: bool,
    },
}

impl Freshness {
    /// Records the end of an action at `now`, by CLOCK_BOOTTIME.
    pub fn action_ended(&mut self, now: Duration) {
        self.acted = self.acted.max(now);
    }

    /// Makes the next inspection a full one: the outcome of a call is unknown, or another client may have
    /// created containers.
    pub fn require_full_inspection(&mut self) {
        self.full = true;
    }

    /// Records a new sandbox.
    pub fn sandbox_created(&mut self, id: &SandboxId) {
        self.created.sandboxes.insert(id.clone());
    }

    /// Records a new container.
    pub fn container_created(&mut self, id: &ContainerId, sandbox: &SandboxId) {
        self.created.containers.insert(id.clone(), sandbox.clone());
    }

    /// Returns the IDs that an inspection must cover in addition to those of the last one.
    #[must_use]
    pub fn created(&self) -> &Known {
        &self.created
    }

    /// Returns whether the last inspection was by this run of pleg-service.
    #[must_use]
    pub fn is_from_epoch(&self, epoch: u64) -> bool {
        self.epoch == epoch
    }

    /// Returns how to obtain current state, given the newest cached state.
    #[must_use]
    pub fn next_observation(&self, at_hand: Option<&PodRuntime>) -> NextObservation {
        let Some(record) = at_hand else { return NextObservation::Inspect { full: self.full } };
        let same_run = record.cursor.epoch == self.epoch;
        let newer = policy::is_newer(record.observed, self.acted) && record.error.is_none();
        if newer && same_run && !self.full && policy::knows(&record.ids(), &self.created.ids()) {
            NextObservation::UseCached
        } else {
            NextObservation::Inspect { full: self.full || !same_run }
        }
    }

    /// Records a successful inspection.
    pub fn observed(&mut self, epoch: u64) {
        self.full = false;
        self.created = Known::default();
        self.epoch = epoch;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_without_a_cached_state_is_inspected_before_any_decision() {
        let mut freshness = Freshness::default();
        assert_eq!(freshness.next_observation(None), NextObservation::Inspect { full: true });
        freshness.observed(7);
        assert_eq!(freshness.next_observation(None), NextObservation::Inspect { full: false });
        freshness.action_ended(Duration::from_secs(1));
        assert_eq!(freshness.next_observation(None), NextObservation::Inspect { full: false });
    }
}
