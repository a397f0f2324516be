//! The process of pod-sync, from its command line to its exit code.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use pod_sync_node_object::NodeNameTaken;
use quintlet_agents::{EXIT_OTHER_AGENT, ProcessTable};
use quintlet_kit::notify::Liveness;
use quintlet_kit::server::SYNC_LOOP;
use quintlet_kit::service::{self, Service};
use quintlet_kit::task;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::start_refusal::node_identity;
use crate::threshold_checks;

/// Runs pod-sync as its own process. Exits with 64 on a usage error, and if thresholds of evictions
/// contradict each other on this machine, and with 69 if another agent uses the root directory or the node
/// name.
#[must_use]
pub fn main() -> ExitCode {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::table::Service::PodSync);
    let problems = threshold_checks::problems(&loaded.args, &loaded.config);
    let loaded = match loaded.with_problems(problems) {
        Ok(loaded) => loaded,
        Err(end) => end.exit(),
    };
    let processes = ProcessTable::default();
    let of_node = || processes.agent_of_node(&node_identity(&loaded.args)?);
    if let Some(other) = processes.agent_of(&loaded.args.root_dir).or_else(of_node) {
        // A closed standard error leaves only the exit code.
        let _ = writeln!(std::io::stderr().lock(), "pod-sync: {other}");
        return ExitCode::from(EXIT_OTHER_AGENT);
    }
    let common = &loaded.args.common;
    let liveness = Liveness::of([common.paths().podsync()]).and_loop(SYNC_LOOP);
    let service =
        Service { name: "pod-sync", common, node_name: Some(loaded.args.node.node_name()), liveness };
    let is_taken = AtomicBool::new(false);
    let serve = |stop| {
        Box::pin(async {
            let served = serve(loaded.args.clone(), stop).await;
            let taken = served.as_ref().is_err_and(|error| error.is::<NodeNameTaken>());
            is_taken.store(taken, Ordering::Relaxed);
            served
        })
    };
    let code = service::run(service, || loaded.publish(), serve);
    if is_taken.load(Ordering::Relaxed) { ExitCode::from(EXIT_OTHER_AGENT) } else { code }
}

/// Serves until `stop`. SIGUSR1 removes the pods of manifests, then ends the service.
async fn serve(mut args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    // Blocks: the service has no work before it listens.
    args.process.limits().apply();
    args.process.kernel_log = Some(PathBuf::from("/dev/kmsg"));
    let (drain_tx, drain) = watch::channel(false);
    let mut drain_signal = signal(SignalKind::user_defined1())?;
    task::spawn("drain-signal", async move {
        while drain_signal.recv().await.is_some() {
            // The service may have ended.
            let _ = drain_tx.send(true);
        }
    });
    crate::run(args, drain, stop).await
}
