//! Starts and stops the parts of the service.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::rate::Rate;
use quintlet_kit::server::{HealthHandle, Server};
use quintlet_kit::socket::{self, PeerPolicy};
use quintlet_proto::status::v1::status_reporter_server::StatusReporterServer;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::ApiClient;
use crate::clients::{self, Current, Purpose};
use crate::events::recorder::Recorder;
use crate::lease::{self, Term};
use crate::metrics::Metrics;
use crate::node::cloud::CloudProvider;
use crate::node::csi_node::{self, CsiNodeKeeper};
use crate::node::health::{HealthBoard, Watched};
use crate::node::keeper::NodeKeeper;
use crate::node::own::{self, LocalMachine};
use crate::node::startup::Startup;
use crate::node::volumes::VolumeBoard;
use crate::node::{FactBoard, setters, skew};
use crate::reporter::Reporter;
use crate::service::Service;

/// Limit of writes in flight after the stop signal.
const DRAIN: Duration = Duration::from_secs(5);

/// Times without health after which the node is not ready, as in the kubelet: 30 s, and 3 min for PLEG.
const PEER_LIMIT: Duration = Duration::from_secs(30);
const PLEG_LIMIT: Duration = Duration::from_secs(180);

/// The configuration of the service.
#[derive(Debug, Clone)]
pub struct Config {
    /// Directories of sockets and state.
    pub paths: Paths,
    /// `None` in standalone mode.
    pub kubeconfig: Option<PathBuf>,
    /// Name of the Node object.
    pub node_name: String,
    /// Whether to create the Node if it does not exist.
    pub register_node: bool,
    /// Users that may read health and metrics.
    pub observers: Vec<u32>,
    /// Intervals and settings of the Node and its Lease.
    pub settings: NodeReportSettings,
}

/// Settings of the Node and of write rates.
#[derive(Debug, Clone)]
pub struct NodeReportSettings {
    /// Taints of a Node that is created, as v1 Taints.
    pub taints: Vec<Value>,
    /// Labels of a Node that is created.
    pub labels: Vec<(String, String)>,
    /// `spec.providerID` of a Node that is created; may be empty.
    pub provider_id: String,
    /// The cloud that the node is in.
    pub cloud: CloudProvider,
    /// A controller attaches volumes to the node.
    pub controller_attaches: bool,
    /// `nodeStatusUpdateFrequency`.
    pub update_every: Duration,
    /// `nodeStatusReportFrequency`.
    pub report_every: Duration,
    /// `nodeLeaseDurationSeconds`.
    pub lease_seconds: u32,
    /// Limit of pod writes, if any.
    pub pods: Option<Rate>,
    /// Limit of events, if any.
    pub events: Option<Rate>,
}

impl Default for NodeReportSettings {
    fn default() -> Self {
        Self {
            taints: Vec::new(),
            labels: Vec::new(),
            provider_id: String::new(),
            cloud: CloudProvider::None,
            controller_attaches: true,
            update_every: setters::UPDATE_EVERY,
            report_every: setters::REPORT_EVERY,
            lease_seconds: lease::DURATION_SECONDS,
            pods: None,
            events: Rate::new(EVENTS_PER_SECOND, EVENT_BURST),
        }
    }
}

/// Default of `eventRecordQPS`.
pub const EVENTS_PER_SECOND: u32 = 50;
/// Default of `eventBurst`.
pub const EVENT_BURST: u32 = 100;

/// Runs until `stop`, then completes the writes in flight.
///
/// # Errors
/// The socket cannot be bound or served.
pub async fn run(config: Config, clock: Clock, stop: CancellationToken) -> io::Result<()> {
    let path = config.paths.status();
    let listener = socket::bind_unix(&path, 0o660)?;
    let metrics = Metrics::register();
    let (facts, volumes) = (FactBoard::default(), VolumeBoard::default());
    let followed = match config.kubeconfig.clone() {
        Some(path) => Some(clients::follow(path, stop.clone()).await),
        None => None,
    };
    let events = match &followed {
        Some(clients) => {
            let api = ApiClient::following(clients.clone(), Purpose::Events).limited(config.settings.events);
            Recorder::start(api, &config.node_name, clock.clone(), metrics.clone(), stop.clone())
        }
        None => {
            info!("running standalone without a kubeconfig, nothing is written");
            Recorder::standalone(metrics.clone())
        }
    };
    let rate = config.settings.pods;
    let pods = followed.clone().map(|clients| ApiClient::following(clients, Purpose::Pods).limited(rate));
    let reporter = Reporter::new(pods.clone(), clock.clone(), metrics);
    let service = Service {
        reporter: reporter.clone(),
        events: events.clone(),
        facts: facts.clone(),
        volumes: volumes.clone(),
        api: pods,
        node: config.node_name.clone(),
        caller: Arc::new(Neighbour::new("pod-sync", &[])),
        stop: stop.clone(),
    };
    let server = Server::new("status-reporter").add_service(StatusReporterServer::new(service));
    if let Some(clients) = followed {
        quintlet_kit::task::spawn("readiness", serve_once_loaded(server.health(), clients.clone()));
        keep_node(&config, &clients, clock, (facts, volumes), events, server.health(), &stop);
    }
    info!(socket = %path.display(), node = %config.node_name, "serving");
    let server = server.observers(&config.observers);
    server.serve(listener, PeerPolicy::root_and_self(), stop).await.map_err(io::Error::other)?;
    if tokio::time::timeout(DRAIN, reporter.idle()).await.is_err() {
        warn!("dropping writes in flight");
    }
    Ok(())
}

/// Sets NOT_SERVING until the kubeconfig is usable. Updates are kept meanwhile.
async fn serve_once_loaded(health: HealthHandle, mut clients: Current) {
    health.set_not_serving("").await;
    if clients.wait_for(Option::is_some).await.is_ok() {
        health.set_serving("").await;
    }
}

/// Runs `work` after the first clients are loaded. Returns without it if the loader has ended.
async fn once_loaded(mut clients: Current, work: impl Future<Output = ()>) {
    if clients.wait_for(Option::is_some).await.is_ok() {
        work.await;
    }
}

/// Runs `work` once the Node is not that of another machine.
async fn once_free(is_free: watch::Receiver<bool>, work: impl Future<Output = ()>) {
    own::wait(is_free).await;
    work.await;
}

/// Spawns the tasks of the Node, of the CSINode and of the lease.
fn keep_node(
    config: &Config,
    clients: &Current,
    clock: Clock,
    (facts, volumes): (FactBoard, VolumeBoard),
    events: Recorder,
    reached: HealthHandle,
    stop: &CancellationToken,
) {
    let watched = |name, socket, limit| Watched { name, socket, limit };
    let peers = vec![
        watched("pod-sync", config.paths.podsync(), PEER_LIMIT),
        watched("pleg-service", config.paths.pleg(), PLEG_LIMIT),
    ];
    let csi_node = CsiNodeKeeper {
        api: ApiClient::following(clients.clone(), Purpose::Storage),
        volumes: volumes.clone(),
        clock: clock.clone(),
        check_every: csi_node::CHECK_EVERY,
        refused_pause: csi_node::REFUSED_PAUSE,
    };
    let is_free = watch::Sender::new(false);
    let free_for_lease = is_free.subscribe();
    let csi_node = once_free(is_free.subscribe(), csi_node.run(stop.clone()));
    quintlet_kit::task::spawn("csi-node", once_loaded(clients.clone(), csi_node));
    let keeper = NodeKeeper {
        is_free,
        machine: LocalMachine::read(),
        api: ApiClient::following(clients.clone(), Purpose::Node),
        name: config.node_name.clone(),
        register: config.register_node,
        taints: config.settings.taints.clone(),
        labels: config.settings.labels.clone(),
        provider_id: config.settings.provider_id.clone(),
        cloud: config.settings.cloud.clone(),
        controller_attaches: config.settings.controller_attaches,
        startup: Startup::new(clock.boot()),
        update_every: config.settings.update_every,
        report_every: config.settings.report_every,
        clock: clock.clone(),
        facts,
        volumes,
        health: HealthBoard::start(peers, clock.clone(), stop),
        events,
        reached,
    };
    quintlet_kit::task::spawn("node", once_loaded(clients.clone(), keeper.run(stop.clone())));
    let api = ApiClient::following(clients.clone(), Purpose::Node);
    quintlet_kit::task::spawn("version-skew", once_loaded(clients.clone(), skew::run(api, stop.clone())));
    let api = ApiClient::following(clients.clone(), Purpose::Lease);
    let lease = lease::run(
        api,
        config.node_name.clone(),
        clock,
        Term::of(config.settings.lease_seconds),
        stop.clone(),
    );
    quintlet_kit::task::spawn("lease", once_loaded(clients.clone(), once_free(free_for_lease, lease)));
}
