//! What other processes see of the pods of pod-sync.
//!
//! Each pod worker publishes a [`PodView`] in the [`PodViews`] after a pass. The server of podsync.v1,
//! housekeeping, image garbage collection and node shutdown read them. There is no task and no I/O here.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod changes;
mod columns;
mod view;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use parking_lot::RwLock;
use pod_sync_layout::{ManifestProblem, SourceKind};
use quintlet_model::ids::PodUid;
use tokio::sync::watch;

pub use changes::is_same_view;
pub use columns::{Columns, columns};
pub use view::{Decision, PodView, Waiting, unix_ns};

/// The views of all pods and the problems of the sources, with a version that grows with every change.
#[derive(Debug)]
pub struct PodViews {
    pods: RwLock<HashMap<PodUid, Arc<PodView>>>,
    problems: RwLock<BTreeMap<SourceKind, Vec<(ManifestProblem, i64)>>>,
    version: watch::Sender<u64>,
    /// Restored pods that have no view yet.
    expected: watch::Sender<HashSet<PodUid>>,
    /// Pods of the first delivery of all sources that have no view yet. None until every source has delivered
    /// its pods.
    delivered: watch::Sender<Option<HashSet<PodUid>>>,
}

/// Longest wait for the views of restored or delivered pods. The first pass of a worker takes milliseconds.
const RESTORE: Duration = Duration::from_secs(2);

impl Default for PodViews {
    fn default() -> Self {
        Self {
            pods: RwLock::default(),
            problems: RwLock::default(),
            version: watch::Sender::new(0),
            expected: watch::Sender::new(HashSet::new()),
            delivered: watch::Sender::new(None),
        }
    }
}

impl PodViews {
    /// Names the restored pods, whose views are due soon.
    pub fn expect_restored(&self, uids: impl IntoIterator<Item = PodUid>) {
        self.expected.send_modify(|expected| expected.extend(uids));
    }

    /// Waits until every restored pod has a view, so that pods do not seem to be gone after a restart of
    /// pod-sync; 2 s at most.
    pub async fn restored(&self) {
        let mut expected = self.expected.subscribe();
        // The sender exists as long as `self`.
        let _ = tokio::time::timeout(RESTORE, expected.wait_for(HashSet::is_empty)).await;
    }

    /// Records that every source has delivered its pods. Further calls have no effect.
    pub fn set_sources_ready(&self, pods: impl IntoIterator<Item = PodUid>) {
        self.delivered.send_if_modified(|delivered| {
            if delivered.is_some() {
                return false;
            }
            let shown = self.pods.read();
            *delivered = Some(pods.into_iter().filter(|uid| !shown.contains_key(uid)).collect());
            true
        });
    }

    /// Waits until every source has delivered its pods and each of them, and each restored pod, has a view.
    /// It waits 2 s at most for the views: a stuck worker does not hide the other pods.
    pub async fn complete(&self) {
        let mut delivered = self.delivered.subscribe();
        // The sender exists as long as `self`.
        let _ = delivered.wait_for(Option::is_some).await;
        let have_views = delivered.wait_for(|pods| pods.as_ref().is_some_and(HashSet::is_empty));
        let _ = tokio::time::timeout(RESTORE, have_views).await;
        self.restored().await;
    }

    /// Returns whether every source has delivered its pods, and each of them, and each restored pod, has a
    /// view.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.delivered.borrow().as_ref().is_some_and(HashSet::is_empty) && self.expected.borrow().is_empty()
    }

    /// Returns whether every source has delivered its pods.
    #[must_use]
    pub fn are_sources_ready(&self) -> bool {
        self.delivered.borrow().is_some()
    }

    fn has_come(&self, uid: &PodUid) {
        self.expected.send_if_modified(|expected| expected.remove(uid));
        self.delivered.send_if_modified(|pods| pods.as_mut().is_some_and(|pods| pods.remove(uid)));
    }

    /// Publishes a view and gives it the next version.
    pub fn publish(&self, uid: &PodUid, mut view: PodView) {
        self.version.send_modify(|v| {
            *v = v.saturating_add(1);
            view.version = *v;
            self.pods.write().insert(uid.clone(), Arc::new(view));
        });
        self.has_come(uid);
    }

    /// Changes a published view. A view that was removed meanwhile stays removed.
    fn change(&self, uid: &PodUid, change: impl FnOnce(&PodView) -> Option<PodView>) {
        self.version.send_if_modified(|v| {
            let mut pods = self.pods.write();
            let Some(shown) = pods.get_mut(uid) else { return false };
            let Some(mut view) = change(shown) else { return false };
            *v = v.saturating_add(1);
            view.version = *v;
            *shown = Arc::new(view);
            true
        });
    }

    /// Changes what a pod waits for, while its worker is in a long call.
    pub fn set_waiting(&self, uid: &PodUid, waiting: Option<Waiting>) {
        self.change(uid, |shown| {
            let shown_wait = |w: &Waiting| (w.reason.clone(), w.container.clone(), w.message.clone());
            let is_new = shown.waiting.as_ref().map(shown_wait) != waiting.as_ref().map(shown_wait);
            is_new.then(|| PodView { waiting, ..shown.clone() })
        });
    }

    /// Publishes at once whether the source removes or deletes a pod: its worker may be in a call that takes
    /// minutes.
    pub fn set_removal(&self, uid: &PodUid, is_removed: bool, deletion: Option<&Time>) {
        self.change(uid, |shown| {
            let is_new = shown.is_removed != is_removed || shown.deletion.as_ref() != deletion;
            is_new.then(|| PodView { is_removed, deletion: deletion.cloned(), ..shown.clone() })
        });
    }

    /// Removes the view of a pod.
    pub fn remove(&self, uid: &PodUid) {
        if self.pods.write().remove(uid).is_some() {
            self.version.send_modify(|v| *v = v.saturating_add(1));
        }
        self.has_come(uid);
    }

    /// Returns the view of a pod.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<Arc<PodView>> {
        self.pods.read().get(uid).cloned()
    }

    /// Returns all views, sorted by namespace and name.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<PodView>> {
        let mut all: Vec<_> = self.pods.read().values().cloned().collect();
        all.sort_by(|a, b| {
            (&a.pod_ref.namespace, &a.pod_ref.name).cmp(&(&b.pod_ref.namespace, &b.pod_ref.name))
        });
        all
    }

    /// Returns the namespace and name of each pod as namespace/name, by its UID.
    #[must_use]
    pub fn names(&self) -> HashMap<PodUid, String> {
        let pods = self.pods.read();
        let named = |(uid, view): (&PodUid, &Arc<PodView>)| {
            (uid.clone(), format!("{}/{}", view.pod_ref.namespace, view.pod_ref.name))
        };
        pods.iter().map(named).collect()
    }

    /// Replaces the problems of one source; each keeps the time it was first seen.
    pub fn set_problems(&self, source: SourceKind, problems: Vec<ManifestProblem>, now_unix_ns: i64) {
        let mut all = self.problems.write();
        let old = all.remove(&source).unwrap_or_default();
        let new: Vec<_> = problems
            .into_iter()
            .map(|p| {
                let since = old.iter().find(|(o, _)| *o == p).map_or(now_unix_ns, |(_, t)| *t);
                (p, since)
            })
            .collect();
        let changed = new != old;
        all.insert(source, new);
        drop(all);
        if changed {
            self.version.send_modify(|v| *v = v.saturating_add(1));
        }
    }

    /// Problems of all sources, with the time each was first seen.
    #[must_use]
    pub fn problems(&self) -> Vec<(SourceKind, ManifestProblem, i64)> {
        let all = self.problems.read();
        all.iter().flat_map(|(s, list)| list.iter().map(|(p, t)| (*s, p.clone(), *t))).collect()
    }

    /// Subscribes to the version.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_view_removed_while_its_worker_publishes_a_wait_stays_removed() {
        let uid = PodUid::parse("u1").expect("a UID");
        let shown = |views: &PodViews| {
            let pod: Pod = serde_json::from_value(serde_json::json!({
                "metadata": {"name": "p", "namespace": "default", "uid": "u1"},
            }))
            .expect("a pod");
            let view = PodView {
                pod_ref: quintlet_model::pod::pod_ref(&pod).expect("names"),
                source: SourceKind::Api,
                pod: Arc::new(pod),
                status: None,
                deletion: None,
                worker: "sync",
                is_removed: false,
                waiting: None,
                decision: Arc::default(),
                created_unix_ns: 0,
                resource_version: String::new(),
                mirror_uid: String::new(),
                version: 0,
            };
            views.publish(&uid, view);
        };
        let views = PodViews::default();
        for round in 0..2000 {
            shown(&views);
            let together = std::sync::Barrier::new(2);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    together.wait();
                    views
                        .set_waiting(&uid, Some(Waiting { reason: round.to_string(), ..Waiting::default() }));
                });
                together.wait();
                views.remove(&uid);
            });
            assert!(views.get(&uid).is_none(), "round {round}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_pods_are_complete_once_the_sources_have_delivered_and_their_pods_have_views() {
        let views = Arc::new(PodViews::default());
        let began = Instant::now();
        let waiting = Arc::clone(&views);
        let waiting = quintlet_kit::task::spawn("complete", async move { waiting.complete().await });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!waiting.is_finished() && !views.are_sources_ready(), "a source is missing");
        let uid = |name: &str| PodUid::parse(name).expect("a UID");
        views.set_sources_ready([uid("u1"), uid("u2")]);
        views.set_sources_ready([uid("u3")]);
        views.remove(&uid("u1"));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!waiting.is_finished() && views.are_sources_ready(), "a pod has no view");
        views.remove(&uid("u2"));
        waiting.await.expect("it ends");
        assert_eq!(began.elapsed(), Duration::from_secs(61));
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_restart_readers_wait_until_every_restored_pod_has_a_view_or_is_gone() {
        let views = Arc::new(PodViews::default());
        let began = Instant::now();
        views.restored().await;
        assert_eq!(began.elapsed(), Duration::ZERO, "no pod was restored");
        let uid = |name: &str| PodUid::parse(name).expect("a UID");
        views.expect_restored([uid("u1"), uid("u2")]);
        let waiting = Arc::clone(&views);
        let waiting = quintlet_kit::task::spawn("restored", async move { waiting.restored().await });
        views.remove(&uid("u1"));
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(!waiting.is_finished());
        views.remove(&uid("u2"));
        waiting.await.expect("it ends");
        assert_eq!(began.elapsed(), Duration::from_millis(10));
        views.expect_restored([uid("u3")]);
        views.restored().await;
        assert_eq!(
            began.elapsed(),
            RESTORE + Duration::from_millis(10),
            "a stuck worker does not hide the other pods"
        );
    }
}
