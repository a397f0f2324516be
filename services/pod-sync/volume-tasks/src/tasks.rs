//! The handle of the volume tasks, and the task that compares the states.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use pod_sync_clients::{EventType, Events, NodeCsiDriver, NodeCsiDrivers, NodeVolumes, NodeVolumesState};
use pod_sync_cri_config::mounts::{MountedVolume, MountedVolumes};
use pod_sync_csi::drivers::{CsiNode, CsiNodeDriver, Drivers};
use pod_sync_csi::mount::Mounter;
use pod_sync_csi::paths::Root;
use pod_sync_in_tree::commands::Commands;
use pod_sync_in_tree::host::Host;
use pod_sync_in_tree::volume::Plugin;
use pod_sync_plugins::{PluginHandler, PluginManager};
use pod_sync_volume_manager::VolumeName;
use pod_sync_volume_manager::actual::{MountState, Outcome};
use pod_sync_volume_manager::desired::{DesiredVolume, Reach};
use pod_sync_volume_manager::operations::FIRST_WAIT;
use pod_sync_volume_manager::reconcile::{Operation, volumes_in_use};
use pod_sync_volume_manager::wait::{LIMIT, NotMounted, TIMED_OUT, not_mounted};
use pod_sync_volumes::token::{TokenCache, TokenSource};
use pod_sync_volumes::{Volumes, is_direct, ownership, referenced};
use quintlet_kit::clock::{self, Clock};
use quintlet_kit::contain::Work;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::claims::{self, Source};
use crate::expansion::{self, Expanded, NotExpanded};
use crate::found;
use crate::limits::LimitUpdates;
use crate::metrics::Metrics;
use crate::mount_in_tree::{self, ALREADY_MOUNTED};
use crate::objects::VolumeObjects;
use crate::resolve::{Resolved, resolve};
use crate::selinux::FileLabel;
use crate::state::{Done, Job, State, StillMounted};
use crate::tools::Tools;
use crate::views::{self, VolumeCounts, VolumeView};
use crate::work::{self, Attempt, Step, Tell};

/// Reason why this node attaches no volumes (`pkg/volume/csi: csiAttacher.Attach`).
const NO_ATTACHER: &str = "attaching volumes from the kubelet is not supported";

/// Inputs of [`VolumeTasks::start`].
pub struct Inputs {
    /// Root directory of the node agent.
    pub root_dir: std::path::PathBuf,
    /// Sets up and removes direct volumes.
    pub volumes: Volumes,
    /// Name of the node.
    pub node: String,
    /// Objects of the API server, if there is one.
    pub objects: Option<Arc<dyn VolumeObjects>>,
    /// Service account tokens for drivers.
    pub tokens: Option<Arc<dyn TokenSource>>,
    /// Socket of status-reporter, which writes volumes in use and drivers to the Node and CSINode objects.
    pub status_reporter: std::path::PathBuf,
    /// A controller attaches volumes (`enableControllerAttachDetach`). This node does not attach volumes, so that without a
    /// controller only volumes that need no attachment are mounted.
    pub controller_attaches: bool,
    /// The machine uses SELinux.
    pub selinux: bool,
    /// mount(8), the tools of file systems, and iscsiadm.
    pub commands: Arc<dyn Commands>,
    /// Directories of devices.
    pub host: Host,
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
    /// The node has no room for another volume of a driver, so the pod is to be rejected.
    pub limit_exceeded: bool,
    /// The last error of a direct volume.
    pub error: Option<String>,
    /// Time until the set-up of a direct volume is due; `None` if the time is the caller's choice.
    pub retry_after: Option<Duration>,
}

impl NotReady {
    fn of(missing: NotMounted, cause: &str) -> Self {
        let text = missing.text(cause);
        let unmounted = missing.unmounted;
        Self { text, unmounted, limit_exceeded: false, error: None, retry_after: None }
    }
}

/// A mounted volume with a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedFileSystem {
    /// Name in the pod.
    pub name: String,
    /// Unique name.
    pub volume: VolumeName,
    /// Mount point.
    pub path: std::path::PathBuf,
    /// A CSI driver mounted the volume.
    pub has_driver: bool,
}

pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    /// Counts changes of the state. Waiters and the task follow it.
    changed: watch::Sender<u64>,
    node_volumes: Arc<NodeVolumes>,
    pub(crate) tools: Tools,
    pub(crate) volumes: Volumes,
    drivers: Arc<Drivers>,
    limits: Arc<LimitUpdates>,
    events: Events,
}

/// The handle of the volume tasks. Clones share them.
#[derive(Clone)]
pub struct VolumeTasks(pub(crate) Arc<Shared>);

impl std::fmt::Debug for VolumeTasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumeTasks").finish_non_exhaustive()
    }
}

impl VolumeTasks {
    /// Reads the volumes that are mounted, and starts the tasks `plugin manager`, `driver limits`, `node volumes`, `attachments`
    /// and `volumes`.
    /// All end with `stop`; nothing is unmounted then.
    ///
    /// # Errors
    /// Fails if a directory cannot be read.
    pub async fn start(inputs: Inputs, stop: CancellationToken) -> std::io::Result<Self> {
        let root = Root::new(&inputs.root_dir);
        let (of, root_dir) = (root.clone(), inputs.root_dir.clone());
        let disk = task::blocking(move || {
            let mut disk = found::read(&of)?;
            found::read_in_tree(&root_dir, &mut disk)?;
            disk.direct = pod_sync_volumes::found::read(&root_dir)?;
            Ok::<_, std::io::Error>(disk)
        });
        let disk = disk.await?;
        let metrics = Box::new(Metrics::default());
        metrics.reconstructed(disk.volumes.len().saturating_add(disk.direct.len()), disk.unreadable.len());
        let mut state = State::default();
        state.node.controller_attaches = inputs.controller_attaches;
        state.found(disk);
        if inputs.objects.is_none() {
            // Nothing is attached without a controller.
            state.actual.attachments_known(&[]);
        }
        let drivers = Arc::new(Drivers::default());
        let limits = Arc::new(LimitUpdates::new(Arc::clone(&drivers)));
        if let Some(objects) = inputs.objects.clone() {
            drop(task::spawn("driver limits", Arc::clone(&limits).run(objects, stop.clone())));
        }
        let handler = Arc::clone(&drivers) as Arc<dyn PluginHandler>;
        let handlers = HashMap::from([(pod_sync_csi::PLUGIN_TYPE.to_owned(), handler)]);
        // The manager's task ends with `stop`.
        drop(PluginManager::start(root.plugins_registry(), handlers, stop.clone()));
        let tools = Tools {
            in_tree: pod_sync_in_tree::mount::Mounter::with_commands(&inputs.root_dir, inputs.commands)
                .on_host(inputs.host),
            controller_attaches: inputs.controller_attaches && inputs.objects.is_some(),
            mounter: Mounter::new(root.clone(), inputs.node.clone(), Arc::clone(&drivers)),
            root,
            node: inputs.node,
            objects: inputs.objects,
            tokens: inputs.tokens,
            token_cache: TokenCache::default(),
            clock: inputs.clock,
            metrics,
            events: inputs.events.clone(),
            nodes: inputs.nodes.clone(),
            file_label: match inputs.selinux {
                true => task::blocking(|| FileLabel::read(Path::new("/"))).await,
                false => None,
            },
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
            volumes: inputs.volumes,
            drivers,
            limits,
            events: inputs.events,
        }));
        drop(task::spawn("volumes", Arc::clone(&tasks.0).run(stop)));
        Ok(tasks)
    }

    /// Reads the objects of a pod's volumes that tasks mount, and makes the volumes desired, unless `cancel` is cancelled before. Does
    /// not wait for their mounts. A pod without such volumes costs nothing.
    ///
    /// Cancellation safety: a declaration that is dropped changes nothing.
    pub async fn declare(&self, pod: &Arc<Pod>, uid: &PodUid, cancel: &CancellationToken) {
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
            resolution = resolve(&self.0.tools, pod, uid) => resolution,
            () = cancel.cancelled() => return,
        };
        for volume in resolution.volumes.values() {
            if let Some(driver) = volume.provided.source.driver() {
                self.0.limits.set_period(driver, volume.rules.limit_period);
            }
        }
        let tools = &self.0.tools;
        let findings = self.0.change(|state| {
            // The errors of an earlier declaration.
            drop(state.desired.take_errors(uid));
            state.declare(uid, resolution, &open, &tools.root, tools.clock.wall())
        });
        for (finding, provided) in findings {
            tools.metrics.found(finding, &provided);
        }
    }

    /// Declares a pod at rest again, in a task of its own since the API server may be slow: if `due` says that its sync is due, if
    /// it was not declared since the start, or if its volumes are not known.
    pub fn refresh(&self, pod: &Arc<Pod>, uid: &PodUid, due: bool) {
        let has_volumes = pods::spec(pod).volumes.iter().flatten().any(|volume| !is_direct(volume));
        let state = self.0.state.lock();
        let is_needed = state.desired.is_incomplete(uid) || has_volumes && (due || !state.is_open(uid));
        drop(state);
        if is_needed {
            let (tasks, pod, uid) = (self.clone(), Arc::clone(pod), uid.clone());
            let declare = async move { tasks.declare(&pod, &uid, &CancellationToken::new()).await };
            drop(task::spawn_contained("volume declaration", None, declare));
        }
    }

    /// Waits until the volumes of a declared pod whose direct volumes were set up are mounted, at most 2m3s and until `cancel` is
    /// cancelled (`WaitForAttachAndMount`). Returns them by their names in the pod. `show` receives the names of those that are not
    /// mounted, and the call in flight or the last error.
    ///
    /// # Errors
    /// Fails at once if a volume could not be resolved, which is an event of the pod, too, or if a direct volume is not set up. Else
    /// fails after the limit.
    pub async fn wait(
        &self,
        pod: &Pod,
        uid: &PodUid,
        cancel: &CancellationToken,
        mut show: impl FnMut(Vec<String>, Option<String>),
    ) -> Result<MountedVolumes, NotReady> {
        let expected: Vec<String> = referenced(pod).iter().map(|volume| volume.name.clone()).collect();
        let limit = clock::deadline_after(Instant::now(), LIMIT);
        let mut changed = self.0.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let (missing, errors, progress, direct) = {
                let mut state = self.0.state.lock();
                let Some(missing) = not_mounted(&state.desired, &state.actual, uid, &expected) else {
                    let mut mounted = mounted_volumes(&state, &self.0.tools, uid);
                    drop(state);
                    mounted.extend(self.0.volumes.mounted(pod, uid));
                    return Ok(mounted);
                };
                let errors = state.desired.take_errors(uid);
                // Without a failed one, an operation of a worker before is in progress.
                let wait = || state.direct_wait(uid, Instant::now()).unwrap_or(FIRST_WAIT);
                let direct = state.missing_direct(uid).map(|error| (error, wait()));
                (missing, errors, state.progress(uid), direct)
            };
            if !errors.is_empty() && !cancel.is_cancelled() {
                let not_ready = self.not_ready(uid, missing, &errors.join("; ")).await;
                if !not_ready.limit_exceeded {
                    let event = format!("Unable to attach or mount volumes: {}", not_ready.text);
                    self.0.events.pod(pod, EventType::Warning, "FailedMount", &event, "");
                }
                return Err(not_ready);
            }
            if let Some((error, wait)) = direct {
                let not_ready = NotReady::of(missing, TIMED_OUT);
                return Err(NotReady { error, retry_after: Some(wait), ..not_ready });
            }
            show(missing.unmounted.clone(), progress);
            // The sender lives as long as the handle, and the mounts go on without the wait.
            let has_ended = tokio::select! {
                changed = tokio::time::timeout_at(limit, changed.changed()) => changed.is_err(),
                () = cancel.cancelled() => true,
            };
            if cancel.is_cancelled() {
                return Err(NotReady::of(missing, TIMED_OUT));
            }
            if has_ended {
                return Err(self.not_ready(uid, missing, TIMED_OUT).await);
            }
        }
    }

    /// Returns the error of a pod whose volumes are not mounted. Looks up whether the node has room for those that are not attached.
    async fn not_ready(&self, uid: &PodUid, missing: NotMounted, cause: &str) -> NotReady {
        let unattached: Vec<Arc<Resolved>> = {
            let state = self.0.state.lock();
            let is_unattached = |volume: &&Arc<Resolved>| {
                volume.desired.reach == Reach::Attachable
                    && state.actual.volume(&volume.desired.name).is_none()
            };
            state.volumes_of(uid).filter(is_unattached).cloned().collect()
        };
        let not_ready = NotReady::of(missing, cause);
        for volume in unattached {
            if work::is_over_limit(&self.0.tools, &volume).await {
                let driver = volume.provided.source.driver().unwrap_or_default();
                if let Err(error) = self.0.drivers.refresh(driver).await {
                    tracing::info!(driver, error = error.text(), "failed to update the limit of a driver");
                }
                let text = format!(
                    "Node has reached its volume attachment limit, rejecting pod. {}",
                    not_ready.text
                );
                return NotReady { text, limit_exceeded: true, ..not_ready };
            }
        }
        not_ready
    }

    /// Removes the subpaths and the direct volumes of a pod whose containers have stopped. Then makes its other volumes undesired, and
    /// waits until they are unmounted and no operation for the pod is in flight, at most 2m3s (`WaitForUnmount`).
    ///
    /// # Errors
    /// Fails at once if a subpath or a direct volume cannot be removed. Else fails after the limit, with the last error of an unmount.
    /// The unmounts go on, and the call can be repeated.
    pub async fn unmount(&self, uid: &PodUid) -> Result<(), StillMounted> {
        self.remove_direct(uid).await?;
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
                return Err(self.0.state.lock().still_mounted(uid));
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

    /// Returns the mounted volumes of a pod that tasks mount, without those that have no file system of their own: block volumes and
    /// paths of the node.
    #[must_use]
    pub fn file_systems(&self, uid: &PodUid) -> Vec<MountedFileSystem> {
        let state = self.0.state.lock();
        let of = |(name, desired): (&str, &DesiredVolume)| {
            let mount = state.actual.mount(&desired.name, uid)?;
            let provided = &state.volume(uid, &desired.spec_name)?.provided;
            if mount.state != MountState::Mounted || provided.is_block {
                return None;
            }
            let (path, has_driver) = match &provided.source {
                Source::Csi(_) => (self.0.tools.root.mount(uid.as_str(), &desired.spec_name).ok()?, true),
                // The kubelet has no statistics of fc volumes.
                Source::InTree(volume) if matches!(volume.plugin(), Plugin::HostPath | Plugin::Fc) => {
                    return None;
                }
                Source::InTree(volume) => (self.0.tools.in_tree.paths().host_path(volume, uid).ok()?, false),
            };
            Some(MountedFileSystem { name: name.to_owned(), volume: desired.name.clone(), path, has_driver })
        };
        state.desired.by_tasks_of(uid).filter_map(of).collect()
    }

    /// Returns the supplemental groups that the PersistentVolumes of a pod add.
    #[must_use]
    pub fn groups(&self, pod: &Pod, uid: &PodUid) -> Vec<i64> {
        let groups = self.0.state.lock().volumes_of(uid).filter_map(|volume| volume.provided.group).collect();
        claims::extra_groups(pod, groups)
    }

    /// Returns the numbers of volumes of pods.
    #[must_use]
    pub fn counts(&self) -> VolumeCounts {
        VolumeCounts::of(&self.0.state.lock())
    }

    /// Returns the volumes of all pods or of one, for display, sorted by pod.
    #[must_use]
    pub fn views(&self, of: Option<&PodUid>) -> Vec<VolumeView> {
        views::of(&self.0.state.lock(), of, Instant::now())
    }
}

/// The mounts of a pod whose volumes are mounted.
fn mounted_volumes(state: &State, tools: &Tools, uid: &PodUid) -> MountedVolumes {
    let root = &tools.root;
    let mut mounted = MountedVolumes::new();
    for (name, desired) in state.desired.volumes_of(uid) {
        let Some(volume) = state.volume(uid, &desired.spec_name) else { continue };
        let read_only = volume.provided.source.is_read_only();
        // Another PersistentVolume of the pod with the same handle may be the one that is mounted.
        let Some(spec_name) = state.actual.mount(&desired.name, uid).map(|mount| &mount.spec_name) else {
            continue;
        };
        let Some(volume) = state.volume(uid, spec_name) else { continue };
        // A volume that is mounted with a label needs no other one.
        if let Source::InTree(volume) = &volume.provided.source {
            // The paths of a volume that is mounted are valid.
            let Ok(host_path) = tools.in_tree.paths().host_path(volume, uid) else { continue };
            let relabel = volume.relabel() && desired.label.is_none();
            mounted.insert(name.to_owned(), MountedVolume { host_path, read_only, relabel });
            continue;
        }
        let relabel = !read_only && desired.label.is_none();
        let path = match volume.provided.is_block {
            true => root.pod_device(uid.as_str(), spec_name),
            false => root.mount(uid.as_str(), spec_name),
        };
        let Ok(host_path) = path else { continue };
        mounted.insert(name.to_owned(), MountedVolume { host_path, read_only, relabel });
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
            Job::Mount { pod, volume, .. } | Job::Expand { pod, volume, .. } => {
                Some(Work::new(pod.to_string(), name(&volume.pod)))
            }
            Job::Unmount { pod, .. } => Some(Work::new(pod.to_string(), String::new())),
            Job::UnmountDevice { .. } | Job::Attach { .. } | Job::Detach => None,
        };
        let (plugin, is_forced) = {
            let state = self.state.lock();
            (state.plugin(&operation.key().volume).cloned(), state.is_forced(&operation))
        };
        let (name_in_metrics, began) = (job.operation_name(), Instant::now());
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
        let is_ok = matches!(&done, Ok(Ok(done)) if done.is_ok());
        let took = now.saturating_duration_since(began);
        self.tools.metrics.completed(plugin.as_ref(), name_in_metrics, is_ok, took);
        if is_forced {
            self.tools.metrics.force_cleaned(is_ok);
        }
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
            Job::Mount { pod, volume, stage, mounted_before, failed_before, is_taken: false, released } => {
                let slow = |message: String| {
                    let (reason, outcome) = (ownership::IN_PROGRESS, Outcome::Finished);
                    self.report(&pod, &volume.pod, &work::Failure { reason, message, outcome });
                };
                let tell = Tell { at, slow: &slow };
                let mounted = match (work::check_node(&self.tools, &volume), &volume.provided.source) {
                    (Err(failure), _) => failure.into(),
                    (Ok(()), Source::Csi(csi)) => {
                        let tools = &self.tools;
                        let attempt = Attempt { stage, mounted_before, failed_before };
                        let mount = work::mount(tools, &volume, csi, &pod, attempt, tell);
                        // Boxed: the futures of gRPC calls are large.
                        Box::pin(mount).await
                    }
                    (Ok(()), Source::InTree(of)) => {
                        let attempt = Attempt { stage, mounted_before, failed_before };
                        let mount =
                            mount_in_tree::mount(&self.tools, &volume, of, &pod, attempt, tell, &released);
                        let (mounted, warning) = Box::pin(mount).await;
                        if let Some(message) = warning {
                            let (reason, outcome) = (ALREADY_MOUNTED, Outcome::Finished);
                            self.report(&pod, &volume.pod, &work::Failure { reason, message, outcome });
                        }
                        mounted
                    }
                };
                match &mounted.result {
                    Err(failure) => self.report(&pod, &volume.pod, failure),
                    Ok(()) => {
                        for message in volume.mapped(&self.tools, &pod) {
                            let reason = "SuccessfulMountVolume";
                            self.events.pod(&volume.pod, EventType::Normal, reason, &message, "");
                        }
                    }
                }
                Done::Mount(mounted)
            }
            Job::Expand { pod, volume, failed_before } => {
                let Some(sizes) = &volume.provided.sizes else {
                    return Done::Expanded(Ok(Expanded::NotRequested));
                };
                at(Step::Expand);
                let expand = expansion::expand(&self.tools, &volume, sizes, &pod, false, failed_before);
                let expanded = Box::pin(expand).await;
                Done::Expanded(expanded.map_err(|failure| {
                    let (name, text) = (&volume.desired.spec_name, &failure.text);
                    let text =
                        format!("NodeExpandVolume.NodeExpandVolume failed for volume {name:?} : {text}");
                    self.events.pod(&volume.pod, EventType::Warning, "VolumeResizeFailed", &text, "");
                    NotExpanded { text, ..failure }
                }))
            }
            Job::Attach { volumes } => {
                let mut text = String::new();
                for volume in volumes {
                    text = format!(
                        "AttachVolume.Attach failed for volume {:?} : {NO_ATTACHER}",
                        volume.desired.spec_name
                    );
                    self.events.pod(&volume.pod, EventType::Warning, "FailedAttachVolume", &text, "");
                }
                Done::NotAttached(text)
            }
            Job::Detach => {
                tracing::warn!(
                    "volume stays attached, since neither a controller nor this node detaches volumes"
                );
                Done::Detached
            }
            Job::Unmount { pod, form, spec_name } => {
                at(form.unmount_steps().0);
                Done::Unmount(work::unmount(&self.tools, &form, &pod, &spec_name).await)
            }
            Job::UnmountDevice { form } => {
                at(form.unmount_steps().1);
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
    let of_plugin = |plugin: &str| {
        let rest = name.strip_prefix(plugin)?.strip_prefix('/')?;
        Some(VolumeName::shared(plugin, rest))
    };
    let plugins = [pod_sync_csi::PLUGIN, Plugin::Iscsi.name(), Plugin::Fc.name()];
    plugins.into_iter().find_map(of_plugin).unwrap_or_else(|| VolumeName::shared("", name))
}
