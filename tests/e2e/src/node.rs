//! The node: five services, a private containerd, and optionally an API server.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::messages::whole;
use quintlet_kit::socket;
use quintlet_localnode::Containerd;
use quintlet_localnode::cni::Families;
use quintlet_proto::debug::v1::MetricsRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::podsync::v1 as podsync;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_testapi::TestApi;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::Status;
use tonic::transport::Channel;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use crate::bins::{self, SERVICES};
use crate::cluster::{Cluster, Real};
use crate::recorder::{API, Before, PODSYNC, Recorder};
use crate::runtime::{self, Listed};
use crate::seen::Seen;
use crate::service::{Service, ServiceCommand};
use crate::wait::{LONG, until};
use crate::{local_images, ports};

/// Name of the node, which is also the suffix of static pods.
pub const NODE: &str = "e2e-node";

/// Bytes printed of each log if a test fails.
const LOG_END: u64 = 6_000;

/// Options of [`Node::start`].
#[derive(Debug, Clone)]
pub struct Options {
    /// Part of the names of directories and cgroups; unique among tests that run at the same time.
    pub name: &'static str,
    /// With an API server in memory.
    pub api: bool,
    /// With a real API server.
    pub real: Option<Real>,
    /// OTLP endpoint for traces.
    pub otlp_endpoint: Option<String>,
    /// Interval between syncs of a pod without changes.
    pub sync_frequency: &'static str,
    /// Additional arguments, each with the name of its service.
    pub extra: Vec<(&'static str, String)>,
    /// With node-api, as an unprivileged user.
    pub node_api: bool,
    /// The services have a wall clock that [`Node::step_clock`] can step.
    pub own_clock: bool,
    /// Size in MiB of a file system of its own for the root directory.
    pub root_disk_mib: Option<u64>,
    /// Size in MiB of a file system of its own for the runtime's images and writable layers.
    pub image_disk_mib: Option<u64>,
    /// Address families of pods.
    pub families: Families,
    /// The directory of sockets and state is a tmpfs, as `/run` is in production.
    pub run_in_memory: bool,
}

/// File with the offset of the services' wall clock to the machine's, for libfaketime.
const CLOCK: &str = "clock";

/// The second instance of probe-service.
const SECOND_PROBER: &str = "probe-1";

/// User of node-api.
pub const NODE_API_UID: u32 = 65_533;

impl Options {
    /// Returns options without an API server.
    #[must_use]
    pub fn standalone(name: &'static str) -> Self {
        Self {
            name,
            api: false,
            real: None,
            otlp_endpoint: None,
            sync_frequency: "1m",
            extra: Vec::new(),
            node_api: false,
            own_clock: false,
            root_disk_mib: None,
            image_disk_mib: None,
            families: Families::default(),
            run_in_memory: false,
        }
    }

    /// Returns options with an API server in memory.
    #[must_use]
    pub fn with_api(name: &'static str) -> Self {
        Self { api: true, ..Self::standalone(name) }
    }

    /// Returns options with the real API server of the environment variables.
    ///
    /// # Panics
    /// They are not set.
    #[must_use]
    pub fn with_real_api(name: &'static str) -> Self {
        Self { real: Some(Real::of_env()), ..Self::standalone(name) }
    }

    fn node_name(&self) -> &str {
        self.real.as_ref().map_or(NODE, |real| &real.node)
    }
}

/// A running node. [`Node::down`] removes it and fails if anything is left. Dropping it removes it without
/// checks.
pub struct Node {
    pub(crate) services: BTreeMap<&'static str, Service>,
    /// The runtime of this node alone.
    pub containerd: Containerd,
    /// The API server in memory.
    pub api: Option<TestApi>,
    /// The API server of either kind.
    cluster: Option<Cluster>,
    pub(crate) paths: Paths,
    node_api_port: u16,
    logs: Logs,
    // Unmounted before its directory is removed.
    root_disk: Option<Disk>,
    run_disk: Option<Disk>,
    // Used by containerd until its end.
    image_disk: Option<Disk>,
    pub(crate) base: TempDir,
}

/// A file system that is mounted on a directory.
struct Disk(PathBuf);

impl Disk {
    fn in_memory(base: &Path, dir: &str) -> Self {
        let dir = base.join(dir);
        std::fs::create_dir_all(&dir).expect("a directory can be made");
        let (none, flags) = (None::<&str>, nix::mount::MsFlags::empty());
        nix::mount::mount(none, &dir, Some("tmpfs"), flags, Some("mode=0755"))
            .expect("a tmpfs can be mounted");
        Self(dir)
    }

    /// Mounts an ext4 file system in a file.
    fn mount(base: &Path, dir: &str, mib: u64) -> Self {
        let (image, dir) = (base.join(format!("{}.img", dir.replace('/', "-"))), base.join(dir));
        let file = std::fs::File::create(&image).expect("a file can be made");
        file.set_len(mib << 20).expect("the file can have holes");
        std::fs::create_dir_all(&dir).expect("a directory can be made");
        let run = |program: &str, args: &[&std::ffi::OsStr]| {
            let status = std::process::Command::new(program).args(args).status();
            assert!(status.is_ok_and(|s| s.success()), "{program} {args:?}");
        };
        // Without blocks for root alone, so that what is free is available.
        run("mkfs.ext4", &["-q".as_ref(), "-m".as_ref(), "0".as_ref(), image.as_ref()]);
        run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_ref(), dir.as_ref()]);
        Self(dir)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        unmount_all(&self.0);
    }
}

/// Removes all mounts on a directory: pod-sync makes its root directory a shared mount, which is a second one
/// if it was a mount before.
pub fn unmount_all(dir: &Path) {
    while nix::mount::umount2(dir, nix::mount::MntFlags::MNT_DETACH).is_ok() {}
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("base", &self.base.path()).finish_non_exhaustive()
    }
}

/// A node before its services start.
#[expect(missing_debug_implementations, reason = "the API server has none")]
pub struct Machine<'a> {
    /// Directory of the files of the node: `root`, `pod-logs` and `manifests`.
    pub base: &'a Path,
    /// The runtime of this node alone.
    pub containerd: &'a Containerd,
    /// The API server in memory.
    pub api: Option<&'a TestApi>,
}

impl Node {
    /// Starts all processes and waits until all five services serve.
    ///
    /// # Panics
    /// A part is missing or does not start, or the process is not root.
    pub async fn start(options: Options) -> Self {
        Self::start_on(options, async |_| {}).await
    }

    /// Like [`Self::start`], and calls `prepare` before the services start.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub async fn start_on(options: Options, prepare: impl AsyncFnOnce(Machine<'_>)) -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "these tests make namespaces, mounts and cgroups: run them as root"
        );
        let bin_dir = bins::dir();
        let base =
            tempfile::Builder::new().prefix("qe2e-").tempdir().expect("a directory in /tmp can be made");
        let logs = Logs::new(options.name);
        let dir = |name: &str| base.path().join(name);
        std::fs::create_dir_all(dir("manifests")).expect("a directory can be made");
        let root_disk = options.root_disk_mib.map(|mib| Disk::mount(base.path(), "root", mib));
        let run_disk = options.run_in_memory.then(|| Disk::in_memory(base.path(), "run"));
        let image_disk = options.image_disk_mib.map(|mib| Disk::mount(base.path(), "containerd/root", mib));
        let mut runtime = quintlet_localnode::Options::new(dir("containerd"));
        runtime.families = options.families;
        runtime.owned = ["root", "pod-logs", "run"].map(dir).to_vec();
        runtime.log_file = Some(logs.dir.join("containerd.log"));
        let containerd = Containerd::start(runtime).await.expect("a private containerd starts");
        containerd.import_images(local_images::archives()).await.expect("the local images are imported");
        let api = if options.api { Some(TestApi::start().await) } else { None };
        let kubeconfig = dir("kubeconfig");
        if let Some(api) = &api {
            api.kubeconfig(&kubeconfig).expect("the kubeconfig can be written");
        }
        prepare(Machine { base: base.path(), containerd: &containerd, api: api.as_ref() }).await;
        let paths = Paths::new(&dir("run"));
        let (kubeconfig, cluster) = match (&api, &options.real) {
            (Some(api), _) => (Some(kubeconfig), Some(Cluster::new(api.client(), NODE))),
            (None, Some(real)) => (Some(real.kubeconfig.clone()), Some(Cluster::real(real).await)),
            (None, None) => (None, None),
        };
        let node_api_port = if options.node_api { ports::free::<1>()[0] } else { 0 };
        if options.node_api {
            prepare_node_api(base.path(), &paths);
        }
        let node_name = cluster.as_ref().map_or(NODE, |cluster| cluster.node.as_str());
        let services = SERVICES
            .into_iter()
            .map(|name| {
                let runtime =
                    Runtime { endpoint: containerd.endpoint(), cgroup_root: containerd.cgroup_root() };
                let mut args = arguments(name, &options, base.path(), &runtime, kubeconfig.as_deref());
                if name == "pod-sync" {
                    args.extend([OsString::from("--node-api-port"), node_api_port.to_string().into()]);
                }
                let log = logs.dir.join(format!("{name}.log"));
                let mut env = if options.own_clock { own_clock(base.path()) } else { Vec::new() };
                env.push(("QUINTLET_NODE_NAME", node_name.into()));
                let plan = ServiceCommand {
                    name,
                    binary: bin_dir.join(name),
                    args,
                    env,
                    log,
                    uid: None,
                    boot: None,
                };
                (name, Service::start(plan))
            })
            .collect();
        let mut node = Self {
            services,
            containerd,
            api,
            cluster,
            paths,
            node_api_port,
            logs,
            root_disk,
            run_disk,
            image_disk,
            base,
        };
        if options.node_api {
            node.start_node_api(&bin_dir, kubeconfig.as_deref(), &options);
        }
        let names: Vec<&'static str> = node.services.keys().copied().collect();
        for name in names {
            node.wait_serving(name, LONG).await;
        }
        node
    }

    fn start_node_api(&mut self, bin_dir: &Path, kubeconfig: Option<&Path>, options: &Options) {
        let Options { families, extra, .. } = options;
        let base = self.base.path();
        // On Linux, the unspecified IPv6 address accepts connections of both families.
        let address = if *families == Families::V4 { "0.0.0.0" } else { "::" };
        let mut args: Vec<OsString> =
            ["--healthz-port", "0", "--address", address, "--node-name", NODE].map(Into::into).into();
        let more = [
            ("--node-api-port", self.node_api_port.to_string().into()),
            ("--run-dir", base.join("run").into_os_string()),
            ("--cert-dir", base.join("node-api/pki").into_os_string()),
            ("--root-dir", base.join("root").into_os_string()),
            ("--cgroup-root", self.containerd.cgroup_root().into()),
            ("--system-log-dir", base.join("pod-logs").into_os_string()),
            ("--pod-logs-dir", base.join("pod-logs").into_os_string()),
            ("--kubeconfig", kubeconfig.expect("the node API reviews with an API server").into()),
        ];
        for (flag, value) in more {
            args.extend([OsString::from(flag), value]);
        }
        if let Some(endpoint) = &options.otlp_endpoint {
            args.extend(["--otlp-endpoint".into(), OsString::from(endpoint)]);
        }
        args.extend(
            extra.iter().filter(|(service, _)| *service == "node-api").map(|(_, arg)| OsString::from(arg)),
        );
        let plan = ServiceCommand {
            name: "node-api",
            binary: bin_dir.join("node-api"),
            args,
            env: Vec::new(),
            log: self.logs.dir.join("node-api.log"),
            uid: Some(NODE_API_UID),
            boot: None,
        };
        self.services.insert("node-api", Service::start(plan));
    }

    /// Starts a second instance of probe-service, named `probe-1`, and waits until it serves.
    ///
    /// # Panics
    /// It does not serve in time.
    pub async fn add_prober(&mut self) {
        let first = self.services["probe-service"].plan.clone();
        let id = |arg: &OsString| if arg == "probe-0" { OsString::from(SECOND_PROBER) } else { arg.clone() };
        let plan = ServiceCommand {
            name: SECOND_PROBER,
            args: first.args.iter().map(id).collect(),
            log: self.logs.dir.join(format!("{SECOND_PROBER}.log")),
            ..first
        };
        self.services.insert(SECOND_PROBER, Service::start(plan));
        self.wait_serving(SECOND_PROBER, LONG).await;
    }

    /// Returns a counter from a service's metrics; zero if it does not exist yet.
    ///
    /// # Panics
    /// The service does not respond in time.
    pub async fn counter(&self, service: &str, name: &str) -> u64 {
        let text = self.metrics(service).await;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(0, |v| v.trim().parse().expect("a counter is a whole number"))
    }

    /// Returns the metrics of a service.
    ///
    /// # Panics
    /// The service does not respond in time.
    pub async fn metrics(&self, service: &str) -> String {
        let mut client = DebugClient::new(self.health_channel(service));
        let what = format!("metrics of {service}");
        let reply = until(&what, LONG, async || whole(client.metrics(MetricsRequest::default())).await);
        reply.await.into_inner().text
    }

    /// Returns the log of a service.
    ///
    /// # Panics
    /// It cannot be read.
    #[must_use]
    pub fn log(&self, service: &str) -> String {
        std::fs::read_to_string(self.logs.dir.join(format!("{service}.log"))).expect("a log that can be read")
    }

    /// Waits until a service has logged a text.
    ///
    /// # Panics
    /// The wait exceeds [`LONG`].
    pub async fn wait_log(&self, service: &str, text: &str) {
        until(&format!("{text:?} in the log of {service}"), LONG, async || {
            let log = self.log(service);
            if log.contains(text) { Ok(()) } else { Err(log) }
        })
        .await;
    }

    /// Returns the HTTPS address of node-api.
    #[must_use]
    pub fn node_api(&self) -> std::net::SocketAddr {
        std::net::SocketAddr::from(([127, 0, 0, 1], self.node_api_port))
    }

    /// Returns the paths in the run directory.
    #[must_use]
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Returns pod-sync's root directory.
    #[must_use]
    pub fn root_dir(&self) -> PathBuf {
        self.base.path().join("root")
    }

    /// Returns the directory of pod logs.
    #[must_use]
    pub fn pod_logs_dir(&self) -> PathBuf {
        self.base.path().join("pod-logs")
    }

    /// Returns the directory of links to container logs.
    #[must_use]
    pub fn container_logs_dir(&self) -> PathBuf {
        self.base.path().join("container-logs")
    }

    /// Returns a command that runs quintctl for this node.
    #[must_use]
    pub fn quintctl(&self, args: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(bins::dir().join("quintctl"));
        command.arg("--run-dir").arg(self.paths.run()).args(args).kill_on_drop(true);
        command
    }

    /// Returns a directory that pods can share.
    ///
    /// # Panics
    /// It cannot be created.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        let dir = self.base.path().join("scratch");
        std::fs::create_dir_all(&dir).expect("a directory can be made");
        dir
    }

    /// Returns the API server in memory.
    ///
    /// # Panics
    /// The node has none.
    #[must_use]
    pub fn api(&self) -> &TestApi {
        self.api.as_ref().expect("this node was started with an API server")
    }

    /// Returns the API server of either kind.
    ///
    /// # Panics
    /// The node has none.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().expect("this node was started with an API server")
    }

    /// Returns a service by the name of its binary. Panics for a service that the node does not have.
    #[must_use]
    pub fn service(&self, name: &str) -> &Service {
        &self.services[name]
    }

    /// Returns a channel to pod-sync.
    #[must_use]
    pub fn podsync(&self) -> Channel {
        socket::channel(self.paths.podsync())
    }

    /// Returns a channel to cri-proxy's socket with the complete CRI.
    #[must_use]
    pub fn cri(&self) -> Channel {
        socket::channel(self.paths.cri(CriSocket::Admin))
    }

    /// Returns the runtime's sandboxes and containers, through cri-proxy.
    ///
    /// # Panics
    /// cri-proxy does not respond in time.
    pub async fn listed(&self) -> Listed {
        let channel = self.cri();
        until("a list of the runtime through cri-proxy", LONG, async || runtime::list(channel.clone()).await)
            .await
    }

    /// Returns major and minor version of the runtime.
    ///
    /// # Panics
    /// cri-proxy does not respond in time.
    pub async fn runtime_version(&self) -> (u32, u32) {
        until("the runtime's version", LONG, async || runtime::version(self.cri()).await).await
    }

    /// Asserts that no sandbox or container exists twice.
    ///
    /// # Panics
    /// One does.
    pub async fn assert_no_duplicates(&self) {
        let duplicates = self.listed().await.duplicates();
        assert!(duplicates.is_empty(), "there twice: {duplicates:#?}");
    }

    /// Writes a manifest atomically.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn manifest(&self, file: &str, content: impl AsRef<[u8]>) {
        let dir = self.base.path().join("manifests");
        let hidden = dir.join(format!(".{file}"));
        std::fs::write(&hidden, content).expect("a manifest can be written");
        std::fs::rename(&hidden, dir.join(file)).expect("a manifest can be renamed");
    }

    /// Writes the manifest of a pod, named after it.
    pub fn pod_manifest(&self, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().unwrap_or("pod");
        self.manifest(&format!("{name}.yaml"), pod.to_string());
    }

    /// Removes a manifest.
    ///
    /// # Panics
    /// It does not exist.
    pub fn remove_manifest(&self, file: &str) {
        std::fs::remove_file(self.base.path().join("manifests").join(file)).expect("the manifest is there");
    }

    /// Returns the pods and problems that pod-sync lists.
    ///
    /// # Errors
    /// The error of pod-sync.
    pub async fn list(&self) -> Result<(Vec<Seen>, Vec<podsync::SourceProblem>), Status> {
        let mut client = PodSyncClient::new(self.podsync());
        let reply = whole(client.list_pods(podsync::ListPodsRequest::default())).await?.into_inner();
        Ok((reply.pods.into_iter().map(Seen::from_view).collect(), reply.problems))
    }

    /// Returns a pod by its name in the manifest, or as `namespace/name`.
    ///
    /// # Errors
    /// The error of pod-sync.
    pub async fn pod(&self, name: &str) -> Result<Seen, Status> {
        let request = podsync::GetPodRequest { pod: name.to_owned() };
        Ok(Seen::from_view(PodSyncClient::new(self.podsync()).get_pod(request).await?.into_inner()))
    }

    /// Waits for a condition on a pod.
    ///
    /// # Panics
    /// The wait exceeds `limit`.
    pub async fn wait_pod(
        &self,
        name: &str,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Seen) -> bool,
    ) -> Seen {
        until(&format!("{name}: {what}"), limit, async || match self.pod(name).await {
            Ok(seen) if wanted(&seen) => Ok(seen),
            Ok(seen) => Err(vec![seen.to_string(), seen.pod["status"].to_string()]),
            Err(e) => Err(vec![e.to_string()]),
        })
        .await
    }

    /// Waits until pod-sync, the runtime, the directories and the cgroups have nothing of a pod.
    ///
    /// # Panics
    /// Something is left.
    pub async fn wait_gone(&self, uid: &str) {
        until(&format!("nothing left of pod {uid}"), LONG, async || {
            let mut left = self.pod_traces(uid);
            match self.list().await {
                Ok((pods, _)) => left.extend(pods.iter().filter(|p| p.uid() == uid).map(Seen::to_string)),
                Err(e) => left.push(e.to_string()),
            }
            match runtime::list(self.cri()).await {
                Ok(listed) if listed.has_pod(uid) => left.push("the runtime still has it".to_owned()),
                Ok(_) => {}
                Err(e) => left.push(e.to_string()),
            }
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }

    /// Returns the files and cgroups of a pod.
    #[must_use]
    pub fn pod_traces(&self, uid: &str) -> Vec<String> {
        let mut left = Vec::new();
        for path in [self.root_dir().join("pods").join(uid), self.paths.state_dir().join(uid)] {
            if path.exists() {
                left.push(path.display().to_string());
            }
        }
        let root = self.containerd.cgroup_root();
        let trees = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|e| e.path());
        for tree in trees.chain([PathBuf::from("/sys/fs/cgroup")]) {
            named_below(&tree.join(root.trim_start_matches('/')), uid, 4, &mut left);
        }
        named_below(&self.pod_logs_dir(), uid, 1, &mut left);
        left
    }

    /// Returns the directory of an emptyDir of a pod.
    #[must_use]
    pub fn empty_dir(&self, uid: &str, volume: &str) -> PathBuf {
        let volumes = self.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir");
        volumes.join(volume)
    }

    /// Returns a file in an emptyDir of a pod; empty if it does not exist.
    #[must_use]
    pub fn empty_dir_file(&self, uid: &str, volume: &str, file: &str) -> String {
        std::fs::read_to_string(self.empty_dir(uid, volume).join(file)).unwrap_or_default()
    }

    /// Sets the wall clock of all services to the machine's plus `seconds`. Monotonic clocks do not change.
    ///
    /// # Panics
    /// The file cannot be written, or the services use the machine's clock.
    pub fn step_clock(&self, seconds: i64) {
        let file = self.base.path().join(CLOCK);
        assert!(file.exists(), "these services have the machine's clock");
        let new = file.with_extension("new");
        std::fs::write(&new, format!("{seconds:+}")).expect("a file can be written");
        std::fs::rename(&new, &file).expect("a file can be renamed");
    }

    /// Kills a service with SIGKILL. Returns the number of its starts so far, for [`Node::wait_back`].
    #[must_use]
    pub fn kill9(&self, name: &str) -> u32 {
        let starts = self.services[name].process().starts;
        self.services[name].signal(Signal::SIGKILL);
        starts
    }

    /// Suspends a service with SIGSTOP.
    pub fn stop(&self, name: &str) {
        self.services[name].signal(Signal::SIGSTOP);
    }

    /// Resumes a suspended service.
    pub fn cont(&self, name: &str) {
        self.services[name].signal(Signal::SIGCONT);
    }

    /// Waits until a service that was killed after `starts` starts serves again.
    ///
    /// # Panics
    /// The wait exceeds `limit`.
    pub async fn wait_back(&self, name: &str, starts: u32, limit: Duration) {
        let channel = self.health_channel(name);
        until(&format!("{name} serving again"), limit, async || {
            let process = self.services[name].process();
            if process.starts <= starts {
                return Err(format!("{process:?}"));
            }
            health(channel.clone()).await
        })
        .await;
    }

    /// Waits until a service serves.
    ///
    /// # Panics
    /// The wait exceeds `limit`.
    pub async fn wait_serving(&self, name: &str, limit: Duration) {
        let channel = self.health_channel(name);
        until(&format!("{name} serving"), limit, async || health(channel.clone()).await).await;
    }

    fn health_channel(&self, name: &str) -> Channel {
        socket::channel(match name {
            "cri-proxy" => self.paths.cri(CriSocket::Admin),
            "pleg-service" => self.paths.pleg(),
            "probe-service" => self.paths.probe("probe-0"),
            SECOND_PROBER => self.paths.probe(SECOND_PROBER),
            "status-reporter" => self.paths.status(),
            "node-api" => self.paths.node_api(),
            _ => self.paths.podsync(),
        })
    }

    /// Records the states of pods from now on.
    pub async fn record(&self) -> Recorder {
        Recorder::start(self.podsync(), self.api.clone()).await
    }

    /// Returns the states of pods that must not change, by manifest names: in pod-sync and, if there is one,
    /// in the API server.
    ///
    /// # Panics
    /// A pod does not exist.
    pub async fn steady(&self, names: &[&str]) -> Before {
        let mut out = Before::new();
        for name in names {
            let seen = self.pod(name).await.unwrap_or_else(|e| panic!("no pod {name}: {e}"));
            if let Some(api) = &self.api {
                let object = api.get("pods", "default", seen.name());
                let object = object.unwrap_or_else(|| panic!("the API server has no pod {}", seen.name()));
                out.insert((API, seen.name().to_owned()), Seen::from_api(object).steady());
            }
            out.insert((PODSYNC, seen.name().to_owned()), seen.steady());
        }
        out
    }

    /// Waits until a pod is Ready, also in the API server if there is one.
    pub async fn wait_ready(&self, name: &str) -> Seen {
        let seen = self.wait_pod(name, "Ready", LONG, Seen::is_ready).await;
        if let Some(api) = &self.api {
            let is_ready = |o: &Value| Seen::from_api(o.clone()).is_ready();
            api.wait_for("pods", "default", seen.name(), LONG, is_ready).await;
        }
        seen
    }

    /// Deletes the pods of the API server, drains pod-sync (SIGUSR1), stops the other services, and removes
    /// the runtime.
    ///
    /// # Panics
    /// A service does not stop, a pod stays, or something is left on the machine.
    pub async fn down(mut self) {
        let take = |services: &mut BTreeMap<&'static str, Service>, name: &str| {
            services.remove(name).expect("every service is ended once")
        };
        if let Some(cluster) = &self.cluster {
            delete_all(cluster).await;
            // The API server deletes a pod shortly before its last files are removed.
            until("pod-sync without pods of the API server", LONG, async || {
                let (pods, _) = self.list().await.map_err(|e| vec![e.to_string()])?;
                let left: Vec<String> =
                    pods.iter().filter(|p| p.view.source == "api").map(Seen::to_string).collect();
                if left.is_empty() { Ok(()) } else { Err(left) }
            })
            .await;
        }
        if self.services.contains_key("node-api") {
            assert!(
                take(&mut self.services, "node-api").terminate().await,
                "node-api does not end after SIGTERM"
            );
        }
        let drained = take(&mut self.services, "pod-sync").end(Signal::SIGUSR1, LONG).await;
        assert!(drained, "pod-sync does not end after SIGUSR1");
        let left = self.listed().await;
        assert!(left.sandboxes.is_empty() && left.containers.is_empty(), "pods are left: {left:#?}");
        if self.services.contains_key(SECOND_PROBER) {
            assert!(
                take(&mut self.services, SECOND_PROBER).terminate().await,
                "{SECOND_PROBER} does not end"
            );
        }
        for name in ["status-reporter", "probe-service", "pleg-service", "cri-proxy"] {
            assert!(take(&mut self.services, name).terminate().await, "{name} does not end after SIGTERM");
        }
        if let Some(cluster) = self.cluster.filter(|_| self.api.is_none()) {
            cluster.delete("nodes", "", &cluster.node).await;
        }
        let Self { containerd, base, logs, root_disk, run_disk, image_disk, .. } = self;
        drop(root_disk);
        drop(run_disk);
        let traces = containerd.traces();
        containerd.down().await.expect("nothing is left behind");
        drop(image_disk);
        assert_eq!(traces.leftovers(), Vec::<String>::new());
        base.close().expect("the directory can be removed");
        logs.discard();
    }
}

/// A container runtime as the services' arguments name it.
#[derive(Debug)]
pub struct Runtime<E, C> {
    /// Path of the socket.
    pub endpoint: E,
    /// Parent cgroup of all pods.
    pub cgroup_root: C,
}

/// Returns the arguments of a service whose files are below `base`.
#[must_use]
pub fn arguments<E: AsRef<OsStr>, C: AsRef<OsStr>>(
    name: &str,
    options: &Options,
    base: &Path,
    runtime: &Runtime<E, C>,
    kubeconfig: Option<&Path>,
) -> Vec<OsString> {
    let mut line: Vec<OsString> = Vec::new();
    let mut flag = |name: &str, value: &dyn AsRef<OsStr>| {
        line.extend([OsString::from(name), value.as_ref().to_owned()]);
    };
    flag("--run-dir", &base.join("run"));
    flag("--log-level", &"info");
    flag("--observer-uid", &NODE_API_UID.to_string());
    if let Some(endpoint) = &options.otlp_endpoint {
        flag("--otlp-endpoint", endpoint);
    }
    match name {
        "cri-proxy" => {
            flag("--runtime-endpoint", &runtime.endpoint);
            flag("--allow-uid", &format!("node-api={NODE_API_UID}"));
            flag("--pod-logs-dir", &base.join("pod-logs"));
        }
        "probe-service" => flag("--id", &"probe-0"),
        "status-reporter" => flag("--node-name", &options.node_name()),
        "pod-sync" => {
            flag("--allow-uid", &NODE_API_UID.to_string());
            flag("--node-name", &options.node_name());
            flag("--root-dir", &base.join("root"));
            flag("--manifests", &base.join("manifests"));
            flag("--cgroup-root", &runtime.cgroup_root);
            flag("--pod-logs-dir", &base.join("pod-logs"));
            flag("--container-logs-dir", &base.join("container-logs"));
            flag("--sync-frequency", &options.sync_frequency);
            // The images were imported and cannot be pulled, so they are kept however full the disk is.
            if !options.extra.iter().any(|(_, arg)| arg.starts_with("--image-gc-high-threshold")) {
                flag("--image-gc-high-threshold", &"100");
            }
            // The machine that runs the tests may be short of memory or disk space.
            if !options.extra.iter().any(|(_, arg)| arg.starts_with("--eviction-hard")) {
                flag("--eviction-hard", &"memory.available=0%");
            }
        }
        _ => {}
    }
    if let Some(file) = kubeconfig.filter(|_| ["status-reporter", "pod-sync"].contains(&name)) {
        flag("--kubeconfig", &file);
    }
    line.extend(
        options.extra.iter().filter(|(service, _)| *service == name).map(|(_, arg)| OsString::from(arg)),
    );
    line
}

/// Returns the environment of a process whose wall clock is set by a file, with Debian's libfaketime.
fn own_clock(base: &Path) -> Vec<(&'static str, OsString)> {
    let library = format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    assert!(Path::new(&library).exists(), "{library} is missing: scripts/install.sh test");
    let file = base.join(CLOCK);
    std::fs::write(&file, "+0").expect("a file can be written");
    vec![
        ("LD_PRELOAD", library.into()),
        ("FAKETIME_TIMESTAMP_FILE", file.into()),
        ("FAKETIME_NO_CACHE", "1".into()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ("NO_FAKE_STAT", "1".into()),
    ]
}

/// Creates what the host's tmpfiles create: sockets that node-api may open, and its directory.
fn prepare_node_api(base: &Path, paths: &Paths) {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let mode = |path: &Path, mode| {
        let set = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
        set.expect("the mode of an own directory can be set");
    };
    mode(base, 0o755);
    let podsync = paths.podsync();
    let pleg = paths.pleg();
    let status = paths.status();
    let probe = paths.probe("x");
    for socket in [podsync, pleg, status, probe, paths.cri(CriSocket::NodeApi)] {
        let dir = socket.parent().expect("a socket lies in a directory");
        std::fs::create_dir_all(dir).expect("a directory can be made");
        chown(dir, None, Some(NODE_API_UID)).expect("root can give directories away");
        mode(dir, 0o2750);
    }
    let own = [paths.node_api(), base.join("node-api/pki")];
    for dir in own.iter().filter_map(|p| p.parent()) {
        std::fs::create_dir_all(dir).expect("a directory can be made");
        chown(dir, Some(NODE_API_UID), Some(NODE_API_UID)).expect("root can give directories away");
    }
}

async fn delete_all(cluster: &Cluster) {
    let is_mirror = |p: &Value| !p["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_null();
    let is_ours = |p: &Value| p["spec"]["nodeName"] == cluster.node.as_str() && !is_mirror(p);
    let pods: Vec<Seen> =
        cluster.list("pods").await.into_iter().filter(is_ours).map(Seen::from_api).collect();
    for pod in &pods {
        cluster.delete("pods", pod.text("/metadata/namespace"), pod.name()).await;
    }
    for pod in &pods {
        let is_gone = |o: &Value| o["metadata"]["uid"] != pod.uid();
        cluster.wait_for("pods", pod.text("/metadata/namespace"), pod.name(), LONG, is_gone).await;
    }
}

async fn health(channel: Channel) -> Result<(), String> {
    let request = HealthCheckRequest { service: String::new() };
    match HealthClient::new(channel).check(request).await {
        Ok(reply) if reply.get_ref().status() == ServingStatus::Serving => Ok(()),
        Ok(reply) => Err(format!("{:?}", reply.get_ref().status())),
        Err(e) => Err(e.to_string()),
    }
}

/// Collects directories with `part` in their name, down to `depth` levels.
fn named_below(dir: &Path, part: &str, depth: u32, out: &mut Vec<String>) {
    // systemd escapes the dashes of UIDs in unit names.
    let escaped = part.replace('-', "_");
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !entry.file_type().is_ok_and(|t| t.is_dir()) {
            continue;
        }
        if name.contains(part) || name.contains(&escaped) {
            out.push(entry.path().display().to_string());
        } else if depth > 1 {
            named_below(&entry.path(), part, depth - 1, out);
        }
    }
}

/// Returns the body of a web server's response.
///
/// # Errors
/// The server cannot be reached.
pub async fn page(ip: &str, port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = tokio::net::TcpStream::connect((ip, port)).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await?;
    Ok(reply.split_once("\r\n\r\n").map_or_else(String::new, |(_, body)| body.to_owned()))
}

/// The services' logs: printed if the test fails, removed otherwise.
struct Logs {
    dir: PathBuf,
}

impl Logs {
    fn new(test: &str) -> Self {
        let dir = bins::profile_dir().join("e2e").join(test);
        // Logs of an earlier run must not be read.
        let _not_there = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a directory beside the binaries can be made");
        Self { dir }
    }

    fn discard(self) {
        // Only logs of failed tests are kept.
        let _removed = std::fs::remove_dir_all(&self.dir);
    }
}

impl Drop for Logs {
    #[expect(clippy::print_stderr, reason = "it is the test's output")]
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for name in SERVICES.iter().chain(&["containerd", "node-api"]) {
            let path = self.dir.join(format!("{name}.log"));
            if !path.exists() {
                continue;
            }
            eprintln!("---- end of {}\n{}", path.display(), end_of(&path).unwrap_or_else(|e| e.to_string()));
        }
    }
}

fn end_of(path: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_END)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
