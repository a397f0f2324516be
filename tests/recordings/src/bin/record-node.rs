//! Records the state that a kubelet leaves on a node; see README.md.
#![allow(clippy::print_stdout, reason = "a tool that a person runs")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Parser;
use quintlet_kit::clock::Clock;
use quintlet_recordings::cluster::{Cluster, path_of, path_to};
use quintlet_recordings::facts::Names;
use quintlet_recordings::fixture::is_static;
use quintlet_recordings::kubelet::{self, Kubelet, KubeletCommand};
use quintlet_recordings::node::{self, ContainerState, FileKind, FileState, NodeState, SandboxState};
use quintlet_recordings::runtime::{self, NODE};
use quintlet_recordings::settled::settled;
use quintlet_recordings::waiting::until;
use quintlet_testkit::fake_runtime::{Behaviour, FakeRuntime, Method, Options};
use serde_json::{Value, json};

/// Records the state that a kubelet leaves on a node.
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
}

/// The container that fails.
const FAILS: &str = "fails";

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The documents of `node/pods.yaml`.
struct Plan {
    objects: Vec<Value>,
    pods: Vec<Value>,
    manifests: Vec<Value>,
    steps: Vec<Value>,
}

impl Plan {
    fn read() -> anyhow::Result<Self> {
        let mut plan =
            Self { objects: Vec::new(), pods: Vec::new(), manifests: Vec::new(), steps: Vec::new() };
        for mut document in node::documents()? {
            if document["kind"] == "Then" {
                plan.steps.push(document);
                continue;
            }
            document["apiVersion"] = json!("v1");
            document["metadata"]["namespace"] = json!("default");
            if document["kind"] != "Pod" {
                plan.objects.push(document);
            } else if is_static(text(&document["metadata"]["name"])) {
                plan.manifests.push(document);
            } else {
                document["spec"]["nodeName"] = json!(NODE);
                plan.pods.push(document);
            }
        }
        Ok(plan)
    }

    /// Returns the names of the pods in the API server.
    fn names(&self) -> impl Iterator<Item = String> {
        let name = |pod: &Value| text(&pod["metadata"]["name"]).to_owned();
        let mirrors = self.manifests.iter().map(move |pod| format!("{}-{NODE}", name(pod)));
        self.pods.iter().map(name).chain(mirrors)
    }
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
    runtime.add_image(node::IMAGE, 1 << 20);
    runtime.behave(FAILS, Behaviour { exit: Some((Duration::ZERO, 3)), ..Behaviour::default() });
    let plan = Plan::read()?;
    // Leftovers of an earlier run.
    cluster.delete(&format!("/api/v1/nodes/{NODE}")).await?;
    for name in plan.names() {
        cluster.delete(&path_to("Pod", &name)?).await?;
    }
    for object in &plan.objects {
        cluster.delete(&path_of(object)?).await?;
        cluster.create(object).await?;
    }
    // A kubelet whose node does not exist yet may wait two minutes before it writes its CSINode.
    cluster.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})).await?;
    let command = KubeletCommand::recorded(&args.kubelet, &args.node_kubeconfig, base.path(), &socket);
    let kubelet = Kubelet::start(&command)?;
    let node_ip = kubelet.wait_ready(&cluster).await?;
    for pod in &plan.manifests {
        let file = base.path().join("manifests").join(format!("{}.json", text(&pod["metadata"]["name"])));
        std::fs::write(file, pod.to_string())?;
    }
    for pod in &plan.pods {
        cluster.create(pod).await?;
    }
    for name in plan.names() {
        wait_settled(&cluster, &runtime, &name).await?;
    }
    for step in &plan.steps {
        take(&cluster, &runtime, step).await.with_context(|| step.to_string())?;
    }
    // The last statuses, and the removal of dead instances.
    tokio::time::sleep(Duration::from_secs(70)).await;

    let mut pods = Vec::new();
    for name in plan.names() {
        pods.push(object(&cluster, "Pod", &name).await?);
    }
    let mut names: Names = ["root", "pod-logs"]
        .map(|dir| base.path().join(dir).display().to_string())
        .into_iter()
        .zip(["<root>", "<logs>"].map(str::to_owned))
        .collect();
    names.push((kubelet.cgroup_root().to_owned(), "<cgroup>".to_owned()));
    names.push((NODE.to_owned(), "<node>".to_owned()));
    let sandboxes = instances(&runtime, &mut names)?;
    let ids = runtime.image_ids().into_iter().filter(|(_, name)| name == node::IMAGE);
    names.extend(ids.map(|(id, _)| (id, "<image-id>".to_owned())));
    names.push((node_ip, "<node-ip>".to_owned()));
    let state = NodeState {
        kubelet: version,
        node: object(&cluster, "Node", NODE).await?,
        objects: plan.objects,
        pods,
        manifests: plan.manifests,
        sandboxes,
        cgroups: cgroups(kubelet.cgroup_root())?,
        files: [FileState::below(&base.path().join("root"))?, directories(&base.path().join("pod-logs"))?]
            .concat(),
    };
    let root = state.files.first().map(|root| &root.kind);
    ensure!(
        root == Some(&FileKind::Shared {}),
        "on a shared mount, a kubelet makes none for its root directory"
    );
    state.write(&names)?;
    println!("{} pods, {} files", state.pods.len(), state.files.len());
    for name in state.pods.iter().map(|pod| text(&pod["metadata"]["name"])) {
        cluster.delete(&path_to("Pod", name)?).await?;
    }
    drop(kubelet);
    Ok(())
}

/// Returns an object without what only an API server reads.
async fn object(cluster: &Cluster, kind: &str, name: &str) -> anyhow::Result<Value> {
    let mut object =
        cluster.get(&path_to(kind, name)?).await?.with_context(|| format!("{kind} {name} is gone"))?;
    object["metadata"].as_object_mut().context("an object without metadata")?.remove("managedFields");
    Ok(object)
}

async fn wait_settled(cluster: &Cluster, runtime: &FakeRuntime, name: &str) -> anyhow::Result<()> {
    let path = path_to("Pod", name)?;
    until(name, async || {
        let mut pod = cluster.get(&path).await?.unwrap_or_default();
        if let mirrored @ Value::String(_) = &pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] {
            pod["metadata"]["uid"] = mirrored.clone();
        }
        let waits = pod["status"]["initContainerStatuses"].as_array().is_some_and(|statuses| {
            statuses.iter().any(|s| s["name"] == "waits" && s["state"]["running"].is_object())
        });
        Ok(if waits { Ok(()) } else { settled(runtime, &pod) })
    })
    .await
}

/// Takes a step after the start of a pod.
async fn take(cluster: &Cluster, runtime: &FakeRuntime, step: &Value) -> anyhow::Result<()> {
    let path = path_to("Pod", text(&step["pod"]))?;
    if let Some(container) = step["exit"].as_str() {
        let pod = cluster.get(&path).await?.context("the pod is gone")?;
        let newest = runtime.newest(text(&pod["metadata"]["uid"]), container).context("no such container")?;
        let code = step["code"].as_i64().context("an exit without a code")?;
        ensure!(runtime.exit(newest.id(), i32::try_from(code)?), "it does not run");
    } else {
        cluster.patch(&format!("{path}/{}", text(&step["subresource"])), &step["patch"]).await?;
    }
    Ok(())
}

/// Returns the instances of the runtime in the order of their creation, and names them.
fn instances(runtime: &FakeRuntime, names: &mut Names) -> anyhow::Result<Vec<SandboxState>> {
    let calls = runtime.calls();
    let (mut sandboxes, mut containers) = (runtime.sandboxes(), runtime.containers());
    sandboxes.sort_by_key(|sandbox| sandbox.status.created_at);
    containers.sort_by_key(|container| container.status.created_at);
    let mut requests: HashMap<String, Value> = HashMap::new();
    for call in &calls {
        let key = match call.method {
            Method::RunPodSandbox => {
                let request = node::decoded(call.method, call.raw())?;
                text(&request["config"]["metadata"]["uid"]).to_owned()
            }
            Method::CreateContainer => {
                let request = node::decoded(call.method, call.raw())?;
                instance(&request["pod_sandbox_id"], &request["config"]["metadata"])
            }
            _ => continue,
        };
        requests.insert(key, node::decoded(call.method, call.raw())?);
    }
    let mut out = Vec::new();
    for (number, sandbox) in sandboxes.iter().enumerate() {
        names.push((sandbox.id().to_owned(), format!("<sandbox {number}>")));
        if let Some(network) = &sandbox.status.network
            && !network.ip.is_empty()
        {
            names.push((network.ip.clone(), format!("<ip {number}>")));
        }
        let mut made = Vec::new();
        for container in containers.iter().filter(|c| c.sandbox_id == sandbox.id()) {
            names.push((container.id().to_owned(), format!("<container {number}.{}>", made.len())));
            let metadata = container.config.metadata.clone().unwrap_or_default();
            let metadata = json!({"name": metadata.name, "attempt": metadata.attempt});
            let request = requests.remove(&instance(&json!(sandbox.id()), &metadata));
            let mut updates = Vec::new();
            for call in calls.iter().filter(|call| call.method == Method::UpdateContainerResources) {
                let request = node::decoded(call.method, call.raw())?;
                if request["container_id"] == container.id() {
                    updates.push(request);
                }
            }
            made.push(ContainerState {
                request: request.context("a container without a request")?,
                exit: (!container.running()).then_some(container.status.exit_code),
                updates,
            });
        }
        let request = requests.remove(sandbox.pod_uid()).context("a sandbox without a request")?;
        out.push(SandboxState { request, containers: made, stopped: !sandbox.ready() });
    }
    Ok(out)
}

/// Returns the key of a container's request. The first attempt is omitted on the wire.
fn instance(sandbox: &Value, metadata: &Value) -> String {
    format!(
        "{} {} {}",
        text(sandbox),
        text(&metadata["name"]),
        metadata["attempt"].as_u64().unwrap_or_default()
    )
}

/// Returns the directories below a directory, and the directory: the files in them are the runtime's.
fn directories(dir: &Path) -> anyhow::Result<Vec<FileState>> {
    let mut entries = FileState::below(dir)?;
    entries.retain(|entry| matches!(entry.kind, FileKind::Directory {}));
    Ok(entries)
}

/// Returns the cgroups below one.
fn cgroups(root: &str) -> anyhow::Result<Vec<String>> {
    let tree = Path::new("/sys/fs/cgroup");
    let tree = if tree.join("cgroup.controllers").exists() { tree.to_owned() } else { tree.join("memory") };
    let mut out = Vec::new();
    named(&tree, Path::new(root), &mut out)?;
    Ok(out)
}

fn named(tree: &Path, cgroup: &Path, out: &mut Vec<String>) -> anyhow::Result<()> {
    out.push(cgroup.display().to_string());
    for entry in std::fs::read_dir(tree.join(cgroup.strip_prefix("/")?))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            named(tree, &cgroup.join(entry.file_name()), out)?;
        }
    }
    Ok(())
}
