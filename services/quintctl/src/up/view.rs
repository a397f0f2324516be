//! The pods as pod-sync shows them, kept up to date.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::watch_pods_event::Event;
use quintlet_proto::podsync::v1::{PodView, SourceProblem, WatchPodsRequest};
use tokio::sync::watch;

/// Between two attempts to reach pod-sync.
const RETRY: Duration = Duration::from_millis(100);

/// What is known of the pods.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    /// By UID.
    pub(super) pods: BTreeMap<String, PodView>,
    pub(super) problems: Vec<SourceProblem>,
    /// Pod-sync answered in full since the view began.
    pub(super) complete: bool,
}

impl View {
    /// The longest grace period of a pod, in seconds.
    pub(super) fn longest_grace(&self) -> u64 {
        self.pods.values().filter_map(grace).max().unwrap_or(0)
    }
}

fn grace(pod: &PodView) -> Option<u64> {
    let pod: serde_json::Value = serde_json::from_slice(&pod.pod).ok()?;
    pod.pointer("/spec/terminationGracePeriodSeconds").map_or(Some(30), serde_json::Value::as_u64)
}

/// Follows pod-sync at a socket until nobody looks any more; reconnects on its own.
pub(super) async fn follow(socket: PathBuf, view: watch::Sender<View>) {
    while !view.is_closed() {
        if let Ok(channel) = quintlet_localnode::cri::connect(&socket).await {
            let mut seen = Some(BTreeSet::new());
            let request =
                WatchPodsRequest { hello: Some(quintlet_proto::hello()), ..WatchPodsRequest::default() };
            // A stream that ends, for whatever reason, is opened again.
            if let Ok(stream) = PodSyncClient::new(channel).watch_pods(request).await {
                let mut stream = stream.into_inner();
                while let Ok(Some(message)) = stream.message().await {
                    view.send_modify(|view| apply(view, &mut seen, message.event));
                }
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// `seen` has the pods of the snapshot until its end: those that are not in it are gone.
fn apply(view: &mut View, seen: &mut Option<BTreeSet<String>>, event: Option<Event>) {
    match event {
        Some(Event::Pod(pod)) => {
            if let Some(seen) = seen {
                seen.insert(pod.uid.clone());
            }
            view.pods.insert(pod.uid.clone(), pod);
        }
        Some(Event::Removed(pod)) => {
            view.pods.remove(&pod.uid);
        }
        Some(Event::SnapshotEnd(_)) => {
            if let Some(seen) = seen.take() {
                view.pods.retain(|uid, _| seen.contains(uid));
            }
            view.complete = true;
        }
        Some(Event::Problems(problems)) => view.problems = problems.problems,
        Some(Event::Hello(_)) | None => {}
    }
}

#[cfg(test)]
mod tests {
    use quintlet_proto::podsync::v1::{PodRemoved, SnapshotEnd};

    use super::*;

    fn pod(uid: &str) -> Option<Event> {
        Some(Event::Pod(PodView { uid: uid.to_owned(), ..PodView::default() }))
    }

    #[test]
    fn after_a_reconnect_pods_that_are_gone_go_with_the_end_of_the_snapshot_only() {
        let mut view = View::default();
        let end = || Some(Event::SnapshotEnd(SnapshotEnd {}));
        let mut seen = Some(BTreeSet::new());
        for event in [pod("a"), pod("b"), end()] {
            apply(&mut view, &mut seen, event);
        }
        assert!(view.complete);
        let mut seen = Some(BTreeSet::new());
        apply(&mut view, &mut seen, pod("b"));
        assert_eq!(view.pods.len(), 2);
        apply(&mut view, &mut seen, end());
        assert_eq!(view.pods.keys().collect::<Vec<_>>(), ["b"]);
        apply(
            &mut view,
            &mut seen,
            Some(Event::Removed(PodRemoved { uid: "b".into(), ..PodRemoved::default() })),
        );
        assert!(view.pods.is_empty());
    }

    #[test]
    fn a_pod_without_a_grace_period_has_the_default_one() {
        let with = |json: &str| PodView { pod: json.as_bytes().to_vec(), ..PodView::default() };
        assert_eq!(grace(&with(r#"{"spec":{}}"#)), Some(30));
        assert_eq!(grace(&with(r#"{"spec":{"terminationGracePeriodSeconds":2}}"#)), Some(2));
        assert_eq!(grace(&with("")), None);
    }
}
