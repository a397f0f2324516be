//! Pending resizes: when they are retried, and in which order
//! (`pkg/kubelet/allocation: retryPendingResizes`).

use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use quintlet_model::ids::PodUid;
use tokio::time::Instant;

/// Time until the first retry, and between retries while a source has not delivered its first snapshot
/// (`pkg/kubelet/allocation`).
const FIRST_RETRY: Duration = Duration::from_secs(30);
/// Interval between retries without any other trigger.
const RETRY: Duration = Duration::from_secs(180);

/// The queue of pods whose resize is pending.
#[derive(Debug)]
pub(crate) struct PendingResizes {
    pods: Vec<PodUid>,
    // Something happened that may make a pending resize fit.
    retry_now: bool,
    retry: Instant,
}

impl PendingResizes {
    pub(crate) fn new() -> Self {
        Self { pods: Vec::new(), retry_now: false, retry: deadline_after(Instant::now(), FIRST_RETRY) }
    }

    /// Adds a pod whose desired resources differ from the allocated ones.
    pub(crate) fn push(&mut self, uid: &PodUid) {
        if !self.pods.contains(uid) {
            self.pods.push(uid.clone());
        }
        self.retry_now = true;
    }

    /// Removes a pod whose desired resources are allocated, or that is gone.
    pub(crate) fn drop(&mut self, uid: &PodUid) {
        self.pods.retain(|u| u != uid);
    }

    /// Marks that resources may have become available.
    pub(crate) fn retry_soon(&mut self) {
        self.retry_now = true;
    }

    /// Sleeps until the next retry without a trigger; for ever while the queue is empty.
    pub(crate) async fn due(&self) {
        if self.pods.is_empty() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until(self.retry).await;
    }

    /// Takes the pods to retry now; [`Self::set_pending`] puts back those that stay pending.
    pub(crate) fn take(&mut self, sources_ready: bool) -> Vec<PodUid> {
        if self.pods.is_empty() || !(self.retry_now || Instant::now() >= self.retry) {
            self.retry_now = false;
            return Vec::new();
        }
        if !sources_ready {
            // The next snapshot of a source triggers a retry.
            self.retry = deadline_after(Instant::now(), FIRST_RETRY);
            return Vec::new();
        }
        self.retry_now = false;
        self.retry = deadline_after(Instant::now(), RETRY);
        std::mem::take(&mut self.pods)
    }

    /// Puts back the pods that stay pending.
    pub(crate) fn set_pending(&mut self, waiting: Vec<PodUid>) {
        self.pods = waiting;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn pending_resizes_are_retried_after_a_trigger_and_every_three_minutes() {
        let mut queue = PendingResizes::new();
        assert!(queue.take(true).is_empty());
        queue.push(&uid("a"));
        queue.push(&uid("a"));
        assert!(queue.take(false).is_empty(), "a source has not delivered its first snapshot");
        assert_eq!(queue.take(true), [uid("a")], "the pod stays in the queue");
        queue.set_pending(vec![uid("a")]);
        assert!(queue.take(true).is_empty(), "no trigger since");
        let began = Instant::now();
        queue.due().await;
        assert_eq!(began.elapsed(), RETRY);
        assert_eq!(queue.take(true), [uid("a")]);
        queue.set_pending(vec![uid("a")]);
        queue.retry_soon();
        assert_eq!(queue.take(true), [uid("a")]);
        queue.set_pending(vec![uid("a")]);
        queue.drop(&uid("a"));
        queue.retry_soon();
        assert!(queue.take(true).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn before_the_first_snapshots_a_pending_resize_is_retried_after_30_seconds() {
        let mut queue = PendingResizes::new();
        queue.push(&uid("a"));
        let began = Instant::now();
        assert!(queue.take(false).is_empty());
        queue.due().await;
        assert_eq!(began.elapsed(), FIRST_RETRY);
    }
}
