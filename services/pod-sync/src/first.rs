//! Static pods go first: the API server, the network and the like may be among them.
//!
//! A kubelet has this by its nature: what it reads from disk is there before the first answer of the API server. Here a pod that
//! is to get its first sandbox waits until the static pods that came before it have theirs, or have failed to get one.

use std::collections::HashMap;
use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use quintlet_model::ids::PodUid;
use tokio::sync::watch;
use tokio::time::Instant;

/// Nobody waits longer than this for one static pod, counted from when it came.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// The static pods that others wait for, and until when.
#[derive(Debug)]
pub struct First(watch::Sender<HashMap<PodUid, Instant>>);

impl Default for First {
    fn default() -> Self {
        Self(watch::Sender::new(HashMap::new()))
    }
}

impl First {
    /// A static pod came.
    pub fn came(&self, uid: &PodUid) {
        let until = deadline_after(Instant::now(), PATIENCE);
        self.0.send_modify(|ahead| {
            ahead.insert(uid.clone(), until);
        });
    }

    /// What kept it was nothing of its own: it is waited for as if it came now, where it still is.
    pub fn was_cut(&self, uid: &PodUid) {
        self.0.send_if_modified(|ahead| {
            ahead.get_mut(uid).map(|until| *until = deadline_after(Instant::now(), PATIENCE)).is_some()
        });
    }

    /// It has its sandbox, or will not have one soon.
    pub fn went(&self, uid: &PodUid) {
        self.0.send_if_modified(|ahead| ahead.remove(uid).is_some());
    }

    /// Waits until none is ahead.
    pub async fn none_ahead(&self) {
        let mut ahead = self.0.subscribe();
        loop {
            let now = Instant::now();
            let Some(until) = ahead.borrow_and_update().values().copied().filter(|until| *until > now).max()
            else {
                return;
            };
            // A change and the time only say "look". The sender lives as long as `self`.
            let _ = tokio::time::timeout_at(until, ahead.changed()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pod_waits_for_static_pods_that_came_before_it_and_not_for_one_that_is_stuck() {
        let uid = |name: &str| PodUid::parse(name).unwrap();
        let began = Instant::now();
        let first = First::default();
        first.none_ahead().await;
        assert_eq!(began.elapsed(), Duration::ZERO);

        first.came(&uid("a"));
        first.came(&uid("b"));
        let goes = async {
            for name in ["a", "b"] {
                tokio::time::sleep(Duration::from_millis(10)).await;
                first.went(&uid(name));
            }
        };
        tokio::join!(first.none_ahead(), goes);
        assert_eq!(began.elapsed(), Duration::from_millis(20));

        let began = Instant::now();
        first.came(&uid("stuck"));
        tokio::time::sleep(Duration::from_millis(500)).await;
        // One that went stays so.
        first.was_cut(&uid("a"));
        first.none_ahead().await;
        assert_eq!(began.elapsed(), PATIENCE);
        first.none_ahead().await;
        assert_eq!(began.elapsed(), PATIENCE, "it is waited for once");

        let began = Instant::now();
        first.came(&uid("cut"));
        let cut = async {
            tokio::time::sleep(PATIENCE / 2).await;
            first.was_cut(&uid("cut"));
        };
        tokio::join!(first.none_ahead(), cut);
        assert_eq!(began.elapsed(), PATIENCE + PATIENCE / 2);
    }
}
