//! Distributes runtime events to subscribers.
use std::sync::Arc;

use parking_lot::Mutex;
use prost::Message as _;
use quintlet_proto::runtime::v1 as pb;
use quintlet_proto::runtime::v1::runtime_event::Event;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::metrics::Metrics;
use crate::runtime_info;

/// Number of hints that a subscriber may lag behind: a burst of 500 containers with five events each, and
/// half as many again.
pub const CAPACITY: usize = 4096;

/// Distributes events to subscribers.
#[derive(Debug, Clone)]
pub struct Hub {
    inner: Arc<Mutex<Inner>>,
    metrics: Metrics,
}

#[derive(Debug)]
struct Inner {
    state: pb::SourceState,
    // The channel has a slot for each event that a subscriber may lag behind, from its start.
    sender: broadcast::Sender<Arc<Event>>,
}

impl Hub {
    /// Creates a hub without a source, for subscribers that lag by at most `capacity`.
    #[must_use]
    pub fn new(capacity: usize, metrics: Metrics) -> Self {
        let state = pb::SourceState {
            source: pb::HintSource::None.into(),
            live: false,
            detail: "the runtime has not been reached yet".to_owned(),
        };
        let inner = Inner { state, sender: broadcast::Sender::new(capacity) };
        Self { inner: Arc::new(Mutex::new(inner)), metrics }
    }

    /// Returns the state of the source.
    #[must_use]
    pub fn state(&self) -> pb::SourceState {
        self.inner.lock().state.clone()
    }

    /// Sends a changed state of the source to all subscribers.
    pub fn set_state(&self, state: pb::SourceState) {
        let mut inner = self.inner.lock();
        if inner.state == state {
            return;
        }
        let same_place = inner.state.source == state.source && inner.state.live == state.live;
        inner.state = state.clone();
        if !same_place {
            tracing::info!(source = ?state.source(), live = state.live, detail = state.detail, "hint source changed");
        }
        // There may be no subscriber. A later one starts with the state.
        let _ = inner.sender.send(Arc::new(Event::Source(state)));
    }

    /// Sends a hint to all subscribers.
    pub fn hint(&self, hint: pb::Hint) {
        self.metrics.hint(hint.kind().as_str_name());
        let _ = self.inner.lock().sender.send(Arc::new(Event::Hint(hint)));
    }

    /// Subscribes. The first event is the current state of the source.
    #[must_use]
    pub fn subscribe(&self) -> Subscriber {
        let inner = self.inner.lock();
        self.metrics.subscribers.inc();
        Subscriber {
            next: vec![Event::Source(inner.state.clone()), Event::Hello(quintlet_proto::hello())],
            receiver: inner.sender.subscribe(),
            hub: self.clone(),
        }
    }
}

/// A subscriber of the hub.
#[derive(Debug)]
pub struct Subscriber {
    /// Events before those of the channel, last first.
    next: Vec<Event>,
    receiver: broadcast::Receiver<Arc<Event>>,
    hub: Hub,
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.hub.metrics.subscribers.dec();
    }
}

impl Subscriber {
    /// Returns the next event, or none if the hub was dropped. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        if let Some(event) = self.next.pop() {
            return Some(event);
        }
        match self.receiver.recv().await {
            Ok(event) => Some(Arc::unwrap_or_clone(event)),
            Err(RecvError::Lagged(missed)) => {
                self.hub.metrics.hints_missed.inc_by(missed);
                // The missed events may include a change of the source.
                self.next.push(Event::Source(self.hub.state()));
                Some(Event::Overrun(pb::Overrun { missed }))
            }
            Err(RecvError::Closed) => None,
        }
    }
}

/// Subscribed topics of containerd.
pub const TOPICS: [&str; 6] = [
    "/containers/create",
    "/tasks/start",
    "/tasks/exit",
    "/tasks/delete",
    "/containers/delete",
    "/tasks/oom",
];

/// Converts a containerd event to a hint. Returns none for exits of exec processes, other topics, and
/// undecodable events.
#[must_use]
pub fn from_containerd(envelope: &containerd_client::types::Envelope) -> Option<pb::Hint> {
    use containerd_client::events as ev;
    let value = envelope.event.as_ref()?.value.as_slice();
    let (kind, id, exit_code) = match envelope.topic.as_str() {
        "/containers/create" => (pb::HintKind::Created, ev::ContainerCreate::decode(value).ok()?.id, 0),
        "/containers/delete" => (pb::HintKind::Deleted, ev::ContainerDelete::decode(value).ok()?.id, 0),
        "/tasks/start" => (pb::HintKind::Started, ev::TaskStart::decode(value).ok()?.container_id, 0),
        "/tasks/oom" => (pb::HintKind::Oom, ev::TaskOom::decode(value).ok()?.container_id, 0),
        "/tasks/exit" => {
            let exit = ev::TaskExit::decode(value).ok()?;
            if exit.id != exit.container_id {
                return None;
            }
            // The CRI shows the exit about 20 ms later.
            (pb::HintKind::Exiting, exit.container_id, exit.exit_status)
        }
        // containerd deletes the task of an exited process right before the CRI shows the exit.
        "/tasks/delete" => {
            let deleted = ev::TaskDelete::decode(value).ok()?;
            if !deleted.id.is_empty() && deleted.id != deleted.container_id {
                return None;
            }
            (pb::HintKind::Exited, deleted.container_id, deleted.exit_status)
        }
        _ => return None,
    };
    let at = envelope.timestamp.as_ref();
    let at_unix_ns =
        at.map_or(0, |t| t.seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(t.nanos)));
    (!id.is_empty()).then(|| pb::Hint {
        kind: kind.into(),
        id,
        pod_uid: String::new(),
        at_unix_ns,
        exit_code,
    })
}

/// Converts a CRI event to a hint.
#[must_use]
pub fn from_cri(event: quintlet_cri_api::v1::ContainerEventResponse) -> Option<pb::Hint> {
    use quintlet_cri_api::v1::ContainerEventType as Type;
    let kind = match event.container_event_type() {
        Type::ContainerCreatedEvent => pb::HintKind::Created,
        Type::ContainerStartedEvent => pb::HintKind::Started,
        Type::ContainerStoppedEvent => pb::HintKind::Exited,
        Type::ContainerDeletedEvent => pb::HintKind::Deleted,
    };
    let pod_uid = event.pod_sandbox_status.and_then(|s| s.metadata).map(|m| m.uid).unwrap_or_default();
    (!event.container_id.is_empty()).then(|| pb::Hint {
        kind: kind.into(),
        id: event.container_id,
        pod_uid,
        at_unix_ns: event.created_at,
        exit_code: 0,
    })
}

/// Returns the event sources to try, in order, for a runtime.
#[must_use]
pub fn sources(runtime_name: &str, version: &str) -> &'static [pb::HintSource] {
    match (runtime_name, runtime_info::numbers(version).first()) {
        ("containerd", Some(0 | 1)) => &[pb::HintSource::Containerd, pb::HintSource::Cri],
        ("containerd", _) => &[pb::HintSource::Cri, pb::HintSource::Containerd],
        // CRI-O supports CRI events. Other runtimes may answer Unimplemented.
        (_, _) => &[pb::HintSource::Cri],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(topic: &str, event: &impl prost::Message) -> containerd_client::types::Envelope {
        containerd_client::types::Envelope {
            timestamp: Some(prost_types::Timestamp { seconds: 2, nanos: 5 }),
            namespace: "k8s.io".into(),
            topic: topic.into(),
            event: Some(prost_types::Any { type_url: String::new(), value: event.encode_to_vec() }),
        }
    }

    #[test]
    fn containerd_events_are_hints_but_exec_exits_are_not() {
        use containerd_client::events as ev;
        let exit = |id: &str| {
            let exit = ev::TaskExit {
                container_id: "c".into(),
                id: id.into(),
                exit_status: 3,
                ..Default::default()
            };
            from_containerd(&envelope("/tasks/exit", &exit))
        };
        let hint = exit("c").unwrap();
        assert_eq!((hint.kind(), hint.id.as_str(), hint.exit_code), (pb::HintKind::Exiting, "c", 3));
        assert_eq!(hint.at_unix_ns, 2_000_000_005);
        assert_eq!(exit("exec-1"), None);
        let deleted = |id: &str| {
            let deleted = ev::TaskDelete { container_id: "c".into(), id: id.into(), ..Default::default() };
            from_containerd(&envelope("/tasks/delete", &deleted))
        };
        for of_the_container in ["", "c"] {
            assert_eq!(deleted(of_the_container).unwrap().kind(), pb::HintKind::Exited);
        }
        assert_eq!(deleted("exec-1"), None);
        let created = ev::ContainerCreate { id: "c".into(), ..Default::default() };
        assert_eq!(
            from_containerd(&envelope("/containers/create", &created)).unwrap().kind(),
            pb::HintKind::Created
        );
        assert_eq!(from_containerd(&envelope("/images/create", &created)), None);
        let mut broken = envelope("/tasks/start", &created);
        broken.event.as_mut().unwrap().value = vec![0xff];
        assert_eq!(from_containerd(&broken), None);
    }

    #[test]
    fn the_source_follows_name_and_version() {
        use pb::HintSource::{Containerd, Cri};
        for (name, version, expected) in [
            ("containerd", "1.6.20~ds1", &[Containerd, Cri][..]),
            ("containerd", "v1.7.2", &[Containerd, Cri]),
            ("containerd", "v2.0.1", &[Cri, Containerd]),
            ("containerd", "", &[Cri, Containerd]),
            ("cri-o", "1.30.0", &[Cri]),
            ("docker", "24.0", &[Cri]),
        ] {
            assert_eq!(sources(name, version), expected, "{name} {version}");
        }
    }

    #[tokio::test]
    async fn a_slow_subscriber_gets_the_number_of_missed_hints_and_the_state_of_the_source() {
        let hub = Hub::new(4, Metrics::default());
        let mut slow = hub.subscribe();
        assert!(matches!(slow.next().await, Some(Event::Hello(_))));
        assert!(matches!(slow.next().await, Some(Event::Source(s)) if !s.live));
        let live = pb::SourceState { source: pb::HintSource::Cri.into(), live: true, detail: String::new() };
        hub.set_state(live.clone());
        for i in 0..9 {
            hub.hint(pb::Hint { id: i.to_string(), ..Default::default() });
        }
        assert_eq!(slow.next().await, Some(Event::Overrun(pb::Overrun { missed: 6 })));
        assert_eq!(slow.next().await, Some(Event::Source(live)));
        for i in 5..9 {
            assert!(matches!(slow.next().await, Some(Event::Hint(h)) if h.id == i.to_string()));
        }
    }
}
