//! Serves `Pods` of `quintlet.subscribe.v1`: what programs that are not part of Quintlet may see of the
//! node's pods. A message is built field by field from the view of a pod; nothing else of its specification
//! can reach a subscriber.

use std::collections::HashMap;
use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pod_sync_views::{PodView, unix_ns};
use pod_sync_worker::context::Reporting;
use quintlet_kit::journal::{Journal, JournalCursor, JournalEvent, JournalItem};
use quintlet_kit::messages::Bounded;
use quintlet_kit::subscribe::{Subscribers, Subscription};
use quintlet_model::ids::PodUid;
use quintlet_model::text::cut;
use quintlet_proto::subscribe::v1 as wire;
use quintlet_proto::subscribe::v1::pods_server::Pods;
use quintlet_proto::subscribe::v1::watch_pods_event::Event;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Longest reason, in bytes. Those of the kubelet are single words; a container's may come from its runtime.
const MAX_REASON: usize = 256;

/// The state of each pod, for subscribers.
pub(crate) type PodJournal = Journal<PodUid, wire::PodState>;

/// The gRPC service. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct PodsService {
    journal: Arc<PodJournal>,
    subscribers: Subscribers,
    /// Ends the streams at the stop.
    stop: CancellationToken,
}

impl PodsService {
    pub(crate) fn new(journal: Arc<PodJournal>, stop: CancellationToken) -> Self {
        Self { journal, subscribers: Subscribers::new("pods"), stop }
    }
}

/// Copies the views of pods into the journal, each time that one of them changes. The first views are those
/// of all sources.
pub(crate) async fn publish(reporting: Arc<Reporting>, journal: Arc<PodJournal>) {
    let mut versions = reporting.views.subscribe();
    let mut seen: HashMap<PodUid, u64> = HashMap::new();
    reporting.views.complete().await;
    loop {
        versions.mark_unchanged();
        let views = reporting.views.all();
        for view in &views {
            let uid = &view.pod_ref.uid;
            if seen.get(uid) != Some(&view.version) {
                journal.put(uid.clone(), state(view));
            }
        }
        seen = views.iter().map(|view| (view.pod_ref.uid.clone(), view.version)).collect();
        journal.retain(|uid| seen.contains_key(uid));
        journal.set_primed();
        if versions.changed().await.is_err() {
            return;
        }
    }
}

#[tonic::async_trait]
impl Pods for PodsService {
    type WatchStream = Bounded<wire::WatchPodsEvent>;

    async fn watch(
        &self,
        request: Request<wire::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let subscription = self.subscribers.admit(&request)?;
        let resume = request.into_inner().resume;
        let resume = resume.map(|at| JournalCursor { epoch: at.epoch, seq: at.seq });
        let hello = wire::WatchPodsEvent { event: Some(Event::Hello(quintlet_proto::hello())), cursor: None };
        let items = self.journal.read(resume).take_until(self.stop.clone().cancelled_owned());
        let events = items.map(move |item| event(item, &subscription));
        let events = futures::stream::iter([hello]).chain(events).map(Ok);
        Ok(Response::new(Bounded::new("Pods.Watch", events)))
    }
}

fn event(item: JournalItem<PodUid, wire::PodState>, subscription: &Subscription) -> wire::WatchPodsEvent {
    let event = match item.event {
        JournalEvent::SnapshotBegin => Event::SnapshotBegin(wire::SnapshotBegin {}),
        JournalEvent::Value(pod) => Event::Pod((*pod).clone()),
        JournalEvent::Gone(uid) => Event::Gone(wire::PodGone { uid: uid.to_string() }),
        JournalEvent::SnapshotEnd => Event::SnapshotEnd(wire::SnapshotEnd {}),
        JournalEvent::Resync(reason) => {
            subscription.count_resync();
            Event::Resync(wire::Resync { reason: reason.to_owned() })
        }
        JournalEvent::Beat => Event::Beat(wire::Beat {}),
    };
    let cursor = item.cursor.map(|at| wire::Cursor { epoch: at.epoch, seq: at.seq });
    wire::WatchPodsEvent { event: Some(event), cursor }
}

/// Returns what subscribers see of a pod.
fn state(view: &PodView) -> wire::PodState {
    let status = view.status();
    let is_ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    let lists = [
        (wire::ContainerKind::Init, &status.init_container_statuses),
        (wire::ContainerKind::Regular, &status.container_statuses),
        (wire::ContainerKind::Ephemeral, &status.ephemeral_container_statuses),
    ];
    let containers = lists.into_iter().flat_map(|(kind, list)| list.iter().flatten().map(move |c| (kind, c)));
    wire::PodState {
        uid: view.pod_ref.uid.to_string(),
        namespace: view.pod_ref.namespace.to_string(),
        name: view.pod_ref.name.to_string(),
        phase: status.phase.clone().unwrap_or_else(|| "Pending".to_owned()),
        reason: reason(status.reason.as_ref()),
        is_ready,
        is_terminating: view.deletion.is_some() || view.is_removed,
        accepted_unix_ns: view.created_unix_ns,
        containers: containers.map(|(kind, status)| container(kind, status)).collect(),
    }
}

fn container(kind: wire::ContainerKind, status: &ContainerStatus) -> wire::ContainerStatus {
    let shown = wire::ContainerStatus {
        name: status.name.clone(),
        kind: kind as i32,
        is_ready: status.ready,
        is_started: status.started == Some(true),
        restart_count: u32::try_from(status.restart_count).unwrap_or(0),
        last_exit: status.last_state.as_ref().and_then(|state| state.terminated.as_ref()).map(last_exit),
        ..wire::ContainerStatus::default()
    };
    let Some(state) = &status.state else { return shown };
    if let Some(ended) = &state.terminated {
        wire::ContainerStatus {
            state: wire::StatusState::Terminated as i32,
            reason: reason(ended.reason.as_ref()),
            started_unix_ns: time(ended.started_at.as_ref()),
            finished_unix_ns: time(ended.finished_at.as_ref()),
            exit_code: ended.exit_code,
            ..shown
        }
    } else if let Some(running) = &state.running {
        let started_unix_ns = time(running.started_at.as_ref());
        wire::ContainerStatus { state: wire::StatusState::Running as i32, started_unix_ns, ..shown }
    } else {
        let reason = reason(state.waiting.as_ref().and_then(|waiting| waiting.reason.as_ref()));
        wire::ContainerStatus { state: wire::StatusState::Waiting as i32, reason, ..shown }
    }
}

fn last_exit(ended: &ContainerStateTerminated) -> wire::LastExit {
    wire::LastExit {
        exit_code: ended.exit_code,
        reason: reason(ended.reason.as_ref()),
        finished_unix_ns: time(ended.finished_at.as_ref()),
    }
}

fn reason(reason: Option<&String>) -> String {
    cut(reason.map_or("", String::as_str), MAX_REASON).to_owned()
}

fn time(time: Option<&Time>) -> i64 {
    time.map_or(0, |time| unix_ns(time.0))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use pod_sync_layout::SourceKind;
    use prost::Message as _;
    use serde_json::json;

    use super::*;

    const SECRET: &str = "s3cret";

    fn view(pod: serde_json::Value) -> PodView {
        let pod: Pod = serde_json::from_value(pod).unwrap();
        PodView {
            pod_ref: quintlet_model::pod::pod_ref(&pod).unwrap(),
            source: SourceKind::Api,
            pod: Arc::new(pod),
            status: None,
            deletion: None,
            worker: "sync",
            is_removed: false,
            waiting: None,
            decision: Arc::default(),
            created_unix_ns: 5,
            resource_version: SECRET.to_owned(),
            mirror_uid: SECRET.to_owned(),
            version: 1,
        }
    }

    #[test]
    fn a_message_has_the_status_of_a_pod_and_nothing_of_its_specification() {
        let ended = |code: i32| {
            json!({"terminated": {
                "exitCode": code, "reason": "OOMKilled", "message": SECRET, "containerID": SECRET,
                "startedAt": "1970-01-01T00:00:01Z", "finishedAt": "1970-01-01T00:00:02Z",
            }})
        };
        let shown = state(&view(json!({
            "metadata": {
                "name": "web", "namespace": "default", "uid": "u1",
                "annotations": {"a": SECRET}, "labels": {"l": SECRET},
            },
            "spec": {"containers": [{
                "name": "app", "image": SECRET, "command": [SECRET], "env": [{"name": "TOKEN", "value": SECRET}],
            }]},
            "status": {
                "phase": "Running", "message": SECRET, "podIP": "10.1.2.3",
                "conditions": [{"type": "Ready", "status": "True", "message": SECRET}],
                "initContainerStatuses": [{
                    "name": "first", "image": SECRET, "imageID": SECRET, "ready": true, "restartCount": 0,
                    "state": ended(0),
                }],
                "containerStatuses": [{
                    "name": "app", "image": SECRET, "imageID": SECRET, "ready": true, "started": true,
                    "restartCount": 3, "state": {"running": {"startedAt": "1970-01-01T00:00:03Z"}},
                    "lastState": ended(137),
                }],
                "ephemeralContainerStatuses": [{
                    "name": "debug", "image": SECRET, "imageID": SECRET, "ready": false, "restartCount": 0,
                    "state": {"waiting": {"reason": "ErrImagePull", "message": SECRET}},
                }],
            },
        })));
        let second = 1_000_000_000;
        let first = wire::ContainerStatus {
            name: "first".into(),
            kind: wire::ContainerKind::Init as i32,
            state: wire::StatusState::Terminated as i32,
            reason: "OOMKilled".into(),
            is_ready: true,
            started_unix_ns: second,
            finished_unix_ns: 2 * second,
            ..Default::default()
        };
        let last_exit =
            wire::LastExit { exit_code: 137, reason: "OOMKilled".into(), finished_unix_ns: 2 * second };
        let app = wire::ContainerStatus {
            name: "app".into(),
            kind: wire::ContainerKind::Regular as i32,
            state: wire::StatusState::Running as i32,
            is_ready: true,
            is_started: true,
            restart_count: 3,
            started_unix_ns: 3 * second,
            last_exit: Some(last_exit),
            ..Default::default()
        };
        let debug = wire::ContainerStatus {
            name: "debug".into(),
            kind: wire::ContainerKind::Ephemeral as i32,
            state: wire::StatusState::Waiting as i32,
            reason: "ErrImagePull".into(),
            ..Default::default()
        };
        let wanted = wire::PodState {
            uid: "u1".into(),
            namespace: "default".into(),
            name: "web".into(),
            phase: "Running".into(),
            is_ready: true,
            accepted_unix_ns: 5,
            containers: vec![first, app, debug],
            ..Default::default()
        };
        let bytes = shown.encode_to_vec();
        assert_eq!(shown, wanted);
        assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()));
    }

    #[test]
    fn a_pod_that_its_source_removes_is_terminating_and_one_without_a_status_is_pending() {
        let pod = json!({"metadata": {"name": "web", "namespace": "default", "uid": "u1"}});
        let removed = PodView { is_removed: true, ..view(pod.clone()) };
        assert_eq!((state(&removed).is_terminating, state(&removed).phase.as_str()), (true, "Pending"));
        let deleted = PodView { deletion: Some(Time(jiff::Timestamp::UNIX_EPOCH)), ..view(pod.clone()) };
        assert!(state(&deleted).is_terminating && !state(&view(pod)).is_terminating);
    }
}
