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
use crate::contain;
use crate::socket::{KEEPALIVE, Peer, PeerPolicy, incoming};

/// How long open calls may go on after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(2);

/// Calls that one connection may have open. A client has one connection, whatever it does: pod-sync observes each of some
/// hundred pods at once through it, and an observer may hold a watch per pod. hyper's own limit of 200 would make them wait
/// without a word. What a call costs is bounded by the queues of the services, not here.
pub const MAX_STREAMS: u32 = 4096;

/// What pod-sync's health calls its sync loop: it serves while the loop makes progress.
pub const SYNC_LOOP: &str = "syncloop";

/// What pleg-service's health calls its loop of full lists: it serves while the loop makes progress, whatever a list ends with.
pub const RELIST_LOOP: &str = "relist";

/// What node-api's health calls the loop that accepts HTTPS connections: it serves while the loop makes progress.
pub const HTTPS_LOOP: &str = "https";

/// What status-reporter's health calls the Node object: it serves while the API server gives and takes it.
pub const NODE: &str = "node";

/// Sets what grpc.health.v1 says.
#[derive(Debug, Clone)]
pub struct HealthHandle {
    reporter: HealthReporter,
    known: Arc<Mutex<Known>>,
}

/// The names somebody set. The empty one is there from the beginning.
#[derive(Debug, Default)]
struct Known {
    names: BTreeSet<String>,
    stopped: bool,
}

impl HealthHandle {
    /// A handle that servers share.
    #[must_use]
    pub fn new() -> Self {
        let known = Known { names: BTreeSet::from([String::new()]), stopped: false };
        Self { reporter: HealthReporter::new(), known: Arc::new(Mutex::new(known)) }
    }

    /// `name` serves; the empty name is the process as a whole. Nothing serves again once the server stops.
    pub async fn set_serving(&self, name: &str) {
        self.set(name, ServingStatus::Serving).await;
    }

    /// `name` does not serve.
    pub async fn set_not_serving(&self, name: &str) {
        self.set(name, ServingStatus::NotServing).await;
    }

    async fn set(&self, name: &str, status: ServingStatus) {
        // Held over the call: what is set at the moment of the stop is not set after it.
        let mut known = self.known.lock().await;
        if known.stopped {
            return;
        }
        known.names.insert(name.to_owned());
        self.reporter.set_service_status(name, status).await;
    }

    /// Nothing serves from now on, whatever its name.
    async fn stop(&self) {
        let mut known = self.known.lock().await;
        known.stopped = true;
        for name in &known.names {
            self.reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
    }
}

impl Default for HealthHandle {
    fn default() -> Self {
        Self::new()
    }
}

/// A server being put together.
#[derive(Debug)]
pub struct Server {
    routes: RoutesBuilder,
    fallback: Option<axum::Router>,
    health: HealthHandle,
    observers: Vec<u32>,
}

impl Server {
    /// A server of the service `name`, with health, reflection and debug.v1 on it.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self::with_health(name, HealthHandle::new())
    }

    /// As [`Server::new`], with a health handle that others share.
    #[must_use]
    pub fn with_health(name: &'static str, health: HealthHandle) -> Self {
        let mut routes = RoutesBuilder::default();
        routes.add_service(HealthServer::new(HealthService::from_health_reporter(health.reporter.clone())));
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(quintlet_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1();
        match reflection {
            Ok(service) => {
                routes.add_service(service);
            }
            Err(error) => tracing::error!(%error, "no reflection"),
        }
        routes.add_service(debug(name));
        Self { routes, fallback: None, health, observers: Vec::new() }
    }

    /// Adds a service.
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
        self
    }

    /// What answers methods that no service here has.
    #[must_use]
    pub fn fallback(mut self, router: axum::Router) -> Self {
        self.fallback = Some(router);
        self
    }

    /// Lets these users in whatever the policy says, for health and debug.v1 only.
    #[must_use]
    pub fn observers(mut self, uids: &[u32]) -> Self {
        self.observers = uids.to_vec();
        self
    }

    /// Sets what health says.
    #[must_use]
    pub fn health(&self) -> HealthHandle {
        self.health.clone()
    }

    /// Serves until told to stop, then lets open calls end for a short while.
    ///
    /// # Errors
    /// The transport failed.
    pub async fn serve(
        self,
        listener: UnixListener,
        policy: PeerPolicy,
        stop: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let Self { routes, fallback, health, observers } = self;
        let mut router = routes.routes().into_axum_router();
        if let Some(fallback) = fallback {
            router = router.fallback_service(fallback);
        }
        let door = policy.clone().and(&observers);
        if !observers.is_empty() {
            let policy = Arc::new(policy);
            router = router.layer(axum::middleware::from_fn(move |request, next| {
                observe_only(policy.clone(), request, next)
            }));
        }
        let router = router.layer(axum::middleware::from_fn(contain_call));
        let routes = Routes::from(router);
        let server = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE))
            .max_concurrent_streams(Some(MAX_STREAMS))
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming(listener, door), stop.clone().cancelled_owned());
        let late = async {
            stop.cancelled().await;
            health.stop().await;
            tokio::time::sleep(DRAIN).await;
        };
        // A stream that never ends does not hold the process: its client comes back to the next one.
        tokio::select! {
            served = server => served,
            () = late => Ok(()),
        }
    }
}

/// What any observer may call.
const OBSERVABLE: [&str; 2] = ["/grpc.health.v1.Health/", "/quintlet.debug.v1.Debug/"];

// A panic in one call ends that call with INTERNAL. Without this it would end the connection, and with it all other calls of
// the client.
async fn contain_call(
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> axum::response::Response {
    let work = contain::Work::of_request(request.headers());
    let called = contain::contained_request(work, next.run(request)).await;
    called.unwrap_or_else(|panic| Status::internal(panic.to_string()).into_http())
}

/// Passes on what the user at the other end may call: everything by the policy, else what shows and changes nothing.
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
    Status::permission_denied("this user may ask for health and metrics only").into_http()
}

/// Serves Prometheus text over HTTP/1 at `/metrics` until told to stop.
///
/// # Errors
/// The address cannot be bound.
pub async fn serve_metrics(address: std::net::SocketAddr, stop: CancellationToken) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    let router = axum::Router::new()
        .route("/metrics", axum::routing::get(|| async { quintlet_telemetry::metrics::text() }));
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

/// debug.v1 of the service `name`, which starts now: for a server that is not put together by [`Server`].
#[must_use]
pub fn debug(name: &'static str) -> DebugServer<DebugService> {
    let clock = Clock::system();
    DebugServer::new(DebugService { name, started: clock.boot(), clock })
}

/// What this process runs with, for debug.v1 of all its servers.
static CONFIGURATION: OnceLock<String> = OnceLock::new();

/// Says what this process runs with: JSON of a KubeletConfiguration, without secrets. The first word counts.
pub fn tell_configuration(json: String) {
    let _ = CONFIGURATION.set(json);
}

/// debug.v1: spans, metrics, build, configuration.
#[derive(Debug)]
pub struct DebugService {
    name: &'static str,
    clock: Clock,
    started: Duration,
}

#[tonic::async_trait]
impl Debug for DebugService {
    async fn traces(
        &self,
        request: Request<wire::TracesRequest>,
    ) -> Result<Response<wire::TracesReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(quintlet_telemetry::ring().query(&request.trace_id, &request.pod_uid)))
    }

    async fn metrics(
        &self,
        _: Request<wire::MetricsRequest>,
    ) -> Result<Response<wire::MetricsReply>, Status> {
        let mut text = String::new();
        encode(&mut text, &quintlet_telemetry::metrics::registry())
            .map_err(|e| Status::internal(e.to_string()))?;
        Ok(Response::new(wire::MetricsReply { text }))
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
        }))
    }
}
