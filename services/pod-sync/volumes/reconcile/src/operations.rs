//! Operations in flight and the back-off of failed ones (`pkg/volume/util/nestedpendingoperations`,
//! `pkg/util/goroutinemap/exponentialbackoff`).

use std::collections::BTreeMap;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock;
use quintlet_model::go_duration;
use quintlet_model::ids::PodUid;
use tokio::time::Instant;

use crate::VolumeName;

/// Wait after the first failure.
pub const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Longest wait between two attempts.
pub const LONGEST_WAIT: Duration = Duration::from_secs(122);

/// Subject of an operation: a volume, or one pod's part of it. Operations on the whole volume exclude all
/// others on it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationKey {
    /// Unique name of the volume.
    pub volume: VolumeName,
    /// The pod; `None` for the whole volume.
    pub pod: Option<PodUid>,
}

impl OperationKey {
    /// Returns the key as the kubelet prints it.
    fn text(&self) -> String {
        let pod = self.pod.as_ref().map_or("", PodUid::as_str);
        format!("{{volumeName:{} podName:{pod} nodeName:}}", self.volume)
    }
}

/// The kind of an operation. Each kind has a back-off of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OperationKind {
    /// Wait for the attachment, mount the device, mount the volume.
    Mount,
    /// Unmount a pod's volume.
    Unmount,
    /// Unmount the device that all pods share.
    UnmountDevice,
    /// Attach the volume from the node.
    Attach,
    /// Detach the volume from the node.
    Detach,
    /// Expand the file system.
    Expand,
}

#[derive(Debug, Clone)]
struct FailedOperation {
    kind: OperationKind,
    backoff: Backoff,
    until: Instant,
}

/// Operations in flight, and those that failed.
#[derive(Debug, Clone, Default)]
pub struct Operations {
    pending: BTreeMap<OperationKey, OperationKind>,
    failed: BTreeMap<OperationKey, FailedOperation>,
    // The pod of the last mount of a shared volume.
    turns: BTreeMap<VolumeName, PodUid>,
    // Declared names of volumes that were found on disk under another name.
    declared: BTreeMap<VolumeName, VolumeName>,
}

/// Answer to whether an operation may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartDecision {
    /// The operation may start now.
    Now,
    /// The operation may start at this time, since it failed before.
    At(Instant),
    /// After another operation on the volume has ended.
    Pending,
}

impl Operations {
    /// Returns whether an operation may start.
    #[must_use]
    pub fn may_start(&self, key: &OperationKey, kind: OperationKind, now: Instant) -> StartDecision {
        if self.is_pending(key) {
            return StartDecision::Pending;
        }
        match self.failed.get(key).filter(|failed| failed.kind == kind && failed.until > now) {
            Some(failed) => StartDecision::At(failed.until),
            None => StartDecision::Now,
        }
    }

    /// Returns whether an operation is in flight on the volume of `key`, and on its pod if it has one.
    #[must_use]
    pub fn is_pending(&self, key: &OperationKey) -> bool {
        let overlaps =
            |pending: &OperationKey| pending.pod.is_none() || key.pod.is_none() || pending.pod == key.pod;
        if self.declared.is_empty() {
            let first = OperationKey { volume: key.volume.clone(), pod: None };
            let of_volume = self.pending.range(first..).map(|(pending, _)| pending);
            return of_volume.take_while(|pending| pending.volume == key.volume).any(overlaps);
        }
        self.pending.keys().any(|pending| {
            self.declared_name(&pending.volume) == self.declared_name(&key.volume) && overlaps(pending)
        })
    }

    fn declared_name<'a>(&'a self, volume: &'a VolumeName) -> &'a VolumeName {
        self.declared.get(volume).unwrap_or(volume)
    }

    /// Records that a volume that was found on disk has another name. Operations under both names exclude
    /// each other: a leftover may be unmounted when its pod is declared.
    pub fn renamed(&mut self, found: &VolumeName, declared: &VolumeName) {
        self.declared.insert(found.clone(), declared.clone());
    }

    /// Records that an operation starts.
    pub fn started(&mut self, key: OperationKey, kind: OperationKind) {
        self.pending.insert(key, kind);
    }

    /// Records that a shared volume is mounted for a pod. The other pods that have it are next: a mount that
    /// fails for one pod, or an error that all have, must not keep others waiting.
    pub fn took_turn(&mut self, volume: &VolumeName, pod: &PodUid) {
        self.turns.insert(volume.clone(), pod.clone());
    }

    /// Returns whether other pods that have a volume are before this one: pods take turns in the order of
    /// their UIDs.
    #[must_use]
    pub fn had_turn(&self, volume: &VolumeName, pod: &PodUid) -> bool {
        self.turns.get(volume).is_some_and(|last| pod <= last)
    }

    /// Ends the back-off of a failed operation.
    pub fn end_backoff(&mut self, key: &OperationKey) {
        self.failed.remove(key);
    }

    /// Records that an operation ended without an attempt. A back-off stays.
    pub fn abandoned(&mut self, key: &OperationKey) {
        self.pending.remove(key);
    }

    /// Records that an operation succeeded, which ends the back-off of its key.
    pub fn succeeded(&mut self, key: &OperationKey) {
        self.pending.remove(key);
        self.failed.remove(key);
    }

    /// Records that an operation failed at `now`, which is `wall` for display. Returns the text with which
    /// the kubelet logs it.
    ///
    /// The wait is 500 ms, then twice the previous one, up to 2m2s. It is reset for another kind of
    /// operation.
    pub fn failed(&mut self, key: &OperationKey, error: &str, now: Instant, wall: jiff::Timestamp) -> String {
        self.failed_within(LONGEST_WAIT, key, error, now, wall)
    }

    /// Like [`Operations::failed`], with another longest wait.
    pub fn failed_within(
        &mut self,
        longest_wait: Duration,
        key: &OperationKey,
        error: &str,
        now: Instant,
        wall: jiff::Timestamp,
    ) -> String {
        let Some(kind) = self.pending.remove(key) else { return error.to_owned() };
        let previous = self.failed.remove(key).filter(|failed| failed.kind == kind);
        let mut backoff =
            previous.map_or_else(|| Backoff::new(FIRST_WAIT, 2.0, longest_wait), |failed| failed.backoff);
        let wait = backoff.next_wait();
        let until = clock::deadline_after(now, wait);
        self.failed.insert(key.clone(), FailedOperation { kind, backoff, until });
        let until = wall.checked_add(wait).unwrap_or(jiff::Timestamp::MAX);
        format!(
            "Operation for \"{}\" failed. No retries permitted until {} (durationBeforeRetry {}). Error: {error}",
            key.text(),
            until.strftime("%Y-%m-%d %H:%M:%S%.f +0000 UTC"),
            go_duration::format(wait),
        )
    }

    /// Forgets the back-off of volumes for which `keep` does not hold.
    pub fn retain(&mut self, keep: impl Fn(&VolumeName) -> bool) {
        self.failed.retain(|key, _| keep(&key.volume));
        self.turns.retain(|volume, _| keep(volume));
        let pending = &self.pending;
        self.declared.retain(|found, declared| {
            keep(declared) || pending.keys().any(|key| key.volume == *found || key.volume == *declared)
        });
    }

    /// Returns the operations in flight.
    pub fn pending(&self) -> impl Iterator<Item = (&OperationKey, OperationKind)> {
        self.pending.iter().map(|(key, kind)| (key, *kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(pod: Option<&str>) -> OperationKey {
        let volume = VolumeName::shared("kubernetes.io/csi", "d^h");
        OperationKey { volume, pod: pod.map(|uid| PodUid::parse(uid).unwrap()) }
    }

    #[test]
    fn operations_under_the_found_and_the_declared_name_exclude_each_other() {
        let key = |name: &str, pod: Option<&str>| OperationKey {
            volume: VolumeName::shared("p", name),
            pod: pod.map(|uid| PodUid::parse(uid).unwrap()),
        };
        let mut operations = Operations::default();
        operations.started(key("found", None), OperationKind::UnmountDevice);
        assert!(!operations.is_pending(&key("declared", None)));
        operations.renamed(&key("found", None).volume, &key("declared", None).volume);
        operations.retain(|_| false);
        assert!(operations.is_pending(&key("declared", None)));
        assert!(operations.is_pending(&key("declared", Some("a"))));
        operations.succeeded(&key("found", None));
        assert!(!operations.is_pending(&key("declared", None)));
        operations.started(key("declared", None), OperationKind::Mount);
        assert!(operations.is_pending(&key("found", None)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_operation_waits_twice_as_long_each_time_and_has_the_kubelets_text() {
        let (now, wall) = (Instant::now(), "2026-11-22T10:00:00.25Z".parse().unwrap());
        let mut operations = Operations::default();
        let mut texts = Vec::new();
        for _ in 0..10 {
            operations.started(key(Some("u1")), OperationKind::Mount);
            texts.push(operations.failed(&key(Some("u1")), "boom", now, wall));
        }
        assert_eq!(
            texts[0],
            "Operation for \"{volumeName:kubernetes.io/csi/d^h podName:u1 nodeName:}\" failed. No retries permitted until \
             2026-11-22 10:00:00.75 +0000 UTC (durationBeforeRetry 500ms). Error: boom"
        );
        assert!(texts[9].contains("(durationBeforeRetry 2m2s)"), "{}", texts[9]);
        assert_eq!(
            operations.may_start(&key(Some("u1")), OperationKind::Mount, now),
            StartDecision::At(now + LONGEST_WAIT)
        );
        assert_eq!(operations.may_start(&key(Some("u1")), OperationKind::Unmount, now), StartDecision::Now);
        operations.started(key(Some("u1")), OperationKind::Unmount);
        operations.succeeded(&key(Some("u1")));
        assert_eq!(operations.may_start(&key(Some("u1")), OperationKind::Mount, now), StartDecision::Now);
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_on_the_whole_volume_excludes_those_of_pods() {
        let now = Instant::now();
        let mut operations = Operations::default();
        operations.started(key(Some("u1")), OperationKind::Unmount);
        for (other, expected) in [
            (key(Some("u1")), StartDecision::Pending),
            (key(Some("u2")), StartDecision::Now),
            (key(None), StartDecision::Pending),
        ] {
            assert_eq!(operations.may_start(&other, OperationKind::Mount, now), expected, "{other:?}");
        }
        operations.succeeded(&key(Some("u1")));
        operations.started(key(None), OperationKind::UnmountDevice);
        assert_eq!(operations.may_start(&key(Some("u1")), OperationKind::Mount, now), StartDecision::Pending);
    }
}
