//! Measures the figures of docs/benchmarks.md, and the same work sent directly to the runtime. Prints JSON.
//!
//! Rounds are interleaved (the runtime alone with each number of pods in flight, then Quintlet), so that a slower machine is
//! slower for all. Each figure is the median of its rounds. Needs release builds and an idle machine.

mod cost;
mod profile;
mod raw;
mod volumes;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use k8s_cri::v1::ContainerStatusRequest;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_e2e::{Node, Options, Seen, pods};
use quintlet_kit::clock::Clock;
use serde_json::{Value, json};
use tokio::time::Instant;

use self::cost::{Cost, idle};
use self::profile::Profiler;
use self::raw::Runtime;

/// Limit for all pods of a round.
const LIMIT: Duration = Duration::from_secs(300);

/// Compares Quintlet with the runtime alone: create → Ready, delete → gone, exit → status, idle CPU and memory.
#[derive(Debug, Parser)]
struct Args {
    /// Pods per round.
    #[arg(long, default_value_t = 100)]
    pods: usize,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Concurrent pods of runs with the runtime alone, of which the best counts.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,100")]
    in_flight: Vec<usize>,
    /// Containers that exit, for exit → status.
    #[arg(long, default_value_t = 30)]
    exits: usize,
    /// Seconds for which the idle services are measured.
    #[arg(long, default_value_t = 20)]
    idle_seconds: u64,
    /// Directory for flame graphs and counts of system calls of each service, during the life of more pods and at rest. Needs perf
    /// and strace.
    #[arg(long)]
    profile: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let node = Node::start(Options { run_in_memory: true, ..Options::with_api("bench") }).await;
    let runtime = RuntimeServiceClient::new(node.containerd.channel().await?);
    let mut create: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut delete = create.clone();
    let mut lives = create.clone();
    for round in 0..args.rounds {
        for in_flight in &args.in_flight {
            let key = format!("raw {in_flight} in flight");
            let (made, gone) = raw::burst(&node, &runtime, args.pods, *in_flight, round).await?;
            create.entry(key.clone()).or_default().push(made);
            delete.entry(key).or_default().push(gone);
        }
        let before = Cost::of(&node)?;
        let made = burst(&node, args.pods).await;
        create.entry("quintlet".to_owned()).or_default().push(made);
        delete.entry("quintlet".to_owned()).or_default().push(remove(&node, args.pods).await);
        for (figure, per_pod) in Cost::of(&node)?.since(&before).per_pod(args.pods) {
            lives.entry(figure).or_default().push(per_pod);
        }
    }
    if let Some(dir) = &args.profile {
        let profiler = Profiler::new(dir, &node)?;
        let life = async || {
            burst(&node, args.pods).await;
            remove(&node, args.pods).await;
        };
        profiler.sample("life", life).await?;
        profiler.count_syscalls("life", life).await?;
        burst(&node, args.pods).await;
        let rest = async || tokio::time::sleep(Duration::from_secs(args.idle_seconds)).await;
        profiler.sample("rest", rest).await?;
        profiler.count_syscalls("rest", rest).await?;
        remove(&node, args.pods).await;
    }
    burst(&node, args.pods).await;
    let idle = idle(&node, Duration::from_secs(args.idle_seconds)).await?;
    let one_more = one_more(&node).await;
    remove(&node, args.pods).await;
    let exits = exits(&node, runtime, args.exits).await?;
    let with_volumes = volumes::compare(&node, args.pods, args.rounds).await?;
    let report = json!({
        "pods": args.pods, "rounds": args.rounds,
        "create_to_ready_seconds": medians(&create),
        "create_to_ready_ratio_to_best_raw": ratio(&create),
        "delete_to_gone_seconds": medians(&delete),
        "delete_to_gone_ratio_to_best_raw": ratio(&delete),
        "per_pod_life": medians(&lives),
        "one_more_create_to_ready_ms": one_more,
        "exit_to_status_ms": {"p50": quantile(&exits, 0.5), "p99": quantile(&exits, 0.99)},
        "idle": idle,
        "five_volumes": with_volumes,
        "load": std::fs::read_to_string("/proc/loadavg")?.trim(),
        "cpus": std::thread::available_parallelism()?.get(),
        "runtime": quintlet_localnode::cri::version(node.containerd.channel().await?).await?,
        "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
        "debug_build": cfg!(debug_assertions),
    });
    writeln!(std::io::stdout(), "{report:#}")?;
    node.down().await;
    Ok(())
}

fn name(i: usize) -> String {
    format!("bench-{i}")
}

/// Returns the seconds from the first POST until all pods are Ready in the API server.
async fn burst(node: &Node, n: usize) -> f64 {
    let began = Instant::now();
    for i in 0..n {
        node.api().create_pod(pods::bound(pods::sleeper(&name(i))));
    }
    for i in 0..n {
        let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
        node.api().wait_for("pods", "default", &name(i), LIMIT, is_ready).await;
    }
    began.elapsed().as_secs_f64()
}

/// Returns the seconds from the first DELETE until the API server has no pod.
async fn remove(node: &Node, n: usize) -> f64 {
    let began = Instant::now();
    for i in 0..n {
        // The pod was created before. If it does not exist, it is gone, which is what is measured.
        let _gone = node.api().delete("pods", "default", &name(i), None);
    }
    for i in 0..n {
        node.api().wait_for("pods", "default", &name(i), LIMIT, Value::is_null).await;
    }
    began.elapsed().as_secs_f64()
}

/// Returns the milliseconds to start one more pod on a full node, the median of five.
async fn one_more(node: &Node) -> f64 {
    let mut took = Vec::new();
    for i in 0..5 {
        let name = format!("more-{i}");
        let began = Instant::now();
        node.api().create_pod(pods::bound(pods::sleeper(&name)));
        let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
        node.api().wait_for("pods", "default", &name, LIMIT, is_ready).await;
        took.push(began.elapsed().as_secs_f64() * 1000.0);
        // It was Ready just now.
        let _gone = node.api().delete("pods", "default", &name, None);
        node.api().wait_for("pods", "default", &name, LIMIT, Value::is_null).await;
    }
    quantile(&took, 0.5)
}

/// Returns, for each of `n` containers, the milliseconds from its exit in the runtime until the API server has it.
async fn exits(node: &Node, mut runtime: Runtime, n: usize) -> anyhow::Result<Vec<f64>> {
    let clock = Clock::system();
    let mut took = Vec::new();
    for i in 0..n {
        let mut pod = pods::bound(pods::script(&format!("exit-{i}"), "sleep 1"));
        pod["spec"]["restartPolicy"] = json!("Never");
        node.api().create_pod(pod);
        let name = format!("exit-{i}");
        let has_ended = |p: &Value| p["status"]["containerStatuses"][0]["state"]["terminated"].is_object();
        let ended = node.api().wait_for("pods", "default", &name, LIMIT, has_ended).await;
        let seen = clock.wall().as_nanosecond();
        let id = Seen::from_api(ended).container("main").id;
        let container_id = id.trim_start_matches("containerd://").to_owned();
        let status =
            runtime.container_status(ContainerStatusRequest { container_id, verbose: false }).await?;
        let at = status.into_inner().status.context("the runtime has the container")?.finished_at;
        took.push((seen - i128::from(at)) as f64 / 1e6);
        node.api().delete("pods", "default", &name, None).map_err(|e| anyhow::anyhow!("{e:?}"))?;
    }
    Ok(took)
}

fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * q).round() as usize).copied().unwrap_or_default()
}

fn medians(all: &BTreeMap<String, Vec<f64>>) -> BTreeMap<&str, f64> {
    all.iter().map(|(key, values)| (key.as_str(), quantile(values, 0.5))).collect()
}

fn ratio(all: &BTreeMap<String, Vec<f64>>) -> f64 {
    let medians = medians(all);
    let raw = medians.iter().filter(|(key, _)| key.starts_with("raw")).map(|(_, v)| *v);
    medians.get("quintlet").copied().unwrap_or_default() / raw.fold(f64::INFINITY, f64::min)
}
