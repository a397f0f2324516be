//! The process: from its command line to its exit code.

use anyhow::Context as _;
use quintlet_config::Service;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::{self, Liveness};
use quintlet_kit::paths::CriSocket;
use quintlet_kit::{error_chain, server, signals, task};
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::policy::Socket;
use crate::serve::{CONNECTIONS, Config, Proxy};
use crate::{budget, hints};

/// Runs `cri-proxy` as its own process: reads the command line, and ends it on a usage error.
///
/// # Errors
/// What keeps it from serving.
#[tokio::main]
pub async fn main() -> anyhow::Result<()> {
    let loaded = quintlet_config::parse::<Args>(Service::CriProxy);
    let args = loaded.args.clone();
    let telemetry = quintlet_telemetry::init("cri-proxy", &args.common.telemetry())?;
    loaded.tell();
    quintlet_kit::contain::panics_end_process();
    let paths = args.common.paths();
    let proxy = Proxy::bind(Config {
        runtime: args.runtime_endpoint,
        images: args.image_service_endpoint,
        timeout: args.runtime_request_timeout,
        namespace: args.containerd_namespace,
        sockets: Socket::ALL.map(|socket| (socket, paths.cri(socket))).into(),
        uids: args.allow_uid.iter().map(|allowed| (allowed.socket, allowed.uid)).collect(),
        pod_logs_dir: args.pod_logs_dir,
        share: budget::share,
        connections: CONNECTIONS,
        hint_capacity: hints::CAPACITY,
        clock: Clock::system(),
        grant_key: paths.grant_key(),
    })
    .context("the sockets cannot be bound")?;

    let stop = CancellationToken::new();
    if let Some(address) = args.common.metrics_listen {
        let serving = server::serve_metrics(address, stop.clone());
        drop(task::spawn("metrics", async move {
            if let Err(error) = serving.await {
                tracing::error!(%address, error = error_chain(&error), "no metrics over HTTP");
            }
        }));
    }
    let serving = task::spawn("serve", proxy.serve(stop.clone()));
    let liveness = Liveness::of(CriSocket::ALL.map(|socket| paths.cri(socket)));
    drop(task::spawn("notify", notify::run(liveness, stop.clone())));
    let reason = signals::stop_signal().await;
    tracing::info!(?reason, "stopping");
    stop.cancel();
    serving.await?;
    telemetry.shutdown().await;
    Ok(())
}
