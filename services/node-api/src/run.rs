//! Builds the node API from its arguments, and serves it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use node_api_access::authn::{Authenticator, Tokens};
use node_api_access::authz::{Authorizer, Webhook};
use node_api_access::cache::Cache;
use node_api_access::limits::{ConnectionLimiter, Limits};
use node_api_access::reload::ReloadedFiles;
use node_api_access::review::{ReviewError, Reviewer};
use node_api_access::tls::{self, ServingCertificate, TlsError};
use node_api_access::x509::ClientCa;
use node_api_base::services::Services;
use node_api_statistics::{Stats, StatsPaths, SystemCgroups};
use node_api_streams::StreamServer;
use quintlet_config::Loaded;
use quintlet_config::table::{ALLOCATED_PODS, CHECKPOINTS, HUGE_PAGE_AWARE_EVICTION, SPLIT_STREAMS};
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::Heartbeat;
use quintlet_kit::server::HTTPS_LOOP;
use quintlet_kit::{server as kit_server, task};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::args::{Mode, NodeApiArgs};
use crate::counters::Counters;
use crate::log_query::LogQuery;
use crate::metrics::MetricsCache;
use crate::routes::{Port, Routes};
use crate::server::{GRACE, Listener, STUCK_AFTER};
use crate::state::{RequestSlots, ServerState, StatsPages};
use crate::subscribers::{OpenPort, PortError, SubscriberPort};
use crate::zpages::DebugPages;

/// Interval between attempts to bind the health port.
const RETRY: Duration = Duration::from_secs(5);

/// The reason why node-api cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Anonymous requests, tokens and client certificates are all off.
    #[error("no authentication method configured")]
    NoAuthentication,
    /// Tokens are reviewed by the API server, and there is no kubeconfig.
    #[error("no client provided, cannot use webhook authentication")]
    NoClientForTokens,
    /// Authorization is by the API server, and there is no kubeconfig.
    #[error("no client provided, cannot use webhook authorization")]
    NoClientForAccess,
    /// The serving certificate or the TLS flags cannot be used.
    #[error("failed to configure TLS")]
    Tls(#[from] TlsError),
    /// The kubeconfig cannot be used.
    #[error("failed to create the API client")]
    Api(#[from] ReviewError),
    /// The address of a port is in use, or not one of this machine.
    #[error("failed to listen on {address}")]
    Listen {
        /// The configured address.
        address: SocketAddr,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The socket for health and metrics.
    #[error("failed to bind {}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
}

/// The node API with its ports bound.
pub struct NodeApi {
    state: Arc<ServerState>,
    main: Option<TcpListener>,
    read_only: Option<TcpListener>,
    socket: tokio::net::UnixListener,
    /// Path of `socket`.
    path: PathBuf,
    /// Users that may read health and metrics.
    observers: Vec<u32>,
    acceptor: TlsAcceptor,
    files: ReloadedFiles,
    healthz: Option<SocketAddr>,
    gate: ConnectionLimiter,
    /// The port for subscribers, and the result of its first opening.
    subscribers: Option<(SubscriberPort, Result<OpenPort, PortError>)>,
}

impl std::fmt::Debug for NodeApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeApi").field("main", &self.main).finish_non_exhaustive()
    }
}

impl NodeApi {
    /// Reads certificates and the kubeconfig, and binds the ports. The other services need not run.
    ///
    /// # Errors
    /// Fails if an argument or file is invalid, or if a port is in use.
    pub async fn bind(
        loaded: &Loaded<NodeApiArgs>,
        limits: Limits,
        clock: Clock,
    ) -> Result<Self, StartError> {
        let args = &loaded.args;
        // Bound first: `quintctl health` reports a socket without a server, so a later failure is visible.
        let paths = args.common.paths();
        let path = paths.node_api();
        let socket = quintlet_kit::socket::bind_unix(&path, 0o660)
            .map_err(|source| StartError::Socket { path: path.clone(), source })?;
        let reviewer = match &args.node.kubeconfig {
            Some(path) => Some(Arc::new(Reviewer::load(path).await?)),
            None => None,
        };
        let ca = args.client_ca_file.as_deref().map(ClientCa::load).transpose()?.map(Arc::new);
        let authn = authenticator(args, limits, ca.clone(), reviewer.clone(), clock.clone())?;
        let authz = authorizer(args, reviewer.clone())?;
        let node_name = args.node.node_name();
        let serving = Arc::new(load_serving(args, &node_name, &clock)?);
        let settings = tls::TlsSettings {
            min_version: args.tls_min_version.clone(),
            cipher_suites: args.tls_cipher_suites.clone(),
            curves: args.tls_curve_preferences.clone(),
        };
        let config = tls::server_config(&settings, serving.clone())?;
        let main = match args.enable_server {
            true => Some(listen(SocketAddr::new(args.address, args.node_api_port)).await?),
            false => None,
        };
        let read_only = match (args.enable_server, args.read_only_port) {
            (true, port) if port != 0 => Some(listen(SocketAddr::new(args.address, port)).await?),
            _ => None,
        };
        let stats_paths = StatsPaths {
            root_dir: args.root_dir.clone(),
            pod_logs_dir: args.pod_logs_dir.clone(),
            cgroups: PathBuf::from("/sys/fs/cgroup"),
            cgroup_root: args.cgroup_root.clone(),
            system: SystemCgroups {
                kubelet: args.kubelet_cgroups.clone(),
                runtime: args.runtime_cgroups.clone(),
                system: args.system_cgroups.clone(),
            },
            subtracts_huge_pages: args.has_gate(HUGE_PAGE_AWARE_EVICTION, true),
        };
        let stats = Stats::new(node_name.clone(), stats_paths, clock.clone());
        let subscribers = match SubscriberPort::of(args, settings, paths.clone(), clock.clone()) {
            Some(port) => {
                let first = port.open().await;
                Some((port, first))
            }
            None => None,
        };
        let counters = Counters::default();
        let tasks = TaskTracker::new();
        let abort = CancellationToken::new();
        let services = Services::new(paths);
        let streams = StreamServer {
            services: services.clone(),
            limits,
            slots: Arc::new(Semaphore::new(limits.upgrades)),
            open: counters.upgrades.clone(),
            tasks: tasks.clone(),
            abort: abort.clone(),
        };
        let state = ServerState {
            settings: DebugPages::new(args, &loaded.config),
            stats: Arc::new(stats),
            pages: StatsPages::default(),
            metrics_cache: MetricsCache::default(),
            started: clock.boot(),
            system_logs: args.enable_system_log_handler.then(|| args.system_log_dir.clone()),
            services,
            node_name,
            authn,
            authz,
            counters,
            limits,
            requests: RequestSlots::default(),
            streams,
            tasks,
            abort,
            clock,
            debugging: args.enable_debugging_handlers,
            debug_flags: args.enable_debug_flags_handler,
            profiling: args.enable_profiling_handler,
            log_query: args.enable_system_log_query.then(LogQuery::default),
            split_streams: args.has_gate(SPLIT_STREAMS, false),
            features: crate::metrics::features::text(|name, default| args.has_gate(name, default)),
            checkpoints: args.has_gate(CHECKPOINTS, true),
            allocated_pods: args.has_gate(ALLOCATED_PODS, false),
        };
        Ok(Self {
            state: Arc::new(state),
            main,
            read_only,
            socket,
            path,
            observers: args.common.observer_uid.clone(),
            acceptor: TlsAcceptor::from(Arc::new(config)),
            files: ReloadedFiles { serving, ca, reviewer },
            healthz: (args.healthz_port != 0)
                .then(|| SocketAddr::new(args.healthz_bind_address, args.healthz_port)),
            gate: ConnectionLimiter::default(),
            subscribers,
        })
    }

    /// Returns the address of HTTPS, unless the server is disabled.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.main.as_ref()?.local_addr().ok()
    }

    /// Returns the address for subscribers, if it is bound.
    #[must_use]
    pub fn subscriber_address(&self) -> Option<SocketAddr> {
        self.subscribers.as_ref()?.1.as_ref().ok()?.address()
    }

    /// Returns the connection limiter of the main port.
    #[must_use]
    pub fn gate(&self) -> ConnectionLimiter {
        self.gate.clone()
    }

    /// Serves until `stop` is cancelled. Requests in flight then have 3 s to complete.
    pub async fn serve(self, stop: CancellationToken) {
        let state = self.state;
        let listener = |port, tls| Listener {
            handler: Routes { state: state.clone(), port },
            tls,
            limits: state.limits,
            gate: self.gate.clone(),
            counters: state.counters.clone(),
            heartbeat: Heartbeat::new(state.clock.clone()),
            tasks: state.tasks.clone(),
            stop: stop.clone(),
            abort: state.abort.clone(),
        };
        let tasks = task::TaskGroup::new();
        tasks.spawn("reload", self.files.reload_changes(stop.clone()));
        let server = kit_server::Server::new("node-api").observers(&self.observers);
        let health = server.health();
        if let Some(main) = self.main {
            let listener = listener(Port::Main, Some(self.acceptor));
            let watch =
                listener.heartbeat.clone().watch(HTTPS_LOOP, STUCK_AFTER, health.clone(), stop.clone());
            tasks.spawn("watch-listener", watch);
            tasks.spawn("listen", listener.run(main));
        }
        if let Some(read_only) = self.read_only {
            // A limiter of its own, since this port has no authentication.
            let listener = Listener { gate: ConnectionLimiter::default(), ..listener(Port::ReadOnly, None) };
            tasks.spawn("listen-read-only", listener.run(read_only));
        }
        if let Some((port, first)) = self.subscribers {
            tasks.spawn("listen-subscribers", port.serve(first, listener(Port::Main, None)));
        }
        if let Some(address) = self.healthz {
            // A limiter of its own: full ports do not make the node look dead.
            let listener = Listener { gate: ConnectionLimiter::default(), ..listener(Port::Healthz, None) };
            tasks.spawn("listen-healthz", listen_again(listener, address, stop.clone()));
        }
        health.set_serving("").await;
        let own = server.serve(self.socket, quintlet_kit::socket::PeerPolicy::root_and_self(), stop.clone());
        tasks.spawn("own-socket", async move {
            if let Err(error) = own.await {
                tracing::warn!(
                    error = quintlet_kit::error_chain(&error),
                    "failed to serve health and metrics"
                );
            }
        });
        stop.cancelled().await;
        state.tasks.close();
        if tokio::time::timeout(GRACE, state.tasks.wait()).await.is_err() {
            tracing::info!(connections = state.tasks.len(), "closing connections that are still open");
            state.abort.cancel();
            let _ = tokio::time::timeout(Duration::from_secs(1), state.tasks.wait()).await;
        }
        for name in tasks.shutdown(GRACE).await {
            tracing::warn!(task = name, "task did not stop in time");
        }
        // `quintctl health` does not report a service that was stopped on purpose.
        // Blocks: the service has ended.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns the configured certificate, the one that pod-sync obtains, or a self-signed one
/// (`cmd/kubelet/app: InitializeTLS`).
fn load_serving(args: &NodeApiArgs, host: &str, clock: &Clock) -> Result<ServingCertificate, TlsError> {
    // The configuration check reports a certificate without a key.
    if let (Some(cert), Some(key)) = (&args.tls_cert_file, &args.tls_private_key_file) {
        return ServingCertificate::load(cert, key);
    }
    if args.rotate_server_certificates {
        let issued = args.issued_certificate_file.clone();
        let issued = issued.unwrap_or_else(|| args.cert_dir.join("kubelet-server-current.pem"));
        return ServingCertificate::awaiting(&issued);
    }
    let (cert, key) = tls::self_signed(&args.cert_dir, host, clock.wall())?;
    ServingCertificate::load(&cert, &key)
}

fn authenticator(
    args: &NodeApiArgs,
    limits: Limits,
    ca: Option<Arc<ClientCa>>,
    reviewer: Option<Arc<Reviewer>>,
    clock: Clock,
) -> Result<Authenticator, StartError> {
    let tokens = match (args.authentication_token_webhook, reviewer) {
        (true, None) => return Err(StartError::NoClientForTokens),
        (true, Some(reviewer)) => {
            Some(Tokens::new(reviewer, args.authentication_token_webhook_cache_ttl, limits))
        }
        (false, _) => None,
    };
    if ca.is_none() && tokens.is_none() && !args.anonymous_auth {
        return Err(StartError::NoAuthentication);
    }
    Ok(Authenticator { ca, tokens, anonymous: args.anonymous_auth, clock })
}

fn authorizer(args: &NodeApiArgs, reviewer: Option<Arc<Reviewer>>) -> Result<Authorizer, StartError> {
    match (args.authorization_mode, reviewer) {
        (Mode::AlwaysAllow, _) => Ok(Authorizer::AlwaysAllow),
        (Mode::Webhook, Some(reviewer)) => Ok(Authorizer::Webhook(Webhook {
            reviewer,
            allow_ttl: args.authorization_webhook_cache_authorized_ttl,
            deny_ttl: args.authorization_webhook_cache_unauthorized_ttl,
            known: Cache::default(),
        })),
        (Mode::Webhook, None) => Err(StartError::NoClientForAccess),
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| StartError::Listen { address, source })
}

async fn listen_again(listener: Listener<Routes>, address: SocketAddr, stop: CancellationToken) {
    loop {
        match listen(address).await {
            Ok(bound) => return listener.run(bound).await,
            Err(error) => {
                tracing::warn!(
                    error = quintlet_kit::error_chain(&error),
                    "failed to bind health port, retrying"
                )
            }
        }
        // Both arms only wait.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}
