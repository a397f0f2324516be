//! The fence around mutations: owner epoch and boottime deadline.
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::HeaderMap;
use quintlet_model::outcome::{DEADLINE_HEADER, OWNER_EPOCH_HEADER};

/// What a mutation carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Epoch of the pod-sync that makes it. None on every socket but `sync`: nobody else owns pods.
    pub epoch: Option<u64>,
    /// CLOCK_BOOTTIME after which it must not be sent. None: whenever.
    pub deadline: Option<Duration>,
}

/// Why a mutation was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// `sync` takes no mutation without an epoch.
    #[error("a mutation on this socket needs the metadata {OWNER_EPOCH_HEADER}")]
    NoEpoch,
    /// One of the two is not a decimal number.
    #[error("the metadata {0} is not a decimal number")]
    NotANumber(&'static str),
    /// A newer owner has been here.
    #[error("owner epoch {given} is over: epoch {highest} has been seen")]
    OldEpoch {
        /// The call's.
        given: u64,
        /// The highest seen.
        highest: u64,
    },
    /// Too late.
    #[error("its deadline passed {} ms before it could be sent", .late.as_millis())]
    DeadlinePassed {
        /// By how much.
        late: Duration,
    },
}

impl Refusal {
    /// The gRPC code.
    #[must_use]
    pub fn code(self) -> tonic::Code {
        match self {
            Self::NoEpoch | Self::OldEpoch { .. } => tonic::Code::FailedPrecondition,
            Self::NotANumber(_) => tonic::Code::InvalidArgument,
            Self::DeadlinePassed { .. } => tonic::Code::DeadlineExceeded,
        }
    }

    /// The label in metrics.
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

impl Terms {
    /// Reads a call's metadata. Only the owner's calls have an epoch: anybody else's could shut the owner out.
    ///
    /// # Errors
    /// [`Refusal::NoEpoch`] where one is needed, [`Refusal::NotANumber`].
    pub fn read(headers: &HeaderMap, of_owner: bool) -> Result<Self, Refusal> {
        let number = |name: &'static str| match headers.get(name) {
            None => Ok(None),
            Some(value) => value
                .to_str()
                .ok()
                .and_then(|v| v.parse::<u64>().ok())
                .map(Some)
                .ok_or(Refusal::NotANumber(name)),
        };
        let epoch = if of_owner { Some(number(OWNER_EPOCH_HEADER)?.ok_or(Refusal::NoEpoch)?) } else { None };
        Ok(Self { epoch, deadline: number(DEADLINE_HEADER)?.map(Duration::from_nanos) })
    }

    /// The terms of a call that an identical one has joined: whichever may run longer.
    #[must_use]
    pub fn joined(self, other: Self) -> Self {
        Self {
            epoch: self.epoch.max(other.epoch),
            deadline: match (self.deadline, other.deadline) {
                (Some(a), Some(b)) => Some(a.max(b)),
                (None, _) | (_, None) => None,
            },
        }
    }
}

/// Remembers the highest owner epoch.
#[derive(Debug, Default)]
pub struct Fence {
    highest: AtomicU64,
}

impl Fence {
    /// The highest epoch seen; 0 before any.
    #[must_use]
    pub fn highest(&self) -> u64 {
        self.highest.load(Ordering::SeqCst)
    }

    /// Asked when a call arrives and again right before it is sent: in between this process may have been stopped.
    ///
    /// # Errors
    /// [`Refusal::OldEpoch`], [`Refusal::DeadlinePassed`].
    pub fn check(&self, terms: Terms, boot: Duration) -> Result<(), Refusal> {
        if let Some(given) = terms.epoch {
            let highest = self.highest.fetch_max(given, Ordering::SeqCst);
            if given < highest {
                return Err(Refusal::OldEpoch { given, highest });
            }
        }
        match terms.deadline {
            Some(deadline) if deadline <= boot => {
                Err(Refusal::DeadlinePassed { late: boot.saturating_sub(deadline) })
            }
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(epoch: u64, deadline: Option<u64>) -> Terms {
        Terms { epoch: Some(epoch), deadline: deadline.map(Duration::from_secs) }
    }

    #[test]
    fn a_lower_epoch_and_a_passed_deadline_are_refused() {
        let fence = Fence::default();
        let boot = Duration::from_secs(100);
        let cases = [
            (terms(5, None), Ok(())),
            (terms(5, Some(101)), Ok(())),
            (terms(4, None), Err(Refusal::OldEpoch { given: 4, highest: 5 })),
            (terms(5, Some(100)), Err(Refusal::DeadlinePassed { late: Duration::ZERO })),
            (terms(6, Some(98)), Err(Refusal::DeadlinePassed { late: Duration::from_secs(2) })),
            (terms(5, Some(101)), Err(Refusal::OldEpoch { given: 5, highest: 6 })),
            (Terms { epoch: None, deadline: None }, Ok(())),
        ];
        for (given, expected) in cases {
            assert_eq!(fence.check(given, boot), expected, "{given:?}");
        }
        assert_eq!(fence.highest(), 6);
    }

    #[test]
    fn metadata_is_read_or_refused_by_name() {
        let read = |epoch: Option<&str>, deadline: Option<&str>, needed| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(OWNER_EPOCH_HEADER, epoch), (DEADLINE_HEADER, deadline)] {
                if let Some(value) = value {
                    headers.insert(name, value.parse().unwrap());
                }
            }
            Terms::read(&headers, needed)
        };
        let at = Some(Duration::from_nanos(9));
        assert_eq!(read(Some("7"), Some("9"), true), Ok(Terms { epoch: Some(7), deadline: at }));
        assert_eq!(read(None, Some("9"), true), Err(Refusal::NoEpoch));
        assert_eq!(read(None, Some("9"), false), Ok(Terms { epoch: None, deadline: at }));
        assert_eq!(read(Some("7"), Some("9"), false), Ok(Terms { epoch: None, deadline: at }));
        assert_eq!(read(Some("-1"), None, true), Err(Refusal::NotANumber(OWNER_EPOCH_HEADER)));
        assert_eq!(read(Some("1"), Some("soon"), true), Err(Refusal::NotANumber(DEADLINE_HEADER)));
    }

    #[test]
    fn a_joined_call_may_run_as_long_as_either() {
        let joined = terms(1, Some(5)).joined(terms(2, Some(4)));
        assert_eq!(joined, terms(2, Some(5)));
        assert_eq!(terms(1, Some(5)).joined(terms(1, None)).deadline, None);
    }
}
