//! Follows pod-sync's view of the pods.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::watch_pods_event::Event;
use quintlet_proto::podsync::v1::{PodView, SourceProblem, WatchPodsRequest};
use tokio::sync::watch;

/// The last state of the pods.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// By UID.
    pub(crate) pods: BTreeMap<String, PodView>,
    pub(crate) problems: Vec<SourceProblem>,
    /// At least one snapshot is complete.
    pub(crate) complete: bool,
}

impl View {
    /// Returns the number of pods that have not terminated, and the longest of their grace periods, in
    /// seconds.
    pub(crate) fn unfinished(&self) -> (usize, u64) {
        self.pods.values().filter_map(grace).fold((0, 0), |(n, longest), grace| (n + 1, longest.max(grace)))
    }
}

/// Returns the grace period of a pod in seconds, or none if the pod has terminated.
fn grace(pod: &PodView) -> Option<u64> {
    let pod: serde_json::Value = serde_json::from_slice(&pod.pod).ok()?;
    let phase = pod.pointer("/status/phase").and_then(serde_json::Value::as_str);
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    pod.pointer("/spec/terminationGracePeriodSeconds").map_or(Some(30), serde_json::Value::as_u64)
}

/// Follows pod-sync at a socket and reconnects, until the receivers are dropped.
pub(crate) async fn follow(socket: PathBuf, view: watch::Sender<View>) {
    while !view.is_closed() {
        if let Ok(channel) = quintlet_localnode::cri::connect(&socket).await {
            let mut seen = Some(BTreeSet::new());
            let request =
                WatchPodsRequest { hello: Some(quintlet_proto::hello()), ..WatchPodsRequest::default() };
            // The stream is reopened after any error.
            if let Ok(stream) = PodSyncClient::new(channel).watch_pods(request).await {
                let mut stream = stream.into_inner();
                while let Ok(Some(message)) = stream.message().await {
                    view.send_modify(|view| apply(view, &mut seen, message.event));
                }
            }
        }
        tokio::time::sleep(CONNECT_INTERVAL).await;
    }
}

/// Applies an event. `seen` collects the pods of a snapshot; at its end, other pods are removed.
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
    use std::time::Duration;

    use quintlet_proto::podsync::v1::pod_sync_server::{PodSync, PodSyncServer};
    use quintlet_proto::podsync::v1::{
        ExplainReply, ExplainRequest, GetPodRequest, ListEventsReply, ListEventsRequest, ListPodsReply,
        ListPodsRequest, PodRemoved, RetryReply, RetryRequest, SnapshotEnd, WatchPodsEvent,
    };

    use super::*;

    fn pod(uid: &str) -> Option<Event> {
        Some(Event::Pod(PodView { uid: uid.to_owned(), ..PodView::default() }))
    }

    #[test]
    fn after_a_reconnect_removed_pods_disappear_at_the_end_of_the_snapshot() {
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

    /// Answers each WatchPods with the next script, then ends the stream.
    #[derive(Clone, Default)]
    struct Scripted(std::sync::Arc<parking_lot::Mutex<std::collections::VecDeque<Vec<Event>>>>);

    #[tonic::async_trait]
    impl PodSync for Scripted {
        type WatchPodsStream = tokio_stream::Iter<std::vec::IntoIter<Result<WatchPodsEvent, tonic::Status>>>;

        async fn watch_pods(
            &self,
            _: tonic::Request<WatchPodsRequest>,
        ) -> Result<tonic::Response<Self::WatchPodsStream>, tonic::Status> {
            let script =
                self.0.lock().pop_front().ok_or_else(|| tonic::Status::unavailable("script over"))?;
            let events = script.into_iter().map(|e| Ok(WatchPodsEvent { event: Some(e), trace: None }));
            Ok(tonic::Response::new(tokio_stream::iter(events.collect::<Vec<_>>())))
        }

        type ListPodsStream = tokio_stream::Empty<Result<ListPodsReply, tonic::Status>>;

        async fn list_pods(
            &self,
            _: tonic::Request<ListPodsRequest>,
        ) -> Result<tonic::Response<Self::ListPodsStream>, tonic::Status> {
            Err(tonic::Status::unimplemented("not scripted"))
        }

        async fn get_pod(
            &self,
            _: tonic::Request<GetPodRequest>,
        ) -> Result<tonic::Response<PodView>, tonic::Status> {
            Err(tonic::Status::unimplemented("not scripted"))
        }

        async fn explain(
            &self,
            _: tonic::Request<ExplainRequest>,
        ) -> Result<tonic::Response<ExplainReply>, tonic::Status> {
            Err(tonic::Status::unimplemented("not scripted"))
        }

        type ListEventsStream = tokio_stream::Empty<Result<ListEventsReply, tonic::Status>>;

        async fn list_events(
            &self,
            _: tonic::Request<ListEventsRequest>,
        ) -> Result<tonic::Response<Self::ListEventsStream>, tonic::Status> {
            Err(tonic::Status::unimplemented("not scripted"))
        }

        async fn retry(
            &self,
            _: tonic::Request<RetryRequest>,
        ) -> Result<tonic::Response<RetryReply>, tonic::Status> {
            Err(tonic::Status::unimplemented("not scripted"))
        }
    }

    #[tokio::test]
    async fn the_view_continues_if_pod_sync_starts_late_or_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("podsync.sock");
        let (views, mut view) = watch::channel(View::default());
        let follower = quintlet_kit::task::spawn("follow", follow(socket.clone(), views));
        let end = || Event::SnapshotEnd(SnapshotEnd {});
        let scripts = Scripted::default();
        let service = PodSyncServer::new(scripts.clone());
        let incoming =
            tokio_stream::wrappers::UnixListenerStream::new(tokio::net::UnixListener::bind(&socket).unwrap());
        let server = tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming);
        let server = quintlet_kit::task::spawn("server", server);
        let both = |view: &View| view.complete && view.pods.len() == 2;
        let one = |view: &View| view.complete && view.pods.keys().eq(["b"]);
        let limit = Duration::from_secs(10);
        scripts.0.lock().push_back(vec![pod("a").unwrap(), pod("b").unwrap(), end()]);
        tokio::time::timeout(limit, view.wait_for(both)).await.unwrap().unwrap();
        scripts.0.lock().push_back(vec![pod("b").unwrap(), end()]);
        tokio::time::timeout(limit, view.wait_for(one)).await.unwrap().unwrap();
        follower.abort();
        server.abort();
    }

    #[test]
    fn a_pod_without_a_grace_period_has_the_default_one() {
        let with = |json: &str| PodView { pod: json.as_bytes().to_vec(), ..PodView::default() };
        assert_eq!(grace(&with(r#"{"spec":{}}"#)), Some(30));
        assert_eq!(grace(&with(r#"{"spec":{"terminationGracePeriodSeconds":2}}"#)), Some(2));
        assert_eq!(grace(&with("")), None);
        assert_eq!(
            grace(&with(r#"{"spec":{},"status":{"phase":"Succeeded"}}"#)),
            None,
            "nothing is left to stop"
        );
    }
}
