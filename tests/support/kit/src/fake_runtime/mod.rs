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
mod event_bus;
mod events;
mod faults;
mod images;
mod lists;
mod options;
mod script;
mod serve;
mod shared;
mod starts;
mod world;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_cri_api::v1;
use tokio_util::sync::CancellationToken;

pub use options::{ExecReply, Options, WALL_BASE_UNIX_NS};
pub use script::{Call, Method, Rule, RuleId};
pub use world::{Behaviour, ContainerRecord, ContainerSeed, SandboxRecord, StopReply};

use event_bus::Event;
use shared::Shared;

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
        let shared = Arc::new(Shared::new(options));
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

    /// Changes the status of a container in ContainerStatus and lists, to simulate a faulty runtime.
    pub fn edit_container(&self, id: &str, edit: impl FnOnce(&mut v1::ContainerStatus)) {
        if let Some(container) = self.shared.world.lock().containers.get_mut(id).map(Arc::make_mut) {
            edit(&mut container.status);
        }
    }

    /// Changes the status of a sandbox in PodSandboxStatus and lists.
    pub fn edit_sandbox(&self, id: &str, edit: impl FnOnce(&mut v1::PodSandboxStatus)) {
        if let Some(sandbox) = self.shared.world.lock().sandboxes.get_mut(id).map(Arc::make_mut) {
            edit(&mut sandbox.status);
        }
    }

    /// Stops a sandbox that another agent made below this cgroup.
    pub fn leave_dead(&self, id: &str, cgroup_parent: &str) {
        if let Some(sandbox) = self.shared.world.lock().sandboxes.get_mut(id).map(Arc::make_mut) {
            sandbox.config.linux.get_or_insert_default().cgroup_parent = cgroup_parent.to_owned();
            sandbox.status.state = v1::PodSandboxState::SandboxNotready.into();
        }
        self.shared.touch();
    }

    /// Adds an image. Returns its ID.
    pub fn add_image(&self, name: &str, size: u64) -> String {
        self.shared.world.lock().add_image(name, size)
    }

    /// Sets the mount point of writable layers in ImageFsInfo, which containerd leaves out.
    pub fn separate_layers(&self, mountpoint: &Path) {
        self.shared.world.lock().container_mountpoint = mountpoint.display().to_string();
    }

    /// Sets the size of the writable layers of all containers with this name.
    pub fn set_layer(&self, container: &str, bytes: u64) {
        self.shared.world.lock().layers.insert(container.to_owned(), bytes);
    }

    // State of the runtime.

    /// Returns all sandboxes, oldest first.
    #[must_use]
    pub fn sandboxes(&self) -> Vec<SandboxRecord> {
        let all: Vec<Arc<_>> = self.shared.world.lock().sandboxes.values().cloned().collect();
        let mut all: Vec<_> = all.into_iter().map(Arc::unwrap_or_clone).collect();
        all.sort_by_key(|s| s.status.created_at);
        all
    }

    /// Returns all containers, oldest first.
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

    /// Returns a container as it is now; `None` if it does not exist.
    #[must_use]
    pub fn container(&self, id: &str) -> Option<ContainerRecord> {
        self.shared.world.lock().containers.get(id).map(|c| ContainerRecord::clone(c))
    }

    /// Returns the newest instance of a container of a pod.
    #[must_use]
    pub fn newest(&self, pod_uid: &str, container: &str) -> Option<ContainerRecord> {
        let (_, containers) = self.records();
        let of_pod = containers.into_iter().filter(|c| c.pod_uid() == pod_uid && c.name() == container);
        of_pod.max_by_key(|c| c.status.created_at).map(Arc::unwrap_or_clone)
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
        self.shared.script.calls(|_| true)
    }

    /// Returns the recorded calls of one method.
    #[must_use]
    pub fn calls_of(&self, method: Method) -> Vec<Call> {
        self.shared.script.calls(|call| call.method == method)
    }

    /// Returns the number of recorded calls that a condition is true of.
    #[must_use]
    pub fn count_calls(&self, wanted: impl Fn(&Call) -> bool) -> usize {
        self.shared.script.count_calls(wanted)
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
