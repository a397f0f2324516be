//! Pending resizes: when they are retried, and in which order (`pkg/kubelet/allocation: retryPendingResizes`).

use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use quintlet_model::ids::PodUid;
use tokio::time::Instant;

/// Until the first look, and while sources have not spoken (pkg/kubelet/allocation).
const FIRST_RETRY: Duration = Duration::from_secs(30);
/// Between looks without any other cause.
const RETRY: Duration = Duration::from_secs(180);

/// The queue.
#[derive(Debug)]
pub(crate) struct Resizes {
    pods: Vec<PodUid>,
    // Something happened that may let one of them through.
    moved: bool,
    retry: Instant,
}

impl Resizes {
    pub(crate) fn new() -> Self {
        Self { pods: Vec::new(), moved: false, retry: deadline_after(Instant::now(), FIRST_RETRY) }
    }

    /// A pod asks for something else than it has.
    pub(crate) fn push(&mut self, uid: &PodUid) {
        if !self.pods.contains(uid) {
            self.pods.push(uid.clone());
        }
        self.moved = true;
    }

    /// A pod asks for what it has, or is gone.
    pub(crate) fn drop(&mut self, uid: &PodUid) {
        self.pods.retain(|u| u != uid);
    }

    /// Room may have come.
    pub(crate) fn moved(&mut self) {
        self.moved = true;
    }

    /// When to look without a cause; far away while nothing waits.
    pub(crate) async fn due(&self) {
        if self.pods.is_empty() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until(self.retry).await;
    }

    /// Those to look at now. [`Self::looked`] says what became of them.
    pub(crate) fn take(&mut self, sources_ready: bool) -> Vec<PodUid> {
        if self.pods.is_empty() || !(self.moved || Instant::now() >= self.retry) {
            self.moved = false;
            return Vec::new();
        }
        if !sources_ready {
            // The next snapshot of a source brings it up again.
            self.retry = deadline_after(Instant::now(), FIRST_RETRY);
            return Vec::new();
        }
        self.moved = false;
        self.retry = deadline_after(Instant::now(), RETRY);
        std::mem::take(&mut self.pods)
    }

    /// These still wait.
    pub(crate) fn looked(&mut self, waiting: Vec<PodUid>) {
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
    async fn what_waits_is_looked_at_when_something_moved_and_every_three_minutes() {
        let mut queue = Resizes::new();
        assert!(queue.take(true).is_empty());
        queue.push(&uid("a"));
        queue.push(&uid("a"));
        assert!(queue.take(false).is_empty(), "sources have not spoken");
        assert_eq!(queue.take(true), [uid("a")], "and it is not forgotten");
        queue.looked(vec![uid("a")]);
        assert!(queue.take(true).is_empty(), "nothing moved since");
        let began = Instant::now();
        queue.due().await;
        assert_eq!(began.elapsed(), RETRY);
        assert_eq!(queue.take(true), [uid("a")]);
        queue.looked(vec![uid("a")]);
        queue.moved();
        assert_eq!(queue.take(true), [uid("a")]);
        queue.looked(vec![uid("a")]);
        queue.drop(&uid("a"));
        queue.moved();
        assert!(queue.take(true).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn before_sources_have_spoken_it_is_tried_again_after_half_a_minute() {
        let mut queue = Resizes::new();
        queue.push(&uid("a"));
        let began = Instant::now();
        assert!(queue.take(false).is_empty());
        queue.due().await;
        assert_eq!(began.elapsed(), FIRST_RETRY);
    }
}
