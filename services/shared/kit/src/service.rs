//! The process of a service: its threads, telemetry, signals, metrics over HTTP, readiness and exit code.

use std::error::Error;
use std::num::NonZero;
use std::process::ExitCode;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

pub use quintlet_telemetry::metrics::register_process_metrics;

/// The allocator of every binary. glibc's allocator keeps freed memory: about 20 MiB in all processes after
/// 300 pods. The settings of jemalloc are in `.cargo/config.toml`.
pub use tikv_jemallocator::Jemalloc as Allocator;

use crate::args::CommonArgs;
use crate::notify::{self, Liveness};
use crate::{contain, error_chain, own_limits, server, signals, task, timers};

/// Cores per worker thread, and most worker threads. Services mostly wait for the runtime, the kernel and
/// each other: a second worker thread costs wake-ups and memory, since each event wakes both.
const CORES_PER_THREAD: usize = 4;
const MAX_THREADS: usize = 4;

/// Time after which an idle thread for blocking calls ends. Periodic calls take turns on idle threads, so
/// with tokio's ten seconds the threads of a burst would stay.
const KEEP_IDLE_THREADS: Duration = Duration::from_secs(1);

/// A service to run as its own process.
#[derive(Debug)]
pub struct Service<'a> {
    /// Name of the program.
    pub name: &'static str,
    /// Arguments that every service has.
    pub common: &'a CommonArgs,
    /// Name of the node, where the service knows it, for its traces.
    pub node_name: Option<String>,
    /// Conditions of readiness and of systemd's watchdog.
    pub liveness: Liveness,
}

type BoxError = Box<dyn Error + Send + Sync>;

/// Runs a service until `serve` returns. Returns the exit code of the process.
///
/// - `on_start` runs once the subscriber for logs is installed.
/// - The token that `serve` receives is cancelled by SIGTERM or SIGINT. A second signal ends the process at
///   once.
/// - A panic outside of contained work ends the process.
/// - If metrics cannot be served over HTTP, an error is logged and the service continues without them.
/// - Remaining spans are exported before the process exits.
/// - An error is logged in the configured format, or printed to stderr if nothing is logged.
#[must_use]
pub fn run<E, F>(
    service: Service<'_>,
    on_start: impl FnOnce(),
    serve: impl FnOnce(CancellationToken) -> F,
) -> ExitCode
where
    E: Into<BoxError>,
    F: Future<Output = Result<(), E>>,
{
    let name = service.name;
    let done = runtime()
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(async { Box::pin(process(service, on_start, serve)).await }));
    exit_code(name, done)
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = cores.div_ceil(CORES_PER_THREAD).clamp(1, MAX_THREADS);
    // With one worker thread, the future of `serve` would run on a second one, and each of its events would
    // wake both.
    let mut builder = if threads == 1 {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    builder.worker_threads(threads).thread_keep_alive(KEEP_IDLE_THREADS).enable_all().build()
}

async fn process<E, F>(
    service: Service<'_>,
    on_start: impl FnOnce(),
    serve: impl FnOnce(CancellationToken) -> F,
) -> Result<(), BoxError>
where
    E: Into<BoxError>,
    F: Future<Output = Result<(), E>>,
{
    // First, so that no signal ends the process without an ordered stop.
    let stop_signal = signals::stop_signal()?;
    let (name, options) = (service.name, service.common.telemetry(service.node_name));
    // It reads files of certificates if traces are exported.
    let telemetry = task::blocking(move || quintlet_telemetry::init(name, &options)).await?;
    task::blocking(own_limits::raise_open_files).await;
    on_start();
    crate::crypto::install();
    timers::align();
    contain::panics_end_process();
    let stop = CancellationToken::new();
    let signalled = stop.clone();
    task::spawn("signals", async move {
        let reason = stop_signal.await;
        tracing::info!(?reason, "stopping service");
        signalled.cancel();
    });
    if let Some(address) = service.common.metrics_listen {
        let serving = server::serve_metrics(address, stop.clone());
        task::spawn("metrics", async move {
            if let Err(error) = serving.await {
                tracing::error!(%address, error = error_chain(&error), "failed to serve metrics over HTTP");
            }
        });
    }
    task::spawn("notify", notify::run(service.liveness, stop.clone()));
    let served = task::main(serve(stop.clone())).await;
    stop.cancel();
    telemetry.shutdown().await;
    served.map_err(Into::into)
}

/// Returns the exit code of a process. Logs an error, or prints it to stderr as one line if nothing is
/// logged.
fn exit_code(name: &str, done: Result<(), BoxError>) -> ExitCode {
    use std::io::Write as _;
    let Err(error) = done else { return ExitCode::SUCCESS };
    let error = error_chain(&*error);
    if tracing::enabled!(tracing::Level::ERROR) {
        tracing::error!(error, "service failed");
    } else {
        // A closed stderr cannot be reported anywhere.
        let _ = writeln!(std::io::stderr().lock(), "{name}: {}", error.replace('\n', " "));
    }
    ExitCode::FAILURE
}
