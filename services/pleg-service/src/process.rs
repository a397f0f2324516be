//! The process of pleg-service, from its command line to its exit code.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use quintlet_kit::args::paths::CriSocket;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::Liveness;
use quintlet_kit::server::{RELIST_LOOP, Server};
use quintlet_kit::service::{self, Service};
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::subscribe;
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::cri::{CriRuntime, ProxyHints};

/// Runs pleg-service as its own process. Exits with 64 on a usage error.
#[must_use]
pub fn main() -> ExitCode {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::Service::Pleg);
    let common = &loaded.args.common;
    let liveness = Liveness::of([common.paths().pleg()]).and_loop_if_any(RELIST_LOOP);
    let service = Service { name: "pleg-service", common, node_name: None, liveness };
    service::run(service, || loaded.publish(), |stop| Box::pin(serve(&loaded.args, stop)))
}

async fn serve(args: &Args, stop: CancellationToken) -> anyhow::Result<()> {
    let paths = args.common.paths();
    // Blocks: the service has no work before it listens.
    if let Some(leader) = args.follow.as_ref().filter(|leader| is_same(leader, &paths.pleg())) {
        anyhow::bail!(
            "{} is where this one would serve: a follower needs a --run-dir of its own",
            leader.display()
        );
    }
    let listener = bind_unix(&paths.pleg(), 0o660).with_context(|| paths.pleg().display().to_string())?;
    let mut server = Server::new("pleg-service").observers(&args.common.observer_uid);
    let clock = Clock::system();
    let periods = args.periods();
    let health = server.health();
    let containers;
    (server, containers) = match &args.follow {
        Some(leader) => {
            let services = crate::start_following(leader.clone(), clock, periods, health, &stop);
            (server.add_service(services.pleg), services.containers)
        }
        None => {
            let read = paths.cri(CriSocket::Read);
            let (runtime, hints) = (CriRuntime::new(read.clone(), periods.call), ProxyHints::new(read));
            let (runtime, hints) = (Arc::new(runtime), Arc::new(hints));
            let services = crate::start(runtime, hints, clock, periods, health, &stop);
            (server.add_service(services.pleg), services.containers)
        }
    };
    subscribe::serve(&paths.pleg_subscribers(), &args.subscribers, &stop, |server| {
        server.add_service(containers)
    });
    server.serve(listener, PeerPolicy::root_and_self(), stop).await.context("serving")
}

/// Reports whether two paths name one socket. Neither needs to exist.
fn is_same(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| {
        let dir = path.parent().and_then(|dir| dir.canonicalize().ok());
        dir.zip(path.file_name()).map(|(dir, name)| dir.join(name))
    };
    a == b || real(a).is_some_and(|a| Some(a) == real(b))
}
