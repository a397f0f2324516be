//! A container runtime in memory, behind the CRI v1 services on a unix socket.
//!
//! Pods, containers and images are in memory. [`Rule`]s inject faults, and a recorder keeps every call.
//! Events are sent like those of containerd 1.x (by its event service, an exit before the CRI state changes),
//! as CRI events, both or not at all. [`FakeRuntime::down`] and [`FakeRuntime::up`] simulate a restart:
//! connections break, the state stays.
//!
//! All time is tokio's, so a test that pauses time also pauses the runtime.

mod calls;
mod cri;
mod cri_extensions;
mod events;
mod images;
mod lists;
mod script;
mod serve;
mod starts;
mod world;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_cri::v1;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;

pub use cri_extensions::UpdatePodSandboxResourcesRequest;
pub use script::{Call, Method, Rule, RuleId};
pub use world::{Behaviour, ContainerRecord, ContainerSeed, SandboxRecord, StopReply};

use events::Event;

/// Default start of the runtime's wall clock: 2026-01-01T00:00:00Z in nanoseconds.
pub const WALL_BASE_UNIX_NS: i64 = 1_767_225_600_000_000_000;

/// Options of a runtime.
#[derive(Debug, Clone)]
pub struct Options {
    /// `runtime_name` of Version.
    pub name: String,
    /// `runtime_version` of Version.
    pub version: String,
    /// Whether to serve containerd's event service.
    pub containerd_events: bool,
    /// Whether to serve CRI GetContainerEvents.
    pub cri_events: bool,
    /// Delay of the CRI state after the exit event, as with containerd.
    pub exit_lag: Duration,
    /// Wall clock at creation, in nanoseconds since 1970.
    pub wall_base_unix_ns: i64,
    /// Base of the URLs of Exec, Attach and PortForward, which are Unimplemented without it.
    pub streaming_base: Option<String>,
    /// Reply of RuntimeConfig, which is Unimplemented without it.
    pub cgroup_driver: Option<v1::CgroupDriver>,
    /// Whether CheckpointContainer is implemented. It writes a file with the container's ID.
    pub checkpoints: bool,
    /// Whether every image exists in the registry.
    pub registry_has_everything: bool,
    /// `features` of Status.
    pub features: Option<v1::RuntimeFeatures>,
    /// `runtime_handlers` of Status.
    pub handlers: Vec<v1::RuntimeHandler>,
    /// Mount point of images in ImageFsInfo.
    pub image_mountpoint: String,
}

impl Default for Options {
    /// Returns the options of containerd 1.6: its own event service, no CRI events, the exit event 5 ms
    /// before the state.
    fn default() -> Self {
        Self {
            name: "containerd".to_owned(),
            version: "1.6.20".to_owned(),
            containerd_events: true,
            cri_events: false,
            exit_lag: Duration::from_millis(5),
            wall_base_unix_ns: WALL_BASE_UNIX_NS,
            streaming_base: None,
            cgroup_driver: None,
            checkpoints: false,
            registry_has_everything: true,
            features: None,
            handlers: Vec::new(),
            image_mountpoint: "/var/lib/fake".to_owned(),
        }
    }
}

impl Options {
    /// Returns the options of containerd 2.x: also CRI events, after the state changed.
    #[must_use]
    pub fn containerd2() -> Self {
        Self { version: "2.1.4".to_owned(), cri_events: true, exit_lag: Duration::ZERO, ..Self::default() }
    }

    /// Returns the options of a runtime without events.
    #[must_use]
    pub fn silent() -> Self {
        Self {
            name: "silent".to_owned(),
            version: "1.0.0".to_owned(),
            containerd_events: false,
            exit_lag: Duration::ZERO,
            ..Self::default()
        }
    }
}

/// Result of a command that ExecSync runs.
#[derive(Debug, Clone, Default)]
pub struct ExecReply {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit_code: i32,
    /// Duration of the command. A duration beyond the call's timeout results in DEADLINE_EXCEEDED.
    pub after: Duration,
}

type ExecHandler = Arc<dyn Fn(&str, &[String]) -> ExecReply + Send + Sync>;

pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) world: Mutex<world::World>,
    pub(crate) script: script::Script,
    pub(crate) bus: events::Bus,
    pub(crate) exec: Mutex<ExecHandler>,
    /// Counts changes of the state, to wake waiting tasks.
    pub(crate) changed: watch::Sender<u64>,
    pub(crate) finish_abandoned: AtomicBool,
    end_failed_starts: AtomicBool,
    /// Whether list streams are implemented.
    pub(crate) list_streams: AtomicBool,
    /// Whether UpdatePodSandboxResources is implemented.
    pub(crate) sandbox_updates: AtomicBool,
    pub(crate) disturbed: AtomicBool,
}

impl Shared {
    pub(crate) fn touch(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    /// Ends the process of a container or sandbox: publishes the containerd event and, after the lag, changes
    /// the CRI state.
    pub(crate) fn exit(self: &Arc<Self>, id: &str, code: i32, reason: Option<&str>) -> bool {
        if !self.world.lock().begin_exit(id) {
            return false;
        }
        self.bus.containerd(Event::Exit { id: id.to_owned(), exec_id: None, code });
        let lag = self.options.exit_lag;
        if lag.is_zero() {
            self.finish_exit(id, code, reason);
        } else {
            let (shared, id, reason) = (Arc::clone(self), id.to_owned(), reason.map(str::to_owned));
            crate::spawn(async move {
                tokio::time::sleep(lag).await;
                shared.finish_exit(&id, code, reason.as_deref());
            });
        }
        true
    }

    fn finish_exit(&self, id: &str, code: i32, reason: Option<&str>) {
        self.world.lock().finish_exit(id, code, reason);
        self.touch();
        self.bus.containerd(Event::TaskDeleted { id: id.to_owned(), code });
        self.cri_event(id, v1::ContainerEventType::ContainerStoppedEvent);
    }

    pub(crate) fn cri_event(&self, id: &str, kind: v1::ContainerEventType) {
        // The event has the whole pod, so it is created only for subscribers.
        if !self.options.cri_events {
            return;
        }
        if let Some(event) = self.world.lock().cri_event(id, kind) {
            self.bus.cri(event);
        }
    }

    /// Ends the process of `id` according to its behaviour.
    pub(crate) fn run_behaviour(self: &Arc<Self>, id: &str) {
        let Some((after, code)) = self.world.lock().behaviour_of(id).exit else { return };
        let (shared, id) = (Arc::clone(self), id.to_owned());
        crate::spawn(async move {
            tokio::time::sleep(after).await;
            shared.exit(&id, code, None);
        });
    }

    /// Waits until `done` holds for the state.
    pub(crate) async fn wait_world(&self, mut done: impl FnMut(&world::World) -> bool) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if done(&self.world.lock()) {
                return;
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Handle of the fake runtime. Clones share one runtime.
#[derive(Clone)]
pub struct FakeRuntime {
    shared: Arc<Shared>,
    path: PathBuf,
    server: Arc<Mutex<Option<CancellationToken>>>,
}

impl FakeRuntime {
    /// Creates a runtime and serves it at `path`.
    ///
    /// # Errors
    /// Fails if the socket cannot be bound.
    pub fn start(path: &Path, options: Options) -> io::Result<Self> {
        let runtime = Self::stopped(path, options);
        runtime.up()?;
        Ok(runtime)
    }

    /// Creates a runtime that does not serve before [`Self::up`].
    #[must_use]
    pub fn stopped(path: &Path, options: Options) -> Self {
        let shared = Arc::new(Shared {
            world: Mutex::new(world::World::new(options.wall_base_unix_ns)),
            script: script::Script::default(),
            bus: events::Bus::new(options.containerd_events, options.cri_events),
            exec: Mutex::new(Arc::new(|_, _| ExecReply::default())),
            changed: watch::Sender::new(0),
            finish_abandoned: AtomicBool::new(false),
            end_failed_starts: AtomicBool::new(false),
            list_streams: AtomicBool::new(false),
            sandbox_updates: AtomicBool::new(false),
            disturbed: AtomicBool::new(false),
            options,
        });
        Self { shared, path: path.to_owned(), server: Arc::default() }
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Starts to serve, unless it serves already.
    ///
    /// # Errors
    /// Fails if the socket cannot be bound.
    pub fn up(&self) -> io::Result<()> {
        let mut server = self.server.lock();
        if server.is_none() {
            *server = Some(serve::start(&self.shared, &self.path)?);
        }
        Ok(())
    }

    /// Simulates a crash: calls in flight end, connections break, the socket is removed. State and running
    /// containers stay.
    pub fn down(&self) {
        self.disturb();
        if let Some(token) = self.server.lock().take() {
            token.cancel();
            let _ = std::fs::remove_file(&self.path);
        }
    }

    // Fault injection.

    fn disturb(&self) {
        self.shared.disturbed.store(true, Ordering::Relaxed);
    }

    /// Returns whether a fault was ever injected.
    #[must_use]
    pub fn was_disturbed(&self) -> bool {
        self.shared.disturbed.load(Ordering::Relaxed)
    }

    pub fn script(&self, rule: Rule) -> RuleId {
        self.disturb();
        self.shared.script.add(rule)
    }

    /// Removes a rule from the script. Calls that hang in it continue.
    pub fn unscript(&self, rule: RuleId) {
        self.shared.script.remove(rule);
    }

    /// Removes all rules.
    pub fn unscript_all(&self) {
        self.shared.script.clear();
    }

    /// Delays every call of `method`.
    pub fn latency(&self, method: Method, latency: Duration) -> RuleId {
        self.script(Rule::on(method).latency(latency))
    }

    /// Fails the next `times` calls of `method`.
    pub fn fail(&self, method: Method, code: Code, text: &str, times: u32) -> RuleId {
        self.script(Rule::on(method).fail(code, text).times(times))
    }

    /// Makes calls of `method` hang until the rule is removed.
    pub fn hang(&self, method: Method) -> RuleId {
        self.script(Rule::on(method).hang())
    }

    /// Sets whether calls whose caller disconnected complete instead of being cancelled.
    pub fn finish_abandoned_calls(&self, yes: bool) {
        self.shared.finish_abandoned.store(yes, Ordering::Relaxed);
    }

    /// Sets whether the list streams of the CRI of Kubernetes 1.36 are implemented. To simulate an upgrade,
    /// call it between [`Self::down`] and [`Self::up`].
    pub fn stream_lists(&self, yes: bool) {
        self.shared.list_streams.store(yes, Ordering::Relaxed);
    }

    /// Sets whether UpdatePodSandboxResources is implemented.
    pub fn update_sandboxes(&self, yes: bool) {
        self.shared.sandbox_updates.store(yes, Ordering::Relaxed);
    }

    /// Drops the next `count` events.
    pub fn drop_events(&self, count: u64) {
        self.disturb();
        self.shared.bus.drop_next(count);
    }

    /// Sets whether every event is sent twice.
    pub fn duplicate_events(&self, yes: bool) {
        self.shared.bus.duplicate(yes);
    }

    /// Ends every open event stream with UNAVAILABLE.
    pub fn cut_event_streams(&self) {
        self.disturb();
        self.shared.bus.cut();
    }

    /// Returns the number of open event streams.
    #[must_use]
    pub fn event_streams(&self) -> usize {
        self.shared.bus.open()
    }

    /// Moves the runtime's wall clock.
    pub fn step_wall_clock(&self, by_ns: i64) {
        self.disturb();
        self.shared.world.lock().step_clock(by_ns);
    }

    /// Makes images whose full name begins with `begin` accessible only to this user.
    pub fn protect(&self, begin: &str, user: &str, password: &str) {
        let entry = (begin.to_owned(), user.to_owned(), password.to_owned());
        self.shared.world.lock().protected.push(entry);
    }

    /// Changes an image without a call.
    pub fn edit_image(&self, name: &str, edit: impl FnOnce(&mut v1::Image)) {
        let mut world = self.shared.world.lock();
        let id = world.image(name).map(|i| i.id.clone());
        if let Some(image) = id.and_then(|id| world.images.get_mut(&id)) {
            edit(image);
        }
    }

    /// Sets the behaviour of started containers named `name`. `*` applies to all other names.
    pub fn behave(&self, name: &str, behaviour: Behaviour) {
        self.shared.world.lock().set_behaviour(name, behaviour);
    }

    /// Sets the memory usage in bytes of containers with this name, for ContainerStats.
    pub fn use_memory(&self, name: &str, bytes: u64) {
        self.shared.world.lock().memory.insert(name.to_owned(), bytes);
    }

    /// Sets the handler of ExecSync, by container ID and command.
    pub fn on_exec(&self, handler: impl Fn(&str, &[String]) -> ExecReply + Send + Sync + 'static) {
        *self.shared.exec.lock() = Arc::new(handler);
    }

    /// Sets a condition of Status, `RuntimeReady` or `NetworkReady`.
    pub fn set_condition(&self, kind: &str, status: bool, reason: &str, message: &str) {
        self.disturb();
        self.shared.world.lock().set_condition(v1::RuntimeCondition {
            r#type: kind.to_owned(),
            status,
            reason: reason.to_owned(),
            message: message.to_owned(),
        });
    }

    // Changes in the runtime without a call.

    /// Adds a ready sandbox as RunPodSandbox does. Returns its ID.
    pub fn add_sandbox(&self, uid: &str, name: &str, namespace: &str, attempt: u32) -> String {
        let id = self.shared.world.lock().add_sandbox(world::pod_config(uid, name, namespace, attempt), "");
        self.shared.touch();
        self.sandbox_events(&id);
        id
    }

    /// Adds a container as CreateContainer and, if the seed says so, StartContainer do. Returns its ID.
    ///
    /// # Panics
    /// Panics if the sandbox does not exist.
    pub fn add_container(&self, sandbox: &str, seed: &ContainerSeed) -> String {
        let config = self.shared.world.lock().seed_config(sandbox, seed);
        let id = self.shared.world.lock().add_container(sandbox, config);
        self.shared.touch();
        self.created_events(&id);
        if seed.running {
            self.start_container(&id);
        }
        id
    }

    /// Starts the process of a created container.
    pub fn start_container(&self, id: &str) {
        let mut world = self.shared.world.lock();
        if world.begin_start(id).and_then(|()| world.start(id)).is_ok() {
            drop(world);
            self.shared.started(id);
        }
    }

    /// Ends the process of a container, or the pause process of a sandbox. Returns false if none runs.
    pub fn exit(&self, id: &str, code: i32) -> bool {
        self.shared.exit(id, code, None)
    }

    /// Like [`Self::exit`], with a reason of the runtime, such as `OOMKilled`.
    pub fn exit_because(&self, id: &str, code: i32, reason: &str) -> bool {
        if reason == "OOMKilled" {
            self.shared.bus.containerd(Event::Oom { id: id.to_owned() });
        }
        self.shared.exit(id, code, Some(reason))
    }

    /// Removes a container, or a sandbox with its containers.
    pub fn remove(&self, id: &str) {
        self.shared.remove(id);
    }

    /// Changes what ContainerStatus and lists say of a container, to make what no good runtime says.
    pub fn edit_container(&self, id: &str, edit: impl FnOnce(&mut v1::ContainerStatus)) {
        if let Some(container) = self.shared.world.lock().containers.get_mut(id).map(Arc::make_mut) {
            edit(&mut container.status);
        }
    }

    /// Changes what PodSandboxStatus and lists say of a sandbox.
    pub fn edit_sandbox(&self, id: &str, edit: impl FnOnce(&mut v1::PodSandboxStatus)) {
        if let Some(sandbox) = self.shared.world.lock().sandboxes.get_mut(id).map(Arc::make_mut) {
            edit(&mut sandbox.status);
        }
    }

    /// An image is there. Returns its id.
    pub fn add_image(&self, name: &str, size: u64) -> String {
        self.shared.world.lock().add_image(name, size)
    }

    // What there is.

    /// All sandboxes, oldest first.
    #[must_use]
    pub fn sandboxes(&self) -> Vec<SandboxRecord> {
        let all: Vec<Arc<_>> = self.shared.world.lock().sandboxes.values().cloned().collect();
        let mut all: Vec<_> = all.into_iter().map(Arc::unwrap_or_clone).collect();
        all.sort_by_key(|s| s.status.created_at);
        all
    }

    /// All containers, oldest first.
    #[must_use]
    pub fn containers(&self) -> Vec<ContainerRecord> {
        let all: Vec<Arc<_>> = self.shared.world.lock().containers.values().cloned().collect();
        let mut all: Vec<_> = all.into_iter().map(Arc::unwrap_or_clone).collect();
        all.sort_by_key(|c| c.status.created_at);
        all
    }

    /// Returns all sandboxes and containers in any order, without copies: for checks after every change.
    #[must_use]
    pub fn records(&self) -> (Vec<Arc<SandboxRecord>>, Vec<Arc<ContainerRecord>>) {
        let world = self.shared.world.lock();
        (world.sandboxes.values().cloned().collect(), world.containers.values().cloned().collect())
    }

    /// Returns a container.
    #[must_use]
    pub fn container(&self, id: &str) -> Option<ContainerRecord> {
        self.shared.world.lock().containers.get(id).map(|c| ContainerRecord::clone(c))
    }

    /// Returns the newest instance of a container of a pod.
    #[must_use]
    pub fn newest(&self, pod_uid: &str, container: &str) -> Option<ContainerRecord> {
        self.containers().into_iter().rfind(|c| c.pod_uid() == pod_uid && c.name() == container)
    }

    /// Returns the names of all images.
    #[must_use]
    pub fn images(&self) -> Vec<String> {
        self.shared.world.lock().images.values().flat_map(|i| i.repo_tags.clone()).collect()
    }

    /// Returns the IDs of all images, with a name of each.
    #[must_use]
    pub fn image_ids(&self) -> Vec<(String, String)> {
        let name =
            |i: &v1::Image| i.repo_tags.first().or(i.repo_digests.first()).cloned().unwrap_or_default();
        self.shared.world.lock().images.values().map(|i| (i.id.clone(), name(i))).collect()
    }

    /// Waits until `done` holds for the sandboxes and containers. It is evaluated again only after a change.
    pub async fn wait(&self, mut done: impl FnMut(&Self) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if done(self) || changed.changed().await.is_err() {
                return;
            }
        }
    }

    // Recorded calls.

    /// Returns the last 65,536 calls, oldest first.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.shared.script.calls()
    }

    /// Returns the recorded calls of one method.
    #[must_use]
    pub fn calls_of(&self, method: Method) -> Vec<Call> {
        self.shared.script.calls().into_iter().filter(|c| c.method == method).collect()
    }

    /// Returns the number of calls of `method` since the start.
    #[must_use]
    pub fn count(&self, method: Method) -> u64 {
        self.shared.script.counts().get(&method).copied().unwrap_or(0)
    }

    /// Returns the number of calls of each method since the start.
    #[must_use]
    pub fn counts(&self) -> HashMap<Method, u64> {
        self.shared.script.counts()
    }

    /// Returns the number of calls of `method` in flight, including those that hang.
    #[must_use]
    pub fn in_flight(&self, method: Method) -> usize {
        self.shared.script.in_flight(method)
    }

    /// Waits until the total number of calls of `method` is `count`.
    pub async fn wait_count(&self, method: Method, count: u64) {
        self.shared.script.wait_count(method, count).await;
    }

    /// Drops the recorded calls and their counts.
    pub fn forget_calls(&self) {
        self.shared.script.forget();
    }

    fn sandbox_events(&self, id: &str) {
        self.shared.sandbox_events(id);
    }

    fn created_events(&self, id: &str) {
        self.shared.bus.containerd(Event::Created { id: id.to_owned() });
        self.shared.cri_event(id, v1::ContainerEventType::ContainerCreatedEvent);
    }
}

impl Shared {
    pub(crate) fn sandbox_events(&self, id: &str) {
        self.bus.containerd(Event::Created { id: id.to_owned() });
        self.bus.containerd(Event::Started { id: id.to_owned() });
        self.cri_event(id, v1::ContainerEventType::ContainerCreatedEvent);
        self.cri_event(id, v1::ContainerEventType::ContainerStartedEvent);
    }

    pub(crate) fn remove(&self, id: &str) {
        let all = self.world.lock().remove(id);
        for gone in all {
            self.bus.containerd(Event::Deleted { id: gone.id });
            if let Some(event) = gone.event {
                self.bus.cri(event);
            }
        }
        self.touch();
    }
}
