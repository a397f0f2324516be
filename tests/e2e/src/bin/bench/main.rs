//! Measures the figures of docs/benchmarks.md, the same work sent directly to the runtime, and a kubelet if
//! there is one. Prints JSON.
//!
//! Rounds are interleaved (the runtime alone with each number of pods in flight, then each agent), so that a
//! slower machine is slower for all. Each figure is the median of its rounds. Needs release builds and an
//! idle machine.

mod confine;
mod devices;
mod exits;
mod figures;
mod kubelet;
mod profile;
mod raw;
mod volumes;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_e2e::cost::{self, Agent, Cost};
use quintlet_e2e::{Node, Options, pods, work};
use serde_json::{Map, Value, json};

use self::figures::{Figures, quantile};
use self::kubelet::KubeletNode;
use self::profile::Profiler;
use self::raw::Runtime;

/// Pods that are started one after the other on a full node.
const MORE: usize = 5;

/// Compares Quintlet with the runtime alone, and with a kubelet: create → Ready, delete → gone, exit →
/// status, idle CPU and memory.
#[derive(Debug, Parser)]
struct Args {
    /// Pods per round.
    #[arg(long, default_value_t = 100)]
    pods: usize,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Rounds with node and control plane confined to a processor each. Needs two processors.
    #[arg(long, default_value_t = 1)]
    confined_rounds: usize,
    /// Concurrent pods of runs with the runtime alone, of which the best counts.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,100")]
    in_flight: Vec<usize>,
    /// Containers that exit, for exit → status.
    #[arg(long, default_value_t = 30)]
    exits: usize,
    /// Seconds for which the idle agents are measured.
    #[arg(long, default_value_t = 20)]
    idle_seconds: u64,
    /// A kubelet that does the same work in the same run, with a runtime and an API server of its own.
    #[arg(long)]
    kubelet: Option<PathBuf>,
    /// Pods of each kind that are started one after the other, with a device, with a claim and without.
    #[arg(long, default_value_t = 30)]
    device_starts: usize,
    /// Pods of a burst with a device each. None: devices are not measured.
    #[arg(long, default_value_t = 250)]
    device_pods: usize,
    /// Without pods with volumes.
    #[arg(long)]
    no_volumes: bool,
    /// Directory for flame graphs and counts of system calls of each service, during the life of more pods
    /// and at rest. Needs perf and strace.
    #[arg(long)]
    profile: Option<PathBuf>,
    /// Counts the system calls of each service during the life of more pods. Needs strace.
    #[arg(long)]
    system_calls: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The default of the kubelet is 110.
    let most_pods = args.pods.saturating_add(MORE).max(args.device_pods).max(110);
    let most_pods = format!("--max-pods={most_pods}");
    let extra = vec![("pod-sync", most_pods)];
    let node = Node::start(Options { run_in_memory: true, extra, ..Options::with_api("bench") }).await;
    let runtime = RuntimeServiceClient::new(node.containerd.channel().await?);
    let kubelet = match &args.kubelet {
        Some(binary) => Some(KubeletNode::start(binary).await?),
        None => None,
    };
    let bench = Bench { args: &args, node: &node, runtime: &runtime, kubelet: kubelet.as_ref() };
    if let Some(kubelet) = &kubelet {
        kubelet.set_running(false)?;
    }
    let mut report = bench.rounds(args.rounds).await?;
    if args.confined_rounds > 0 {
        let pids = bench.pids()?;
        confine::confine(&pids)?;
        let confined = bench.rounds(args.confined_rounds).await?;
        confine::release(&pids)?;
        report.insert("one_processor_each".to_owned(), Value::Object(confined));
    }
    if let Some(dir) = &args.profile {
        bench.profile(&Profiler::new(dir, &node)?).await?;
    }
    if args.system_calls {
        report.insert("system_calls_per_pod_life".to_owned(), bench.system_calls().await?);
    }
    let mut agents = Map::new();
    agents.insert("quintlet".to_owned(), bench.full_node(&Agent::of(&node)?, &runtime, true).await?);
    if let Some(kubelet) = &kubelet {
        kubelet.set_running(true)?;
        let mut figures = bench.full_node(&kubelet.agent(), &kubelet.runtime, false).await?;
        figures["version"] = json!(kubelet.version);
        agents.insert("kubelet".to_owned(), figures);
        kubelet.set_running(false)?;
    }
    report.insert("full_node".to_owned(), Value::Object(agents));
    if args.device_pods > 0 {
        report.insert("devices".to_owned(), bench.devices().await?);
    }
    if !args.no_volumes {
        report.insert("five_volumes".to_owned(), volumes::compare(&node, args.pods, args.rounds).await?);
    }
    report.extend([
        ("pods".to_owned(), json!(args.pods)),
        ("rounds".to_owned(), json!(args.rounds)),
        ("load".to_owned(), json!(std::fs::read_to_string("/proc/loadavg")?.trim())),
        ("cpus".to_owned(), json!(std::thread::available_parallelism()?.get())),
        (
            "runtime".to_owned(),
            json!(quintlet_localnode::cri::version(node.containerd.channel().await?).await?),
        ),
        ("kernel".to_owned(), json!(std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim())),
        ("debug_build".to_owned(), json!(cfg!(debug_assertions))),
    ]);
    writeln!(std::io::stdout(), "{:#}", Value::Object(report))?;
    if let Some(kubelet) = kubelet {
        kubelet.down().await?;
    }
    node.down().await;
    Ok(())
}

struct Bench<'a> {
    args: &'a Args,
    node: &'a Node,
    runtime: &'a Runtime,
    kubelet: Option<&'a KubeletNode>,
}

impl Bench<'_> {
    /// Measures bursts and deletions.
    async fn rounds(&self, rounds: usize) -> anyhow::Result<Map<String, Value>> {
        let pods = self.args.pods;
        let mut figures = Figures::default();
        for round in 0..rounds {
            for in_flight in &self.args.in_flight {
                let before = Cost::of_machine()?;
                let burst = raw::burst(self.node, self.runtime, pods, *in_flight, round).await?;
                let who = format!("raw {in_flight} in flight");
                figures.add(&who, burst.created, burst.remove_seconds);
                figures.add_start(&who, &burst.start_cost, pods);
                figures.add_cost(&who, &Cost::of_machine()?.since(&before), pods);
            }
            figures.add_life("quintlet", &Agent::of(self.node)?, pods).await?;
            if let Some(kubelet) = self.kubelet {
                kubelet.set_running(true)?;
                figures.add_life("kubelet", &kubelet.agent(), pods).await?;
                kubelet.set_running(false)?;
            }
        }
        Ok(figures.report())
    }

    /// Measures an agent with all pods: at rest, with more pods (and the runtime alone with as many), with
    /// probes, with pods that exit.
    async fn full_node(&self, agent: &Agent<'_>, runtime: &Runtime, with_raw: bool) -> anyhow::Result<Value> {
        let pods = self.args.pods;
        work::burst(agent.api, pods).await;
        let idle = cost::idle(agent, Duration::from_secs(self.args.idle_seconds)).await?;
        let more = work::one_more(agent.api, MORE).await;
        let mut raw = Vec::new();
        for i in 0..if with_raw { MORE } else { 0 } {
            raw.push(raw::burst(self.node, runtime, 1, 1, i).await?.created.ready * 1000.0);
        }
        work::remove(agent.api, pods).await;
        work::burst_of(agent.api, pods, pods::http_probed).await;
        let probed = cost::idle(agent, Duration::from_secs(self.args.idle_seconds)).await?;
        work::remove(agent.api, pods).await;
        let exits = exits::exits(agent.api, runtime, self.args.exits).await?;
        let raw_exits = match with_raw {
            true => raw::exits(self.node, runtime, self.args.exits).await?,
            false => Vec::new(),
        };
        let quantiles = |all: &[f64]| json!({"p50": quantile(all, 0.5), "p99": quantile(all, 0.99)});
        Ok(json!({
            "idle": idle,
            "two_http_probes_each": probed,
            "one_more_create_to_ready_ms": quantile(&more, 0.5),
            "one_more_raw_ms": with_raw.then(|| quantile(&raw, 0.5)),
            "exit_to_status_ms": quantiles(&exits),
            "exit_to_raw_status_ms": with_raw.then(|| quantiles(&raw_exits)),
        }))
    }

    /// Measures pods with devices of each agent.
    async fn devices(&self) -> anyhow::Result<Value> {
        let (starts, pods) = (self.args.device_starts, self.args.device_pods);
        let mut figures = Map::new();
        let ours = devices::measure(self.node.api(), &self.node.root_dir(), starts, pods).await?;
        figures.insert("quintlet".to_owned(), ours);
        if let Some(kubelet) = self.kubelet {
            kubelet.set_running(true)?;
            let theirs = devices::measure(&kubelet.api, &kubelet.root_dir(), starts, pods).await?;
            kubelet.set_running(false)?;
            figures.insert("kubelet".to_owned(), theirs);
        }
        Ok(Value::Object(figures))
    }

    async fn profile(&self, profiler: &Profiler) -> anyhow::Result<()> {
        let (api, pods) = (self.node.api(), self.args.pods);
        let life = async || {
            work::burst(api, pods).await;
            work::remove(api, pods).await;
        };
        profiler.sample("life", life).await?;
        profiler.count_syscalls("life", life).await?;
        work::burst(api, pods).await;
        let rest = async || tokio::time::sleep(Duration::from_secs(self.args.idle_seconds)).await;
        profiler.sample("rest", rest).await?;
        profiler.count_syscalls("rest", rest).await?;
        work::remove(api, pods).await;
        work::burst_of(api, pods, pods::http_probed).await;
        profiler.sample("probes", rest).await?;
        profiler.count_syscalls("probes", rest).await?;
        work::remove(api, pods).await;
        Ok(())
    }

    /// Returns the system calls of each service per pod life, without those that depend on how threads are
    /// scheduled.
    async fn system_calls(&self) -> anyhow::Result<Value> {
        let (api, pods) = (self.node.api(), self.args.pods);
        let dir = tempfile::tempdir()?;
        let profiler = Profiler::new(dir.path(), self.node)?;
        profiler
            .count_syscalls("life", async || {
                work::burst(api, pods).await;
                work::remove(api, pods).await;
            })
            .await?;
        let mut of_services = Map::new();
        let mut all = 0;
        for (service, calls) in profiler.counted("life")? {
            all += calls;
            of_services.insert(service.to_owned(), json!(calls as f64 / pods as f64));
        }
        of_services.insert("all".to_owned(), json!(all as f64 / pods as f64));
        Ok(Value::Object(of_services))
    }

    /// Returns the processes of the agents and their runtimes.
    fn pids(&self) -> anyhow::Result<Vec<i32>> {
        let mut pids: Vec<i32> = Agent::of(self.node)?.processes.iter().map(|(_, pid)| *pid).collect();
        let kubelet = self.kubelet.map(KubeletNode::agent);
        pids.extend(kubelet.iter().flat_map(|agent| &agent.processes).map(|(_, pid)| *pid));
        let runtimes = [Some(&self.node.containerd), self.kubelet.map(|kubelet| &kubelet.containerd)];
        let runtimes = runtimes.into_iter().flatten().filter_map(|containerd| containerd.pid());
        pids.extend(runtimes.map(u32::cast_signed));
        Ok(pids)
    }
}
