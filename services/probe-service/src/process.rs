//! The process of probe-service, from its command line to its exit code.

use std::time::Duration;

use clap::Parser;
use quintlet_config::{ConfigArgs, Loaded, Service};
use quintlet_kit::args::CommonArgs;
use quintlet_kit::notify::{self, Liveness};
use quintlet_kit::task::TaskGroup;
use quintlet_kit::{error_chain, server, signals};
use tokio_util::sync::CancellationToken;

/// Probes the containers of a node and remembers the results. Needs neither root nor API credentials.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    /// Name of this instance; its socket is RUN_DIR/probe/ID.sock. pod-sync shares the pods among all instances.
    #[arg(long, default_value = "0", value_parser = instance_id, value_name = "ID")]
    id: String,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

fn instance_id(value: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if value.is_empty() || value.len() > 64 || !value.chars().all(fits) {
        return Err("1 to 64 letters, digits, - or _".to_owned());
    }
    Ok(value.to_owned())
}

/// Runs probe-service as its own process. Exits with 64 on a usage error.
///
/// # Errors
/// The service cannot start, or serving fails.
pub fn main() -> anyhow::Result<()> {
    let loaded = quintlet_config::parse::<Args>(Service::Probe);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve(loaded))
}

async fn serve(loaded: Loaded<Args>) -> anyhow::Result<()> {
    let args = &loaded.args;
    let telemetry = quintlet_telemetry::init(crate::SERVICE, &args.common.telemetry())?;
    loaded.tell();
    quintlet_kit::contain::panics_end_process();
    let stop = CancellationToken::new();
    let tasks = TaskGroup::new();
    tasks.spawn("stop-signal", {
        let stop = stop.clone();
        async move {
            // The service may also end without a signal.
            tokio::select! {
                reason = signals::stop_signal() => tracing::info!(?reason, "stopping service"),
                () = stop.cancelled() => {}
            }
            stop.cancel();
        }
    });
    if let Some(address) = args.common.metrics_listen {
        let stop = stop.clone();
        tasks.spawn("metrics", async move {
            if let Err(error) = server::serve_metrics(address, stop).await {
                tracing::error!(%address, error = %error_chain(&error), "serve metrics failed");
            }
        });
    }
    let liveness = Liveness::of([args.common.paths().probe(&args.id)]);
    tasks.spawn("notify", notify::run(liveness, stop.clone()));
    tracing::info!(id = args.id, "starting probe-service");
    let serving = crate::run(&args.common.run_dir, &args.id, &args.common.observer_uid, stop.clone());
    let served = quintlet_kit::task::main(serving).await;
    stop.cancel();
    for name in tasks.shutdown(Duration::from_secs(1)).await {
        tracing::warn!(task = name, "task did not stop in time");
    }
    telemetry.shutdown().await;
    Ok(served?)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_table_of_fields_and_the_flags_are_the_same() {
        Args::command().debug_assert();
        assert_eq!(quintlet_config::cli::problems(&Args::command(), Service::Probe), [""; 0]);
    }
}
