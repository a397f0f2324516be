//! Reads the runtime's events, and reports whether the runtime is connected. There is one reader per process.
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use containerd_client::services::v1::events_client::EventsClient;
use containerd_client::services::v1::{PublishRequest, SubscribeRequest};
use futures::StreamExt as _;
use quintlet_cri_api::v1;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::backoff::Backoff;
use quintlet_kit::peer_startup::{PeerFailure, PeerStartup};
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_proto::runtime::v1 as pb;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status, Streaming};

use crate::hints::{self, Hub, TOPICS};
use crate::inflight::InFlight;
use crate::metrics::Metrics;
use crate::runtime_info::{RuntimeInfo, message_of};
use crate::upstream::Upstream;

/// Time after which an open stream counts as live. Go servers send no headers before the first event.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which a marker event is published to containerd until the subscription returns it.
const MARKER_INTERVAL: Duration = Duration::from_millis(20);
/// Topic of the marker event.
const MARKER_TOPIC: &str = "/quintlet/subscribed";
/// Longest pause between attempts.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Interval of connection checks without an event source.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum size of an event. A CRI event contains the whole status of its pod.
const MAX_EVENT: usize = 16 << 20;

/// Reads events and publishes the state of the connection.
#[derive(Debug)]
pub(crate) struct EventReader {
    /// A connection of its own, so that events do not wait behind lists.
    pub upstream: Upstream,
    /// Distributes the hints to subscribers.
    pub hub: Hub,
    /// Receives the runtime's identity and state after each change.
    pub info: watch::Sender<RuntimeInfo>,
    /// The containerd namespace of pods.
    pub namespace: String,
    /// Mutations in flight, whose callers observe the pod afterwards.
    pub in_flight: InFlight,
    /// Metrics of hints and of the connection.
    pub metrics: Metrics,
}

enum StreamEnd {
    /// The runtime does not have this event source.
    Unimplemented,
    /// The stream has ended for this reason.
    Closed(String),
}

impl EventReader {
    /// Runs until `stop` is cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        // Dropping a session drops its stream.
        let _ = stop.run_until_cancelled(self.run_forever()).await;
    }

    async fn run_forever(&self) {
        let mut backoff = Backoff::new(CONNECT_INTERVAL, 2.0, MAX_PAUSE);
        let mut runtime = PeerStartup::default();
        loop {
            match RuntimeInfo::of(&self.upstream).await {
                Ok(info) => {
                    backoff.reset();
                    self.set_info(&mut runtime, info.clone());
                    let (source, why) = self.session(&info).await;
                    self.hub.set_state(state(source, false, &why));
                    if !self.upstream.is_connected().await {
                        let error =
                            format!("the runtime at {} went away: {why}", self.upstream.path().display());
                        self.set_info(&mut runtime, RuntimeInfo { error, ..RuntimeInfo::default() });
                    }
                    tokio::time::sleep(CONNECT_INTERVAL).await;
                }
                Err(error) => {
                    let info = RuntimeInfo { error: error.clone(), ..RuntimeInfo::default() };
                    self.set_info(&mut runtime, info);
                    self.hub.set_state(state(pb::HintSource::None, false, &error));
                    // Connecting to a missing socket costs nothing. A runtime that answers with errors gets a
                    // longer pause.
                    if self.upstream.is_connected().await {
                        tokio::time::sleep(backoff.next_wait()).await;
                    } else {
                        backoff.reset();
                        tokio::time::sleep(CONNECT_INTERVAL).await;
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

    /// Reads the events of one connection until it ends. Returns the source and the reason of the end.
    async fn session(&self, info: &RuntimeInfo) -> (pb::HintSource, String) {
        for source in hints::sources(&info.name, &info.version) {
            let stream_end = match source {
                pb::HintSource::Containerd => self.read_containerd().await,
                pb::HintSource::Cri => self.read_cri().await,
                pb::HintSource::None | pb::HintSource::Unspecified => StreamEnd::Unimplemented,
            };
            if let StreamEnd::Closed(why) = stream_end {
                return (*source, why);
            }
        }
        let detail = format!("{} {} has no events", info.name, info.version);
        self.hub.set_state(state(pb::HintSource::None, false, &detail));
        while self.upstream.is_connected().await {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        (pb::HintSource::None, "the connection to the runtime ended".to_owned())
    }

    async fn read_containerd(&self) -> StreamEnd {
        let filters = TOPICS
            .into_iter()
            .chain([MARKER_TOPIC])
            .map(|topic| format!("namespace=={:?},topic=={topic:?}", self.namespace))
            .collect();
        let mut client = EventsClient::new(self.upstream.clone()).max_decoding_message_size(MAX_EVENT);
        let opening = client.subscribe(self.in_namespace(SubscribeRequest { filters }));
        let marker = async {
            loop {
                let mut client = EventsClient::new(self.upstream.clone());
                let event =
                    prost_types::Any { type_url: "quintlet.Subscribed".to_owned(), value: Vec::new() };
                let request = PublishRequest { topic: MARKER_TOPIC.to_owned(), event: Some(event) };
                if let Err(error) = client.publish(self.in_namespace(request)).await {
                    tracing::debug!(%error, "failed to publish marker event");
                }
                tokio::time::sleep(MARKER_INTERVAL).await;
            }
        };
        self.read(pb::HintSource::Containerd, opening, marker, |envelope| hints::from_containerd(&envelope))
            .await
    }

    async fn read_cri(&self) -> StreamEnd {
        let mut client =
            RuntimeServiceClient::new(self.upstream.clone()).max_decoding_message_size(MAX_EVENT);
        let opening = client.get_container_events(v1::GetEventsRequest {});
        self.read(pb::HintSource::Cri, opening, std::future::pending(), hints::from_cri).await
    }

    /// Opens a stream and reads it. `marker` runs until the stream is open, and may make the server answer
    /// sooner.
    async fn read<T>(
        &self,
        source: pb::HintSource,
        opening: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
        marker: impl Future<Output = ()>,
        hint: impl Fn(T) -> Option<pb::Hint>,
    ) -> StreamEnd {
        let mut opening = pin!(opening);
        let opened = {
            // The marker's loop does not end by itself. Dropping a publish in flight is harmless.
            let mut marker = pin!(marker);
            tokio::select! {
                opened = &mut opening => Some(opened),
                () = tokio::time::sleep(OPEN_TIMEOUT) => None,
                () = &mut marker => None,
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
            Err(status) => return stream_end(&status),
        };
        let mut first = true;
        loop {
            // A server may open the stream before it reports that the method is unimplemented.
            if first {
                first = false;
                match tokio::time::timeout(CHECK_INTERVAL, stream.next()).await {
                    Ok(Some(Err(status))) => return stream_end(&status),
                    Ok(Some(Ok(event))) => {
                        self.hub.set_state(state(source, true, ""));
                        self.forward_hint(hint(event));
                    }
                    Ok(None) => {
                        return StreamEnd::Closed("the runtime ended the event stream".to_owned());
                    }
                    Err(_) => self.hub.set_state(state(source, true, "")),
                }
                continue;
            }
            match stream.next().await {
                Some(Ok(event)) => self.forward_hint(hint(event)),
                Some(Err(status)) => return stream_end(&status),
                None => return StreamEnd::Closed("the runtime ended the event stream".to_owned()),
            }
        }
    }

    fn forward_hint(&self, hint: Option<pb::Hint>) {
        let Some(mut hint) = hint else { return };
        if hint.kind() == pb::HintKind::Exited && self.in_flight.is_stopping(&hint.id) {
            hint.set_kind(pb::HintKind::Exiting);
        }
        self.hub.hint(hint);
    }

    fn in_namespace<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        // The parser of the flag refuses names that are not valid header values.
        if let Ok(namespace) = self.namespace.parse() {
            request.metadata_mut().insert("containerd-namespace", namespace);
        }
        request
    }
}

fn stream_end(status: &Status) -> StreamEnd {
    match status.code() {
        Code::Unimplemented => StreamEnd::Unimplemented,
        _ => StreamEnd::Closed(message_of(status)),
    }
}

fn state(source: pb::HintSource, live: bool, detail: &str) -> pb::SourceState {
    pb::SourceState { source: source.into(), live, detail: detail.to_owned() }
}
