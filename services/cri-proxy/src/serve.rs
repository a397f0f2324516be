//! The sockets: one per kind of caller, each in its own directory and with a list of allowed users.
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use quintlet_kit::clock::Clock;
use quintlet_kit::control::control;
use quintlet_kit::gathered::Gathered;
use quintlet_kit::local_authority::LocalAuthority;
use quintlet_kit::reflection::Reflection;
use quintlet_kit::socket::{Peer, PeerPolicy, bind_unix};
use quintlet_kit::stack::{ContinueTraceLayer, CountLayer};
use quintlet_kit::{contain, server, task, timers};
use quintlet_proto::runtime::v1 as pb;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::ServiceExt as _;

use crate::event_reader::EventReader;
use crate::forward::Forwarder;
use crate::hints::Hub;
use crate::logs::ContainerLogs;
use crate::metrics::Metrics;
use crate::policy::{self, CallDecision, Socket};
use crate::reply::{self, Body, Reply};
use crate::runtime_info::RuntimeInfo;
use crate::services::{
    GrantVerifier, OBSERVE_INTERVAL, ProbeExecService, ProxyInfoService, RuntimeEventsService,
};
use crate::upstream::Upstream;

/// Maximum number of concurrent calls on a connection: 8 for each of 500 pods. Clients queue further calls.
const MAX_STREAMS: u32 = 4096;
/// Maximum number of connections of a socket. A client has one for its calls, and one per health or metrics
/// request.
const CONNECTIONS: usize = 64;
/// Maximum number of connections of root's own tools. critest of cri-tools 1.37 has 142 specs. Each opens a
/// client of the runtime service and one of the image service, and closes neither: 284 connections. The
/// others are for `crictl`, and for specs of later versions.
const ADMIN_CONNECTIONS: usize = 512;
/// Mode of the sockets. Access is restricted by the mode of each directory and by the list of users.
const SOCKET_MODE: u32 = 0o660;
/// Maximum size of a call's headers.
const MAX_HEADERS: u32 = 256 << 10;
/// Grace period for mutations in flight when the service stops.
const GRACE: Duration = Duration::from_secs(5);
/// Time limit for callers to read the last frames of streams.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// Returns the maximum number of connections of a socket.
#[must_use]
pub fn connection_limit(socket: Socket) -> usize {
    match socket {
        Socket::Admin => ADMIN_CONNECTIONS,
        Socket::Sync | Socket::Read | Socket::NodeApi | Socket::Probe => CONNECTIONS,
    }
}

/// Configuration of the proxy.
#[derive(Debug, Clone)]
pub struct Config {
    /// Socket of the runtime.
    pub runtime: PathBuf,
    /// Socket of the image service, if it differs.
    pub images: Option<PathBuf>,
    /// Default time limit of a call; [`policy::CRI_TIMEOUT`] unless configured.
    pub timeout: Duration,
    /// The containerd namespace of pods.
    pub namespace: String,
    /// Path of each socket.
    pub sockets: Vec<(Socket, PathBuf)>,
    /// Users that may connect to a socket, in addition to root and the process's own user.
    pub uids: Vec<(Socket, u32)>,
    /// Directory of container logs. Logs outside of it are not read.
    pub pod_logs_dir: PathBuf,
    /// Byte limit of a socket; [`crate::budget::limit`] except in tests.
    pub byte_limit: fn(Socket) -> usize,
    /// Connection limit of a socket; [`connection_limit`] except in tests.
    pub connections: fn(Socket) -> usize,
    /// Lag limit of a subscriber; [`crate::hints::CAPACITY`] except in tests.
    pub hint_capacity: usize,
    /// The clock of deadlines, which tests replace.
    pub clock: Clock,
    /// Path of the key of exec grants.
    pub grant_key: PathBuf,
}

/// A proxy whose sockets are bound.
#[derive(Debug)]
pub struct Proxy {
    listeners: Vec<(Socket, UnixListener)>,
    config: Config,
    forwarder: Arc<Forwarder>,
    hub: Hub,
    metrics: Metrics,
}

impl Proxy {
    /// Binds all sockets. The runtime need not run.
    ///
    /// # Errors
    /// Fails if a socket cannot be bound. The message has its path.
    pub fn bind(config: Config) -> io::Result<Self> {
        let metrics = Metrics::default();
        let listeners = config
            .sockets
            .iter()
            .map(|(socket, path)| {
                let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
                Ok((*socket, bind_unix(path, SOCKET_MODE).map_err(named)?))
            })
            .collect::<io::Result<Vec<_>>>()?;
        let upstream = Upstream::new(config.runtime.clone());
        let images = config.images.clone().filter(|path| *path != config.runtime).map(Upstream::new);
        let forwarder = Arc::new(Forwarder::new(
            upstream,
            images,
            &config.namespace,
            config.timeout,
            config.clock.clone(),
            metrics.clone(),
            config.byte_limit,
        ));
        let hub = Hub::new(config.hint_capacity, metrics.clone());
        Ok(Self { listeners, config, forwarder, hub, metrics })
    }

    /// Returns the metrics of the process.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Serves until `stop` is cancelled. Mutations in flight then have 5 s to complete.
    pub async fn serve(self, stop: CancellationToken) {
        let upstream = Upstream::new(self.config.runtime.clone());
        let (info, runtime) = watch::channel(RuntimeInfo::default());
        let (reporter, health) = tonic_health::server::health_reporter();
        let tasks = TaskTracker::new();
        let reader = EventReader {
            upstream,
            hub: self.hub.clone(),
            info,
            namespace: self.config.namespace.clone(),
            in_flight: self.forwarder.in_flight(),
            metrics: self.metrics.clone(),
        };
        drop(task::spawn("runtime-events", tasks.track_future(reader.run(stop.clone()))));
        let reporting = report_health(reporter.clone(), runtime.clone(), self.forwarder.clone());
        drop(task::spawn("health", stop.clone().run_until_cancelled_owned(reporting)));

        let grants = Arc::new(GrantVerifier::new(self.config.grant_key.clone()));
        let debug = server::debug("cri-proxy");
        let reflection = Reflection::default();
        let logs = ContainerLogs::new(self.forwarder.clone(), &self.config.pod_logs_dir);
        // Connections outlive `stop`, so that calls in flight get their replies.
        let close_connections = CancellationToken::new();
        for (socket, listener) in self.listeners {
            let mut routes = Routes::new(health.clone()).add_service(reflection.clone());
            let info = ProxyInfoService {
                runtime: runtime.clone(),
                hub: self.hub.clone(),
                forwarder: self.forwarder.clone(),
                endpoint: self.config.runtime.display().to_string(),
            };
            let probe = ProbeExecService { forwarder: self.forwarder.clone(), grants: grants.clone() };
            // All services are added to every socket; `policy::verdict` restricts access.
            routes = routes
                .add_service(pb::runtime_events_server::RuntimeEventsServer::new(RuntimeEventsService(
                    self.hub.clone(),
                )))
                .add_service(pb::proxy_info_server::ProxyInfoServer::new(info))
                .add_service(debug.clone())
                .add_service(control())
                .add_service(pb::probe_exec_server::ProbeExecServer::new(probe))
                .add_service(pb::container_logs_server::ContainerLogsServer::new(logs.clone()));
            let of_socket = self.config.uids.iter().filter(|(allowed_on, _)| *allowed_on == socket);
            let of_socket: Vec<u32> = of_socket.map(|(_, uid)| *uid).collect();
            let routes = Routes::from(routes.into_axum_router().layer(CountLayer));
            let server_of_socket = SocketServer {
                socket,
                routes: routes.prepare(),
                forwarder: self.forwarder.clone(),
                peers: Arc::new(PeerPolicy::root_and_self().and(&of_socket)),
                connection_slots: Arc::new(Semaphore::new((self.config.connections)(socket))),
                metrics: self.metrics.clone(),
                tasks: tasks.clone(),
                close_connections: close_connections.clone(),
            };
            drop(task::spawn(
                "listen",
                stop.clone().run_until_cancelled_owned(server_of_socket.listen(listener)),
            ));
        }
        stop.cancelled().await;
        reporter.set_service_status("", ServingStatus::NotServing).await;
        tasks.close();
        if tokio::time::timeout(GRACE, self.forwarder.wait_idle()).await.is_err() {
            tracing::warn!("calls still in flight after the grace period");
        }
        self.forwarder.end_streams();
        close_connections.cancel();
        let _ = tokio::time::timeout(Duration::from_secs(1), tasks.wait()).await;
    }
}

async fn report_health(
    reporter: HealthReporter,
    mut runtime: watch::Receiver<RuntimeInfo>,
    forwarder: Arc<Forwarder>,
) {
    let mut tick = tokio::time::interval_at(timers::first_tick(OBSERVE_INTERVAL), OBSERVE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        let connected = runtime.borrow_and_update().connected;
        let status = if connected { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status("", status).await;
        // Both arms only wake the loop.
        tokio::select! {
            changed = runtime.changed() => if changed.is_err() { return },
            _ = tick.tick() => forwarder.observe_lanes(),
        }
    }
}

/// The server of one socket.
#[derive(Clone)]
struct SocketServer {
    socket: Socket,
    routes: Routes,
    forwarder: Arc<Forwarder>,
    peers: Arc<PeerPolicy>,
    /// Free connection slots.
    connection_slots: Arc<Semaphore>,
    metrics: Metrics,
    tasks: TaskTracker,
    close_connections: CancellationToken,
}

impl SocketServer {
    async fn listen(self, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => self.admit(stream),
                Err(error) => {
                    // Most likely the process is out of file descriptors. Other connections will free some.
                    tracing::warn!(socket = self.socket.name(), %error, "failed to accept connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn admit(&self, stream: UnixStream) {
        let peer = stream.peer_cred().map(|peer| Peer { uid: peer.uid(), pid: peer.pid() });
        match peer {
            Ok(peer) if self.peers.allows(peer.uid) => {
                let Ok(slot) = self.connection_slots.clone().try_acquire_owned() else {
                    self.metrics.refused_connections.inc();
                    let uid = peer.uid;
                    tracing::warn!(socket = self.socket.name(), uid, "connection refused, too many are open");
                    return;
                };
                let serving = self.clone().serve_connection(stream, peer);
                let work = self.tasks.track_future(async move {
                    serving.await;
                    drop(slot);
                });
                drop(task::spawn_contained("connection", None, work));
            }
            Ok(Peer { uid, .. }) => {
                self.metrics.refused_peers.inc();
                tracing::warn!(socket = self.socket.name(), uid, "connection refused, user is not allowed");
            }
            Err(error) => tracing::debug!(%error, "peer disconnected"),
        }
    }

    async fn serve_connection(self, stream: UnixStream, peer: Peer) {
        let (socket, close_connections) = (self.socket, self.close_connections.clone());
        // Without a deadline layer: `policy` has the deadlines of calls to the runtime.
        let service = tower::ServiceBuilder::new().layer(ContinueTraceLayer).service_fn(
            move |request: Request<Incoming>| {
                // Boxed, since a call's future is large and a connection may have thousands.
                let answer: BoxFuture<'static, Result<Response<Body>, Infallible>> =
                    Box::pin(self.clone().answer_contained(request, peer));
                answer
            },
        );
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADERS)
            .auto_date_header(false)
            .serve_connection(
                TokioIo::new(LocalAuthority::new(Gathered::new(stream))),
                TowerToHyperService::new(service),
            );
        let mut connection = Box::pin(connection);
        // Neither arm loses anything: the connection is only borrowed.
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = close_connections.cancelled() => {
                connection.as_mut().graceful_shutdown();
                // Watches do not end by themselves. They are closed, and their callers reconnect to the next
                // process.
                tokio::time::timeout(CLOSE_TIMEOUT, &mut connection).await.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            tracing::debug!(socket = socket.name(), %error, "connection failed");
        }
    }

    // Without this, a panic would end the connection with all other calls on it.
    async fn answer_contained(
        self,
        request: Request<Incoming>,
        peer: Peer,
    ) -> Result<Response<Body>, Infallible> {
        let work = contain::Work::of_request(request.headers());
        let answered = contain::contained_request(work, Box::pin(self.answer(request, peer))).await;
        answered.unwrap_or_else(|panic| Ok(Reply::panicked(&panic).into_response()))
    }

    async fn answer(self, mut request: Request<Incoming>, peer: Peer) -> Result<Response<Body>, Infallible> {
        let own = policy::split_path(request.uri().path()).is_some_and(|(service, method)| {
            policy::decide(self.socket, service, method) == CallDecision::Local
        });
        if !own {
            return Ok(self.forwarder.forward(self.socket, request).await);
        }
        request.extensions_mut().insert(peer);
        let response = self.routes.oneshot(request.map(tonic::body::Body::new)).await?;
        Ok(response.map(reply::boxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_roots_tools_has_room_for_critest_and_each_other_socket_for_64_connections() {
        let limits = Socket::ALL.map(|socket| (socket.name(), connection_limit(socket)));
        assert_eq!(limits, [("admin", 512), ("sync", 64), ("read", 64), ("node-api", 64), ("probe", 64)]);
        let of_critest = 142 * 2;
        assert!(connection_limit(Socket::Admin) > of_critest + CONNECTIONS);
    }
}
