//! The `status-reporter` binary.

use std::path::PathBuf;

use anyhow::Context;
use clap::{ArgAction, Parser};
use quintlet_kit::args::{self, CommonArgs};
use quintlet_kit::clock::Clock;
use quintlet_kit::{server, signals, task};
use status_reporter::run::{Config, run};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

/// Writes what the node tells the API server: pod status, node, lease, events, mirror pods.
#[derive(Parser)]
#[command(name = "status-reporter", version)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// Kubeconfig of the API server; it may appear later. Without it nothing is written (standalone).
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Name of the Node object. Default: the host name in lower case.
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// Create the Node object if it is not there.
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    register_node: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args: Args = args::parse();
    let telemetry = quintlet_telemetry::init("status-reporter", &args.common.telemetry())?;
    let node_name = match args.node_name {
        Some(name) => name,
        None => host_name().context("no --node-name, and the host has no name")?,
    };
    let stop = CancellationToken::new();
    let signalled = stop.clone();
    task::spawn("signals", async move {
        let reason = signals::stop_signal().await;
        info!(?reason, "stopping");
        signalled.cancel();
    });
    if let Some(address) = args.common.metrics_listen {
        let stop = stop.clone();
        task::spawn("metrics", async move {
            if let Err(error) = server::serve_metrics(address, stop).await {
                error!(%address, %error, "no metrics over HTTP");
            }
        });
    }
    let config = Config {
        paths: args.common.paths(),
        kubeconfig: args.kubeconfig,
        node_name,
        register_node: args.register_node,
    };
    let outcome = run(config, Clock::system(), stop).await;
    telemetry.shutdown().await;
    outcome.context("status-reporter cannot serve")
}

fn host_name() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_lowercase();
    anyhow::ensure!(!name.is_empty(), "/proc/sys/kernel/hostname is empty");
    Ok(name)
}
