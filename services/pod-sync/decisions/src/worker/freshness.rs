//! Decides whether cached runtime state is newer than the last action on a pod (ARCHITECTURE.md, invariant 2).

use std::time::Duration;

use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::runtime::{Known, PodRuntime};

use super::{Judge, Sound};

/// What a worker remembers of its last action and its last look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freshness {
    // End of the last action: nothing older is decided on.
    acted: Duration,
    // A full look comes first.
    full: bool,
    epoch: u64,
    // Made since the last look: a look that does not know of them is no look after the action.
    created: Known,
}

impl Default for Freshness {
    // First sight is a full look.
    fn default() -> Self {
        Self { acted: Duration::ZERO, full: true, epoch: 0, created: Known::default() }
    }
}

/// How to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextObservation {
    /// The record at hand will do.
    UseCached,
    /// Ask for an inspection.
    Inspect {
        /// Of the whole runtime, not only of the ids that are known.
        full: bool,
    },
}

impl Freshness {
    /// An action ended at `now`, CLOCK_BOOTTIME.
    pub fn action_ended(&mut self, now: Duration) {
        self.acted = self.acted.max(now);
    }

    /// The outcome of a call is unknown, or somebody may have made what nobody here knows of.
    pub fn require_full_inspection(&mut self) {
        self.full = true;
    }

    /// A sandbox was made.
    pub fn sandbox_created(&mut self, id: &SandboxId) {
        self.created.sandboxes.insert(id.clone());
    }

    /// A container was made.
    pub fn container_created(&mut self, id: &ContainerId, sandbox: &SandboxId) {
        self.created.containers.insert(id.clone(), sandbox.clone());
    }

    /// What a look must ask about beside the ids of the last one.
    #[must_use]
    pub fn created(&self) -> &Known {
        &self.created
    }

    /// Whether the last look was of this run of pleg-service.
    #[must_use]
    pub fn is_from_epoch(&self, epoch: u64) -> bool {
        self.epoch == epoch
    }

    /// How to look, given the newest record at hand.
    #[must_use]
    pub fn next_observation(&self, at_hand: Option<&PodRuntime>) -> NextObservation {
        self.next_observation_by(&Sound, at_hand)
    }

    pub(super) fn next_observation_by(
        &self,
        judge: &impl Judge,
        at_hand: Option<&PodRuntime>,
    ) -> NextObservation {
        let Some(record) = at_hand else { return NextObservation::Inspect { full: self.full } };
        let same_run = record.cursor.epoch == self.epoch;
        let newer = judge.is_newer(record.observed, self.acted) && record.error.is_none();
        if newer && same_run && !self.full && judge.knows(&record.ids(), &self.created.ids()) {
            NextObservation::UseCached
        } else {
            NextObservation::Inspect { full: self.full || !same_run }
        }
    }

    /// A look succeeded.
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
    fn a_pod_that_pleg_service_calls_gone_is_asked_for_before_anything_is_decided() {
        let mut freshness = Freshness::default();
        assert_eq!(freshness.next_observation(None), NextObservation::Inspect { full: true });
        freshness.observed(7);
        assert_eq!(freshness.next_observation(None), NextObservation::Inspect { full: false });
        freshness.action_ended(Duration::from_secs(1));
        assert_eq!(freshness.next_observation(None), NextObservation::Inspect { full: false });
    }
}
