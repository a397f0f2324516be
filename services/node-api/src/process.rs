//! The process: from its command line to its exit code.

use quintlet_config::Service;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::{self, Liveness};
use quintlet_kit::server::HTTPS_LOOP;
use quintlet_kit::{signals, task};
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;
use crate::{NodeApi, NodeApiArgs};

/// Runs `node-api` as its own process: reads the command line, and ends it on a usage error.
///
/// # Errors
/// What keeps it from serving.
#[tokio::main]
pub async fn main() -> anyhow::Result<()> {
    let loaded = quintlet_config::parse::<NodeApiArgs>(Service::NodeApi);
    let telemetry = quintlet_telemetry::init("node-api", &loaded.args.common.telemetry())?;
    loaded.tell();
    quintlet_kit::contain::panics_end_process();
    let api = NodeApi::bind(&loaded, Limits::default(), Clock::system()).await?;
    tracing::info!(address = ?api.address(), "serving");
    let stop = CancellationToken::new();
    let serving = task::spawn("serve", api.serve(stop.clone()));
    let liveness = Liveness::of([loaded.args.common.paths().node_api()]).and_loop_if_any(HTTPS_LOOP);
    drop(task::spawn("notify", notify::run(liveness, stop.clone())));
    let reason = signals::stop_signal().await;
    tracing::info!(?reason, "stopping");
    stop.cancel();
    serving.await?;
    telemetry.shutdown().await;
    Ok(())
}
