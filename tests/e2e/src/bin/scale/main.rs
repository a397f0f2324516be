//! Measures a full node on the fake runtime: the cost of a pod's life with 100 and 500 pods and of pods that
//! exit again and again, the cost of a relist of 18,000 containers in cri-proxy and pleg-service, the delay
//! that watchers see, and the lag of 1,200 probes. Prints JSON.
//!
//! There are three kinds of process: the fake runtime ([`runtime`], this binary again), the two built
//! services, and this one with the watchers ([`watch`]). CPU time and memory are those of the services only.
//! Relists follow each other without a pause, which is more than a real node does. Needs release builds and
//! an idle machine.

mod measure;
mod node;
mod probes;
mod runtime;
mod watch;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_e2e::bins;
use quintlet_e2e::service::{Service, ServiceCommand};
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::clock::Clock;
use quintlet_kit::socket::channel;
use serde_json::{Value, json};
use tokio::time::Instant;

use measure::{delays, metric, usage};
use runtime::{Fake, FakeArgs};
use watch::{Sizes, Watchers};

/// Limit of all waits.
const LIMIT: Duration = Duration::from_secs(300);
/// Size limit of a message, in bytes.
const MAX_MESSAGE: usize = 16 << 20;
/// Metric of pleg-service: number and seconds of relists.
const RELISTS: &str = "kubelet_pleg_relist_duration_seconds";

/// Measures relists of thousands of containers: CPU, memory, messages, and the delay that watchers see.
#[derive(Debug, Clone, Parser)]
struct Args {
    #[arg(long, default_value_t = 6_000)]
    pods: usize,
    #[arg(long, default_value_t = 3)]
    containers: usize,
    #[arg(long, default_value_t = 10)]
    relists: u64,
    /// Watchers of pleg-service.
    #[arg(long, default_value_t = 50)]
    watchers: usize,
    /// Containers that exit, during relists and again without.
    #[arg(long, default_value_t = 400)]
    exits: usize,
    /// Kinds of runtime: with list streams, without.
    #[arg(long, value_delimiter = ',', default_value = "streams,lists")]
    runtimes: Vec<String>,
    /// HTTP probes.
    #[arg(long, default_value_t = 1_000)]
    probes: usize,
    /// Period of HTTP probes in milliseconds.
    #[arg(long, default_value_t = 1_000)]
    probe_period_ms: u32,
    /// Exec probes, which the runtime in memory answers.
    #[arg(long, default_value_t = 200)]
    exec_probes: usize,
    /// Period of exec probes in milliseconds.
    #[arg(long, default_value_t = 5_000)]
    exec_period_ms: u32,
    /// Instances of probe-service, which share the probed pods.
    #[arg(long, default_value_t = 1)]
    probe_instances: usize,
    /// Busy loops beside the second measurement of probes.
    #[arg(long, default_value_t = 2)]
    busy: usize,
    /// Watchers of the probes' evaluations.
    #[arg(long, default_value_t = 50)]
    probe_watchers: usize,
    /// Seconds for which probes are measured, on an idle and on a busy machine.
    #[arg(long, default_value_t = 20)]
    probe_seconds: u64,
    /// Numbers of pods on a whole node.
    #[arg(long, value_delimiter = ',', default_value = "100,500")]
    node_pods: Vec<usize>,
    /// Rounds with each of these numbers.
    #[arg(long, default_value_t = 1)]
    node_rounds: usize,
    /// Pods of that node whose container exits again and again.
    #[arg(long, default_value_t = 200)]
    flapping: usize,
    /// Restarts of each of these pods.
    #[arg(long, default_value_t = 4)]
    restarts: i64,
    /// Seconds for which the idle node is measured.
    #[arg(long, default_value_t = 20)]
    idle_seconds: u64,
    /// A kubelet that does the work of the whole node as well.
    #[arg(long)]
    kubelet: Option<PathBuf>,
    /// Leave out the runtimes and the whole node.
    #[arg(long)]
    only_probes: bool,
    /// Only the whole node.
    #[arg(long)]
    only_node: bool,
    /// Run as the runtime at this socket, controlled by standard input.
    #[arg(long, hide = true)]
    serve: Option<PathBuf>,
    /// Run as the runtime of a whole node at this socket, until standard input ends.
    #[arg(long, hide = true)]
    serve_node: Option<PathBuf>,
}

impl Args {
    fn node(&self) -> node::NodeArgs {
        node::NodeArgs {
            sizes: self.node_pods.clone(),
            rounds: self.node_rounds,
            flapping: self.flapping,
            restarts: self.restarts,
            idle: Duration::from_secs(self.idle_seconds),
            kubelet: self.kubelet.clone(),
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // A real runtime makes lists in parallel to its other work as well.
    let workers = if args.serve.is_some() || args.serve_node.is_some() { 4 } else { 2 };
    let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build()?;
    threads.block_on(async {
        if let Some(socket) = &args.serve {
            return runtime::serve(socket, &FakeArgs::of(&args)?).await;
        }
        if let Some(socket) = &args.serve_node {
            return node::serve(socket).await;
        }
        let span = Duration::from_secs(args.probe_seconds);
        let probe_args = probes::ProbeArgs {
            http: args.probes,
            http_period: Duration::from_millis(args.probe_period_ms.into()),
            exec: args.exec_probes,
            exec_period: Duration::from_millis(args.exec_period_ms.into()),
            instances: args.probe_instances,
            busy: args.busy,
            watchers: args.probe_watchers,
            span,
        };
        if args.only_probes {
            writeln!(std::io::stdout(), "{:#}", probes::measured(probe_args).await?)?;
            return Ok(());
        }
        let node = node::measured(&args.node()).await?;
        if args.only_node {
            writeln!(std::io::stdout(), "{node:#}")?;
            return Ok(());
        }
        let mut reports = serde_json::Map::new();
        for kind in &args.runtimes {
            let one = Args { runtimes: vec![kind.clone()], ..args.clone() };
            reports.insert(kind.clone(), measured(&one).await.with_context(|| format!("runtime {kind:?}"))?);
        }
        let probes = probes::measured(probe_args).await?;
        let report = json!({
            "pods": args.pods, "containers": args.pods * args.containers, "watchers": args.watchers,
            "relists": args.relists, "exits": args.exits, "runtimes": reports, "probes": probes, "node": node,
            "load": std::fs::read_to_string("/proc/loadavg")?.trim(),
            "cpus": std::thread::available_parallelism()?.get(),
            "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
            "bin_dir": bins::dir(),
        });
        writeln!(std::io::stdout(), "{report:#}")?;
        Ok(())
    })
}

/// The services on one runtime.
struct Node {
    dir: tempfile::TempDir,
    fake: Fake,
    proxy: Service,
    paths: Paths,
}

impl Node {
    async fn start(args: &Args) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("runtime.sock");
        let fake = Fake::start(&socket, &FakeArgs::of(args)?).await?;
        let paths = Paths::new(&dir.path().join("run"));
        let endpoint = format!("unix://{}", socket.display());
        let proxy = service(dir.path(), "cri-proxy", &["--runtime-endpoint", &endpoint]);
        Ok(Self { dir, fake, proxy, paths })
    }

    fn pleg(&self, pause: &str) -> Service {
        service(self.dir.path(), "pleg-service", &["--relist-period-live", pause])
    }
}

fn service(dir: &Path, name: &'static str, args: &[&str]) -> Service {
    Service::start(command(dir, name, args))
}

fn command(dir: &Path, name: &'static str, args: &[&str]) -> ServiceCommand {
    let run = ["--run-dir".into(), dir.join("run").into_os_string()];
    ServiceCommand {
        name,
        binary: bins::dir().join(name),
        args: run.into_iter().chain(args.iter().map(Into::into)).collect(),
        env: Vec::new(),
        log: dir.join(format!("{name}.log")),
        uid: None,
        boot: None,
    }
}

/// Waits for a number of relists and samples memory meanwhile. Returns their number, their total seconds, and
/// the peak memory.
async fn relists(node: &Node, pids: [i32; 2], upto: u64) -> anyhow::Result<(u64, f64, [u64; 2])> {
    let deadline = Instant::now() + LIMIT;
    let mut most = [0; 2];
    loop {
        let text = metric::text(&node.paths.pleg()).await?;
        let count = metric::of(&text, &format!("{RELISTS}_count"));
        for (most, pid) in most.iter_mut().zip(pids) {
            *most = usage(pid)?.pss_kib.max(*most);
        }
        // A whole number in decimal notation.
        if count >= upto as f64 {
            return Ok((count as u64, metric::of(&text, &format!("{RELISTS}_sum")), most));
        }
        anyhow::ensure!(Instant::now() < deadline, "{count} relists of {upto} within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn measured(args: &Args) -> anyhow::Result<Value> {
    let mut node = Node::start(args).await?;
    quintlet_kit::socket::wait_ready(&node.paths.cri(CriSocket::Read), LIMIT).await?;
    let proxy_at_start = usage(pid(&node.proxy)?)?;

    // The first state of all pods.
    let began = Instant::now();
    let mut pleg = node.pleg("1ms");
    let mut watchers = Watchers::open(&node.paths.pleg(), args.watchers, args.pods, LIMIT).await?;
    let first_picture = began.elapsed().as_secs_f64();
    let pids = [pid(&node.proxy)?, pid(&pleg)?];
    let (proxy_first, pleg_first) = (usage(pids[0])?, usage(pids[1])?);

    // Relists without changes.
    let (begun, ..) = relists(&node, pids, 1).await?;
    let (before_count, before_sum, _) = relists(&node, pids, begun + 2).await?;
    let before = [usage(pids[0])?, usage(pids[1])?];
    let (count, sum, most) = relists(&node, pids, before_count + args.relists).await?;
    let after = [usage(pids[0])?, usage(pids[1])?];
    let n = (count - before_count) as f64;
    let cpu = |i: usize| (after[i].cpu_seconds - before[i].cpu_seconds) / n;

    // Changes during relists, and without relists.
    let during = changes(&mut node, &mut watchers, args.exits, 0).await?;
    let after_changes = [usage(pids[0])?, usage(pids[1])?];
    let (after_count, ..) = relists(&node, pids, 1).await?;
    let largest_watch = watchers.largest();
    drop(watchers);
    let text = metric::text(&node.paths.cri(CriSocket::Read)).await?;
    anyhow::ensure!(pleg.process().starts == 1 && node.proxy.process().starts == 1, "a service ended");
    pleg.terminate().await;
    let mut pleg = node.pleg("10m");
    let mut watchers = Watchers::open(&node.paths.pleg(), args.watchers, args.pods, LIMIT).await?;
    let rest = changes(&mut node, &mut watchers, args.exits, args.exits).await?;
    drop(watchers);

    // The lists as pleg-service receives them.
    let read = channel(node.paths.cri(CriSocket::Read));
    let containers = Sizes::of(read.clone(), "/runtime.v1.RuntimeService/StreamContainers").await?;
    let sandboxes = Sizes::of(read, "/runtime.v1.RuntimeService/StreamPodSandboxes").await?;
    let largest = containers.largest.max(sandboxes.largest).max(largest_watch);
    pleg.terminate().await;
    node.proxy.terminate().await;
    let service = |i: usize| {
        json!({
            "cpu_seconds_per_relist": cpu(i),
            "pss_kib": {"before": before[i].pss_kib, "most_during": most[i], "after": after[i].pss_kib,
                "after_changes": after_changes[i].pss_kib},
        })
    };
    Ok(json!({
        "list_bytes": {"containers": containers.bytes, "sandboxes": sandboxes.bytes},
        "cpu_seconds_per_relist": cpu(0) + cpu(1),
        "wall_seconds_per_relist": (sum - before_sum) / n,
        "relists_measured": n,
        "relists_during_changes": after_count - count,
        "cri-proxy": service(0),
        "pleg-service": service(1),
        "first_picture": {
            "seconds": first_picture,
            "cri-proxy_cpu_seconds": proxy_first.cpu_seconds - proxy_at_start.cpu_seconds,
            "pleg-service_cpu_seconds": pleg_first.cpu_seconds,
        },
        "largest_message_bytes": {
            "containers": containers.largest, "sandboxes": sandboxes.largest, "watch": largest_watch,
            "all_under_16_mib": largest < MAX_MESSAGE,
        },
        "cri-proxy_most_bytes_of_a_list": metric::of(&text, "quintlet_cri_list_bytes_most"),
        "exit_seen_ms": {"while_relists_run": during, "without_relists": rest},
        "exit_lag_of_the_runtime_ms": runtime::EXIT_LAG.as_millis(),
    }))
}

fn pid(service: &Service) -> anyhow::Result<i32> {
    service.process().pid.context("the service runs")
}

/// Lets containers exit, one after the other. Returns the delays of all watchers.
///
/// A direct client polls the runtime at the same time: a delay of the runtime itself is a delay for both.
async fn changes(
    node: &mut Node,
    watchers: &mut Watchers,
    exits: usize,
    first: usize,
) -> anyhow::Result<Value> {
    let mut at = Vec::new();
    let mut observations = tokio::task::JoinSet::new();
    let runtime = RuntimeServiceClient::new(channel(node.dir.path().join("runtime.sock")));
    for n in 0..exits {
        let exit = node.fake.exit(first + n).await?;
        observations.spawn(runtime::says_exited(runtime.clone(), exit.clone()));
        at.push(exit);
        // Not in step with anything: 10 to 49 ms.
        tokio::time::sleep(Duration::from_millis(10 + (n as u64 * 17) % 40)).await;
    }
    let seen = watchers.exits(&at, LIMIT).await?;
    let observed: Vec<u64> = observations.join_all().await.into_iter().collect::<anyhow::Result<_>>()?;
    Ok(json!({"watchers": delays(&seen), "runtime_asked_directly": delays(&observed)}))
}

/// Returns CLOCK_BOOTTIME in nanoseconds.
fn now() -> u64 {
    u64::try_from(Clock::system().boot().as_nanos()).unwrap_or(u64::MAX)
}

type Exit = (String, u64);
