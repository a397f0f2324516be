//! Delays new sandboxes of other pods until the static pods that were admitted earlier have theirs.
//!
//! The API server and the network plugin may be static pods. In a kubelet, manifests are read before the API
//! server's first answer arrives. Here the gate gives the same order.

use std::collections::HashMap;
use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use quintlet_model::ids::PodUid;
use tokio::sync::watch;
use tokio::time::Instant;

/// Longest time that other pods wait for one static pod, from its admission.
const LIMIT: Duration = Duration::from_secs(5);

/// The static pods that have no sandbox yet, each with the time at which other pods stop waiting for it.
#[derive(Debug)]
pub struct StaticPodGate(watch::Sender<HashMap<PodUid, Instant>>);

impl Default for StaticPodGate {
    fn default() -> Self {
        Self(watch::Sender::new(HashMap::new()))
    }
}

impl StaticPodGate {
    /// Adds an admitted static pod.
    pub fn register(&self, uid: &PodUid) {
        let until = deadline_after(Instant::now(), LIMIT);
        self.0.send_modify(|waiting| {
            waiting.insert(uid.clone(), until);
        });
    }

    /// Restarts the limit of a static pod that was held up by another service. No effect on a pod that was
    /// released.
    pub fn extend(&self, uid: &PodUid) {
        self.0.send_if_modified(|waiting| {
            waiting.get_mut(uid).map(|until| *until = deadline_after(Instant::now(), LIMIT)).is_some()
        });
    }

    /// Removes a static pod that has its sandbox, or that will not have one soon.
    pub fn release(&self, uid: &PodUid) {
        self.0.send_if_modified(|waiting| waiting.remove(uid).is_some());
    }

    /// Waits until no static pod is left, or the limit of each has passed.
    pub async fn opened(&self) {
        let mut waiting = self.0.subscribe();
        loop {
            let now = Instant::now();
            let Some(until) =
                waiting.borrow_and_update().values().copied().filter(|until| *until > now).max()
            else {
                return;
            };
            // Either outcome leads to another check. The sender lives as long as `self`.
            let _ = tokio::time::timeout_at(until, waiting.changed()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pod_waits_for_earlier_static_pods_and_not_for_one_that_is_stuck() {
        let uid = |name: &str| PodUid::parse(name).unwrap();
        let began = Instant::now();
        let gate = StaticPodGate::default();
        gate.opened().await;
        assert_eq!(began.elapsed(), Duration::ZERO);

        gate.register(&uid("a"));
        gate.register(&uid("b"));
        let goes = async {
            for name in ["a", "b"] {
                tokio::time::sleep(Duration::from_millis(10)).await;
                gate.release(&uid(name));
            }
        };
        tokio::join!(gate.opened(), goes);
        assert_eq!(began.elapsed(), Duration::from_millis(20));

        let began = Instant::now();
        gate.register(&uid("stuck"));
        tokio::time::sleep(Duration::from_millis(500)).await;
        // A released pod stays released.
        gate.extend(&uid("a"));
        gate.opened().await;
        assert_eq!(began.elapsed(), LIMIT);
        gate.opened().await;
        assert_eq!(began.elapsed(), LIMIT, "the limit applies once");

        let began = Instant::now();
        gate.register(&uid("cut"));
        let cut = async {
            tokio::time::sleep(LIMIT / 2).await;
            gate.extend(&uid("cut"));
        };
        tokio::join!(gate.opened(), cut);
        assert_eq!(began.elapsed(), LIMIT + LIMIT / 2);
    }
}
