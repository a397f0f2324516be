//! The `cri-proxy` binary.
use anyhow::Context as _;
use cri_proxy::args::Args;
use cri_proxy::hints;
use cri_proxy::policy::Socket;
use cri_proxy::serve::{Config, Proxy};
use quintlet_kit::clock::Clock;
use quintlet_kit::{error_chain, server, signals, task};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::Service::CriProxy);
    let args = loaded.args.clone();
    let telemetry = quintlet_telemetry::init("cri-proxy", &args.common.telemetry())?;
    loaded.tell();
    let paths = args.common.paths();
    let mut uids = args.allow_uid;
    uids.extend([0, nix::unistd::geteuid().as_raw()]);
    let proxy = Proxy::bind(Config {
        runtime: args.runtime_endpoint,
        images: args.image_service_endpoint,
        timeout: args.runtime_request_timeout,
        namespace: args.containerd_namespace,
        sockets: Socket::ALL.map(|socket| (socket, paths.cri(socket))).into(),
        uids,
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
                tracing::warn!(%address, error = error_chain(&error), "no metrics over HTTP");
            }
        }));
    }
    let serving = task::spawn("serve", proxy.serve(stop.clone()));
    let reason = signals::stop_signal().await;
    tracing::info!(?reason, "stopping");
    stop.cancel();
    serving.await?;
    telemetry.shutdown().await;
    Ok(())
}
