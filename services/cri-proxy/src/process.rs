//! The process of cri-proxy, from its command line to its exit code.

use std::process::ExitCode;

use anyhow::Context as _;
use quintlet_kit::args::paths::CriSocket;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::Liveness;
use quintlet_kit::own_limits::OwnLimits;
use quintlet_kit::service::{self, Service};
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::policy::Socket;
use crate::serve::{Config, Proxy, connection_limit};
use crate::{budget, hints};

/// Runs cri-proxy as its own process. Exits with 64 on a usage error.
#[must_use]
pub fn main() -> ExitCode {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::table::Service::CriProxy);
    let paths = loaded.args.common.paths();
    let liveness = Liveness::of(CriSocket::ALL.map(|socket| paths.cri(socket)));
    let service = Service { name: "cri-proxy", common: &loaded.args.common, node_name: None, liveness };
    service::run(service, || loaded.publish(), |stop| Box::pin(serve(loaded.args.clone(), stop)))
}

async fn serve(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    OwnLimits { oom_score_adj: args.oom_score_adj, open_files: None }.apply();
    let paths = args.common.paths();
    let proxy = Proxy::bind(Config {
        runtime: args.runtime_endpoint,
        images: args.image_service_endpoint,
        timeout: args.runtime_request_timeout,
        namespace: args.containerd_namespace,
        sockets: Socket::ALL.map(|socket| (socket, paths.cri(socket))).into(),
        uids: args.allow_uid.iter().map(|allowed| (allowed.socket, allowed.uid)).collect(),
        pod_logs_dir: args.pod_logs_dir,
        byte_limit: budget::limit,
        connections: connection_limit,
        hint_capacity: hints::CAPACITY,
        clock: Clock::system(),
        grant_key: paths.grant_key(),
    })
    .context("failed to bind the sockets")?;
    proxy.serve(stop).await;
    Ok(())
}
