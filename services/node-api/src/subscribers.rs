//! Subscribers over TCP: passes `Watch` of `quintlet.subscribe.v1` on to the sockets for subscribers of the
//! services.
//!
//! A client needs a certificate of the CA of subscribers whose common name may subscribe. A stream has a
//! connection of its own to the service, so that a client that does not read delays no other one, and it is
//! verified again while it is open. Any other method is refused.
//!
//! Tasks: one per stream, which ends it early, and `listen-subscribers`. The latter reads the files and binds
//! the address, and tries again if that fails: the node API does not depend on it.

mod admission;
mod relayed;

use std::collections::BTreeMap;
use std::error::Error;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::header::{CONTENT_TYPE, TE};
use http::{HeaderName, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use node_api_access::limits::{Client, ConnectionLimiter, Limits, Share, Shares, Slots};
use node_api_access::reload::ReloadedFiles;
use node_api_access::tls::{self, ServingCertificate, TlsError, TlsSettings};
use node_api_access::x509::ClientCa;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::args::paths::{Paths, socket_names};
use quintlet_kit::clock::Clock;
use quintlet_kit::rate::LogInterval;
use quintlet_kit::slots::ReachedLimit;
use quintlet_kit::{socket, task};
use quintlet_telemetry::metrics::{counter_family, gauge_family};
use rustls::pki_types::CertificateDer;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::client::GrpcService as _;
use tonic::{Status, TimeoutExpired};

use self::admission::{Admission, INSTANCE, Refusal, STREAMS, STREAMS_OF_CLIENT, choose_instance};
use self::relayed::{EarlyEnd, RelayedBody};
use crate::args::NodeApiArgs;
use crate::server::{Handler, Listener, Peer};

/// Interval between attempts to read the files and to bind the address.
const RETRY: Duration = Duration::from_secs(5);
/// Interval at which the certificate of an open stream is verified again: it may have expired, or its CA may
/// be removed.
const RECHECK: Duration = Duration::from_secs(60);
/// Interval between log lines of refused clients, for each reason.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Size of a request with the prefix of its message. The services accept 64 KiB.
const MOST_REQUEST: usize = (64 << 10) + 5;
/// Time limit for the client to read the next bytes of a stream. A stream has a message every few seconds.
const WRITE: Duration = Duration::from_secs(60);
/// Window of a connection to a service, and of its stream: what node-api holds for a client that does not
/// read.
const WINDOW: u32 = 64 << 10;
/// Concurrent calls of a connection: the three streams of a node, and those that replace them.
const CALLS: u32 = 8;

/// Headers of a request that are passed on.
const PASSED: [&str; 4] = ["grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "user-agent"];

/// The streams of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum StreamKind {
    Containers,
    Probes,
    Pods,
}

impl StreamKind {
    const ALL: [Self; 3] = [Self::Containers, Self::Probes, Self::Pods];

    /// Returns the label in metrics.
    fn name(self) -> &'static str {
        match self {
            Self::Containers => "containers",
            Self::Probes => "probes",
            Self::Pods => "pods",
        }
    }

    /// Returns the path of the method.
    fn path(self) -> &'static str {
        match self {
            Self::Containers => "/quintlet.subscribe.v1.Containers/Watch",
            Self::Probes => "/quintlet.subscribe.v1.Probes/Watch",
            Self::Pods => "/quintlet.subscribe.v1.Pods/Watch",
        }
    }

    fn service(self) -> &'static str {
        match self {
            Self::Containers => "pleg-service",
            Self::Probes => "probe-service",
            Self::Pods => "pod-sync",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StreamLabel {
    stream: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Metrics and log lines of refused clients.
#[derive(Debug, Clone)]
struct Refusals {
    counts: Family<ReasonLabel, Counter>,
    log: Arc<Mutex<BTreeMap<&'static str, LogInterval>>>,
}

impl Refusals {
    fn count(&self, address: SocketAddr, refusal: &Refusal) {
        let reason = refusal.reason();
        self.counts.get_or_create(&ReasonLabel { reason }).inc();
        let due = self.log.lock().entry(reason).or_insert(LogInterval::new(REFUSAL_LOG_INTERVAL)).count();
        if let Some(count) = due {
            tracing::info!(%address, error = %refusal, count, "refused subscriber");
        }
    }
}

/// The arguments of the port.
#[derive(Debug, Clone)]
struct PortSettings {
    address: SocketAddr,
    cert: PathBuf,
    key: PathBuf,
    ca: PathBuf,
    names: Vec<String>,
    tls: TlsSettings,
}

/// Limits of the port. A client without a valid certificate has none of the connections of the others.
fn limits(all: Limits) -> Limits {
    let certificates = Share { all: STREAMS.saturating_mul(4), each: STREAMS_OF_CLIENT.saturating_mul(2) };
    let connections = Shares { certificates, others: Share { all: 0, each: 0 } };
    Limits { strangers: 64, connections, streams: CALLS, header_bytes: 16 << 10, write: WRITE, ..all }
}

/// The port for subscribers.
#[derive(Debug, Clone)]
pub(crate) struct SubscriberPort {
    settings: PortSettings,
    paths: Paths,
    clock: Clock,
}

/// The port with its files read and its address bound.
pub(crate) struct OpenPort {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    serving: Arc<ServingCertificate>,
    ca: Arc<ClientCa>,
}

impl OpenPort {
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }
}

/// The reason why the port is closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortError {
    #[error("failed to configure TLS for subscribers")]
    Tls(#[from] TlsError),
    #[error("failed to listen for subscribers on {address}")]
    Listen { address: SocketAddr, source: std::io::Error },
}

impl SubscriberPort {
    /// Returns the port, or none if the arguments have no address for it. clap and the check of the
    /// configuration report an address without files and names.
    pub(crate) fn of(args: &NodeApiArgs, tls: TlsSettings, paths: Paths, clock: Clock) -> Option<Self> {
        let settings = PortSettings {
            address: args.subscriber_listen?,
            cert: args.subscriber_cert_file.clone()?,
            key: args.subscriber_key_file.clone()?,
            ca: args.subscriber_client_ca_file.clone()?,
            names: args.subscriber_name.clone(),
            tls,
        };
        Some(Self { settings, paths, clock })
    }

    /// Reads the files and binds the address.
    ///
    /// # Errors
    /// A file is not valid, or the address cannot be bound.
    pub(crate) async fn open(&self) -> Result<OpenPort, PortError> {
        let PortSettings { address, cert, key, ca, names: _, tls } = self.settings.clone();
        let load = move || {
            let serving = Arc::new(ServingCertificate::load(&cert, &key)?);
            let ca = Arc::new(ClientCa::load(&ca)?);
            let mut config = tls::server_config(&tls, Arc::clone(&serving))?;
            config.alpn_protocols = vec![b"h2".to_vec()];
            Ok::<_, TlsError>((serving, ca, TlsAcceptor::from(Arc::new(config))))
        };
        let (serving, ca, acceptor) = task::blocking(load).await?;
        let bound = TcpListener::bind(address).await;
        let listener = bound.map_err(|source| PortError::Listen { address, source })?;
        Ok(OpenPort { listener, acceptor, serving, ca })
    }

    /// Serves until the stop of `template`, whose limits, handler and connections are replaced. `first` is
    /// the result of the first [`SubscriberPort::open`].
    pub(crate) async fn serve<H>(self, first: Result<OpenPort, PortError>, template: Listener<H>) {
        let Some(OpenPort { listener, acceptor, serving, ca }) = self.opened(first, &template.stop).await
        else {
            return;
        };
        let names = Arc::new(self.settings.names.iter().cloned().collect());
        let admission = Admission { ca: Arc::clone(&ca), names, clock: self.clock };
        let limits = limits(template.limits);
        let relay = Relay::new(admission, self.paths, limits, template.stop.clone());
        let stop = template.stop.clone();
        let port = Listener {
            handler: relay,
            tls: Some(acceptor),
            limits,
            gate: ConnectionLimiter::default(),
            counters: template.counters,
            heartbeat: template.heartbeat,
            tasks: template.tasks,
            stop: template.stop,
            abort: template.abort,
        };
        let files = ReloadedFiles { serving, ca: Some(ca), reviewer: None };
        // Both end at the stop.
        tokio::join!(port.run(listener), files.reload_changes(stop));
    }

    /// Returns the open port. Opens it again and again if `first` failed. Returns none once stopped.
    async fn opened(&self, first: Result<OpenPort, PortError>, stop: &CancellationToken) -> Option<OpenPort> {
        let mut opened = first;
        let mut logged = String::new();
        loop {
            let error = match opened {
                Ok(port) => {
                    if !logged.is_empty() {
                        tracing::info!(address = ?port.address(), "opened the port for subscribers");
                    }
                    return Some(port);
                }
                Err(error) => quintlet_kit::error_chain(&error),
            };
            // Files may be missing for hours: an error is logged when it begins and when its text changes.
            if error != logged {
                tracing::error!(error, "failed to open the port for subscribers, retrying");
                logged = error;
            }
            // Both arms only wait.
            tokio::select! {
                () = stop.cancelled() => return None,
                () = tokio::time::sleep(RETRY) => {}
            }
            opened = self.open().await;
        }
    }
}

/// Passes streams of the services on to clients that are admitted.
#[derive(Debug, Clone)]
struct Relay {
    admission: Admission,
    paths: Paths,
    limits: Limits,
    /// Open streams of each kind, by the name of the client.
    slots: BTreeMap<StreamKind, Slots<String>>,
    open: Family<StreamLabel, Gauge>,
    refusals: Refusals,
    stop: CancellationToken,
}

impl Relay {
    fn new(admission: Admission, paths: Paths, limits: Limits, stop: CancellationToken) -> Self {
        let counts = counter_family(
            "quintlet_node_api_refused_subscribers",
            "Subscribers over TCP that were refused, by reason; a failed handshake counts elsewhere",
        );
        Self {
            admission,
            paths,
            limits,
            slots: StreamKind::ALL.map(|kind| (kind, Slots::default())).into(),
            open: gauge_family("quintlet_node_api_subscribers", "Open streams of subscribers over TCP"),
            refusals: Refusals { counts, log: Arc::default() },
            stop,
        }
    }

    /// Returns the stream, or why there is none.
    async fn relay(&self, request: Request<Incoming>) -> Result<Response<Body>, Status> {
        let (parts, body) = request.into_parts();
        let Some(peer) = parts.extensions.get::<Peer>().cloned() else {
            return Err(Status::internal("the connection has no client"));
        };
        let refused = |refusal: Refusal| {
            self.refusals.count(peer.address, &refusal);
            if refusal.ends_connection() {
                peer.life.refuse_once_answered();
            }
            refusal.status()
        };
        let name = self.admission.admit(&peer.chain).map_err(refused)?;
        let trusted = peer.life.trust(&Client::Certificate(name.clone()));
        trusted.map_err(|_| refused(Refusal::Connections(name.clone())))?;
        let kind = StreamKind::ALL.into_iter().find(|kind| kind.path() == parts.uri.path());
        let kind = kind.ok_or_else(|| Status::unimplemented("only Watch is served over TCP"))?;
        let slots = self.slots.get(&kind).cloned().unwrap_or_default();
        let share = Share { all: STREAMS, each: STREAMS_OF_CLIENT };
        let slot = slots.enter(name.clone(), share).map_err(|reached| {
            refused(match reached {
                ReachedLimit::OfAll => Refusal::Streams,
                ReachedLimit::OfClient => Refusal::StreamsOfClient(name),
            })
        })?;
        let read = axum::body::to_bytes(Body::new(body), MOST_REQUEST);
        let message = tokio::time::timeout(self.limits.body, read).await;
        let message = message.map_err(|_| Status::deadline_exceeded("the request did not arrive in time"))?;
        let message = message.map_err(|_| Status::out_of_range("the request is larger than 64 KiB"))?;

        let mut call = Request::new(tonic::body::Body::new(axum::body::Body::from(message)));
        *call.method_mut() = Method::POST;
        *call.uri_mut() = http::Uri::from_static(kind.path());
        call.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
        call.headers_mut().insert(TE, http::HeaderValue::from_static("trailers"));
        for header in PASSED {
            if let Some(value) = parts.headers.get(header) {
                call.headers_mut().insert(HeaderName::from_static(header), value.clone());
            }
        }
        let wanted =
            parts.headers.get(INSTANCE).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        let path = self.socket(kind, wanted).await?;
        let response = self.call(kind, path, call).await?;
        let open = self.open.get_or_create(&StreamLabel { stream: kind.name() }).clone();
        let (sender, end) = oneshot::channel();
        let connection = Arc::downgrade(&peer.life);
        let watch = relayed::end_early(self.early_end(peer), sender, connection);
        drop(task::spawn_contained("node-api-subscriber", None, watch));
        Ok(response.map(|body| Body::new(RelayedBody::new(body, end, open, slot))))
    }

    /// Calls the service on a connection of its own, which ends with the stream.
    async fn call(
        &self,
        kind: StreamKind,
        path: PathBuf,
        request: Request<tonic::body::Body>,
    ) -> Result<Response<tonic::body::Body>, Status> {
        let mut channel = socket::channel_with_window(path, WINDOW);
        let called = async {
            poll_fn(|cx| channel.poll_ready(cx)).await?;
            channel.call(request).await
        };
        let unavailable = || Status::unavailable(format!("{} does not answer", kind.service()));
        // A service answers at once; the first message of a stream is its greeting.
        let called = tokio::time::timeout(self.limits.body, called).await;
        called.map_err(|_| unavailable())?.map_err(|error| {
            tracing::debug!(
                stream = kind.name(),
                error = quintlet_kit::error_chain(&error),
                "failed to subscribe for a client"
            );
            let first: &(dyn Error + 'static) = &error;
            match std::iter::successors(Some(first), |&error| error.source())
                .any(|error| error.is::<TimeoutExpired>())
            {
                true => Status::deadline_exceeded("the time of the request has expired"),
                false => unavailable(),
            }
        })
    }

    async fn socket(&self, kind: StreamKind, instance: Option<String>) -> Result<PathBuf, Status> {
        match kind {
            StreamKind::Containers => Ok(self.paths.pleg_subscribers()),
            StreamKind::Pods => Ok(self.paths.podsync_subscribers()),
            StreamKind::Probes => {
                let paths = self.paths.clone();
                let dir = self.paths.probe_subscribers_dir();
                let names = task::blocking(move || socket_names(&dir)).await;
                let instances: Vec<String> = names.into_iter().collect();
                choose_instance(&instances, instance.as_deref()).map(|id| paths.probe_subscribers(id))
            }
        }
    }

    /// Returns the end of a stream at a stop, or once its client is not admitted any more.
    fn early_end(&self, peer: Peer) -> EarlyEnd {
        let Self { admission, refusals, stop, .. } = self.clone();
        Box::pin(async move {
            loop {
                // Both arms only wait.
                tokio::select! {
                    () = stop.cancelled() => return Status::ok("node-api stops"),
                    () = tokio::time::sleep(RECHECK) => {}
                }
                if let Err(refusal) = admission.admit(&peer.chain) {
                    refusals.count(peer.address, &refusal);
                    return refusal.status();
                }
            }
        })
    }
}

impl Handler for Relay {
    fn certified(&self, chain: &[CertificateDer<'static>]) -> Option<Client> {
        self.admission.admit(chain).ok().map(Client::Certificate)
    }

    async fn handle(&self, request: Request<Incoming>) -> Response<Body> {
        let content_type = request.headers().get(CONTENT_TYPE).map(|value| value.as_bytes().to_owned());
        let is_grpc = content_type.is_some_and(|value| value.starts_with(b"application/grpc"));
        if request.method() != Method::POST || !is_grpc {
            if let Some(peer) = request.extensions().get::<Peer>() {
                peer.life.refuse();
            }
            return node_api_base::answer::text(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "only gRPC is served here",
            );
        }
        self.relay(request).await.unwrap_or_else(Status::into_http)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use node_api_access::limits::ConnectionLimiter;
    use quintlet_testkit::certificates::Authority;
    use tonic::Code;

    use super::*;
    use crate::connection::ConnectionState;

    /// Writes a new CA into a file. Returns the certificate of a client that it signed.
    fn authority(file: &Path, name: &str) -> CertificateDer<'static> {
        let ca = Authority::new(name);
        std::fs::write(file, ca.pem()).unwrap();
        ca.client_until("watcher", "g", 2030).der()
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_stream_ends_once_its_certificate_has_expired_or_its_authority_is_removed() {
        for (expires, message) in [
            (true, "the client certificate has expired, or is not valid yet"),
            (false, "the client certificate is signed by another CA"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("ca.crt");
            let chain = authority(&file, "first");
            let ca = Arc::new(ClientCa::load(&file).unwrap());
            let clock = Clock::fixed("2029-12-30T00:00:00Z".parse().unwrap(), Duration::ZERO);
            let names = Arc::new(["watcher".to_owned()].into());
            let admission = Admission { ca: Arc::clone(&ca), names, clock: clock.clone() };
            let limits = limits(Limits::default());
            let relay = Relay::new(admission, Paths::new(dir.path()), limits, CancellationToken::new());
            let address = SocketAddr::from(([127, 0, 0, 1], 1));
            let slot = ConnectionLimiter::default().enter(address.ip(), &limits).unwrap();
            let life = Arc::new(ConnectionState::new(slot, limits));
            let mut end = relay.early_end(Peer { address, chain: Arc::new([chain]), life });
            let open = tokio::time::timeout(Duration::from_secs(3600), &mut end).await;
            assert!(open.is_err(), "{open:?}");
            if expires {
                clock.advance(Duration::from_secs(3 * 24 * 3600));
            } else {
                authority(&file, "second");
                assert!(ca.refresh().unwrap());
            }
            let status = tokio::time::timeout(RECHECK, end).await.expect("an end");
            assert_eq!((status.code(), status.message()), (Code::Unauthenticated, message));
        }
    }
}
