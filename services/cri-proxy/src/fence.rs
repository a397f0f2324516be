//! Fences mutations by owner epoch and by deadline (CLOCK_BOOTTIME).
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::HeaderMap;
use quintlet_model::outcome::{DEADLINE_HEADER, OWNER_EPOCH_HEADER};

/// The fencing metadata of a mutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FencingToken {
    /// Epoch of the pod-sync that sends it. Only calls on the socket `sync` have one.
    pub epoch: Option<u64>,
    /// CLOCK_BOOTTIME after which the mutation must not be sent.
    pub deadline: Option<Duration>,
}

/// The reason why a mutation is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FenceError {
    /// A mutation on the socket `sync` has no epoch.
    #[error("a mutation on this socket requires the metadata {OWNER_EPOCH_HEADER}")]
    NoEpoch,
    /// The value of the named metadata cannot be parsed.
    #[error("the metadata {0} is not a decimal number")]
    NotANumber(&'static str),
    /// A call with a higher epoch was received.
    #[error("owner epoch {given} is stale: epoch {highest} was seen")]
    OldEpoch {
        /// Epoch of this call.
        given: u64,
        /// Highest epoch seen.
        highest: u64,
    },
    /// The caller's deadline passed while the call waited for its slot, by this much.
    #[error("the deadline passed {} ms before the call could be sent", .late.as_millis())]
    DeadlinePassed {
        /// Time since the deadline.
        late: Duration,
    },
}

impl FenceError {
    /// Returns the gRPC code of the refusal.
    #[must_use]
    pub fn code(self) -> tonic::Code {
        match self {
            Self::NoEpoch | Self::OldEpoch { .. } => tonic::Code::FailedPrecondition,
            Self::NotANumber(_) => tonic::Code::InvalidArgument,
            Self::DeadlinePassed { .. } => tonic::Code::DeadlineExceeded,
        }
    }

    /// Returns the label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoEpoch => "no-epoch",
            Self::NotANumber(_) => "not-a-number",
            Self::OldEpoch { .. } => "old-epoch",
            Self::DeadlinePassed { .. } => "deadline",
        }
    }
}

impl FencingToken {
    /// Reads the metadata of a call. Epochs are read only from the owner's calls, so that no other caller can
    /// lock out the owner.
    ///
    /// # Errors
    /// Fails if a required epoch is missing, or if a value is not a number.
    pub fn read(headers: &HeaderMap, is_from_owner: bool) -> Result<Self, FenceError> {
        let number = |name: &'static str| match headers.get(name) {
            None => Ok(None),
            Some(value) => value
                .to_str()
                .ok()
                .and_then(|v| v.parse::<u64>().ok())
                .map(Some)
                .ok_or(FenceError::NotANumber(name)),
        };
        let epoch =
            if is_from_owner { Some(number(OWNER_EPOCH_HEADER)?.ok_or(FenceError::NoEpoch)?) } else { None };
        Ok(Self { epoch, deadline: number(DEADLINE_HEADER)?.map(Duration::from_nanos) })
    }

    /// Returns the token of two identical calls that are joined: the higher epoch and the later deadline.
    #[must_use]
    pub fn merged(self, other: Self) -> Self {
        Self {
            epoch: self.epoch.max(other.epoch),
            deadline: match (self.deadline, other.deadline) {
                (Some(a), Some(b)) => Some(a.max(b)),
                (None, _) | (_, None) => None,
            },
        }
    }
}

/// The highest owner epoch that was seen.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    highest: AtomicU64,
}

impl Fence {
    /// Returns the highest epoch seen, or 0.
    #[must_use]
    pub(crate) fn highest(&self) -> u64 {
        self.highest.load(Ordering::SeqCst)
    }

    /// Checks a token and records its epoch. Called when a call arrives, and again before it is sent, since
    /// the process may have been suspended in between.
    ///
    /// # Errors
    /// Fails if the epoch is stale or the deadline has passed.
    pub(crate) fn check(&self, token: FencingToken, boot: Duration) -> Result<(), FenceError> {
        if let Some(given) = token.epoch {
            let highest = self.highest.fetch_max(given, Ordering::SeqCst);
            if given < highest {
                return Err(FenceError::OldEpoch { given, highest });
            }
        }
        match token.deadline {
            Some(deadline) if deadline <= boot => {
                Err(FenceError::DeadlinePassed { late: boot.saturating_sub(deadline) })
            }
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(epoch: u64, deadline: Option<u64>) -> FencingToken {
        FencingToken { epoch: Some(epoch), deadline: deadline.map(Duration::from_secs) }
    }

    #[test]
    fn a_lower_epoch_and_a_passed_deadline_are_refused() {
        let fence = Fence::default();
        let boot = Duration::from_secs(100);
        let cases = [
            (token(5, None), Ok(())),
            (token(5, Some(101)), Ok(())),
            (token(4, None), Err(FenceError::OldEpoch { given: 4, highest: 5 })),
            (token(5, Some(100)), Err(FenceError::DeadlinePassed { late: Duration::ZERO })),
            (token(6, Some(98)), Err(FenceError::DeadlinePassed { late: Duration::from_secs(2) })),
            (token(5, Some(101)), Err(FenceError::OldEpoch { given: 5, highest: 6 })),
            (FencingToken { epoch: None, deadline: None }, Ok(())),
        ];
        for (given, expected) in cases {
            assert_eq!(fence.check(given, boot), expected, "{given:?}");
        }
        assert_eq!(fence.highest(), 6);
    }

    #[test]
    fn invalid_metadata_is_refused_with_its_name() {
        let read = |epoch: Option<&str>, deadline: Option<&str>, needed| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(OWNER_EPOCH_HEADER, epoch), (DEADLINE_HEADER, deadline)] {
                if let Some(value) = value {
                    headers.insert(name, value.parse().unwrap());
                }
            }
            FencingToken::read(&headers, needed)
        };
        let at = Some(Duration::from_nanos(9));
        assert_eq!(read(Some("7"), Some("9"), true), Ok(FencingToken { epoch: Some(7), deadline: at }));
        assert_eq!(read(None, Some("9"), true), Err(FenceError::NoEpoch));
        assert_eq!(read(None, Some("9"), false), Ok(FencingToken { epoch: None, deadline: at }));
        assert_eq!(read(Some("7"), Some("9"), false), Ok(FencingToken { epoch: None, deadline: at }));
        assert_eq!(read(Some("-1"), None, true), Err(FenceError::NotANumber(OWNER_EPOCH_HEADER)));
        assert_eq!(read(Some("1"), Some("soon"), true), Err(FenceError::NotANumber(DEADLINE_HEADER)));
    }

    #[test]
    fn a_joined_call_has_the_later_of_both_deadlines() {
        let joined = token(1, Some(5)).merged(token(2, Some(4)));
        assert_eq!(joined, token(2, Some(5)));
        assert_eq!(token(1, Some(5)).merged(token(1, None)).deadline, None);
    }
}
