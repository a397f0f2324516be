//! The handle of the volume tasks, and the task that compares the states.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use pod_sync_clients::{EventType, Events, NodeCsiDriver, NodeCsiDrivers, NodeVolumes, NodeVolumesState};
use pod_sync_cri_config::mounts::{MountedVolume, MountedVolumes};
use pod_sync_csi::drivers::{CsiNode, CsiNodeDriver, Drivers};
use pod_sync_csi::mount::Mounter;
use pod_sync_csi::paths::Root;
use pod_sync_plugins::{PluginHandler, PluginManager};
use pod_sync_volume_manager::VolumeName;
use pod_sync_volume_manager::actual::{MountState, Outcome};
use pod_sync_volume_manager::reconcile::{Operation, volumes_in_use};
use pod_sync_volume_manager::wait::{LIMIT, TIMED_OUT, not_mounted, still_mounted};
use pod_sync_volumes::is_of_driver;
use pod_sync_volumes::token::{TokenCache, TokenSource};
use quintlet_kit::clock::{self, Clock};
use quintlet_kit::contain::Work;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::claims;
use crate::found;
use crate::objects::VolumeObjects;
use crate::resolve::resolve;
use crate::state::{Done, Job, State};
use crate::work::{self, Step, Tools};

/// Inputs of [`VolumeTasks::start`].
pub struct Inputs {
    /// Root directory of the node agent.
    pub root_dir: std::path::PathBuf,
    /// Name of the node.
    pub node: String,
    /// Objects of the API server, if there is one.
    pub objects: Option<Arc<dyn VolumeObjects>>,
    /// Service account tokens for drivers.
    pub tokens: Option<Arc<dyn TokenSource>>,
    /// Socket of status-reporter, which writes volumes in use and drivers to the Node and CSINode objects.
    pub status_reporter: std::path::PathBuf,
    /// The Node object, as it changes.
    pub nodes: watch::Receiver<Option<Arc<Node>>>,
    /// Events of pods.
    pub events: Events,
    /// Time.
    pub clock: Clock,
}

impl std::fmt::Debug for Inputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inputs").field("root_dir", &self.root_dir).finish_non_exhaustive()
    }
}

/// The error of a pod whose volumes are not mounted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct NotReady {
    /// The kubelet's text.
    pub text: String,
    /// Names in the pod.
    pub unmounted: Vec<String>,
}

/// A volume of a pod, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeView {
    /// UID of the pod.
    pub pod: PodUid,
    /// Name in the pod; empty if the pod no longer needs the volume.
    pub name: String,
    /// Name of the PersistentVolume, or of the inline volume.
    pub spec_name: String,
    /// Unique name.
    pub volume: String,
    /// Whether the pod has the volume: `None` for no.
    pub state: Option<MountState>,
    /// Step of the operation in flight, and since when.
    pub step: Option<(Step, Duration)>,
    /// Last error and its time, until an operation succeeds.
    pub error: Option<(String, Timestamp)>,
}

struct Shared {
    state: Mutex<State>,
    /// Counts changes of the state. Waiters and the task follow it.
    changed: watch::Sender<u64>,
    node_volumes: Arc<NodeVolumes>,
    tools: Tools,
    drivers: Arc<Drivers>,
    events: Events,
}

/// The handle of the volume tasks. Clones share them.
#[derive(Clone)]
pub struct VolumeTasks(Arc<Shared>);

impl std::fmt::Debug for VolumeTasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumeTasks").finish_non_exhaustive()
    }
}

impl VolumeTasks {
    /// Reads the volumes that are mounted, and starts the tasks `plugin manager`, `node volumes`, `attachments` and `volumes`.
    /// All end with `stop`; nothing is unmounted then.
    ///
    /// # Errors
    /// Fails if a directory cannot be read.
    pub async fn start(inputs: Inputs, stop: CancellationToken) -> std::io::Result<Self> {
        let root = Root::new(&inputs.root_dir);
        let of = root.clone();
        let disk = task::blocking(move || found::read(&of)).await?;
        let mut state = State::default();
        state.node.controller_attaches = true;
        state.found(disk);
        if inputs.objects.is_none() {
            // Nothing is attached without a controller.
            state.actual.attachments_known(&[]);
        }
        let drivers = Arc::new(Drivers::default());
        let handler = Arc::clone(&drivers) as Arc<dyn PluginHandler>;
        let handlers = HashMap::from([(pod_sync_csi::PLUGIN_TYPE.to_owned(), handler)]);
        // The manager's task ends with `stop`.
        drop(PluginManager::start(root.plugins_registry(), handlers, stop.clone()));
        let tools = Tools {
            mounter: Mounter::new(root.clone(), inputs.node.clone(), Arc::clone(&drivers)),
            root,
            node: inputs.node,
            objects: inputs.objects,
            tokens: inputs.tokens,
            token_cache: TokenCache::default(),
            clock: inputs.clock,
        };
        let node_volumes = Arc::new(NodeVolumes::new(inputs.status_reporter));
        drop(task::spawn("node volumes", Arc::clone(&node_volumes).run(stop.clone())));
        let observe = Arc::clone(&node_volumes).follow_node(inputs.nodes, stop.clone());
        drop(task::spawn("attachments", observe));
        let tasks = Self(Arc::new(Shared {
            state: Mutex::new(state),
            changed: watch::Sender::new(0),
            node_volumes: Arc::clone(&node_volumes),
            tools,
            drivers,
            events: inputs.events,
        }));
        drop(task::spawn("volumes", Arc::clone(&tasks.0).run(stop)));
        Ok(tasks)
    }

    /// Reads the objects of a pod's volumes, and makes the volumes desired, unless `cancel` is cancelled before. Does not wait for
    /// their mounts. A pod without such volumes costs nothing.
    ///
    /// Cancellation safety: a declaration that is dropped changes nothing.
    pub async fn declare(&self, pod: &Arc<Pod>, uid: &PodUid, cancel: &CancellationToken) {
        let Some(objects) = self.0.tools.objects.as_deref() else { return };
        if claims::provided(pod).is_empty() {
            // A directory without metadata may be left of a pod that never had a volume.
            if self.0.state.lock().desired.is_incomplete(uid) {
                self.0.change(|state| state.desired.set(uid, BTreeMap::new(), []));
            }
            return;
        }
        let open = self.0.state.lock().open(uid);
        // A read that is dropped changes nothing.
        let resolution = tokio::select! {
            resolution = resolve(objects, pod, uid) => resolution,
            () = cancel.cancelled() => return,
        };
        self.0.change(|state| {
            // The errors of an earlier declaration.
            drop(state.desired.take_errors(uid));
            state.declare(uid, resolution, &open, &self.0.tools.root);
        });
    }

    /// Declares a pod at rest again, in a task of its own since the API server may be slow: if `due` says that its sync is due, if
    /// it was not declared since the start, or if its volumes are not known.
    pub fn refresh(&self, pod: &Arc<Pod>, uid: &PodUid, due: bool) {
        let has_volumes = pods::spec(pod).volumes.iter().flatten().any(is_of_driver);
        let state = self.0.state.lock();
        let is_needed = state.desired.is_incomplete(uid) || has_volumes && (due || !state.is_open(uid));
        drop(state);
        if is_needed {
            let (tasks, pod, uid) = (self.clone(), Arc::clone(pod), uid.clone());
            let declare = async move { tasks.declare(&pod, &uid, &CancellationToken::new()).await };
            drop(task::spawn_contained("volume declaration", None, declare));
        }
    }

    /// Waits until the volumes of a declared pod are mounted, at most 2m3s and until `cancel` is cancelled
    /// (`WaitForAttachAndMount`). Returns them by their names in the pod. `show` receives the names of those that are not mounted,
    /// and the call in flight or the last error.
    ///
    /// # Errors
    /// Fails if a volume could not be resolved, which is an event of the pod, too, or after the limit.
    pub async fn wait(
        &self,
        pod: &Pod,
        uid: &PodUid,
        cancel: &CancellationToken,
        mut show: impl FnMut(Vec<String>, Option<String>),
    ) -> Result<MountedVolumes, NotReady> {
        let expected: Vec<String> = claims::provided(pod).iter().map(|volume| volume.name.clone()).collect();
        let limit = clock::deadline_after(Instant::now(), LIMIT);
        let mut changed = self.0.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let missing = {
                let mut state = self.0.state.lock();
                let Some(missing) = not_mounted(&state.desired, &state.actual, uid, &expected) else {
                    return Ok(mounted_volumes(&state, &self.0.tools.root, uid));
                };
                let errors = state.desired.take_errors(uid);
                if !errors.is_empty() && !cancel.is_cancelled() {
                    let text = missing.text(&errors.join("; "));
                    let event = format!("Unable to attach or mount volumes: {text}");
                    self.0.events.pod(pod, EventType::Warning, "FailedMount", &event, "");
                    return Err(NotReady { text, unmounted: missing.unmounted });
                }
                let progress = state.progress(uid);
                drop(state);
                show(missing.unmounted.clone(), progress);
                missing
            };
            // The sender lives as long as the handle, and the mounts go on without the wait.
            let has_ended = tokio::select! {
                changed = tokio::time::timeout_at(limit, changed.changed()) => changed.is_err(),
                () = cancel.cancelled() => true,
            };
            if has_ended {
                let text = missing.text(TIMED_OUT);
                return Err(NotReady { text, unmounted: missing.unmounted });
            }
        }
    }

    /// Makes the volumes of a pod undesired, and waits until they are unmounted and no operation for the pod is in flight, at most
    /// 2m3s (`WaitForUnmount`). The containers of the pod have stopped, and the mounts of its subpaths are gone.
    ///
    /// # Errors
    /// Fails after the limit, with the last error of an unmount. The unmounts go on, and the call can be repeated.
    pub async fn unmount(&self, uid: &PodUid) -> Result<(), String> {
        self.release(uid);
        let limit = clock::deadline_after(Instant::now(), LIMIT);
        let mut changed = self.0.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if !self.may_have_mounts(uid) {
                self.0.tools.token_cache.remove_pod(uid.as_str());
                return Ok(());
            }
            if tokio::time::timeout_at(limit, changed.changed()).await.is_err() {
                let state = self.0.state.lock();
                let last = state.errors.iter().find(|(key, _)| key.pod.as_ref() == Some(uid));
                let cause = last.map_or(TIMED_OUT, |(_, (error, _))| error.as_str());
                let text = still_mounted(&state.actual, uid, cause);
                return Err(text.unwrap_or_else(|| format!("volumes may still be mounted: {cause}")));
            }
        }
    }

    /// Makes the volumes of a pod undesired, without waiting.
    pub fn release(&self, uid: &PodUid) {
        self.0.change(|state| state.release(uid));
    }

    /// Returns whether a pod has volumes, certainly or possibly.
    #[must_use]
    pub fn may_have_mounts(&self, uid: &PodUid) -> bool {
        self.0.state.lock().may_have_mounts(uid)
    }

    /// All sources of pods have delivered: devices that no pod has may be unmounted.
    pub fn sources_ready(&self) {
        if !self.0.state.lock().node.pods_known {
            self.0.change(|state| state.node.pods_known = true);
        }
    }

    /// Returns what drivers contribute to the CSINode and Node objects, as it changes.
    #[must_use]
    pub fn csi_node(&self) -> watch::Receiver<CsiNode> {
        self.0.drivers.csi_node()
    }

    /// Returns a mounter for reads of volumes, such as their statistics.
    #[must_use]
    pub fn mounter(&self) -> Mounter {
        self.0.tools.mounter.clone()
    }

    /// Returns the supplemental groups that the PersistentVolumes of a pod have.
    #[must_use]
    pub fn groups(&self, uid: &PodUid) -> BTreeSet<i64> {
        self.0.state.lock().volumes_of(uid).filter_map(|volume| volume.provided.group).collect()
    }

    /// Returns the volumes of all pods, for display, sorted by pod.
    #[must_use]
    pub fn views(&self) -> Vec<VolumeView> {
        let now = Instant::now();
        let state = self.0.state.lock();
        let mut views: Vec<VolumeView> = Vec::new();
        let view = |pod: &PodUid, name: &str, spec_name: &str, volume: &VolumeName| {
            let is_it = |key: &pod_sync_volume_manager::operations::Key| {
                key.volume == *volume && key.pod.as_ref().is_none_or(|of| of == pod)
            };
            let running = state.running.iter().find(|(key, _)| is_it(key)).map(|(_, running)| running);
            VolumeView {
                pod: pod.clone(),
                name: name.to_owned(),
                spec_name: spec_name.to_owned(),
                volume: volume.to_string(),
                state: state.actual.mount(volume, pod).map(|mount| mount.state),
                step: running.and_then(|r| Some((r.step?, now.saturating_duration_since(r.since)))),
                error: state.errors.iter().find(|(key, _)| is_it(key)).map(|(_, error)| error.clone()),
            }
        };
        for (pod, volume) in state.desired.all() {
            let mut of_pod = state.desired.volumes_of(pod);
            let name = of_pod.find(|(_, other)| *other == volume).map_or("", |(name, _)| name);
            views.push(view(pod, name, &volume.spec_name, &volume.name));
        }
        for (name, volume) in state.actual.volumes() {
            for (pod, mount) in &volume.pods {
                if !state.desired.has(pod, name) {
                    views.push(view(pod, "", &mount.spec_name, name));
                }
            }
        }
        views.sort_by(|a, b| (&a.pod, &a.name, &a.volume).cmp(&(&b.pod, &b.name, &b.volume)));
        views
    }
}

/// The mounts of a pod whose volumes are mounted.
fn mounted_volumes(state: &State, root: &Root, uid: &PodUid) -> MountedVolumes {
    let mut mounted = MountedVolumes::new();
    for (name, desired) in state.desired.volumes_of(uid) {
        let Some(volume) = state.volume(uid, &desired.spec_name) else { continue };
        let read_only = volume.provided.csi.read_only;
        let path = match volume.provided.is_block {
            true => root.pod_device(uid.as_str(), &desired.spec_name),
            false => root.mount(uid.as_str(), &desired.spec_name),
        };
        // The paths of a volume that is mounted are valid.
        let Ok(host_path) = path else { continue };
        mounted.insert(name.to_owned(), MountedVolume { host_path, read_only, relabel: !read_only });
    }
    mounted
}

impl Shared {
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state.lock());
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
        changed
    }

    async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut changed = self.changed.subscribe();
        let mut registered = self.drivers.csi_node();
        let mut known: BTreeSet<String> = BTreeSet::new();
        let mut removed: BTreeSet<String> = BTreeSet::new();
        let mut node = self.node_volumes.state();
        loop {
            changed.borrow_and_update();
            self.read_node(&node.borrow_and_update());
            let csi_node = registered.borrow_and_update().clone();
            let drivers: BTreeSet<String> = csi_node.drivers.keys().cloned().collect();
            for driver in drivers.difference(&known) {
                self.state.lock().driver_registered(driver);
            }
            removed.extend(known.difference(&drivers).cloned());
            removed.retain(|driver| !drivers.contains(driver));
            known = drivers;
            self.node_volumes.set_drivers(reported(csi_node, &removed));
            let next = self.reconcile();
            let due = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            // Each arm only says that something has changed, which the next pass reads.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = changed.changed() => {}
                _ = registered.changed() => {}
                _ = node.changed() => {}
                () = due => {}
            }
        }
    }

    fn read_node(&self, node: &NodeVolumesState) {
        let (in_use, attached) = match node {
            NodeVolumesState::Unknown => return,
            NodeVolumesState::NoApi => (BTreeSet::new(), BTreeSet::new()),
            NodeVolumesState::Known { in_use, attached } => {
                let in_use = in_use.iter().map(|name| parsed(name)).collect();
                (in_use, attached.keys().map(|name| parsed(name)).collect())
            }
        };
        let mut state = self.state.lock();
        if state.actual.needs_attachments() {
            let list: Vec<VolumeName> = attached.iter().cloned().collect();
            state.actual.attachments_known(&list);
        }
        state.node.attached = attached;
        state.node.reported_in_use = in_use;
    }

    fn reconcile(self: &Arc<Self>) -> Option<Instant> {
        let mut state = self.state.lock();
        let (jobs, next) = state.plan(Instant::now());
        let in_use = state.node.pods_known.then(|| volumes_in_use(&state.desired, &state.actual));
        drop(state);
        if let Some(in_use) = in_use {
            self.node_volumes.set_in_use(in_use.iter().map(ToString::to_string).collect());
        }
        for (operation, job) in jobs {
            drop(task::spawn("volume operation", Arc::clone(self).execute(operation, job)));
        }
        next
    }

    /// Executes an operation. A panic fails the operation.
    async fn execute(self: Arc<Self>, operation: Operation, job: Job) {
        let name = |pod: &Pod| {
            let text = |value: &Option<String>| value.clone().unwrap_or_default();
            format!("{}/{}", text(&pod.metadata.namespace), text(&pod.metadata.name))
        };
        let work = match &job {
            Job::Mount { pod, volume, .. } => Some(Work::new(pod.to_string(), name(&volume.pod))),
            Job::Unmount { pod, .. } => Some(Work::new(pod.to_string(), String::new())),
            Job::UnmountDevice { .. } => None,
        };
        let (of, key) = (Arc::clone(&self), operation.key());
        let done = task::spawn_contained("volume operation call", work, async move {
            let at = |step: Step| {
                let mut state = of.state.lock();
                if let Some(running) = state.running.get_mut(&key) {
                    running.step = Some(step);
                    running.since = Instant::now();
                }
                drop(state);
                of.changed.send_modify(|count| *count = count.wrapping_add(1));
            };
            of.run_job(job, &at).await
        });
        let done = done.await;
        let (now, wall) = (Instant::now(), self.tools.clock.wall());
        self.change(|state| match done {
            Ok(Ok(done)) => state.done(&operation, done, now, wall),
            Ok(Err(panic)) => state.panicked(&operation, &panic.message, now, wall),
            // The process ends.
            Err(error) => state.panicked(&operation, &error.to_string(), now, wall),
        });
    }

    async fn run_job(&self, job: Job, at: &(dyn Fn(Step) + Send + Sync)) -> Done {
        match job {
            Job::Mount { pod, volume, is_taken: true, .. } => {
                let text =
                    "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
                let failure = volume.failure("SetUp", text, Outcome::Transient);
                self.report(&pod, &volume.pod, &failure);
                Done::Mount(failure.into())
            }
            Job::Mount { pod, volume, stage, mounted_before, is_taken: false, released } => {
                // Boxed: the futures of gRPC calls are large.
                let mount = work::mount(&self.tools, &volume, &pod, stage, mounted_before, &released, at);
                let mounted = Box::pin(mount).await;
                if let Err(failure) = &mounted.result {
                    self.report(&pod, &volume.pod, failure);
                }
                Done::Mount(mounted)
            }
            Job::Unmount { pod, form, spec_name } => {
                at(Step::Unpublish);
                Done::Unmount(work::unmount(&self.tools, &form, &pod, &spec_name).await)
            }
            Job::UnmountDevice { form } => {
                at(Step::Unstage);
                Done::UnmountDevice(work::unmount_device(&self.tools, &form).await)
            }
        }
    }

    fn report(&self, uid: &PodUid, pod: &Pod, failure: &work::Failure) {
        // A pod that was released no longer needs the volume.
        if self.state.lock().is_open(uid) && !pods::is_mirror(pod) {
            self.events.pod(pod, EventType::Warning, failure.reason, &failure.message, "");
        }
    }
}

/// The drivers for the CSINode and Node objects.
fn reported(node: CsiNode, removed: &BTreeSet<String>) -> NodeCsiDrivers {
    let of = |(name, driver): (String, CsiNodeDriver)| {
        let CsiNodeDriver { node_id, topology, allocatable } = driver;
        (name, NodeCsiDriver { node_id, topology, allocatable })
    };
    NodeCsiDrivers { registered: node.drivers.into_iter().map(of).collect(), removed: removed.clone() }
}

/// A unique name as the API server has it.
fn parsed(name: &str) -> VolumeName {
    match name.strip_prefix("kubernetes.io/csi/") {
        Some(rest) => VolumeName::shared(pod_sync_csi::PLUGIN, rest),
        None => VolumeName::shared("", name),
    }
}
