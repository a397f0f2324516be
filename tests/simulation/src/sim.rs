//! The simulated node.

use std::collections::BTreeMap;
use std::fmt::{self, Debug as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use nix::mount::MsFlags;
use parking_lot::Mutex;
use quintlet_kit::args::SubscriberArgs;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::socket;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{GetPodRequest, PodView};
use quintlet_testapi::TestApi;
use quintlet_testkit::fake_runtime::{self, FakeRuntime, Method, SandboxRecord};
use quintlet_testkit::logs::Lines;
use quintlet_testkit::wait::until;
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use crate::cuts::Cuts;
use crate::leftovers;
use crate::permissions;
use crate::seen::{EventSeen, Seen};
use crate::service::{Places, Running, Service};
use crate::watch::Watch;

/// Limit of waits. It bounds failures only: a wait for a back-off takes 15 s on an idle machine.
pub const LONG: Duration = Duration::from_secs(60);

static NODES: AtomicU32 = AtomicU32::new(0);

/// Options of [`Sim::start`].
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Options of the fake runtime, which uses the machine's wall clock.
    pub runtime: fake_runtime::Options,
    /// pod-sync is killed at failpoints ([`Sim::cuts`]), which makes it slower.
    pub cuts: bool,
    /// A planted bug of all services of this node: [`quintlet_kit::failpoint::planted`].
    pub planted: Option<&'static str>,
    /// Changes that the API server keeps per resource for watches; none for its default.
    pub api_history: Option<usize>,
}

/// A running node. [`Sim::finish`] ends it and fails if an invariant was violated.
pub struct Sim {
    /// The container runtime in memory.
    pub runtime: FakeRuntime,
    /// The API server in memory.
    pub api: TestApi,
    services: Mutex<BTreeMap<Service, Running>>,
    places: Places,
    watch: Watch,
    watching: JoinHandle<()>,
    // A service was killed, or the node was disturbed by the test.
    disturbed: AtomicBool,
    base: Option<TempDir>,
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim").field("places", &self.places).finish_non_exhaustive()
    }
}

impl Sim {
    /// Starts a node with all services.
    ///
    /// # Panics
    /// The process is not root, or a part cannot be created.
    pub async fn start(options: Options) -> Self {
        let sim = Self::prepare(options).await;
        sim.start_all();
        sim
    }

    /// Starts every service.
    pub fn start_all(&self) {
        for service in Service::ALL {
            self.up(service);
        }
    }

    /// Creates a node without starting a service.
    ///
    /// # Panics
    /// The process is not root, or a part cannot be created.
    pub async fn prepare(options: Options) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "pod-sync makes cgroups: run these tests as root");
        quintlet_virtual_time::start();
        leftovers::clear();
        let prefix = leftovers::prefix();
        let base = tempfile::Builder::new().prefix(&prefix).tempdir().expect("a directory can be made");
        // A disk would take the machine's time for each record that is written through to it.
        mount_tmpfs(base.path(), None);
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        let places = Places {
            base: base.path().to_owned(),
            cgroup_root: format!("/{prefix}{number}"),
            kubeconfig: Some(base.path().join("kubeconfig")),
            pod_sync_args: Vec::new(),
            pleg_periods: pleg_service::Periods::default(),
            subscribers: SubscriberArgs::default(),
            log: Lines::default(),
            cuts: Arc::default(),
            exact: options.cuts,
            planted: options.planted,
        };
        std::fs::create_dir_all(places.dir("manifests")).expect("a directory can be made");
        let mut of_api = quintlet_testapi::Options::default();
        of_api.history = options.api_history.unwrap_or(of_api.history);
        let api = TestApi::start_with(of_api).await.expect("a free loopback port can be bound");
        api.kubeconfig(&places.dir("kubeconfig")).expect("the kubeconfig can be written");
        let wall = Clock::system().wall().as_nanosecond();
        let wall_base_unix_ns = i64::try_from(wall).expect("the year is before 2262");
        let mut options = fake_runtime::Options { wall_base_unix_ns, ..options.runtime };
        if options.image_mountpoint == fake_runtime::Options::default().image_mountpoint {
            // Image garbage collection must not depend on the machine's disk.
            let images = places.dir("images");
            std::fs::create_dir_all(&images).expect("a directory can be made");
            mount_tmpfs(&images, Some("size=16m"));
            options.image_mountpoint = images.display().to_string();
        }
        let runtime =
            FakeRuntime::start(&places.dir("runtime.sock"), options).expect("the fake runtime starts");
        let watch = Watch::default();
        let watching = quintlet_kit::task::spawn("watch", watch.clone().run(runtime.clone()));
        let (services, disturbed) = (Mutex::default(), AtomicBool::new(false));
        Self { runtime, api, services, places, watch, watching, disturbed, base: Some(base) }
    }

    /// Starts a service.
    pub fn up(&self, service: Service) {
        self.services.lock().entry(service).or_insert_with(|| Running::start(service, self.places.clone()));
    }

    /// Kills a service like SIGKILL.
    pub async fn kill(&self, service: Service) {
        self.disturb();
        let running = self.services.lock().remove(&service);
        if let Some(running) = running {
            running.kill().await;
        }
    }

    /// Stops a service like SIGTERM.
    pub async fn stop(&self, service: Service) {
        self.disturb();
        let running = self.services.lock().remove(&service);
        if let Some(running) = running {
            running.stop().await;
        }
    }

    /// Kills and starts a service.
    pub async fn restart(&self, service: Service) {
        self.kill(service).await;
        self.up(service);
    }

    /// Returns the failpoints of pod-sync.
    #[must_use]
    pub fn cuts(&self) -> &Cuts {
        &self.places.cuts
    }

    /// Returns the paths of the sockets.
    #[must_use]
    pub fn paths(&self) -> Paths {
        self.places.paths()
    }

    /// Returns pod-sync's root directory.
    #[must_use]
    pub fn root_dir(&self) -> PathBuf {
        self.places.dir("root")
    }

    /// Returns the manifest directory.
    #[must_use]
    pub fn manifests_dir(&self) -> PathBuf {
        self.places.dir("manifests")
    }

    /// Returns the directory of pod logs.
    #[must_use]
    pub fn pod_logs_dir(&self) -> PathBuf {
        self.places.dir("pod-logs")
    }

    /// Returns the parent cgroup of `kubepods`.
    #[must_use]
    pub fn cgroup_root(&self) -> &str {
        &self.places.cgroup_root
    }

    /// Removes the API server. Call it before any start.
    pub fn set_standalone(&mut self) {
        self.places.kubeconfig = None;
    }

    /// Makes a node with SELinux, whose containers have files with the label
    /// `system_u:object_r:container_file_t`. Call it before any start.
    ///
    /// # Panics
    /// The files cannot be written.
    pub fn set_selinux(&self) {
        let contexts = "file = \"system_u:object_r:container_file_t:s0\"\n";
        for (path, text) in
            [("sys/fs/selinux/enforce", "1"), ("usr/share/containers/selinux/contexts", contexts)]
        {
            let path = self.places.selinux_root().join(path);
            std::fs::create_dir_all(path.parent().expect("it has a directory")).expect("it can be made");
            std::fs::write(path, text).expect("the file can be written");
        }
    }

    /// Adds arguments of pod-sync. Call it before its start.
    pub fn set_pod_sync_args(&mut self, args: &[&str]) {
        self.places.pod_sync_args = args.iter().map(|a| (*a).to_owned()).collect();
    }

    /// Lets this process subscribe to containers, probes and pods. Call it before the services start.
    pub fn set_subscribers(&mut self) {
        let uid = nix::unistd::geteuid().as_raw();
        self.places.subscribers.subscriber_uid.push(uid);
        self.places.pod_sync_args.push(format!("--subscriber-uid={uid}"));
    }

    /// Makes periodic repairs rarer than a test lasts: relists while hints arrive, resyncs of pods, and
    /// checks of containers' logs. Call it before the services start.
    pub fn without_periodic_repairs(&mut self) {
        let never = Duration::from_secs(3600);
        self.places.pleg_periods.relist_live = never;
        for flag in ["sync-frequency", "container-log-monitor-interval"] {
            self.places.pod_sync_args.push(format!("--{flag}={}s", never.as_secs()));
        }
    }

    /// Returns the command line of pod-sync, including its name, to run it as a process.
    #[must_use]
    pub fn pod_sync_line(&self) -> Vec<String> {
        crate::service::pod_sync_line(&self.places)
    }

    /// Returns the command line of cri-proxy as a process of its own, starting with its name.
    #[must_use]
    pub fn cri_proxy_line(&self) -> Vec<String> {
        crate::service::cri_proxy_line(&self.places)
    }

    /// Creates a pod in the API server. Returns its UID.
    ///
    /// # Panics
    /// The API server rejects it.
    #[must_use]
    pub fn create(&self, pod: Value) -> String {
        let made = self.api.create_pod(pod);
        made["metadata"]["uid"].as_str().expect("the server gives a UID").to_owned()
    }

    /// Deletes a pod; `None` means its own grace period.
    ///
    /// # Panics
    /// The API server rejects it.
    pub fn delete(&self, name: &str, grace: Option<i64>) {
        self.api.delete("pods", "default", name, grace).expect("the pod is there");
    }

    /// Writes a manifest atomically.
    ///
    /// # Panics
    /// It cannot be written.
    pub fn manifest(&self, name: &str, pod: &Value) {
        let dir = self.places.dir("manifests");
        let hidden = dir.join(format!(".{name}"));
        std::fs::write(&hidden, pod.to_string()).expect("a manifest can be written");
        std::fs::rename(&hidden, dir.join(format!("{name}.yaml"))).expect("a manifest can be renamed");
    }

    /// Removes a manifest.
    ///
    /// # Panics
    /// It does not exist.
    pub fn remove_manifest(&self, name: &str) {
        let file = self.places.dir("manifests").join(format!("{name}.yaml"));
        std::fs::remove_file(file).expect("the manifest is there");
    }

    /// Returns a pod of namespace `default`.
    #[must_use]
    pub fn pod(&self, name: &str) -> Seen {
        Seen(self.api.share("pods", "default", name).unwrap_or_default())
    }

    /// Returns the events of a pod.
    #[must_use]
    pub fn events(&self, pod: &str) -> Vec<EventSeen> {
        let events = self.api.share_all("events");
        events.iter().filter(|e| e["involvedObject"]["name"] == pod).map(|e| EventSeen::of(e)).collect()
    }

    /// Returns the Warning events of a pod.
    #[must_use]
    pub fn warnings(&self, pod: &str) -> Vec<EventSeen> {
        self.events(pod).into_iter().filter(|e| e.kind == "Warning").collect()
    }

    /// Waits for a condition on a pod.
    ///
    /// # Panics
    /// The wait timed out. The message has the last pod, its events, and its runtime state.
    pub async fn wait_pod(&self, name: &str, what: &str, wanted: impl Fn(&Seen) -> bool) -> Seen {
        until(&format!("{name}: {what}"), LONG, async || {
            let seen = self.pod(name);
            // Reads events and instances for the message only.
            if wanted(&seen) { Ok(seen) } else { Err(fmt::from_fn(move |f| self.all_of(name, &seen).fmt(f))) }
        })
        .await
    }

    fn all_of(&self, name: &str, seen: &Seen) -> Vec<String> {
        let uid = seen.uid().to_owned();
        let mut out = vec![format!("{seen:?}")];
        out.extend(self.events(name).iter().map(|e| format!("{e:?}")));
        out.extend(self.instances(&uid));
        out
    }

    /// Returns a pod from podsync.v1, by the name of the pod or of its manifest.
    ///
    /// # Errors
    /// The error of pod-sync.
    pub async fn view(&self, name: &str) -> Result<PodView, Status> {
        let mut client = PodSyncClient::new(socket::channel(self.paths().podsync()));
        Ok(client.get_pod(GetPodRequest { pod: name.to_owned() }).await?.into_inner())
    }

    /// Waits for a condition on a pod in podsync.v1.
    pub async fn wait_view(&self, name: &str, what: &str, wanted: impl Fn(&PodView) -> bool) -> PodView {
        until(&format!("{name} in podsync.v1: {what}"), LONG, async || match self.view(name).await {
            Ok(view) if wanted(&view) => Ok(view),
            other => Err(format!("{other:?}")),
        })
        .await
    }

    /// Waits until podsync.v1 does not have the pod.
    pub async fn wait_no_view(&self, name: &str) {
        until(&format!("{name} gone from podsync.v1"), LONG, async || match self.view(name).await {
            Err(status) if status.code() == Code::NotFound => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
    }

    /// Waits until a pod is ready.
    pub async fn wait_ready(&self, name: &str) -> Seen {
        self.wait_pod(name, "Ready", Seen::is_ready).await
    }

    /// Waits until the API server does not have the pod.
    pub async fn wait_gone(&self, name: &str) {
        self.wait_pod(name, "gone", Seen::is_gone).await;
    }

    /// Waits until neither the runtime nor pod-sync's directories have anything of a pod.
    pub async fn wait_nothing_left(&self, uid: &str) {
        until("nothing left of the pod", LONG, async || {
            let mut left = self.instances(uid);
            let dirs = [self.root_dir().join("pods").join(uid), self.paths().state_dir().join(uid)];
            left.extend(dirs.iter().filter(|d| d.exists()).map(|d| d.display().to_string()));
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }

    /// Waits for an event of a pod.
    pub async fn wait_event(&self, pod: &str, what: &str, wanted: impl Fn(&EventSeen) -> bool) -> EventSeen {
        until(&format!("event of {pod}: {what}"), LONG, async || {
            let events = self.events(pod);
            events.iter().find(|e| wanted(e)).cloned().ok_or(events)
        })
        .await
    }

    /// Waits for a condition on the runtime.
    pub async fn wait_runtime(&self, what: &str, wanted: impl Fn(&FakeRuntime) -> bool) {
        until(what, LONG, async || {
            if wanted(&self.runtime) { Ok(()) } else { Err(fmt::from_fn(|f| self.instances("").fmt(f))) }
        })
        .await;
    }

    /// Waits for a number of calls of a method about a subject.
    pub async fn wait_calls(&self, method: Method, subject: &str, at_least: usize) {
        until(&format!("{at_least} calls of {method:?} about {subject}"), LONG, async || {
            let n = self.calls_about(method, subject);
            if n >= at_least { Ok(()) } else { Err(n) }
        })
        .await;
    }

    /// Returns the number of calls of a method about a subject.
    #[must_use]
    pub fn calls_about(&self, method: Method, subject: &str) -> usize {
        self.runtime.count_calls(|c| c.method == method && c.subjects.iter().any(|s| s == subject))
    }

    /// Returns the sandboxes of a pod.
    #[must_use]
    pub fn sandboxes(&self, uid: &str) -> Vec<SandboxRecord> {
        self.runtime.sandboxes().into_iter().filter(|s| s.pod_uid() == uid).collect()
    }

    /// Describes the runtime state of a pod, or of all pods with an empty UID.
    #[must_use]
    pub fn instances(&self, uid: &str) -> Vec<String> {
        let is_wanted = |u: &str| uid.is_empty() || u == uid;
        let (mut sandboxes, mut containers) = self.runtime.records();
        sandboxes.sort_by_key(|s| s.status.created_at);
        containers.sort_by_key(|c| c.status.created_at);
        let sandboxes = sandboxes.iter().filter(|s| is_wanted(s.pod_uid()));
        let sandboxes = sandboxes.map(|s| format!("sandbox {} ready {}", s.pod_uid(), s.ready()));
        let containers = containers.iter().filter(|c| is_wanted(c.pod_uid()));
        let containers = containers.map(|c| {
            let attempt = c.config.metadata.as_ref().map_or(0, |m| m.attempt);
            format!("container {} {} {attempt} {:?}", c.pod_uid(), c.name(), c.status.state())
        });
        sandboxes.chain(containers).collect()
    }

    /// Asserts that the pod has one sandbox, one container of each name, no restart and no Warning event.
    ///
    /// # Panics
    /// It does not hold.
    pub fn assert_started_once(&self, name: &str, uid: &str) {
        let seen = self.pod(name);
        let all = self.all_of(name, &seen);
        assert_eq!(self.sandboxes(uid).len(), 1, "one sandbox: {all:#?}");
        let of_pod = self.runtime.containers().into_iter().filter(|c| c.pod_uid() == uid);
        let mut names: Vec<String> = of_pod.map(|c| c.name().to_owned()).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(count, names.len(), "one container of each name: {all:#?}");
        assert_eq!(seen.restarts(), 0, "no restart: {all:#?}");
        assert_eq!(self.warnings(name), [], "nothing was warned of: {all:#?}");
    }

    /// Declares that the test disturbs the node other than through the runtime or the API server.
    pub fn disturb(&self) {
        self.disturbed.store(true, Ordering::Relaxed);
    }

    /// Returns the log lines of all services at WARN and above.
    ///
    /// # Panics
    /// A line is not JSON.
    #[must_use]
    pub fn log(&self) -> Vec<Value> {
        let severe = |line: &Value| line["level"] == "warn" || line["level"] == "error";
        self.lines().into_iter().filter(severe).collect()
    }

    /// Returns the log lines of all services at INFO and above.
    ///
    /// # Panics
    /// A line is not JSON.
    #[must_use]
    pub fn lines(&self) -> Vec<Value> {
        let lines = self.places.log.all();
        lines.iter().map(|line| line.parse().expect("a line is a JSON object")).collect()
    }

    // Without a disturbance, lines at WARN concern pods only, whose spec may be wrong. Without a killed
    // service, each fault of a pod is logged once a minute.
    fn assert_log(&self) {
        let text = |line: &Value, field: &str| line[field].as_str().unwrap_or_default().to_owned();
        let log = self.log();
        let ended = self.disturbed.load(Ordering::Relaxed);
        if !ended && !self.runtime.was_disturbed() && !self.api.was_disturbed() {
            let of_pod = |l: &Value| l["pod.name"].is_string() || l["pod.uid"].is_string();
            let odd: Vec<&Value> = log.iter().filter(|l| !of_pod(l)).collect();
            assert!(odd.is_empty(), "logged at WARN and above in a clean run: {odd:#?}");
        }
        let mut last: BTreeMap<[String; 4], jiff::Timestamp> = BTreeMap::new();
        for line in log.iter().filter(|l| !ended && l["pod.uid"].is_string()) {
            let fault = ["service", "pod.uid", "msg", "reason"].map(|field| text(line, field));
            let at: jiff::Timestamp = text(line, "ts").parse().expect("a line has its time");
            if let Some(before) = last.insert(fault, at) {
                let apart = at.duration_since(before).as_secs();
                assert!(apart >= 59, "a fault was logged again after {apart} s: {line:#?}");
            }
        }
    }

    /// Returns the violations of invariants so far.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.watch.violations()
    }

    /// Ends all services.
    ///
    /// # Panics
    /// An invariant was violated, or a service sent a request that docs/helm.md does not have.
    pub async fn finish(self) {
        let requests = self.api.counts();
        self.finish_beside_clients().await;
        let undocumented = permissions::undocumented(requests.iter());
        assert_eq!(undocumented, Vec::<String>::new(), "requests without a row in docs/helm.md");
    }

    /// Ends all services. The API server may have had requests of other clients.
    ///
    /// # Panics
    /// An invariant was violated.
    pub async fn finish_beside_clients(self) {
        self.runtime.unscript_all();
        let services = std::mem::take(&mut *self.services.lock());
        for (_, running) in services.into_iter().rev() {
            running.kill().await;
        }
        assert_eq!(self.violations(), Vec::<String>::new(), "what must never be");
        self.assert_log();
    }
}

fn mount_tmpfs(at: &Path, options: Option<&str>) {
    let tmpfs = Some("tmpfs");
    nix::mount::mount(tmpfs, at, tmpfs, MsFlags::empty(), options).expect("root can mount");
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.watching.abort();
        self.runtime.unscript_all();
        for (_, running) in std::mem::take(&mut *self.services.lock()) {
            running.abandon();
        }
        leftovers::unmount(&self.places.base);
        for root in leftovers::cgroup_roots() {
            leftovers::remove_group(&root.join(self.places.cgroup_root.trim_start_matches('/')));
        }
        drop(self.base.take());
    }
}
