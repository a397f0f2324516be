//! A whole node on the fake runtime: cost of a pod's life with few and many pods, memory, and containers that
//! exit again and again.
//!
//! The runtime costs the services nothing here, and starts pods as fast as they are requested, so that the
//! figures are those of the agent alone. With a kubelet, that does the same work on a runtime and an API
//! server of its own.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use quintlet_e2e::bins::{self, SERVICES};
use quintlet_e2e::cost::{Agent, Cost, idle};
use quintlet_e2e::service::{Service, ServiceCommand};
use quintlet_e2e::{NODE, arguments, pods, unmount_all, work};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::socket;
use quintlet_localnode::images;
use quintlet_recordings::cluster::Cluster;
use quintlet_recordings::kubelet::{self, Kubelet};
use quintlet_testapi::TestApi;
use quintlet_testkit::fake_runtime::{Behaviour, FakeRuntime, Options};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::LIMIT;

/// Container whose process exits after [`FLAP`], again and again.
const FLAPPING: &str = "flapping";
/// Time for which that process runs.
const FLAP: Duration = Duration::from_secs(1);
/// Largest number of pods of a node.
const MAX_PODS: usize = 1_000;

/// Sizes, durations and programs of the measurement.
#[derive(Debug, Clone)]
pub(crate) struct NodeArgs {
    /// Numbers of pods.
    pub(crate) sizes: Vec<usize>,
    /// Pods whose container exits again and again.
    pub(crate) flapping: usize,
    /// Restarts of each of them.
    pub(crate) restarts: i64,
    /// Time for which the idle node is measured.
    pub(crate) idle: Duration,
    /// Rounds with each number of pods.
    pub(crate) rounds: usize,
    pub(crate) kubelet: Option<PathBuf>,
}

/// Measures the services and, if there is one, the kubelet.
pub(crate) async fn measured(args: &NodeArgs) -> anyhow::Result<Value> {
    let mut report = serde_json::Map::new();
    let node = Quintlet::start().await?;
    report.insert("quintlet".to_owned(), figures(args, &node.agent()?).await?);
    node.down().await?;
    if let Some(binary) = &args.kubelet {
        let node = OfKubelet::start(binary).await?;
        let mut figures = figures(args, &node.agent()).await?;
        figures["version"] = json!(kubelet::version(binary)?);
        report.insert("kubelet".to_owned(), figures);
    }
    Ok(Value::Object(report))
}

async fn figures(args: &NodeArgs, agent: &Agent<'_>) -> anyhow::Result<Value> {
    // The first pods of a node cost more than later ones.
    work::burst(agent.api, 10).await;
    work::remove(agent.api, 10).await;
    let mut sizes = Vec::new();
    for pods in &args.sizes {
        for _ in 0..args.rounds {
            sizes.push(lives(agent, *pods, args.idle).await?);
        }
    }
    Ok(json!({"sizes": sizes, "flapping": flapping(agent, args).await?}))
}

/// Measures the lives of `pods` pods, and the node at rest with all of them.
async fn lives(agent: &Agent<'_>, pods: usize, span: Duration) -> anyhow::Result<Value> {
    let start = Cost::of(agent).await?;
    let created = work::burst(agent.api, pods).await;
    let cost_of_start = Cost::of(agent).await?.since(&start);
    let rest = if span.is_zero() { Value::Null } else { idle(agent, span).await? };
    let end = Cost::of(agent).await?;
    let deleted = work::remove(agent.api, pods).await;
    let cost_of_end = Cost::of(agent).await?.since(&end);
    Ok(json!({
        "pods": pods,
        "create_to_ready_seconds": created.ready,
        "delete_to_gone_seconds": deleted,
        "per_pod_start": cost_of_start.per_pod(pods),
        "per_pod_end": cost_of_end.per_pod(pods),
        "idle": rest,
    }))
}

/// Measures pods whose container exits after a second and is restarted with the back-off of crash loops.
async fn flapping(agent: &Agent<'_>, args: &NodeArgs) -> anyhow::Result<Value> {
    if args.flapping == 0 {
        return Ok(Value::Null);
    }
    let name = |i: usize| format!("flapping-{i}");
    let before = Cost::of(agent).await?;
    let began = Instant::now();
    for i in 0..args.flapping {
        let mut pod = pods::bound(pods::sleeper(&name(i)));
        pod["spec"]["containers"][0]["name"] = json!(FLAPPING);
        agent.api.create_pod(pod);
    }
    let has_restarted =
        |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_i64() >= Some(args.restarts);
    for i in 0..args.flapping {
        agent.api.wait_for("pods", "default", &name(i), LIMIT, has_restarted).await;
    }
    let seconds = began.elapsed().as_secs_f64();
    let cost = Cost::of(agent).await?.since(&before).per_pod(args.flapping);
    for i in 0..args.flapping {
        // Created above, so the pod exists.
        let _gone = agent.api.delete("pods", "default", &name(i), None);
    }
    for i in 0..args.flapping {
        agent.api.wait_for("pods", "default", &name(i), LIMIT, Value::is_null).await;
    }
    Ok(json!({"pods": args.flapping, "restarts": args.restarts, "seconds": seconds, "per_pod": cost}))
}

/// Serves a fake runtime until standard input ends.
pub(crate) async fn serve(path: &Path) -> anyhow::Result<()> {
    let now = i64::try_from(Clock::system().wall().as_nanosecond())?;
    let images = path.parent().context("the socket is in a directory")?.join("images");
    std::fs::create_dir_all(&images)?;
    let image_mountpoint = images.display().to_string();
    let options = Options { wall_base_unix_ns: now, image_mountpoint, ..Options::default() };
    let runtime = FakeRuntime::stopped(path, options);
    runtime.add_image(images::BUSYBOX, 1 << 20);
    runtime.behave(FLAPPING, Behaviour { exit: Some((FLAP, 1)), ..Behaviour::default() });
    runtime.up()?;
    tokio::io::stdout().write_all(b"ready\n").await?;
    // Ends with the parent.
    let mut input = Vec::new();
    tokio::io::stdin().read_to_end(&mut input).await?;
    Ok(())
}

/// The fake runtime in a process of its own. Dropping it ends the process.
struct Runtime {
    _process: Child,
    socket: PathBuf,
}

impl Runtime {
    async fn start(base: &Path) -> anyhow::Result<Self> {
        let socket = base.join("runtime.sock");
        let mut process = Command::new(std::env::current_exe()?)
            .arg("--serve-node")
            .arg(&socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut lines = BufReader::new(process.stdout.take().context("its standard output")?).lines();
        let first = lines.next_line().await?;
        anyhow::ensure!(first.as_deref() == Some("ready"), "the runtime reports {first:?}");
        Ok(Self { _process: process, socket })
    }
}

/// The five services on a runtime in memory.
struct Quintlet {
    services: Vec<(&'static str, Service)>,
    api: TestApi,
    cgroup_root: String,
    _runtime: Runtime,
    // Removed after its users.
    base: TempDir,
}

impl Quintlet {
    async fn start() -> anyhow::Result<Self> {
        let base = tempfile::Builder::new().prefix("qscale-").tempdir_in("/dev/shm")?;
        let runtime = Runtime::start(base.path()).await?;
        let api = TestApi::start().await;
        let kubeconfig = base.path().join("kubeconfig");
        api.kubeconfig(&kubeconfig)?;
        let cgroup_root = format!("/qscale-{}", std::process::id());
        kubelet::make_cgroup(&cgroup_root)?;
        let paths = Paths::new(&base.path().join("run"));
        std::fs::create_dir_all(base.path().join("manifests"))?;
        let extra = vec![("pod-sync", format!("--max-pods={MAX_PODS}"))];
        let options = quintlet_e2e::Options { extra, ..quintlet_e2e::Options::with_api("scale") };
        let endpoint = format!("unix://{}", runtime.socket.display());
        let of_services = quintlet_e2e::Runtime { endpoint, cgroup_root: &cgroup_root };
        let start = |name: &'static str| {
            let args = arguments(name, &options, base.path(), &of_services, Some(&kubeconfig));
            let (binary, log) = (bins::dir().join(name), base.path().join(format!("{name}.log")));
            (
                name,
                Service::start(ServiceCommand {
                    name,
                    binary,
                    args,
                    env: Vec::new(),
                    log,
                    uid: None,
                    boot: None,
                }),
            )
        };
        let services = SERVICES.into_iter().map(start).collect();
        socket::wait_ready(&paths.podsync(), LIMIT).await?;
        Ok(Self { services, api, cgroup_root, _runtime: runtime, base })
    }

    fn agent(&self) -> anyhow::Result<Agent<'_>> {
        let pid = |service: &Service| service.process().pid.context("the service runs");
        let processes = self.services.iter().map(|(name, service)| Ok((*name, pid(service)?)));
        Ok(Agent { processes: processes.collect::<anyhow::Result<_>>()?, api: &self.api, node: None })
    }

    async fn down(self) -> anyhow::Result<()> {
        for (name, mut service) in self.services.into_iter().rev() {
            anyhow::ensure!(service.process().starts == 1, "{name} was restarted");
            service.terminate().await;
        }
        kubelet::remove_cgroup(&self.cgroup_root);
        unmount_all(&self.base.path().join("root"));
        self.base.close()?;
        Ok(())
    }
}

/// A kubelet on a runtime in memory.
struct OfKubelet {
    kubelet: Kubelet,
    api: TestApi,
    _runtime: Runtime,
    // Removed after its users.
    _base: TempDir,
}

impl OfKubelet {
    async fn start(binary: &Path) -> anyhow::Result<Self> {
        let base = tempfile::Builder::new().prefix("qscale-kubelet-").tempdir_in("/dev/shm")?;
        let runtime = Runtime::start(base.path()).await?;
        let api = TestApi::start().await;
        let kubeconfig = base.path().join("kubeconfig");
        api.kubeconfig(&kubeconfig)?;
        // As in the benchmark of a node: the defaults, but for what the services have as well.
        let config = json!({
            "clusterDNS": [],
            "contentType": "application/json",
            "fileCheckFrequency": "20s",
            "maxPods": MAX_PODS,
        });
        let plan = kubelet::KubeletCommand {
            binary,
            kubeconfig: &kubeconfig,
            base: base.path(),
            root_dir: base.path().join("root"),
            node: NODE,
            runtime: &runtime.socket,
            config,
        };
        let kubelet = Kubelet::start(&plan)?;
        kubelet.wait_ready(&Cluster::connect(&kubeconfig).await?).await?;
        Ok(Self { kubelet, api, _runtime: runtime, _base: base })
    }

    fn agent(&self) -> Agent<'_> {
        Agent { processes: vec![("kubelet", self.kubelet.pid())], api: &self.api, node: None }
    }
}
