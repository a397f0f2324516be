//! The process of status-reporter, from its command line to its exit code.

use anyhow::Context;
use quintlet_config::Service;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::{self, Liveness};
use quintlet_kit::{server, signals, task};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::args::Args;
use crate::run::{Config, run};

/// Runs status-reporter as its own process. Exits with 64 on a usage error.
///
/// # Errors
/// The service cannot start, or serving fails.
#[tokio::main]
pub async fn main() -> anyhow::Result<()> {
    let loaded = quintlet_config::parse::<Args>(Service::StatusReporter);
    let args = loaded.args.clone();
    let telemetry = quintlet_telemetry::init("status-reporter", &args.common.telemetry())?;
    loaded.tell();
    quintlet_kit::contain::panics_end_process();
    let settings = args.settings();
    let node_name = args.node_name.unwrap_or_else(quintlet_kit::args::host_name);
    let stop = CancellationToken::new();
    let signalled = stop.clone();
    task::spawn("signals", async move {
        let reason = signals::stop_signal().await;
        info!(?reason, "stopping service");
        signalled.cancel();
    });
    if let Some(address) = args.common.metrics_listen {
        let stop = stop.clone();
        task::spawn("metrics", async move {
            if let Err(error) = server::serve_metrics(address, stop).await {
                error!(%address, %error, "serve metrics failed");
            }
        });
    }
    let config = Config {
        observers: args.common.observer_uid.clone(),
        paths: args.common.paths(),
        kubeconfig: args.kubeconfig,
        node_name,
        register_node: args.register_node,
        settings,
    };
    let liveness = Liveness::of([config.paths.status()]);
    task::spawn("notify", notify::run(liveness, stop.clone()));
    let outcome = task::main(run(config, Clock::system(), stop)).await;
    telemetry.shutdown().await;
    outcome.context("status-reporter cannot serve")
}
