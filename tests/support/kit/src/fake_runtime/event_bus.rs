//! Distributes the runtime's events to the streams of subscribers.
#![allow(clippy::disallowed_methods, reason = "the queues of a runtime in tests need no metrics")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use containerd_client::events::{ContainerCreate, ContainerDelete, TaskDelete, TaskExit, TaskOom, TaskStart};
use containerd_client::types::Envelope;
use parking_lot::Mutex;
use prost::Message;
use prost_types::{Any, Timestamp};
use quintlet_cri_api::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// Events by which a subscriber may lag before its stream ends: thousands of containers that start and exit
/// at once.
const SUBSCRIBER_CAPACITY: usize = 65_536;

/// An event, in containerd's terms.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Created { id: String },
    Started { id: String },
    Exit { id: String, exec_id: Option<String>, code: i32 },
    TaskDeleted { id: String, code: i32 },
    Oom { id: String },
    Deleted { id: String },
}

impl Event {
    fn envelope(self) -> Envelope {
        let now = Some(Timestamp::default());
        let (topic, event) = match self {
            Self::Created { id } => {
                ("/containers/create", any("ContainerCreate", &ContainerCreate { id, ..Default::default() }))
            }
            Self::Started { id } => {
                ("/tasks/start", any("TaskStart", &TaskStart { container_id: id, pid: 1 }))
            }
            Self::Exit { id, exec_id, code } => (
                "/tasks/exit",
                any(
                    "TaskExit",
                    &TaskExit {
                        id: exec_id.unwrap_or_else(|| id.clone()),
                        container_id: id,
                        pid: 1,
                        exit_status: code.cast_unsigned(),
                        exited_at: now,
                    },
                ),
            ),
            Self::TaskDeleted { id, code } => (
                "/tasks/delete",
                any(
                    "TaskDelete",
                    &TaskDelete {
                        container_id: id,
                        pid: 1,
                        exit_status: code.cast_unsigned(),
                        exited_at: now,
                        id: String::new(),
                    },
                ),
            ),
            Self::Oom { id } => ("/tasks/oom", any("TaskOOM", &TaskOom { container_id: id })),
            Self::Deleted { id } => ("/containers/delete", any("ContainerDelete", &ContainerDelete { id })),
        };
        Envelope {
            timestamp: now,
            namespace: "k8s.io".to_owned(),
            topic: topic.to_owned(),
            event: Some(event),
        }
    }
}

/// Encodes a message like containerd's typeurl: only the full name.
fn any(name: &str, message: &impl Message) -> Any {
    Any { type_url: format!("containerd.events.{name}"), value: message.encode_to_vec() }
}

type Sender<T> = mpsc::Sender<Result<T, Status>>;

struct Containerd {
    filter: Filter,
    to: Sender<Envelope>,
}

#[derive(Default)]
struct Subscribers {
    containerd: Vec<Containerd>,
    cri: Vec<Sender<v1::ContainerEventResponse>>,
}

/// Distributes events to the open streams.
pub(crate) struct Bus {
    containerd_on: bool,
    cri_on: bool,
    subscribers: Mutex<Subscribers>,
    drop_next: AtomicU64,
    duplicate: AtomicBool,
}

impl Bus {
    pub(crate) fn new(containerd_on: bool, cri_on: bool) -> Self {
        Self {
            containerd_on,
            cri_on,
            subscribers: Mutex::default(),
            drop_next: AtomicU64::new(0),
            duplicate: AtomicBool::new(false),
        }
    }

    pub(crate) fn drop_next(&self, count: u64) {
        self.drop_next.store(count, Ordering::Relaxed);
    }

    pub(crate) fn duplicate(&self, yes: bool) {
        self.duplicate.store(yes, Ordering::Relaxed);
    }

    pub(crate) fn cut(&self) {
        let gone = std::mem::take(&mut *self.subscribers.lock());
        for c in gone.containerd {
            let _ = c.to.try_send(Err(Status::unavailable("event stream cut")));
        }
        for c in gone.cri {
            let _ = c.try_send(Err(Status::unavailable("event stream cut")));
        }
    }

    pub(crate) fn open(&self) -> usize {
        let mut subscribers = self.subscribers.lock();
        subscribers.containerd.retain(|c| !c.to.is_closed());
        subscribers.cri.retain(|c| !c.is_closed());
        subscribers.containerd.len() + subscribers.cri.len()
    }

    /// Returns how often the next event is sent; 0 if it is lost.
    fn copies(&self) -> usize {
        let lost =
            self.drop_next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok();
        if lost { 0 } else { 1 + usize::from(self.duplicate.load(Ordering::Relaxed)) }
    }

    pub(crate) fn containerd(&self, event: Event) {
        if !self.containerd_on {
            return;
        }
        let envelope = event.envelope();
        for _ in 0..self.copies() {
            self.subscribers
                .lock()
                .containerd
                .retain(|c| !c.filter.matches(&envelope) || c.to.try_send(Ok(envelope.clone())).is_ok());
        }
    }

    pub(crate) fn cri(&self, event: v1::ContainerEventResponse) {
        if !self.cri_on {
            return;
        }
        for _ in 0..self.copies() {
            self.subscribers.lock().cri.retain(|c| c.try_send(Ok(event.clone())).is_ok());
        }
    }

    pub(crate) fn subscribe_cri(
        &self,
    ) -> Result<ReceiverStream<Result<v1::ContainerEventResponse, Status>>, Status> {
        if !self.cri_on {
            return Err(Status::unimplemented(
                "unknown method GetContainerEvents for service runtime.v1.RuntimeService",
            ));
        }
        let (sender, receiver) = mpsc::channel(SUBSCRIBER_CAPACITY);
        self.subscribers.lock().cri.push(sender);
        Ok(ReceiverStream::new(receiver))
    }

    pub(super) fn subscribe_containerd(
        &self,
        filters: &[String],
    ) -> Result<ReceiverStream<Result<Envelope, Status>>, Status> {
        if !self.containerd_on {
            return Err(Status::unimplemented("unknown service containerd.services.events.v1.Events"));
        }
        let filter = Filter::parse(filters).map_err(Status::invalid_argument)?;
        let (sender, receiver) = mpsc::channel(SUBSCRIBER_CAPACITY);
        self.subscribers.lock().containerd.push(Containerd { filter, to: sender });
        Ok(ReceiverStream::new(receiver))
    }
}

/// containerd's filters over `topic` and `namespace`: at least one list must match in all of its terms.
struct Filter(Vec<Vec<Term>>);

struct Term {
    topic: bool,
    test: Test,
}

enum Test {
    Equal(String),
    NotEqual(String),
    Matches(regex::Regex),
}

impl Filter {
    fn parse(filters: &[String]) -> Result<Self, String> {
        filters.iter().map(|f| f.split(',').map(Term::parse).collect()).collect::<Result<_, _>>().map(Self)
    }

    fn matches(&self, envelope: &Envelope) -> bool {
        self.0.is_empty() || self.0.iter().any(|all| all.iter().all(|t| t.matches(envelope)))
    }
}

impl Term {
    fn parse(text: &str) -> Result<Self, String> {
        let (field, op, value) = ["==", "!=", "~="]
            .into_iter()
            .find_map(|op| {
                text.split_once(op).map(|(f, v)| (f.trim(), op, v.trim().trim_matches(['"', '\'', '/'])))
            })
            .ok_or_else(|| format!("filter {text:?} has no operator"))?;
        let topic = match field {
            "topic" => true,
            "namespace" => false,
            _ => return Err(format!("filter {text:?}: unknown field {field:?}")),
        };
        let slashed = || if topic { format!("/{value}") } else { value.to_owned() };
        let test = match op {
            "==" => Test::Equal(slashed()),
            "!=" => Test::NotEqual(slashed()),
            _ => Test::Matches(regex::Regex::new(value).map_err(|e| e.to_string())?),
        };
        Ok(Self { topic, test })
    }

    fn matches(&self, envelope: &Envelope) -> bool {
        let value = if self.topic { &envelope.topic } else { &envelope.namespace };
        match &self.test {
            Test::Equal(v) => v == value,
            Test::NotEqual(v) => v != value,
            Test::Matches(r) => r.is_match(value),
        }
    }
}
