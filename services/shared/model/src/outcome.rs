//! What became of a call through cri-proxy, and the metadata that fences mutations.

use std::fmt;

/// Metadata of a mutating call: the owner epoch of the pod-sync that makes it, decimal.
pub const OWNER_EPOCH_HEADER: &str = "quintlet-owner-epoch";
/// Metadata of a mutating call: CLOCK_BOOTTIME nanoseconds after which it must not run, decimal.
pub const DEADLINE_HEADER: &str = "quintlet-deadline-boottime-ns";

/// The call may have been made before, not before this: CLOCK_BOOTTIME nanoseconds, decimal. It joins an identical one in
/// flight and gets the answer of one that ended. One that never came is made now. Where nobody can tell, since cri-proxy
/// is younger or the answer is forgotten, it is NOT_FOUND and not dispatched.
pub const JOIN_ONLY_HEADER: &str = "quintlet-join-only";
/// Trailer of every forwarded call: an [`Outcome`] by name.
pub const OUTCOME_TRAILER: &str = "quintlet-outcome";
/// Trailer of every forwarded call: milliseconds it waited for dispatch, decimal.
pub const QUEUED_MS_TRAILER: &str = "quintlet-queued-ms";

/// What is known of a call once it returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The runtime did it.
    Ok,
    /// The runtime answered that it did not. Only this makes events, waiting reasons and back-off.
    RuntimeError,
    /// The runtime never saw it: repeat as soon as the service is back.
    NotDispatched,
    /// It may have happened: a full observation must come before the next decision.
    Unknown,
}

impl Outcome {
    /// The name used in [`OUTCOME_TRAILER`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::RuntimeError => "runtime-error",
            Self::NotDispatched => "not-dispatched",
            Self::Unknown => "unknown",
        }
    }

    /// Reads a trailer. A name from a later version, or none, is [`Outcome::Unknown`]: the careful reading.
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
    fn what_is_not_understood_is_unknown() {
        for outcome in [Outcome::Ok, Outcome::RuntimeError, Outcome::NotDispatched, Outcome::Unknown] {
            assert_eq!(Outcome::from_name(Some(outcome.name())), outcome);
        }
        assert_eq!(Outcome::from_name(None), Outcome::Unknown);
        assert_eq!(Outcome::from_name(Some("maybe")), Outcome::Unknown);
    }
}
