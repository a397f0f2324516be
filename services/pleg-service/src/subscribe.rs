//! Serves `Containers` of `quintlet.subscribe.v1`: what programs that are not part of Quintlet may see of the
//! runtime's state. A message is built field by field; nothing else of a record can reach a subscriber.

use futures::StreamExt as _;
use quintlet_kit::messages::Bounded;
use quintlet_kit::subscribe::{Subscribers, Subscription};
use quintlet_model::runtime::{Container, ContainerState, Cursor, PodRuntime};
use quintlet_model::text::cut;
use quintlet_proto::subscribe::v1 as wire;
use quintlet_proto::subscribe::v1::containers_server::Containers;
use quintlet_proto::subscribe::v1::watch_containers_event::Event;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::readers::{ReaderEvent, ReaderItem, ReaderKind, Readers};
use crate::store::Latest;

/// Longest reason of an exit, in bytes. Runtimes have single words.
const MAX_REASON: usize = 256;

/// The gRPC service. Clones share it.
#[derive(Debug, Clone)]
pub struct ContainersService {
    readers: Readers,
    subscribers: Subscribers,
    /// Ends the streams at the stop.
    stop: CancellationToken,
}

impl ContainersService {
    pub(crate) fn new(readers: Readers, stop: CancellationToken) -> Self {
        Self { readers, subscribers: Subscribers::new("containers"), stop }
    }
}

#[tonic::async_trait]
impl Containers for ContainersService {
    type WatchStream = Bounded<wire::WatchContainersEvent>;

    async fn watch(
        &self,
        request: Request<wire::WatchContainersRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let subscription = self.subscribers.admit(&request)?;
        let resume = request.into_inner().resume.map(|at| Cursor { epoch: at.epoch, rev: at.seq });
        let items = self.readers.items(resume, ReaderKind::Subscriber);
        let items = items.take_until(self.stop.clone().cancelled_owned());
        let events = items.map(move |item| Ok(event(item, &subscription)));
        Ok(Response::new(Bounded::new("Containers.Watch", events)))
    }
}

fn event(item: ReaderItem, subscription: &Subscription) -> wire::WatchContainersEvent {
    let event = match item.event {
        ReaderEvent::Hello => Event::Hello(quintlet_proto::hello()),
        ReaderEvent::SnapshotBegin => Event::SnapshotBegin(wire::SnapshotBegin {}),
        ReaderEvent::Pod(Latest { pod: Some(pod), .. }) => Event::Pod(pod_containers(&pod)),
        ReaderEvent::Pod(Latest { uid, .. }) => Event::Gone(wire::PodContainersGone { uid: uid.to_string() }),
        ReaderEvent::SnapshotEnd => Event::SnapshotEnd(wire::SnapshotEnd {}),
        ReaderEvent::Resync(reason) => {
            subscription.count_resync();
            Event::Resync(wire::Resync { reason })
        }
        ReaderEvent::Beat => Event::Beat(wire::Beat {}),
    };
    let cursor = item.cursor.map(|at| wire::Cursor { epoch: at.epoch, seq: at.rev });
    wire::WatchContainersEvent { event: Some(event), cursor }
}

fn pod_containers(pod: &PodRuntime) -> wire::PodContainers {
    wire::PodContainers {
        uid: pod.pod.uid.to_string(),
        namespace: pod.pod.namespace.to_string(),
        name: pod.pod.name.to_string(),
        is_sandbox_ready: pod.active_sandbox().is_some(),
        containers: pod.containers.iter().map(container).collect(),
    }
}

fn container(container: &Container) -> wire::ContainerInstance {
    let state = match container.state {
        ContainerState::Created => wire::ContainerState::Created,
        ContainerState::Running => wire::ContainerState::Running,
        ContainerState::Exited => wire::ContainerState::Exited,
        ContainerState::Unknown => wire::ContainerState::Unknown,
    };
    wire::ContainerInstance {
        name: container.name.clone(),
        restart_count: container.restart_count(),
        state: state as i32,
        created_unix_ns: container.created_unix_ns,
        started_unix_ns: container.started_unix_ns,
        finished_unix_ns: container.finished_unix_ns,
        exit_code: container.exit_code,
        reason: cut(&container.reason, MAX_REASON).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use prost::Message as _;
    use quintlet_kit::clock::Clock;
    use quintlet_kit::socket::Peer;
    use quintlet_kit::subscribe::{STREAMS, STREAMS_OF_USER};
    use quintlet_model::ids::{ContainerId, PodRef, PodUid, SandboxId};
    use quintlet_model::labels;
    use quintlet_model::runtime::{Mount, User};

    use super::*;
    use crate::store::{Store, TOMBSTONES};

    const SECRET: &str = "s3cret";

    /// Returns a container that has the secret in each text that no subscriber may see.
    fn exited(restarts: u32) -> Container {
        let secret = || BTreeMap::from([(SECRET.to_owned(), SECRET.to_owned())]);
        let mut annotations = secret();
        annotations.insert(labels::RESTART_COUNT.to_owned(), restarts.to_string());
        Container {
            id: ContainerId::parse("c1").unwrap(),
            sandbox_id: SandboxId::parse("s1").unwrap(),
            name: "app".to_owned(),
            attempt: restarts,
            state: ContainerState::Exited,
            created_unix_ns: 1,
            started_unix_ns: 2,
            finished_unix_ns: 3,
            exit_code: 137,
            reason: "OOMKilled".to_owned(),
            message: SECRET.to_owned(),
            image: SECRET.to_owned(),
            image_ref: SECRET.to_owned(),
            image_id: SECRET.to_owned(),
            log_path: SECRET.to_owned(),
            labels: secret(),
            annotations,
            mounts: vec![Mount { container_path: SECRET.into(), host_path: SECRET.into(), readonly: false }],
            resources: None,
            user: Some(User::default()),
            stop_signal: SECRET.to_owned(),
        }
    }

    fn pod(restarts: u32) -> PodRuntime {
        let pod =
            PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() };
        let empty = PodRuntime::empty(pod, Cursor::default(), Duration::ZERO);
        PodRuntime { containers: vec![exited(restarts)], error: Some(SECRET.to_owned()), ..empty }
    }

    #[test]
    fn a_message_has_the_exit_of_a_container_and_no_other_text_of_the_record() {
        let sent = pod_containers(&pod(4));
        let wanted = wire::ContainerInstance {
            name: "app".to_owned(),
            restart_count: 4,
            state: wire::ContainerState::Exited as i32,
            created_unix_ns: 1,
            started_unix_ns: 2,
            finished_unix_ns: 3,
            exit_code: 137,
            reason: "OOMKilled".to_owned(),
        };
        assert_eq!(sent.containers, [wanted]);
        assert_eq!((&*sent.uid, &*sent.namespace, &*sent.name), ("u1", "default", "web"));
        let bytes = sent.encode_to_vec();
        assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()));
    }

    /// Opens a stream, and returns its events up to the end of the snapshot or, without one, up to the first
    /// beat.
    async fn read(
        service: &ContainersService,
        resume: Option<wire::Cursor>,
    ) -> Vec<wire::WatchContainersEvent> {
        let request = Request::new(wire::WatchContainersRequest { hello: None, resume });
        let mut stream = service.watch(request).await.unwrap().into_inner();
        let mut all = Vec::new();
        loop {
            let event = stream.next().await.unwrap().unwrap();
            let is_last = matches!(event.event, Some(Event::SnapshotEnd(_) | Event::Beat(_)));
            all.push(event);
            if is_last {
                return all;
            }
        }
    }

    fn words(events: &[wire::WatchContainersEvent]) -> Vec<&'static str> {
        let word = |event: &wire::WatchContainersEvent| match event.event.as_ref().unwrap() {
            Event::Hello(_) => "hello",
            Event::SnapshotBegin(_) => "begin",
            Event::SnapshotEnd(_) => "end",
            Event::Resync(_) => "resync",
            Event::Beat(_) => "beat",
            Event::Pod(_) => "pod",
            Event::Gone(_) => "gone",
        };
        events.iter().map(word).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_begins_with_a_snapshot_and_continues_at_a_cursor() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1));
        let readers = Readers::new(Store::new(7, TOMBSTONES), clock, Duration::from_secs(5));
        let (store, stop) = (readers.store.clone(), CancellationToken::new());
        let service = ContainersService::new(readers, stop);
        assert_eq!(words(&read(&service, None).await), ["hello", "beat"], "the first list is not complete");
        store.publish(pod(0), None);
        store.set_primed();
        let first = read(&service, None).await;
        assert_eq!(words(&first), ["hello", "begin", "pod", "end"]);
        let cursor = first.last().unwrap().cursor.unwrap();
        assert_eq!((cursor.epoch, cursor.seq), (7, 1));
        store.publish(pod(1), None);
        store.publish(pod(2), None);
        let more = read(&service, Some(cursor)).await;
        assert_eq!(words(&more), ["hello", "pod", "beat"], "only the latest state is sent");
        let Some(Event::Pod(pod)) = &more[1].event else { panic!("{more:?}") };
        assert_eq!((pod.containers[0].restart_count, more[1].cursor.unwrap().seq), (2, 3));
        store.remove(&PodUid::parse("u1").unwrap(), Duration::ZERO, None);
        assert_eq!(words(&read(&service, more[1].cursor).await), ["hello", "gone", "beat"]);
        for (epoch, seq) in [(6, 1), (8, 1), (7, 90)] {
            let lost = read(&service, Some(wire::Cursor { epoch, seq })).await;
            assert_eq!(words(&lost), ["hello", "resync", "begin", "end"], "{epoch} {seq}");
        }
        let text = quintlet_telemetry::metrics::text();
        assert!(text.contains("\nquintlet_subscriber_resyncs_total{stream=\"containers\"} 3\n"), "{text}");
        assert_eq!(service.subscribers.open(), 0);
    }

    #[tokio::test]
    async fn a_stream_beyond_the_limit_is_refused_until_another_one_ends() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1));
        let readers = Readers::new(Store::new(7, TOMBSTONES), clock, Duration::from_secs(5));
        let service = ContainersService::new(readers, CancellationToken::new());
        let request = |uid| {
            let mut request = Request::new(wire::WatchContainersRequest::default());
            request.extensions_mut().insert(Peer { uid, pid: None });
            request
        };
        let mut open = Vec::new();
        for place in 0..STREAMS {
            let user = u32::try_from(place / STREAMS_OF_USER).unwrap();
            open.push(service.watch(request(user)).await.unwrap());
        }
        assert_eq!(service.subscribers.open(), STREAMS);
        let refused = service.watch(request(100)).await.map(drop).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        open.pop();
        service.watch(request(100)).await.unwrap();
        let text = quintlet_telemetry::metrics::text();
        assert!(text.contains("\nquintlet_subscribers_rejected_total{stream=\"containers\"} 1\n"), "{text}");
    }
}
