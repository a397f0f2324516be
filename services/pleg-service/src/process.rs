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
    let loaded = quintlet_config::parse::<Args>(quintlet_config::table::Service::Pleg);
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
    server = match &args.follow {
        Some(leader) => {
            if !args.subscribers.is_empty() {
                // The configuration is that of the leader, too.
                tracing::info!("subscribers are served by the leader alone");
            }
            server.add_service(crate::start_following(leader.clone(), clock, periods, health, &stop).pleg)
        }
        None => {
            let read = paths.cri(CriSocket::Read);
            let (runtime, hints) = (CriRuntime::new(read.clone(), periods.call), ProxyHints::new(read));
            let (runtime, hints) = (Arc::new(runtime), Arc::new(hints));
            let services = crate::start(runtime, hints, clock, periods, health, &stop);
            subscribe::serve(&paths.pleg_subscribers(), &args.subscribers, &stop, |server| {
                server.add_service(services.containers)
            });
            server.add_service(services.pleg)
        }
    };
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[tokio::test]
    async fn a_leader_has_a_socket_for_subscribers_and_a_follower_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str| dir.path().join(name);
        let line = |name: &str, more: &[&str]| {
            let run = run(name).display().to_string();
            let flags = ["pleg-service", "--run-dir", &run, "--subscriber-uid=0", "--subscriber-gid=0"];
            Args::try_parse_from(flags.iter().chain(more)).unwrap()
        };
        let leader_socket = run("leader").join("pleg/pleg.sock").display().to_string();
        for (name, more, serves) in
            [("leader", &[][..], true), ("follower", &["--follow", &leader_socket], false)]
        {
            let (args, stop) = (line(name, more), CancellationToken::new());
            let paths = args.common.paths();
            // The sockets exist before the first wait.
            let mut serving = Box::pin(serve(&args, stop.clone()));
            assert!(futures::poll!(serving.as_mut()).is_pending(), "{name}");
            assert!(paths.pleg().exists());
            assert_eq!(paths.pleg_subscribers().exists(), serves, "{name}");
            stop.cancel();
        }
    }
}
