//! State that all pages share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::clock::Clock;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::authn::Authenticator;
use crate::auth::authz::Authorizer;
use crate::counters::Counters;
use crate::limits::Limits;
use crate::log_query::LogQuery;
use crate::metrics::Board;
use crate::node::Node;
use crate::stats::Stats;
use crate::zpages::Settings;

/// What pages need.
#[derive(Debug)]
pub struct State {
    /// The other services.
    pub node: Node,
    /// The node's name.
    pub node_name: String,
    /// Who asks.
    pub authn: Authenticator,
    /// Whether they may.
    pub authz: Authorizer,
    /// What is counted.
    pub counters: Counters,
    /// What is allowed.
    pub limits: Limits,
    /// Places for upgraded connections.
    pub upgrades: Arc<Semaphore>,
    /// Tasks of upgraded connections.
    pub tasks: TaskTracker,
    /// Cuts them.
    pub cut: CancellationToken,
    /// Time.
    pub clock: Clock,
    /// Logs, exec, attach, port-forward, run and runningpods are there.
    pub debugging: bool,
    /// Readers of logs may choose a stream.
    pub split_streams: bool,
    /// Users may have containers checkpointed.
    pub checkpoints: bool,
    /// What `/logs/` shows; none: it is off.
    pub system_logs: Option<PathBuf>,
    /// Answers its queries; none: they are off.
    pub log_query: Option<LogQuery>,
    /// Statistics.
    pub stats: Stats,
    /// The last figures of each service.
    pub board: Board,
    /// The metric of feature gates.
    pub features: String,
    /// What this process was told.
    pub settings: Settings,
    /// CLOCK_BOOTTIME at the start.
    pub started: Duration,
}
