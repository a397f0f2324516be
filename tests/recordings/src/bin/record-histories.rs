//! Records the statuses, events and driver calls of a kubelet for each scenario; see README.md.
#![allow(clippy::print_stdout, reason = "a tool that a person runs")]

use std::path::PathBuf;

use anyhow::ensure;
use clap::Parser;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use quintlet_kit::clock::Clock;
use quintlet_recordings::cluster::{Cluster, path_of, path_to};
use quintlet_recordings::history::observe::Observer;
use quintlet_recordings::history::run::RecordedNode;
use quintlet_recordings::history::scenario::{self, History, ScenarioStep};
use quintlet_recordings::kubelet::{self, Kubelet, KubeletCommand};
use quintlet_recordings::runtime::{self, NODE};
use quintlet_recordings::waiting::until;
use quintlet_testkit::fake_runtime::{FakeRuntime, Options};
use serde_json::json;

/// Records the histories of a kubelet.
#[derive(Parser)]
struct Args {
    /// The program of the kubelet.
    #[arg(long, value_name = "FILE")]
    kubelet: PathBuf,
    /// Credentials of an administrator.
    #[arg(long, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// Credentials of the node `sim-node`.
    #[arg(long, value_name = "FILE")]
    node_kubeconfig: PathBuf,
    /// The program csi-node-driver-registrar, which registers drivers.
    #[arg(long, value_name = "FILE")]
    registrar: PathBuf,
    /// Only these scenarios.
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let version = kubelet::version(&args.kubelet)?;
    let cluster = Cluster::connect(&args.kubeconfig).await?;
    let base = tempfile::Builder::new().prefix("qrec-").tempdir()?;
    let hosts = base.path().join("hosts");
    let mut scenarios = scenario::scenarios(&hosts)?;
    scenarios.retain(|s| args.scenarios.is_empty() || args.scenarios.contains(&s.name));
    ensure!(!scenarios.is_empty(), "no scenario of that name");
    // Leftovers of an earlier run.
    cluster.delete(&format!("/api/v1/nodes/{NODE}")).await?;
    for step in scenarios.iter().flat_map(|s| &s.steps) {
        let paths = match step {
            ScenarioStep::Create(object) => vec![path_of(object)?],
            ScenarioStep::Bind(binding) => vec![
                path_to("PersistentVolume", &binding.volume)?,
                path_to("PersistentVolumeClaim", &binding.claim)?,
            ],
            _ => continue,
        };
        for path in paths {
            remove(&cluster, &path).await?;
        }
    }
    // A kubelet whose node does not exist yet may wait two minutes before it writes its CSINode.
    cluster.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})).await?;
    let wall = Clock::system().wall().as_nanosecond();
    let options = Options { wall_base_unix_ns: i64::try_from(wall)?, ..runtime::options() };
    let socket = base.path().join("runtime.sock");
    let runtime = FakeRuntime::start(&socket, options)?;
    runtime::prepare(&runtime);
    let plan = KubeletCommand::recorded(&args.kubelet, &args.node_kubeconfig, base.path(), &socket);
    let kubelet = Kubelet::start(&plan)?;
    kubelet.wait_ready(&cluster).await?;
    let root = base.path().join("root");
    let node = RecordedNode {
        observer: Observer::start(&cluster).await?,
        cluster,
        names: vec![(root.display().to_string(), "<root>".to_owned())],
        root,
        hosts,
        registrar: Some(args.registrar),
        attached: None,
        drivers: base.path().join("drivers"),
    };
    let mut failed = 0_usize;
    let mut runs: FuturesUnordered<_> =
        scenarios.iter().map(async |scenario| (&scenario.name, node.run(scenario, 0).await)).collect();
    while let Some((name, facts)) = runs.next().await {
        match facts {
            Ok(facts) => {
                scenario::write(name, &History { kubelet: version.clone(), facts })?;
                println!("{name}");
            }
            Err(error) => {
                failed = failed.saturating_add(1);
                println!("{error:#}");
            }
        }
    }
    drop(runs);
    if failed > 0 {
        std::fs::copy(base.path().join("kubelet.log"), "kubelet.log")?;
    }
    drop(kubelet);
    ensure!(failed == 0, "{failed} of {} not recorded, see kubelet.log", scenarios.len());
    Ok(())
}

/// Deletes an object and its finalizers, if it exists.
async fn remove(cluster: &Cluster, path: &str) -> anyhow::Result<()> {
    cluster.delete(path).await?;
    until(path, async || {
        if cluster.get(path).await?.is_none() {
            return Ok(Ok(()));
        }
        // The object may be gone by now.
        let _ = cluster.merge(path, &json!({"metadata": {"finalizers": null}})).await;
        Ok(Err("still there".to_owned()))
    })
    .await
}
