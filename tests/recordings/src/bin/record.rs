//! Records the CRI requests of a kubelet for each spec; see README.md.
#![allow(clippy::print_stdout, reason = "a tool that a person runs")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::Parser;
use http::Method;
use quintlet_kit::clock::Clock;
use quintlet_recordings::cluster::{Cluster, path_of};
use quintlet_recordings::facts::{Instances, Names};
use quintlet_recordings::fixture::{self, Fixture, Spec, Then};
use quintlet_recordings::kubelet::{self, Kubelet, KubeletCommand};
use quintlet_recordings::runtime::{self, NODE};
use quintlet_recordings::settled::{answered, settled};
use quintlet_recordings::waiting::until;
use quintlet_testkit::fake_runtime::{FakeRuntime, Options};
use serde_json::{Value, json};

/// Records the CRI requests of a kubelet.
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
    /// Only these specs.
    #[arg(value_name = "SPEC")]
    specs: Vec<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let version = kubelet::version(&args.kubelet)?;
    let cluster = Cluster::connect(&args.kubeconfig).await?;
    let base = tempfile::Builder::new().prefix("qrec-").tempdir()?;
    let wall = Clock::system().wall().as_nanosecond();
    let options = Options { wall_base_unix_ns: i64::try_from(wall)?, ..runtime::options() };
    let socket = base.path().join("runtime.sock");
    let runtime = FakeRuntime::start(&socket, options)?;
    runtime::prepare(&runtime);
    let all = fixture::specs()?;
    // Leftovers of an earlier run.
    cluster.delete(&format!("/api/v1/nodes/{NODE}")).await?;
    for object in all.iter().flat_map(|s| s.objects.iter().chain([&s.pod])) {
        cluster.delete(&path_of(object)?).await?;
    }
    // All objects of all specs: the environment of a pod has all services of its namespace.
    for object in all.iter().flat_map(|s| &s.objects) {
        cluster.create(object).await?;
    }
    let specs: Vec<Spec> =
        all.into_iter().filter(|s| args.specs.is_empty() || args.specs.contains(&s.name)).collect();
    ensure!(!specs.is_empty(), "no spec of that name");
    let plan = KubeletCommand::recorded(&args.kubelet, &args.node_kubeconfig, base.path(), &socket);
    let kubelet = Kubelet::start(&plan)?;
    let node_ip = kubelet.wait_ready(&cluster).await?;
    let base_text = |name: &str| base.path().join(name).display().to_string();
    let names: Names = vec![
        (base_text("root"), "<root>".to_owned()),
        (base_text("pod-logs"), "<logs>".to_owned()),
        (kubelet.cgroup_root().to_owned(), "<cgroup>".to_owned()),
        (node_ip, "<node-ip>".to_owned()),
    ];
    let mut failed = 0;
    let mut made = HashMap::new();
    for spec in &specs {
        let pod = if fixture::is_static(&spec.name) {
            std::fs::write(
                base.path().join("manifests").join(format!("{}.json", spec.name)),
                spec.pod.to_string(),
            )?;
            spec.pod.clone()
        } else {
            cluster.create(&spec.pod).await?
        };
        made.insert(spec.name.clone(), pod);
    }
    for spec in &specs {
        match record(&cluster, &runtime, base.path(), &names, spec).await {
            Ok((facts, then)) => {
                let mut pod = made.remove(&spec.name).unwrap_or_default();
                fixture::strip(&mut pod);
                let (kubelet, objects) = (version.clone(), spec.objects.clone());
                let fixture = Fixture { kubelet, objects, pod, then, facts };
                fixture::write(&spec.name, &fixture)?;
                println!("{}", spec.name);
            }
            Err(error) => {
                failed += 1;
                println!("{}: {error:#}", spec.name);
            }
        }
    }
    drop(kubelet);
    ensure!(failed == 0, "{failed} of {} not recorded", specs.len());
    Ok(())
}

async fn record(
    cluster: &Cluster,
    runtime: &FakeRuntime,
    base: &Path,
    names: &Names,
    spec: &Spec,
) -> anyhow::Result<(Value, Option<Then>)> {
    let is_static = fixture::is_static(&spec.name);
    let name = if is_static { format!("{}-{NODE}", spec.name) } else { spec.name.clone() };
    let path = format!("/api/v1/namespaces/default/pods/{name}");
    let pod = until(&name, async || {
        let mut pod = cluster.get(&path).await?.unwrap_or_default();
        if is_static {
            // The mirror pod has another UID.
            pod["metadata"]["uid"] = pod["metadata"]["annotations"]["kubernetes.io/config.mirror"].clone();
        }
        let done = settled(runtime, &pod);
        let reason = pod["status"]["message"].clone();
        Ok(done.map(|()| pod).map_err(|missing| format!("{missing} {reason}")))
    })
    .await?;
    let uid = pod["metadata"]["uid"].as_str().context("a pod without UID")?;
    let mut then = spec.then.clone();
    match &mut then {
        Some(Then::Exit(container)) => {
            let newest = runtime.newest(uid, container).context("no such container")?;
            runtime.exit(newest.id(), 1);
        }
        Some(Then::Patch { subresource, patch }) => {
            let patched = cluster.patch(&format!("{path}/{subresource}"), patch).await?;
            *patch = patched["spec"].clone();
        }
        Some(Then::Restarted(_)) | None => {}
    }
    if let Some(then) = &then {
        until(&name, async || Ok(answered(runtime, &cluster.get(&path).await?.unwrap_or_default(), then)))
            .await?;
    }
    let instances = Instances::of(runtime, uid, names);
    if is_static {
        std::fs::remove_file(base.join("manifests").join(format!("{}.json", spec.name)))?;
    } else {
        cluster.call(Method::DELETE, &path, Some(&json!({}))).await?;
    }
    until(&format!("{name} gone"), async || {
        Ok(if cluster.get(&path).await?.is_none() { Ok(()) } else { Err("still there".to_owned()) })
    })
    .await?;
    Ok((instances.facts(runtime)?, then))
}
