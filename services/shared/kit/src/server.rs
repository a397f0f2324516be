//! A gRPC server on a unix socket: the given services, health, reflection and debug.v1.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use quintlet_proto::debug::v1 as wire;
use quintlet_proto::debug::v1::debug_server::{Debug, DebugServer};
use tokio::net::UnixListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::{Routes, RoutesBuilder};
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

use crate::clock::Clock;
use crate::control::control;
use crate::messages::{self, Bounded};
use crate::reflection::Reflection;
use crate::slots::Share;
use crate::socket::{Peer, PeerPolicy, at_most, incoming};
use crate::stack;

/// Time limit for open calls after a server stops.
const DRAIN: Duration = Duration::from_secs(2);

/// Open calls per connection. A client uses one connection: pod-sync observes hundreds of pods at once
/// through it, and an observer may hold a watch per pod. hyper's default of 200 would delay further calls
/// silently. The queues of the services bound the cost of calls.
pub const MAX_STREAMS: u32 = 4096;

/// Health name of pod-sync's sync loop: SERVING while the loop makes progress.
pub const SYNC_LOOP: &str = "syncloop";

/// Health name of pod-sync's offline cache: NOT_SERVING while pods run that were started from it and that the
/// API server has not confirmed. Unknown without the cache.
pub const OFFLINE_CACHE: &str = "offline";

/// Health name of pleg-service's relist loop: SERVING while the loop makes progress, even if the lists fail.
pub const RELIST_LOOP: &str = "relist";

/// Health name of node-api's loop that accepts HTTPS connections: SERVING while the loop makes progress.
pub const HTTPS_LOOP: &str = "https";

/// Health name of status-reporter's Node object: SERVING while it can be read from and written to the API
/// server.
pub const NODE: &str = "node";

/// Sets the statuses that grpc.health.v1 reports. Clones share them.
#[derive(Debug, Clone)]
pub struct HealthHandle {
    reporter: HealthReporter,
    registered: Arc<Mutex<Registered>>,
}

/// The names that have a status. The empty name always has one.
#[derive(Debug, Default)]
struct Registered {
    names: BTreeSet<String>,
    stopped: bool,
}

impl HealthHandle {
    /// Returns a handle that several servers may share.
    #[must_use]
    pub fn new() -> Self {
        let registered = Registered { names: BTreeSet::from([String::new()]), stopped: false };
        Self { reporter: HealthReporter::new(), registered: Arc::new(Mutex::new(registered)) }
    }

    /// Sets `name` to SERVING. The empty name stands for the whole process. Has no effect once the server
    /// stops.
    pub async fn set_serving(&self, name: &str) {
        self.set(name, ServingStatus::Serving).await;
    }

    /// Sets `name` to NOT_SERVING.
    pub async fn set_not_serving(&self, name: &str) {
        self.set(name, ServingStatus::NotServing).await;
    }

    async fn set(&self, name: &str, status: ServingStatus) {
        // The lock is held during the call, so that no status is set after the stop.
        let mut registered = self.registered.lock().await;
        if registered.stopped {
            return;
        }
        registered.names.insert(name.to_owned());
        self.reporter.set_service_status(name, status).await;
    }

    /// Sets all names to NOT_SERVING for good.
    async fn stop(&self) {
        let mut registered = self.registered.lock().await;
        registered.stopped = true;
        for name in &registered.names {
            self.reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
    }
}

impl Default for HealthHandle {
    fn default() -> Self {
        Self::new()
    }
}

/// Flow-control windows of a guest's connection and its streams, in bytes: a guest sends small requests.
const GUEST_WINDOW: u32 = 64 << 10;

/// Interval of HTTP/2 pings to a guest, and time limit for the answer. A guest that is stopped would keep its
/// connection and its streams for ever.
const GUEST_PING: Duration = Duration::from_secs(60);
const GUEST_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Limits of a server whose clients are not part of Quintlet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestLimits {
    /// Open connections, of all users and of each. Further ones are closed at once.
    pub connections: Share,
    /// Open calls per connection. A call is open until its client has read the answer.
    pub calls: u32,
}

/// Builder of a server.
#[derive(Debug)]
pub struct Server {
    routes: RoutesBuilder,
    fallback: Option<axum::Router>,
    health: HealthHandle,
    observers: Vec<u32>,
    guests: Option<GuestLimits>,
    /// Open calls per connection.
    streams: u32,
    /// The services that were added.
    names: Vec<&'static str>,
}

impl Server {
    /// Returns a server of the service `name` with health, reflection and debug.v1.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self::with_health(name, HealthHandle::new())
    }

    /// Returns a server as [`Server::new`] does, with a shared health handle.
    #[must_use]
    pub fn with_health(name: &'static str, health: HealthHandle) -> Self {
        let mut routes = RoutesBuilder::default();
        routes.add_service(HealthServer::new(HealthService::from_health_reporter(health.reporter.clone())));
        routes.add_service(Reflection::default());
        routes.add_service(debug(name));
        routes.add_service(control());
        Self {
            routes,
            fallback: None,
            health,
            observers: Vec::new(),
            guests: None,
            streams: MAX_STREAMS,
            names: Vec::new(),
        }
    }

    /// Returns a server for programs that are not part of Quintlet: without health, reflection and debug.v1,
    /// and with limits.
    #[must_use]
    pub fn for_guests(limits: GuestLimits) -> Self {
        Self {
            routes: RoutesBuilder::default(),
            fallback: None,
            health: HealthHandle::new(),
            observers: Vec::new(),
            guests: Some(limits),
            streams: limits.calls,
            names: Vec::new(),
        }
    }

    /// Adds reflection of the services so far to a server that [`Server::for_guests`] returned.
    #[must_use]
    pub fn with_reflection(self) -> Self {
        let names = self.names.clone();
        self.add_service(Reflection::of(names))
    }

    /// Adds a gRPC service.
    #[must_use]
    pub fn add_service<S>(mut self, service: S) -> Self
    where
        S: tower::Service<http::Request<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Response: axum::response::IntoResponse,
        S::Future: Send + 'static,
    {
        self.routes.add_service(service);
        self.names.push(S::NAME);
        self
    }

    /// Sets the router for methods that no service of this server has.
    #[must_use]
    pub fn fallback(mut self, router: axum::Router) -> Self {
        self.fallback = Some(router);
        self
    }

    /// Sets the number of open calls per connection; default: [`MAX_STREAMS`]. A further call waits in its
    /// client.
    #[must_use]
    pub fn streams(mut self, streams: u32) -> Self {
        self.streams = streams;
        self
    }

    /// Allows these users to call health and debug.v1, in addition to the policy.
    #[must_use]
    pub fn observers(mut self, uids: &[u32]) -> Self {
        self.observers = uids.to_vec();
        self
    }

    /// Returns the handle that sets the server's health.
    #[must_use]
    pub fn health(&self) -> HealthHandle {
        self.health.clone()
    }

    /// Serves until `stop` is cancelled, then waits up to 2 s for open calls.
    ///
    /// # Errors
    /// Fails if the transport fails.
    pub async fn serve(
        self,
        listener: UnixListener,
        policy: PeerPolicy,
        stop: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let Self { routes, fallback, health, observers, guests, streams, names: _ } = self;
        let mut router = routes.routes().into_axum_router();
        if let Some(fallback) = fallback {
            router = router.fallback_service(fallback);
        }
        let connect_policy = policy.clone().and(&observers);
        router = router.layer(stack::server());
        // Outside of the other layers, so that a rejected call chooses no label of a metric.
        if !observers.is_empty() {
            let policy = Arc::new(policy);
            router = router.layer(axum::middleware::from_fn(move |request, next| {
                observe_only(policy.clone(), request, next)
            }));
        }
        let routes = Routes::from(router);
        let share = guests.map_or(Share::UNLIMITED, |guests| guests.connections);
        let connections = at_most(share, incoming(listener, connect_policy));
        let window = guests.map(|_| GUEST_WINDOW);
        let server = tonic::transport::Server::builder()
            .max_concurrent_streams(Some(streams))
            .initial_connection_window_size(window)
            .initial_stream_window_size(window)
            .http2_keepalive_interval(guests.map(|_| GUEST_PING))
            .http2_keepalive_timeout(guests.map(|_| GUEST_PING_TIMEOUT))
            .add_routes(routes)
            .serve_with_incoming_shutdown(connections, stop.clone().cancelled_owned());
        let late = async {
            stop.cancelled().await;
            health.stop().await;
            tokio::time::sleep(DRAIN).await;
        };
        // An endless stream does not delay the end of the process: its client reconnects to the next one.
        tokio::select! {
            served = server => served,
            () = late => Ok(()),
        }
    }
}

/// Path prefixes of the methods that observers may call.
const OBSERVABLE: [&str; 2] = ["/grpc.health.v1.Health/", "/quintlet.debug.v1.Debug/"];

/// Rejects calls of users that the policy does not allow, except for [`OBSERVABLE`] methods.
async fn observe_only(
    policy: Arc<PeerPolicy>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> axum::response::Response {
    let is_for_all = OBSERVABLE.iter().any(|service| request.uri().path().starts_with(service));
    let is_peer = request.extensions().get::<Peer>().is_some_and(|peer| policy.allows(peer.uid));
    if is_for_all || is_peer {
        return next.run(request).await;
    }
    Status::permission_denied("this user may only read health and metrics").into_http()
}

/// Serves metrics in the OpenMetrics text format over HTTP/1 at `/metrics` until `stop` is cancelled.
///
/// # Errors
/// Fails if the address cannot be bound.
pub async fn serve_metrics(address: std::net::SocketAddr, stop: CancellationToken) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    let router = axum::Router::new()
        .route("/metrics", axum::routing::get(|| async { quintlet_telemetry::metrics::text() }));
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

/// Returns debug.v1 of the service `name`, which starts now, for a server that [`Server`] does not build.
#[must_use]
pub fn debug(name: &'static str) -> DebugServer<DebugService> {
    let clock = Clock::system();
    DebugServer::new(DebugService { name, started: clock.boot(), clock })
}

fn metrics_text() -> Result<String, Status> {
    let mut text = String::new();
    encode(&mut text, &quintlet_telemetry::metrics::registry())
        .map_err(|e| Status::internal(e.to_string()))?;
    Ok(text)
}

/// Configuration of the process, which debug.v1 reports.
static CONFIGURATION: OnceLock<String> = OnceLock::new();

/// Sets the configuration that debug.v1 reports: a KubeletConfiguration as JSON without secrets. Only the
/// first call has an effect.
pub fn set_configuration(json: String) {
    let _ = CONFIGURATION.set(json);
}

/// Implements debug.v1: spans, metrics, build and configuration.
#[derive(Debug)]
pub struct DebugService {
    name: &'static str,
    clock: Clock,
    started: Duration,
}

#[tonic::async_trait]
impl Debug for DebugService {
    type TracesStream = Bounded<wire::TracesReply>;

    async fn traces(
        &self,
        request: Request<wire::TracesRequest>,
    ) -> Result<Response<Self::TracesStream>, Status> {
        let request = request.into_inner();
        let wire::TracesReply { spans, dropped } =
            quintlet_telemetry::ring().query(&request.trace_id, &request.pod_uid);
        let chunk = move |spans| wire::TracesReply { spans, dropped };
        Ok(Response::new(Bounded::of_chunks("Debug.Traces", messages::chunks(spans).map(chunk))))
    }

    type MetricsStream = Bounded<wire::MetricsReply>;

    async fn metrics(
        &self,
        _: Request<wire::MetricsRequest>,
    ) -> Result<Response<Self::MetricsStream>, Status> {
        let text = metrics_text()?;
        let pieces: Vec<_> =
            messages::pieces(&text).map(|piece| wire::MetricsReply { text: piece.to_owned() }).collect();
        Ok(Response::new(Bounded::of_chunks("Debug.Metrics", pieces.into_iter())))
    }

    async fn config(&self, _: Request<wire::ConfigRequest>) -> Result<Response<wire::ConfigReply>, Status> {
        let kubelet_configuration = CONFIGURATION.get().cloned().unwrap_or_default();
        Ok(Response::new(wire::ConfigReply { kubelet_configuration }))
    }

    async fn build(&self, _: Request<wire::BuildRequest>) -> Result<Response<wire::BuildReply>, Status> {
        Ok(Response::new(wire::BuildReply {
            service: self.name.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: crate::build::commit().to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.clock.boot().saturating_sub(self.started).as_secs_f64(),
            refused_peers: crate::neighbour::refused_peers(),
        }))
    }
}
