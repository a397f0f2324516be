//! The one reader of the runtime's events, which is also what knows whether the runtime is there.
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use containerd_client::services::v1::events_client::EventsClient;
use containerd_client::services::v1::{PublishRequest, SubscribeRequest};
use futures::StreamExt as _;
use k8s_cri::v1;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::peer_startup::{PeerFailure, PeerStartup};
use quintlet_proto::runtime::v1 as pb;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status, Streaming};

use crate::hints::{self, Hub, TOPICS};
use crate::metrics::Metrics;
use crate::upstream::{RECONNECT_EVERY, Upstream};

/// What the runtime says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// Whether it is there.
    pub connected: bool,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The CRI version it speaks.
    pub api_version: String,
    /// Why it is not connected; empty otherwise.
    pub error: String,
}

/// A runtime that does not say its version within this is not connected.
const VERSION_TIMEOUT: Duration = Duration::from_secs(2);
/// A stream that is open this long without an answer is live: Go's servers send no headers before the first event.
const OPEN_WAIT: Duration = Duration::from_secs(1);
/// How often containerd is sent a marker until the subscription shows it.
const MARK_EVERY: Duration = Duration::from_millis(20);
/// The topic of the marker.
const MARK_TOPIC: &str = "/quintlet/subscribed";
/// Longest pause between attempts.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// How often a connection without event source is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A CRI event carries the whole status of its pod.
const MAX_EVENT: usize = 16 << 20;

/// Reads events and keeps the connection's state. One per process.
#[derive(Debug)]
pub struct Reader {
    /// A connection of its own: events must not wait behind lists.
    pub upstream: Upstream,
    /// Where hints go.
    pub hub: Hub,
    /// Where the state goes.
    pub info: watch::Sender<RuntimeInfo>,
    /// The containerd namespace of pods.
    pub namespace: String,
    /// What is counted.
    pub metrics: Metrics,
}

enum Ended {
    /// The source does not exist here.
    Unimplemented,
    /// It ended.
    Why(String),
}

impl Reader {
    /// Runs until stopped.
    pub async fn run(self, stop: CancellationToken) {
        // Dropping a session drops its stream, which is all it holds.
        let _ = stop.run_until_cancelled(self.run_forever()).await;
    }

    async fn run_forever(&self) {
        let mut pause = RECONNECT_EVERY;
        let mut runtime = PeerStartup::default();
        loop {
            match self.version().await {
                Ok(info) => {
                    pause = RECONNECT_EVERY;
                    self.set_info(&mut runtime, info.clone());
                    let (source, why) = self.session(&info).await;
                    self.hub.set_state(state(source, false, &why));
                    if !self.upstream.is_connected().await {
                        let error =
                            format!("the runtime at {} went away: {why}", self.upstream.path().display());
                        self.set_info(&mut runtime, RuntimeInfo { error, ..RuntimeInfo::default() });
                    }
                    tokio::time::sleep(RECONNECT_EVERY).await;
                }
                Err(error) => {
                    let info = RuntimeInfo { error: error.clone(), ..RuntimeInfo::default() };
                    self.set_info(&mut runtime, info);
                    self.hub.set_state(state(pb::HintSource::None, false, &error));
                    // Asking a socket that is not there costs nothing; a runtime that answers badly gets a rest.
                    if self.upstream.is_connected().await {
                        tokio::time::sleep(pause).await;
                        pause = pause.saturating_mul(2).min(MAX_PAUSE);
                    } else {
                        pause = RECONNECT_EVERY;
                        tokio::time::sleep(pause).await;
                    }
                }
            }
        }
    }

    fn set_info(&self, runtime: &mut PeerStartup, info: RuntimeInfo) {
        self.metrics.connected.set(i64::from(info.connected));
        let (path, error) = (self.upstream.path().display(), &info.error);
        if info.connected {
            runtime.reached();
        } else {
            match runtime.failed() {
                PeerFailure::Starting => tracing::info!(%path, error, "runtime not connected"),
                PeerFailure::Down => tracing::warn!(%path, error, "runtime not connected"),
                PeerFailure::Repeated => tracing::debug!(%path, error, "runtime not connected"),
            }
        }
        self.info.send_if_modified(|known| {
            if *known == info {
                return false;
            }
            if info.connected {
                tracing::info!(runtime = info.name, version = info.version, "runtime connected");
            }
            *known = info;
            true
        });
    }

    async fn version(&self) -> Result<RuntimeInfo, String> {
        let mut client = RuntimeServiceClient::new(self.upstream.clone());
        let asked = client.version(v1::VersionRequest::default());
        match tokio::time::timeout(VERSION_TIMEOUT, asked).await {
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                Ok(RuntimeInfo {
                    connected: true,
                    name: answer.runtime_name,
                    version: answer.runtime_version,
                    api_version: answer.runtime_api_version,
                    error: String::new(),
                })
            }
            Ok(Err(status)) => Err(message_of(&status)),
            Err(_) => Err(format!(
                "the runtime at {} does not say its version within {} s",
                self.upstream.path().display(),
                VERSION_TIMEOUT.as_secs()
            )),
        }
    }

    /// Reads one connection's events to their end. Returns the source and why it ended.
    async fn session(&self, info: &RuntimeInfo) -> (pb::HintSource, String) {
        for source in hints::sources(&info.name, &info.version) {
            let ended = match source {
                pb::HintSource::Containerd => self.read_containerd().await,
                pb::HintSource::Cri => self.read_cri().await,
                pb::HintSource::None | pb::HintSource::Unspecified => Ended::Unimplemented,
            };
            if let Ended::Why(why) = ended {
                return (*source, why);
            }
        }
        let detail = format!("{} {} has no events", info.name, info.version);
        self.hub.set_state(state(pb::HintSource::None, false, &detail));
        while self.upstream.is_connected().await {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        (pb::HintSource::None, "the connection to the runtime ended".to_owned())
    }

    async fn read_containerd(&self) -> Ended {
        let filters = TOPICS
            .into_iter()
            .chain([MARK_TOPIC])
            .map(|topic| format!("namespace=={:?},topic=={topic:?}", self.namespace))
            .collect();
        let mut client = EventsClient::new(self.upstream.clone()).max_decoding_message_size(MAX_EVENT);
        let opening = client.subscribe(self.in_namespace(SubscribeRequest { filters }));
        let mark = async {
            loop {
                let mut client = EventsClient::new(self.upstream.clone());
                let event =
                    prost_types::Any { type_url: "quintlet.Subscribed".to_owned(), value: Vec::new() };
                let request = PublishRequest { topic: MARK_TOPIC.to_owned(), event: Some(event) };
                if let Err(error) = client.publish(self.in_namespace(request)).await {
                    tracing::debug!(%error, "the marker was not taken");
                }
                tokio::time::sleep(MARK_EVERY).await;
            }
        };
        self.read(pb::HintSource::Containerd, opening, mark, |envelope| hints::of_containerd(&envelope)).await
    }

    async fn read_cri(&self) -> Ended {
        let mut client =
            RuntimeServiceClient::new(self.upstream.clone()).max_decoding_message_size(MAX_EVENT);
        let opening = client.get_container_events(v1::GetEventsRequest {});
        self.read(pb::HintSource::Cri, opening, std::future::pending(), hints::of_cri).await
    }

    /// Opens one stream and reads it. `mark` runs beside the opening and may make the server answer sooner.
    async fn read<T>(
        &self,
        source: pb::HintSource,
        opening: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
        mark: impl Future<Output = ()>,
        hint: impl Fn(T) -> Option<pb::Hint>,
    ) -> Ended {
        let mut opening = pin!(opening);
        let opened = {
            // The marker's loop never ends by itself; dropping a publish in flight harms nothing.
            let mut mark = pin!(mark);
            tokio::select! {
                opened = &mut opening => Some(opened),
                () = tokio::time::sleep(OPEN_WAIT) => None,
                () = &mut mark => None,
            }
        };
        let opened = match opened {
            Some(opened) => opened,
            None => {
                self.hub.set_state(state(source, true, "open, no event yet"));
                opening.await
            }
        };
        let mut stream = match opened {
            Ok(response) => response.into_inner(),
            Err(status) => return ended(&status),
        };
        let mut first = true;
        loop {
            // A server may open the stream before it says that it has no such method.
            if first {
                first = false;
                match tokio::time::timeout(LOOK_EVERY, stream.next()).await {
                    Ok(Some(Err(status))) => return ended(&status),
                    Ok(Some(Ok(event))) => {
                        self.hub.set_state(state(source, true, ""));
                        self.pass(hint(event));
                    }
                    Ok(None) => return Ended::Why("the runtime ended the event stream".to_owned()),
                    Err(_) => self.hub.set_state(state(source, true, "")),
                }
                continue;
            }
            match stream.next().await {
                Some(Ok(event)) => self.pass(hint(event)),
                Some(Err(status)) => return ended(&status),
                None => return Ended::Why("the runtime ended the event stream".to_owned()),
            }
        }
    }

    fn pass(&self, hint: Option<pb::Hint>) {
        if let Some(hint) = hint {
            self.hub.hint(hint);
        }
    }

    fn in_namespace<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        // The flag's parser has refused names that are no header value.
        if let Ok(namespace) = self.namespace.parse() {
            request.metadata_mut().insert("containerd-namespace", namespace);
        }
        request
    }
}

fn ended(status: &Status) -> Ended {
    match status.code() {
        Code::Unimplemented => Ended::Unimplemented,
        _ => Ended::Why(message_of(status)),
    }
}

/// The innermost cause says more than tonic's "transport error".
fn message_of(status: &Status) -> String {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    if text.is_empty() { format!("{:?}", status.code()) } else { text }
}

fn state(source: pb::HintSource, live: bool, detail: &str) -> pb::SourceState {
    pb::SourceState { source: source.into(), live, detail: detail.to_owned() }
}
