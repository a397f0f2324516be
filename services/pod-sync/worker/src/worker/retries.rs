//! When the worker retries a step that failed.

use std::collections::BTreeMap;
use std::time::Duration;

use pod_sync_clients::CallError;
use pod_sync_decisions::starts::StartHold;
use pod_sync_decisions::unknown_calls::UnknownCalls;
use pod_sync_decisions::worker;
use pod_sync_volume_manager::Again;
use quintlet_kit::backoff::Backoff;
use quintlet_model::outcome::Outcome;
use rand::RngExt as _;

/// Time until the next pass after an error of this pod, before jitter
/// (`pkg/kubelet/pod_workers.go: workerBackOffPeriod`).
pub(super) const ERROR_WAIT: Duration = Duration::from_secs(10);
/// First delay after a failed set-up of volumes (`pkg/volume/util/exponentialbackoff`).
const MOUNT_WAIT: Duration = Duration::from_millis(500);
/// Longest delay after a failed set-up of volumes. A kubelet waits up to two minutes.
const MOUNT_WAIT_MAX: Duration = Duration::from_secs(16);

/// Returns `d`, increased by a random part of up to one half.
pub(super) fn jitter(d: Duration) -> Duration {
    worker::jitter(d, rand::rng().random_range(0.0..1.0))
}

/// Times (CLOCK_BOOTTIME) before which a failed step is not retried.
pub(super) struct RetryTimes {
    // Starts of containers that failed without a back-off of their own.
    pub(super) containers: BTreeMap<String, StartHold>,
    // Set-up of sandbox, cgroup and volumes.
    pub(super) pod: Duration,
    // A resize that the runtime refused.
    pub(super) resize: Duration,
    // The claims of a running pod that are not recorded.
    pub(super) claims: Duration,
    // Back-off between waits for volumes that tasks mount.
    pub(super) mounts: Backoff,
    // The direct volumes that the next set-up repeats. All before the first one and after one that succeeded.
    pub(super) volumes: Again,
    // The changes of the pod's objects before the last set-up of volumes, if it failed.
    pub(super) failed_with: Option<u64>,
    // The releases of ranges for user namespaces before the last set-up, if the pod found no free one.
    pub(super) without_range: Option<u64>,
    // Calls whose outcome stays unknown, which count as failures after some tries.
    unknown_calls: UnknownCalls,
}

impl Default for RetryTimes {
    fn default() -> Self {
        Self {
            containers: BTreeMap::new(),
            pod: Duration::ZERO,
            resize: Duration::ZERO,
            claims: Duration::ZERO,
            mounts: Backoff::new(MOUNT_WAIT, 2.0, MOUNT_WAIT_MAX),
            volumes: Again::All,
            failed_with: None,
            without_range: None,
            unknown_calls: UnknownCalls::default(),
        }
    }
}

impl RetryTimes {
    /// Ends all waits except those for calls with unknown outcomes.
    pub(super) fn reset(&mut self) {
        self.containers.clear();
        self.pod = Duration::ZERO;
        self.resize = Duration::ZERO;
        self.volumes_mounted();
    }

    /// Returns whether an unsuccessful call counts as a failure of `container`, with a reason and a back-off:
    /// the runtime refused it, or its outcome stays unknown. `object` is the container, the sandbox or the
    /// image of the call.
    pub(super) fn is_failure(
        &mut self,
        error: &CallError,
        container: &str,
        object: &str,
        boot: Duration,
    ) -> bool {
        match error.outcome {
            Outcome::Ok | Outcome::NotDispatched => false,
            Outcome::RuntimeError => {
                self.settled(container, error.method);
                true
            }
            Outcome::Unknown => self.has_repeated(error, container, object, boot),
        }
    }

    /// Counts a call without success, and returns whether there were several.
    pub(super) fn has_repeated(
        &mut self,
        error: &CallError,
        container: &str,
        object: &str,
        boot: Duration,
    ) -> bool {
        self.unknown_calls.add(container, error.method, object, boot)
    }

    /// Records that a call for a container has a known outcome.
    pub(super) fn settled(&mut self, container: &str, method: &'static str) {
        self.unknown_calls.settled(container, method);
    }

    /// Records that the volumes of the pod are mounted.
    pub(super) fn volumes_mounted(&mut self) {
        self.mounts.reset();
        self.volumes = Again::All;
        self.failed_with = None;
    }

    /// Ends the wait for a range of a user namespace if one was released since.
    pub(super) fn ranges_released(&mut self, releases: u64) {
        if self.without_range.take_if(|before| *before != releases).is_some() {
            self.pod = Duration::ZERO;
        }
    }

    /// Ends the wait after a failed set-up of volumes if an object of the pod has changed since.
    pub(super) fn objects_changed(&mut self, changes: u64) {
        if self.failed_with.is_some_and(|before| before != changes) {
            self.pod = Duration::ZERO;
            self.mounts.reset();
            self.failed_with = Some(changes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_of_a_range_ends_the_wait_of_a_pod_that_found_none_and_of_no_other() {
        let held = Duration::from_secs(100);
        // (releases before the attempt that found no range, releases now) and whether the pod still waits.
        for (before, now, waits) in [(None, 7, true), (Some(7), 7, true), (Some(7), 8, false)] {
            let mut retries = RetryTimes {
                pod: held,
                without_range: before,
                failed_with: Some(1),
                ..RetryTimes::default()
            };
            retries.ranges_released(now);
            assert_eq!(retries.pod == held, waits, "{before:?} {now}");
            // The next failure has its own wait.
            retries.pod = held;
            retries.ranges_released(now.wrapping_add(u64::from(!waits)));
            assert_eq!(retries.pod, held, "{before:?} {now}");
        }
    }
}
