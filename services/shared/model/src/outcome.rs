//! The outcome of a call through cri-proxy, and the metadata that fences mutating calls.

use std::fmt;

/// Metadata of a mutating call: owner epoch of the calling pod-sync, decimal.
pub const OWNER_EPOCH_HEADER: &str = "quintlet-owner-epoch";
/// Metadata of a mutating call: time after which it must not be dispatched, in CLOCK_BOOTTIME nanoseconds,
/// decimal.
pub const DEADLINE_HEADER: &str = "quintlet-deadline-boottime-ns";

/// Metadata of a call that repeats an earlier one: earliest time of the first call, in CLOCK_BOOTTIME
/// nanoseconds, decimal.
///
/// The call joins an identical call in flight, or returns the result of a completed one. If cri-proxy never
/// received the first call, it dispatches this one. If cri-proxy started later than that time or has dropped
/// the result, it returns NOT_FOUND without dispatching the call.
pub const JOIN_ONLY_HEADER: &str = "quintlet-join-only";
/// Trailer of every forwarded call: the name of an [`Outcome`].
pub const OUTCOME_TRAILER: &str = "quintlet-outcome";
/// Trailer of every forwarded call: time in the queue before dispatch, in milliseconds, decimal.
pub const QUEUED_MS_TRAILER: &str = "quintlet-queued-ms";

/// Knowledge of the caller about the effect of a completed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The runtime executed the call.
    Ok,
    /// The runtime returned an error, which causes an event, a waiting reason and back-off.
    RuntimeError,
    /// The runtime never received the call. Retry as soon as the service is available again.
    NotDispatched,
    /// The call may have taken effect. A full observation must precede the next decision. Only if the outcome
    /// stays unknown does it cause an event, a waiting reason and back-off.
    Unknown,
}

impl Outcome {
    /// Returns the name used in [`OUTCOME_TRAILER`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::RuntimeError => "runtime-error",
            Self::NotDispatched => "not-dispatched",
            Self::Unknown => "unknown",
        }
    }

    /// Parses the trailer. A missing name and a name of a later version mean [`Outcome::Unknown`], the safe
    /// choice.
    #[must_use]
    pub fn from_name(name: Option<&str>) -> Self {
        match name {
            Some("ok") => Self::Ok,
            Some("runtime-error") => Self::RuntimeError,
            Some("not-dispatched") => Self::NotDispatched,
            Some(_) | None => Self::Unknown,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unrecognized_outcome_is_unknown() {
        for outcome in [Outcome::Ok, Outcome::RuntimeError, Outcome::NotDispatched, Outcome::Unknown] {
            assert_eq!(Outcome::from_name(Some(outcome.name())), outcome);
        }
        assert_eq!(Outcome::from_name(None), Outcome::Unknown);
        assert_eq!(Outcome::from_name(Some("maybe")), Outcome::Unknown);
    }
}
