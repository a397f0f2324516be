//! Records the CRI requests of a kubelet for each spec; see README.md.
#![allow(clippy::print_stdout, reason = "a tool that a person runs")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use http::Method;
use quintlet_kit::clock::Clock;
use quintlet_recordings::facts::{Instances, Names};
use quintlet_recordings::fixture::{self, Fixture, Spec, Then};
use quintlet_recordings::kubelet::Kubelet;
use quintlet_recordings::runtime::{self, NODE};
use quintlet_recordings::settled::{answered, settled};
use quintlet_testkit::fake_runtime::{FakeRuntime, Options};
use serde_json::{Value, json};

/// Longest start or removal of a pod.
const LONG: Duration = Duration::from_secs(120);

/// Interval between checks.
const STEP: Duration = Duration::from_millis(200);

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

struct Cluster(kube::Client);

impl Cluster {
    async fn connect(kubeconfig: &Path) -> anyhow::Result<Self> {
        let read = kube::config::Kubeconfig::read_from(kubeconfig)?;
        let config = kube::Config::from_custom_kubeconfig(read, &Default::default()).await?;
        Ok(Self(kube::Client::try_from(config)?))
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, kube::Error> {
        let patches = method == Method::PATCH;
        let kind = if patches { "application/strategic-merge-patch+json" } else { "application/json" };
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", kind)
            .body(body.map_or_else(Vec::new, |b| b.to_string().into_bytes()))
            .map_err(|e| kube::Error::BuildRequest(kube::core::request::Error::BuildRequest(e)))?;
        self.0.request(request).await
    }

    /// Returns `None` if the object does not exist.
    async fn get(&self, path: &str) -> anyhow::Result<Option<Value>> {
        match self.call(Method::GET, path, None).await {
            Ok(object) => Ok(Some(object)),
            Err(kube::Error::Api(e)) if e.code == 404 => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    async fn create(&self, object: &Value) -> anyhow::Result<Value> {
        let path = collection(object)?;
        self.call(Method::POST, &path, Some(object)).await.with_context(|| path_of(object).unwrap_or(path))
    }

    async fn patch(&self, path: &str, patch: &Value) -> anyhow::Result<Value> {
        self.call(Method::PATCH, path, Some(patch)).await.with_context(|| path.to_owned())
    }

    /// Deletes an object at once, if it exists.
    async fn delete(&self, path: &str) -> anyhow::Result<()> {
        match self.call(Method::DELETE, path, Some(&json!({"gracePeriodSeconds": 0}))).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(e)) if e.code == 404 => Ok(()),
            Err(e) => Err(e).with_context(|| path.to_owned()),
        }
    }
}

fn collection(object: &Value) -> anyhow::Result<String> {
    let namespaced = |plural: &str| format!("/api/v1/namespaces/default/{plural}");
    Ok(match object["kind"].as_str() {
        Some("Pod") => namespaced("pods"),
        Some("ConfigMap") => namespaced("configmaps"),
        Some("Secret") => namespaced("secrets"),
        Some("Service") => namespaced("services"),
        Some("RuntimeClass") => "/apis/node.k8s.io/v1/runtimeclasses".to_owned(),
        other => bail!("no way to make a {other:?}"),
    })
}

fn path_of(object: &Value) -> anyhow::Result<String> {
    Ok(format!("{}/{}", collection(object)?, object["metadata"]["name"].as_str().unwrap_or_default()))
}

/// Waits until `look` returns a value.
async fn until<T>(
    what: &str,
    mut look: impl AsyncFnMut() -> anyhow::Result<Result<T, String>>,
) -> anyhow::Result<T> {
    let clock = Clock::system();
    let end = clock.boot() + LONG;
    loop {
        match look().await? {
            Ok(found) => return Ok(found),
            Err(missing) if clock.boot() > end => bail!("{what}: {missing}"),
            Err(_) => tokio::time::sleep(STEP).await,
        }
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let version = std::process::Command::new(&args.kubelet).arg("--version").output()?;
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    let cluster = Cluster::connect(&args.kubeconfig).await?;
    let base = tempfile::Builder::new().prefix("qrec-").tempdir()?;
    let wall = Clock::system().wall().as_nanosecond();
    let options = Options { wall_base_unix_ns: i64::try_from(wall)?, ..runtime::options() };
    let runtime = FakeRuntime::start(&base.path().join("runtime.sock"), options)?;
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
    let kubelet = Kubelet::start(&args.kubelet, &args.node_kubeconfig, base.path())?;
    let ready = until("the node", async || {
        let node = cluster.get(&format!("/api/v1/nodes/{NODE}")).await?.unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ready = conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
        let addresses = node["status"]["addresses"].as_array().cloned().unwrap_or_default();
        let address =
            addresses.iter().find(|a| a["type"] == "InternalIP").and_then(|a| a["address"].as_str());
        Ok(address.filter(|_| ready).map(str::to_owned).ok_or_else(|| format!("{conditions:?}")))
    });
    let node_ip = match ready.await {
        Ok(address) => address,
        Err(error) => {
            let log = std::fs::read_to_string(base.path().join("kubelet.log"))?;
            let end: Vec<&str> = log.lines().rev().take(20).collect();
            bail!("{error:#}\n{}", end.into_iter().rev().collect::<Vec<_>>().join("\n"));
        }
    };
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
