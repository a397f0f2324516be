//! Decides when a changed Node is written.

use std::time::Duration;

use serde_json::Value;

use super::conditions::is_own;
use super::patch;
use crate::status::{list, text};

/// Urgency of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// Only heartbeats differ.
    Nothing,
    /// A field differs.
    Changed,
    /// `volumesInUse` lacks a volume, which waits for it to be mounted.
    Volumes,
    /// The status of a condition differs.
    Turned,
}

/// Default interval between writes of a changed status.
pub const UPDATE_EVERY: Duration = Duration::from_secs(10);

/// Shortest interval between writes of volumes that come into use, so that a burst of pods causes few writes.
pub const VOLUMES_EVERY: Duration = Duration::from_secs(1);

/// Default interval between writes of an unchanged status.
pub const REPORT_EVERY: Duration = Duration::from_secs(300);

/// The write that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// The object is as it should be, and no interval has ended.
    Nothing,
    /// The changed fields.
    Change,
    /// The changed fields and the heartbeats.
    Report,
}

/// Ages of the last write and of the last report; `None` before the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ages {
    /// Time since the last write of any kind.
    pub update: Option<Duration>,
    /// Time since the last write with heartbeats, or the last write of a change, which has them, too.
    pub report: Option<Duration>,
}

/// Returns the write that is due: changed conditions immediately, volumes that come into use every
/// [`VOLUMES_EVERY`], other changes every `update_every`, heartbeats every `report_every`. Without facts no
/// heartbeat is due.
#[must_use]
pub fn due(
    weight: Weight,
    has_facts: bool,
    ages: Ages,
    update_every: Duration,
    report_every: Duration,
) -> Due {
    let passed = |since: Option<Duration>, every: Duration| since.is_none_or(|since| since >= every);
    if has_facts && passed(ages.report, report_every) {
        return Due::Report;
    }
    let is_due = match weight {
        Weight::Turned => true,
        Weight::Volumes => passed(ages.update, VOLUMES_EVERY.min(update_every)),
        Weight::Changed => passed(ages.update, update_every),
        Weight::Nothing => false,
    };
    if is_due { Due::Change } else { Due::Nothing }
}

/// Compares the desired Node with the live one.
#[must_use]
pub fn weigh(live: &Value, desired: &Value) -> Weight {
    let statuses = |node: &Value| -> Vec<(String, String)> {
        let own = list(&node["status"], "conditions").iter().filter(|c| is_own(c));
        let mut all: Vec<_> =
            own.map(|c| (text(c, "type").to_owned(), text(c, "status").to_owned())).collect();
        all.sort();
        all
    };
    // The first address is urgent, since a Node without an address is unreachable.
    let has_address = |node: &Value| !list(&node["status"], "addresses").is_empty();
    if statuses(live) != statuses(desired) || has_address(desired) && !has_address(live) {
        return Weight::Turned;
    }
    if super::super::volumes::adds_in_use(live, desired) {
        return Weight::Volumes;
    }
    if patch(live, desired, false).is_some() { Weight::Changed } else { Weight::Nothing }
}
