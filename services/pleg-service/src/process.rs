//! The process of pleg-service, from its command line to its exit code.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use quintlet_kit::args::paths::CriSocket;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::{self, Liveness};
use quintlet_kit::server::{RELIST_LOOP, Server, serve_metrics};
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::cri::{CriRuntime, ProxyHints};

/// Runs pleg-service as its own process. Exits with 64 on a usage error.
///
/// # Errors
/// The service cannot start, or serving fails.
pub fn main() -> anyhow::Result<()> {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::Service::Pleg);
    // Two threads suffice, since most of the work is waiting for the runtime.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(loaded))
}

async fn run(loaded: quintlet_config::Loaded<Args>) -> anyhow::Result<()> {
    let args = &loaded.args;
    let telemetry = quintlet_telemetry::init("pleg-service", &args.common.telemetry())?;
    loaded.tell();
    quintlet_kit::contain::panics_end_process();
    let paths = args.common.paths();
    if let Some(leader) = args.follow.as_ref().filter(|leader| is_same(leader, &paths.pleg())) {
        anyhow::bail!(
            "{} is where this one would serve: a follower needs a --run-dir of its own",
            leader.display()
        );
    }
    let listener = bind_unix(&paths.pleg(), 0o660).with_context(|| paths.pleg().display().to_string())?;
    let stop = CancellationToken::new();
    let mut server = Server::new("pleg-service").observers(&args.common.observer_uid);
    let (clock, periods, health) = (Clock::system(), args.periods(), server.health());
    server = match &args.follow {
        Some(leader) => {
            server.add_service(crate::start_following(leader.clone(), clock, periods, health, &stop))
        }
        None => {
            let read = paths.cri(CriSocket::Read);
            let (runtime, hints) = (CriRuntime::new(read.clone(), periods.call), ProxyHints::new(read));
            let (runtime, hints) = (Arc::new(runtime), Arc::new(hints));
            server.add_service(crate::start(runtime, hints, clock, periods, health, &stop))
        }
    };
    if let Some(address) = args.common.metrics_listen {
        let stop = stop.clone();
        quintlet_kit::task::spawn("metrics", async move {
            if let Err(error) = serve_metrics(address, stop).await {
                tracing::error!(%error, %address, "serve metrics failed");
            }
        });
    }
    let signal = stop.clone();
    quintlet_kit::task::spawn("signals", async move {
        let reason = quintlet_kit::signals::stop_signal().await;
        tracing::info!(?reason, "stopping service");
        signal.cancel();
    });
    let liveness = Liveness::of([paths.pleg()]).and_loop_if_any(RELIST_LOOP);
    quintlet_kit::task::spawn("notify", notify::run(liveness, stop.clone()));
    let served = quintlet_kit::task::main(server.serve(listener, PeerPolicy::root_and_self(), stop)).await;
    telemetry.shutdown().await;
    served.context("serving")
}

/// Reports whether two paths name one socket. Neither needs to exist.
fn is_same(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| {
        let dir = path.parent().and_then(|dir| dir.canonicalize().ok());
        dir.zip(path.file_name()).map(|(dir, name)| dir.join(name))
    };
    a == b || real(a).is_some_and(|a| Some(a) == real(b))
}
