//! The `cri-proxy` binary.
use std::sync::Arc;

use clap::Parser as _;
use cri_proxy::args::Args;
use cri_proxy::policy::Socket;
use cri_proxy::serve::{Config, Proxy};
use cri_proxy::{hints, rt};
use quintlet_telemetry::TelemetryOptions;
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let telemetry = quintlet_telemetry::init("cri-proxy", &TelemetryOptions::default())?;
    let sockets = Socket::ALL.map(|s| (s, args.run_dir.join("cri").join(s.name()).join("cri.sock")));
    let mut uids = args.allow_uid.clone();
    uids.extend([0, nix::unistd::geteuid().as_raw()]);
    let proxy = Proxy::bind(Config {
        runtime: args.runtime_endpoint,
        namespace: args.containerd_namespace,
        sockets: sockets.into(),
        uids,
        hint_capacity: hints::CAPACITY,
        boot: rt::boot_clock(),
        verify: Arc::new(|_, _, _, _| Err("no grant key".to_owned())),
    })?;
    let stop = CancellationToken::new();
    let serving = rt::spawn("serve", proxy.serve(stop.clone()));
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = term.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    stop.cancel();
    serving.await?;
    telemetry.shutdown().await;
    Ok(())
}
