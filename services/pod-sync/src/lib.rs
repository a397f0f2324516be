//! pod-sync: the desired pods of the node, one worker per pod, and the status of each pod.
//!
//! Tasks:
//! - one per source of pods ([`pod_sync_sources`])
//! - the sync loop (`pod_manager`) and one worker per pod ([`pod_sync_worker`])
//! - clients of pleg-service, probe-service and status-reporter ([`pod_sync_clients`])
//! - the runtime poll and the reports about the node ([`pod_sync_node_object`])
//! - the server of podsync.v1 (`serve`)
//!
//! A worker is woken and then reads the newest state; nothing queues work for it. What it decides is in
//! [`pod_sync_decisions`], which does no I/O.
//!
//! [`run`] takes the root directory, restores the records of an earlier run ([`pod_sync_records`]), connects
//! to the other services and starts the sources last. SIGTERM leaves every pod running. SIGUSR1 removes the
//! pods of manifests, then ends.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod admission;
pub mod args;
mod certificate_args;
mod checkpoint;
mod claims;
mod cpus;
mod dead_foreign;
mod devices;
mod eviction;
mod eviction_args;
mod exclusive;
mod housekeeping;
mod image_gc;
mod listing;
mod machine_args;
mod node_client;
mod offline_args;
mod orphan_listing;
mod pending_resizes;
mod pod_manager;
mod pods_api;
mod pressure;
mod process;
mod resource_args;
mod serve;
mod settings;
mod shutdown;
mod start_refusal;
mod startup;
mod storage;
mod subscribe;
mod threshold_checks;
mod volumes;

pub use crate::process::main;
pub use pod_sync_node_object::NodeNameTaken;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use pod_sync_eviction_loop::Published;
use pod_sync_records::Owner;
use pod_sync_sources::SourceMessage;
use quintlet_kit::clock::Clock;
use quintlet_kit::server::SYNC_LOOP;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::admission::NodeConditions;
use crate::args::Args;
use crate::pod_manager::PodManager;
use crate::pressure::EvictionRounds;
use crate::startup::Agent;

/// How long tasks get to end.
const GRACE: Duration = Duration::from_secs(3);

/// Shortest time without an iteration after which the sync loop is reported as stuck
/// (`pkg/kubelet/kubelet.go: syncLoopHealthCheck`).
const STUCK: Duration = Duration::from_secs(300);

/// pod-sync after its set-up: all tasks but the sync loop run.
struct Started {
    owner: Owner,
    agent: Agent,
    manager: PodManager,
    sources: mpsc::Receiver<SourceMessage>,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
}

/// Runs until `stop`, or until `drain` is true and no pod is left. If the set-up fails, the Node gets the
/// event `KubeletSetupFailed`.
///
/// # Errors
/// Another process owns the root directory, or a directory, file or socket cannot be created. A missing
/// runtime, service or API server is no error.
pub async fn run(args: Args, drain: watch::Receiver<bool>, stop: CancellationToken) -> anyhow::Result<()> {
    let (status, node) = (args.common.paths().status(), args.node.node_name());
    let clock = Clock::system();
    let Started { owner, agent, manager, sources, serving } =
        match Box::pin(set_up(args, clock.clone(), stop.clone())).await {
            Ok(started) => *started,
            Err(error) => {
                let text = quintlet_kit::error_chain(&*error);
                let recorded = pod_sync_clients::record_setup_failure(status, &node, &text, &clock);
                Box::pin(stop.run_until_cancelled(recorded)).await;
                return Err(error);
            }
        };
    manager.run(sources, drain, stop.clone()).await;

    stop.cancel();
    let late = agent.tasks.shutdown(GRACE).await;
    if !late.is_empty() {
        tracing::warn!(tasks = ?late, "tasks did not end in time");
    }
    agent.write_allocations().await;
    serving.await?.context("server")?;
    drop(owner);
    agent.tasks.result()
}

async fn set_up(args: Args, clock: Clock, stop: CancellationToken) -> anyhow::Result<Box<Started>> {
    // Blocks: there is no pod before the start.
    let owner = Owner::take(&args.root_dir, &clock)?;
    if let Some(identity) = crate::start_refusal::node_identity(&args) {
        owner.publish(&identity.to_text()).context("failed to write the lock of the root directory")?;
    }
    let stuck_after = STUCK.max(args.sync_frequency.saturating_mul(2));
    // Boxed, so that the process does not keep the memory of its start.
    let (agent, inputs) = Box::pin(Agent::open(args, clock, owner.epoch(), stop.clone())).await?;
    let node = agent.node();
    node.start_certificates();
    node.start_name_check();
    agent.clients().start(inputs);
    let maintenance = agent.maintenance();
    let shutting_down = maintenance.start_shutdown()?;
    maintenance.start();
    // Blocks: there is no pod before the start.
    let records = agent.load_records();
    let (pressure_tx, pressure) = watch::channel(BTreeSet::new());
    let (rounds_tx, rounds) = watch::channel(None);
    let full_round = Arc::new(Notify::new());
    let published =
        Published { conditions: pressure_tx, round: rounds_tx, full_round: Arc::clone(&full_round) };
    let evictions = maintenance.evictions(&records, published)?;
    let conditions = NodeConditions { shutting_down, pressure };
    node.start_reports(&conditions);
    let servers = agent.servers();
    let (serving, health) =
        servers.serve(evictions.is_some().then_some(EvictionRounds { last: rounds, full_round })).await?;
    servers.serve_subscribers();
    servers.serve_pods_api()?;
    servers.serve_device_plugins()?;
    servers.serve_pod_resources()?;
    servers.wipe_resource_slices();
    maintenance.reconcile_cpus();
    servers.serve_metrics();
    // Blocks: pods are managed after it.
    let (mut manager, sources) = agent.sources().pod_manager(conditions, &records);
    manager.restore(records);
    if let Some(evictions) = evictions {
        agent.tasks.spawn("eviction", evictions);
    }
    let heartbeat = manager.heartbeat();
    agent.tasks.spawn("watch-sync-loop", heartbeat.watch(SYNC_LOOP, stuck_after, health, stop));
    Ok(Box::new(Started { owner, agent, manager, sources, serving }))
}
