//! Decides the last steps of a pod: how long its containers may still stop, and what follows its final
//! status.

use std::time::Duration;

use crate::grace;
use crate::waiting::Waiting;

/// The recorded grace period of a termination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GracePeriod {
    /// Length, in seconds.
    pub seconds: i64,
    /// Time of its end (CLOCK_BOOTTIME).
    pub deadline: Duration,
}

/// The stop of a pod, from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodStop {
    /// Rest of the grace period, in seconds.
    pub seconds: i64,
    /// The whole grace period, in seconds.
    pub grace_seconds: i64,
    /// CLOCK_BOOTTIME.
    pub deadline: Duration,
}

/// Returns the stop of a pod whose termination has this grace period, counted from its start. A pod without
/// one stops with the minimum.
#[must_use]
pub fn pod_stop(grace_period: Option<GracePeriod>, now: Duration) -> PodStop {
    match grace_period {
        Some(GracePeriod { seconds, deadline }) => PodStop {
            seconds: grace::remaining_until(deadline, now).min(seconds),
            grace_seconds: seconds,
            deadline,
        },
        None => PodStop {
            seconds: grace::MINIMUM_STOP_SECONDS,
            grace_seconds: grace::MINIMUM_STOP_SECONDS,
            deadline: now,
        },
    }
}

/// Answer of status-reporter to the final status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinalStatus {
    /// There is no answer yet.
    Sent,
    /// The status was written, or is not to be written.
    Settled,
    /// The object of the pod no longer exists.
    Gone,
}

/// The input of [`finished_work`].
#[derive(Debug, Clone)]
pub struct FinishedInput {
    /// Whether nothing needs the rest of the pod any more.
    pub is_clean: bool,
    /// Whether the pod comes from a file or a URL, so that no API server deletes it.
    pub is_static: bool,
    /// Whether `metadata.deletionTimestamp` is set.
    pub is_deleted: bool,
    /// Whether there is an API server.
    pub has_api: bool,
    /// Progress of the last status on its way to the API server.
    pub status: FinalStatus,
    /// The answer of an API server that declines the status. status-reporter repeats the write.
    pub declined: Option<String>,
    /// Reason and message of an admission that rejected the pod.
    pub rejected: Option<(String, String)>,
}

/// The work on a pod that has terminated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishedWork {
    /// Remove the rest of it from the node.
    Remove,
    /// Something else has to happen first.
    Wait(Waiting),
    /// Remove dead instances that nothing needs, and wait for the deletion of the pod.
    CollectDead,
}

/// Decides the work on a pod that has terminated. The rest of it stays until its source and the API server no
/// longer need it.
#[must_use]
pub fn finished_work(input: FinishedInput) -> FinishedWork {
    let FinishedInput { is_clean, is_static, is_deleted, has_api, status, declined, rejected } = input;
    // The removal of a mirror pod does not remove its static pod.
    if is_clean || !is_static && status == FinalStatus::Gone {
        return FinishedWork::Remove;
    }
    if is_deleted {
        return FinishedWork::Wait(Waiting::FinalDelete { declined });
    }
    if has_api && status == FinalStatus::Sent && !is_static {
        return FinishedWork::Wait(Waiting::StatusWrite { declined });
    }
    match rejected {
        Some((reason, message)) => FinishedWork::Wait(Waiting::Rejected { reason, message }),
        None => FinishedWork::CollectDead,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_stop_has_the_rest_of_its_grace_period_and_never_more_than_the_whole() {
        let minimum = grace::MINIMUM_STOP_SECONDS;
        for (name, period, now, want) in [
            ("at its start", Some((30, s(130))), s(100), (30, 30, s(130))),
            ("later", Some((30, s(130))), s(120), (10, 30, s(130))),
            ("shortened", Some((5, s(130))), s(100), (5, 5, s(130))),
            ("none", None, s(100), (minimum, minimum, s(100))),
        ] {
            let period = period.map(|(seconds, deadline)| GracePeriod { seconds, deadline });
            let stop = pod_stop(period, now);
            assert_eq!((stop.seconds, stop.grace_seconds, stop.deadline), want, "{name}");
        }
    }

    #[test]
    fn the_rest_of_a_pod_stays_until_nothing_needs_it() {
        let base = || FinishedInput {
            is_clean: false,
            is_static: false,
            is_deleted: false,
            has_api: true,
            status: FinalStatus::Settled,
            declined: None,
            rejected: None,
        };
        let no = || Some("no".to_owned());
        let rejected = || Some(("Evicted".to_owned(), "full".to_owned()));
        let wait = FinishedWork::Wait;
        let is_rejected =
            wait(Waiting::Rejected { reason: "Evicted".to_owned(), message: "full".to_owned() });
        for (name, input, want) in [
            ("clean", FinishedInput { is_clean: true, ..base() }, FinishedWork::Remove),
            ("gone", FinishedInput { status: FinalStatus::Gone, ..base() }, FinishedWork::Remove),
            (
                "a mirror that is gone",
                FinishedInput { is_static: true, status: FinalStatus::Gone, ..base() },
                FinishedWork::CollectDead,
            ),
            (
                "deleted",
                FinishedInput { is_deleted: true, declined: no(), ..base() },
                wait(Waiting::FinalDelete { declined: no() }),
            ),
            (
                "not written yet",
                FinishedInput { status: FinalStatus::Sent, rejected: rejected(), ..base() },
                wait(Waiting::StatusWrite { declined: None }),
            ),
            (
                "not written without an API server",
                FinishedInput { status: FinalStatus::Sent, has_api: false, ..base() },
                FinishedWork::CollectDead,
            ),
            ("rejected", FinishedInput { rejected: rejected(), ..base() }, is_rejected),
            ("written", base(), FinishedWork::CollectDead),
        ] {
            assert_eq!(finished_work(input), want, "{name}");
        }
    }
}
