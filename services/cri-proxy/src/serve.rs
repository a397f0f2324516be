//! The sockets: one per kind of caller, each with its own directory, peers checked by uid.
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use quintlet_kit::clock::Clock;
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::{contain, server, task};
use quintlet_proto::runtime::v1 as pb;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::ServiceExt as _;

use crate::forward::Forwarder;
use crate::hints::Hub;
use crate::logs::ContainerLogs;
use crate::metrics::Metrics;
use crate::policy::{self, Socket, Verdict};
use crate::reply::{self, Body, Reply};
use crate::services::{Events, Grants, Info, OBSERVE_EVERY, ProbeExec};
use crate::source::{Reader, RuntimeInfo};
use crate::upstream::Upstream;

/// Calls one connection may have open: 8 for each of 500 pods. A client makes further ones wait.
const MAX_STREAMS: u32 = 4096;
/// Connections one socket may have. A client has one for its calls, and one for each question about health or metrics.
pub const CONNECTIONS: usize = 64;
/// Mode of the sockets. Who may connect is decided by the directory of each and by its list of users.
const SOCKET_MODE: u32 = 0o660;
/// Headers of a call may be this large.
const MAX_HEADERS: u32 = 256 << 10;
/// How long mutations in flight may take to end when the service stops.
const GRACE: Duration = Duration::from_secs(5);
/// How long the last frames of streams may take to be read by their callers.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What a proxy needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// The runtime's socket.
    pub runtime: PathBuf,
    /// The image service's socket, if that is another one.
    pub images: Option<PathBuf>,
    /// How long a call may usually take; [`policy::CRI_TIMEOUT`] unless configured.
    pub timeout: Duration,
    /// The containerd namespace of pods.
    pub namespace: String,
    /// Where each socket goes.
    pub sockets: Vec<(Socket, PathBuf)>,
    /// Users that may connect to a socket, besides root and the user of this process.
    pub uids: Vec<(Socket, u32)>,
    /// The directory of the pods' logs, outside of which no log is read.
    pub pod_logs_dir: PathBuf,
    /// Bytes that the calls of a socket may hold; [`crate::budget::share`] but in tests.
    pub share: fn(Socket) -> usize,
    /// Connections that a socket may have; [`CONNECTIONS`] but in tests.
    pub connections: usize,
    /// Hints a subscriber may lag behind; [`crate::hints::CAPACITY`] but in tests.
    pub hint_capacity: usize,
    /// Boottime, for deadlines.
    pub clock: Clock,
    /// Where the key of exec grants is.
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
    /// Binds all sockets. The runtime need not be there.
    ///
    /// # Errors
    /// When a socket cannot be bound; the message names it.
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
            config.share,
        ));
        let hub = Hub::new(config.hint_capacity, metrics.clone());
        Ok(Self { listeners, config, forwarder, hub, metrics })
    }

    /// What it counts.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Serves until stopped, then lets the mutations in flight end, for at most 5 s.
    pub async fn serve(self, stop: CancellationToken) {
        let upstream = Upstream::new(self.config.runtime.clone());
        let (info, runtime) = watch::channel(RuntimeInfo::default());
        let (reporter, health) = tonic_health::server::health_reporter();
        let tasks = TaskTracker::new();
        let reader = Reader {
            upstream,
            hub: self.hub.clone(),
            info,
            namespace: self.config.namespace.clone(),
            metrics: self.metrics.clone(),
        };
        drop(task::spawn("runtime-events", tasks.track_future(reader.run(stop.clone()))));
        let reporting = report_health(reporter.clone(), runtime.clone(), self.forwarder.clone());
        drop(task::spawn("health", stop.clone().run_until_cancelled_owned(reporting)));

        let grants = Arc::new(Grants::new(self.config.grant_key.clone()));
        let debug = server::debug("cri-proxy");
        let logs = ContainerLogs::new(self.forwarder.clone(), &self.config.pod_logs_dir);
        // Open connections outlive `stop`: what is in flight on them still gets its answer.
        let hang_up = CancellationToken::new();
        for (socket, listener) in self.listeners {
            let mut routes = Routes::new(health.clone());
            if let Ok(reflection) = tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(quintlet_proto::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                .build_v1()
            {
                routes = routes.add_service(reflection);
            }
            let info = Info {
                runtime: runtime.clone(),
                hub: self.hub.clone(),
                forwarder: self.forwarder.clone(),
                endpoint: self.config.runtime.display().to_string(),
            };
            let probe = ProbeExec { forwarder: self.forwarder.clone(), grants: grants.clone() };
            // The table of verdicts decides who reaches which.
            routes = routes
                .add_service(pb::runtime_events_server::RuntimeEventsServer::new(Events(self.hub.clone())))
                .add_service(pb::proxy_info_server::ProxyInfoServer::new(info))
                .add_service(debug.clone())
                .add_service(pb::probe_exec_server::ProbeExecServer::new(probe))
                .add_service(pb::container_logs_server::ContainerLogsServer::new(logs.clone()));
            let of_socket = self.config.uids.iter().filter(|(of, _)| *of == socket);
            let of_socket: Vec<u32> = of_socket.map(|(_, uid)| *uid).collect();
            let door = Door {
                socket,
                routes: routes.prepare(),
                forwarder: self.forwarder.clone(),
                peers: Arc::new(PeerPolicy::root_and_self().and(&of_socket)),
                room: Arc::new(Semaphore::new(self.config.connections)),
                metrics: self.metrics.clone(),
                tasks: tasks.clone(),
                hang_up: hang_up.clone(),
            };
            drop(task::spawn("listen", stop.clone().run_until_cancelled_owned(door.listen(listener))));
        }
        stop.cancelled().await;
        reporter.set_service_status("", ServingStatus::NotServing).await;
        tasks.close();
        if tokio::time::timeout(GRACE, self.forwarder.idle()).await.is_err() {
            tracing::warn!("calls were still in flight when the grace ended");
        }
        self.forwarder.end_streams();
        hang_up.cancel();
        let _ = tokio::time::timeout(Duration::from_secs(1), tasks.wait()).await;
    }
}

async fn report_health(
    reporter: HealthReporter,
    mut runtime: watch::Receiver<RuntimeInfo>,
    forwarder: Arc<Forwarder>,
) {
    let mut tick = tokio::time::interval(OBSERVE_EVERY);
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

/// One socket's callers.
#[derive(Clone)]
struct Door {
    socket: Socket,
    routes: Routes,
    forwarder: Arc<Forwarder>,
    peers: Arc<PeerPolicy>,
    /// Connections that may still come.
    room: Arc<Semaphore>,
    metrics: Metrics,
    tasks: TaskTracker,
    hang_up: CancellationToken,
}

impl Door {
    async fn listen(self, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => self.admit(stream),
                Err(error) => {
                    // Out of file descriptors, most likely: others will close some.
                    tracing::warn!(socket = self.socket.name(), %error, "no connection accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn admit(&self, stream: UnixStream) {
        let uid = stream.peer_cred().map(|peer| peer.uid());
        match uid {
            Ok(uid) if self.peers.allows(uid) => {
                let Ok(place) = self.room.clone().try_acquire_owned() else {
                    self.metrics.refused_connections.inc();
                    tracing::warn!(socket = self.socket.name(), uid, "too many connections, refused one");
                    return;
                };
                let conversation = self.clone().converse(stream);
                let work = self.tasks.track_future(async move {
                    conversation.await;
                    drop(place);
                });
                drop(task::spawn_contained("connection", None, work));
            }
            Ok(uid) => {
                self.metrics.refused_peers.inc();
                tracing::warn!(
                    socket = self.socket.name(),
                    uid,
                    "connection refused: this uid is not allowed"
                );
            }
            Err(error) => tracing::debug!(%error, "the peer went away"),
        }
    }

    async fn converse(self, stream: UnixStream) {
        let (socket, hang_up) = (self.socket, self.hang_up.clone());
        let service = hyper::service::service_fn(move |request| {
            let door = self.clone();
            // Boxed: one call's future is large, and a connection may hold thousands.
            let answer: BoxFuture<'static, Response<Body>> = Box::pin(door.answer_contained(request));
            async move { Ok::<_, Infallible>(answer.await) }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADERS)
            .auto_date_header(false)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = Box::pin(connection);
        // Neither arm loses anything: the connection is only borrowed.
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = hang_up.cancelled() => {
                connection.as_mut().graceful_shutdown();
                // Watches of our own have no end; they are cut, and their callers come back to the next process.
                tokio::time::timeout(LAST_WORDS, &mut connection).await.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            tracing::debug!(socket = socket.name(), %error, "a connection failed");
        }
    }

    // Without this a panic would end the connection, and all other calls of the client with it.
    async fn answer_contained(self, request: Request<Incoming>) -> Response<Body> {
        let work = contain::Work::of_request(request.headers());
        let answered = contain::contained_request(work, Box::pin(self.answer(request))).await;
        answered.unwrap_or_else(|panic| Reply::panicked(&panic).into_response())
    }

    async fn answer(self, request: Request<Incoming>) -> Response<Body> {
        let own = policy::split_path(request.uri().path())
            .is_some_and(|(service, method)| policy::verdict(self.socket, service, method) == Verdict::Own);
        if !own {
            return self.forwarder.forward(self.socket, request).await;
        }
        match self.routes.oneshot(request.map(tonic::body::Body::new)).await {
            Ok(response) => response.map(reply::boxed),
            Err(never) => match never {},
        }
    }
}
