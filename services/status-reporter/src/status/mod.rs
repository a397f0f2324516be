//! Merges, normalizes and patches pod statuses. No I/O, no clock.
//!
//! Statuses are JSON, so that unknown fields are kept.

pub mod merge;
pub mod normalize;
pub mod patch;

use serde_json::Value;

pub use quintlet_model::pod_status::is_terminal;
pub(crate) use quintlet_model::pod_status::{FOREIGN_FIELDS, OWNED, SHARED, list, text};

pub(crate) fn phase(status: &Value) -> &str {
    text(status, "phase")
}

pub(crate) fn condition<'a>(status: &'a Value, kind: &str) -> Option<&'a Value> {
    list(status, "conditions").iter().find(|c| text(c, "type") == kind)
}

/// Reports whether a condition exists and is True.
#[must_use]
pub fn is_true(status: &Value, kind: &str) -> bool {
    condition(status, kind).is_some_and(|c| text(c, "status") == "True")
}
