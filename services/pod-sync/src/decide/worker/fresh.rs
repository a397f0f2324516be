//! Whether what is known of the runtime is newer than the last action (DESIGN §5.2).

use std::time::Duration;

use quintlet_model::runtime::PodRuntime;

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
    made: Vec<String>,
}

impl Default for Freshness {
    // First sight is a full look.
    fn default() -> Self {
        Self { acted: Duration::ZERO, full: true, epoch: 0, made: Vec::new() }
    }
}

/// How to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The record at hand will do.
    AtHand,
    /// Ask for an inspection.
    Ask {
        /// Of the whole runtime, not only of the ids that are known.
        full: bool,
    },
}

impl Freshness {
    /// An action ended at `now`, CLOCK_BOOTTIME.
    pub fn acted(&mut self, now: Duration) {
        self.acted = self.acted.max(now);
    }

    /// The outcome of a call is unknown, or somebody may have made what nobody here knows of.
    pub fn unknown(&mut self) {
        self.full = true;
    }

    /// A sandbox or container was made.
    pub fn made(&mut self, id: String) {
        self.made.push(id);
    }

    /// Ids that a look must ask about beside those of the last one.
    #[must_use]
    pub fn made_ids(&self) -> &[String] {
        &self.made
    }

    /// How to look, given the newest record at hand.
    #[must_use]
    pub fn look(&self, at_hand: Option<&PodRuntime>) -> Look {
        self.look_by(&Sound, at_hand)
    }

    pub(super) fn look_by(&self, judge: &impl Judge, at_hand: Option<&PodRuntime>) -> Look {
        let Some(record) = at_hand else { return Look::Ask { full: true } };
        let same_run = record.cursor.epoch == self.epoch;
        let newer = judge.is_newer(record.observed, self.acted) && record.error.is_none();
        if newer && same_run && !self.full && judge.knows(&record.ids(), &self.made) {
            Look::AtHand
        } else {
            Look::Ask { full: self.full || !same_run }
        }
    }

    /// A look succeeded.
    pub fn looked(&mut self, epoch: u64) {
        self.full = false;
        self.made.clear();
        self.epoch = epoch;
    }
}
