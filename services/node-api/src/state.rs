//! State that all pages share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use node_api_access::authn::Authenticator;
use node_api_access::authz::Authorizer;
use node_api_access::limits::{Client, Limits, Pool, Slots};
use node_api_base::services::Services;
use node_api_statistics::Stats;
use node_api_streams::StreamServer;
use quintlet_kit::clock::Clock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::counters::Counters;
use crate::log_query::LogQuery;
use crate::metrics::MetricsCache;
use crate::shared_page::SharedPage;
use crate::zpages::DebugPages;

/// The pages of statistics.
#[derive(Debug, Default)]
pub(crate) struct StatsPages {
    /// `/stats/summary`.
    pub summary: SharedPage,
    /// The summary with CPU and memory only.
    pub light_summary: SharedPage,
    /// `/metrics/resource`.
    pub resource: SharedPage,
    /// `/metrics/cadvisor`.
    pub cadvisor: SharedPage,
}

/// Slots of requests in flight, of each [`Pool`].
#[derive(Debug, Default)]
pub(crate) struct RequestSlots {
    certificates: Slots<Client>,
    others: Slots<Client>,
}

impl RequestSlots {
    pub(crate) fn of(&self, pool: Pool) -> &Slots<Client> {
        match pool {
            Pool::Certificates => &self.certificates,
            Pool::Others => &self.others,
        }
    }
}

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct ServerState {
    /// Clients of the other services.
    pub services: Services,
    /// Name of the node, the object of authorization.
    pub node_name: String,
    /// Identifies the users of requests.
    pub authn: Authenticator,
    /// Authorizes the requests of identified users.
    pub authz: Authorizer,
    /// Metrics of requests.
    pub counters: Counters,
    /// Limits of the time and size of requests.
    pub limits: Limits,
    /// Requests in flight by user.
    pub requests: RequestSlots,
    /// Serves exec, attach, port-forward and run.
    pub streams: StreamServer,
    /// Tasks of connections.
    pub tasks: TaskTracker,
    /// Cancelled when open connections are closed.
    pub abort: CancellationToken,
    /// Wall clock and CLOCK_BOOTTIME.
    pub clock: Clock,
    /// `enableDebuggingHandlers`: serves logs, exec, attach, port-forward, run and runningpods.
    pub debugging: bool,
    /// `enableDebugFlagsHandler`: serves `/debug/flags/v`.
    pub debug_flags: bool,
    /// `enableProfilingHandler`: serves `/debug/pprof/`.
    pub profiling: bool,
    /// Readers of container logs may select a stream.
    pub split_streams: bool,
    /// `/checkpoint` is served.
    pub checkpoints: bool,
    /// `/allocatedPods` is served.
    pub allocated_pods: bool,
    /// Directory that `/logs/` serves; none if it is disabled.
    pub system_logs: Option<PathBuf>,
    /// Runs log queries; none if they are disabled.
    pub log_query: Option<LogQuery>,
    /// Collects statistics.
    pub stats: Arc<Stats>,
    /// Rendered pages, which requests at the same time share.
    pub pages: StatsPages,
    /// The last metrics of each service.
    pub metrics_cache: MetricsCache,
    /// The metric of feature gates.
    pub features: String,
    /// The command line and configuration of this process.
    pub settings: DebugPages,
    /// CLOCK_BOOTTIME at the start of the process.
    pub started: Duration,
}
