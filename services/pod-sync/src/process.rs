//! The process: from its command line to its exit code.

use std::process::ExitCode;

use quintlet_kit::notify::{self, Liveness};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::args::Args;

/// Runs `pod-sync` as its own process: reads the command line, and ends it on a usage error.
#[tokio::main]
pub async fn main() -> ExitCode {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::Service::PodSync);
    let args = loaded.args.clone();
    let telemetry = match quintlet_telemetry::init("pod-sync", &args.common.telemetry()) {
        Ok(guard) => guard,
        Err(e) => return fail(&e),
    };
    loaded.tell();
    quintlet_kit::contain::panics_end_process();
    let stop = CancellationToken::new();
    let told = stop.clone();
    quintlet_kit::task::spawn("signals", async move {
        let reason = quintlet_kit::signals::stop_signal().await;
        tracing::info!(?reason, "stopping; pods go on");
        told.cancel();
    });
    let (drain_tx, drain) = watch::channel(false);
    match signal(SignalKind::user_defined1()) {
        Ok(mut usr1) => {
            quintlet_kit::task::spawn("drain-signal", async move {
                while usr1.recv().await.is_some() {
                    let _ = drain_tx.send(true);
                }
            });
        }
        Err(e) => return fail(&e),
    }
    let liveness = Liveness::of([args.common.paths().podsync()]).and_loop(quintlet_kit::server::SYNC_LOOP);
    quintlet_kit::task::spawn("notify", notify::run(liveness, stop.clone()));
    let ran = quintlet_kit::task::main(crate::run(args, drain, stop)).await;
    let code = match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(e.as_ref()),
    };
    telemetry.shutdown().await;
    code
}

fn fail(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    tracing::error!("{}", quintlet_kit::error_chain(error));
    ExitCode::FAILURE
}
