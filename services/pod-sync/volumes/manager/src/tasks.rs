//! The handle of the volume tasks.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use pod_sync_clients::{EventType, Events, NodeVolumes};
use pod_sync_cri_config::mounts::{MountedVolume, MountedVolumes};
use pod_sync_csi::drivers::{CsiNode, Drivers};
use pod_sync_csi::mount::Mounter;
use pod_sync_csi::paths::Root;
use pod_sync_direct_volumes::{Volumes, is_direct, referenced};
use pod_sync_in_tree::commands::Commands;
use pod_sync_in_tree::host::Host;
use pod_sync_in_tree::volume::Plugin;
use pod_sync_layout::{TokenCache, TokenSource};
use pod_sync_plugins::{PluginHandler, PluginManager};
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::actual::MountState;
use pod_sync_volume_reconcile::desired::{DesiredVolume, Reach};
use pod_sync_volume_reconcile::operations::FIRST_WAIT;
use pod_sync_volume_reconcile::wait::{LIMIT, NotMounted, TIMED_OUT, not_mounted};
use quintlet_kit::clock::{self, Clock};
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::claims::{self, Source};
use crate::found;
use crate::health::HealthAnswers;
use crate::limits::LimitUpdates;
use crate::metrics::Metrics;
use crate::objects::VolumeObjects;
use crate::resolve::{Resolved, resolve};
use crate::selinux::FileLabel;
use crate::state::{ManagerState, StillMounted};
use crate::tools::Tools;
use crate::views::{self, VolumeCounts, VolumeView};
use crate::work;

/// Inputs of [`VolumeTasks::start`].
pub struct VolumeTasksContext {
    /// Root directory of the node agent.
    pub root_dir: PathBuf,
    /// Sets up and removes direct volumes.
    pub volumes: Volumes,
    /// Name of the node.
    pub node: String,
    /// Objects of the API server, if there is one.
    pub objects: Option<Arc<dyn VolumeObjects>>,
    /// Service account tokens for drivers.
    pub tokens: Option<Arc<dyn TokenSource>>,
    /// Socket of status-reporter, which writes volumes in use and drivers to the Node and CSINode objects.
    pub status_reporter: PathBuf,
    /// A controller attaches volumes (`enableControllerAttachDetach`). This node does not attach volumes, so
    /// that without a controller only volumes that need no attachment are mounted.
    pub controller_attaches: bool,
    /// Root directory of the machine's SELinux policy; none on a machine without SELinux.
    pub selinux_root: Option<PathBuf>,
    /// PersistentVolumes of all access modes are mounted with an SELinux label.
    pub selinux_mount: bool,
    /// mount(8), the tools of file systems, and iscsiadm.
    pub commands: Arc<dyn Commands>,
    /// Directories of devices.
    pub host: Host,
    /// The Node object, as it changes.
    pub nodes: watch::Receiver<Option<Arc<Node>>>,
    /// Handlers of other plugin types than that of CSI drivers.
    pub plugin_handlers: HashMap<String, Arc<dyn PluginHandler>>,
    /// Events of pods.
    pub events: Events,
    /// Time.
    pub clock: Clock,
}

impl std::fmt::Debug for VolumeTasksContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumeTasksContext").field("root_dir", &self.root_dir).finish_non_exhaustive()
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
    pub(crate) state: Mutex<ManagerState>,
    /// Counts changes of the state. Waiters and the task follow it.
    pub(crate) changed: watch::Sender<u64>,
    pub(crate) node_volumes: Arc<NodeVolumes>,
    pub(crate) tools: Tools,
    pub(crate) volumes: Volumes,
    pub(crate) drivers: Arc<Drivers>,
    pub(crate) limits: Arc<LimitUpdates>,
    pub(crate) events: Events,
    pub(crate) health: Arc<HealthAnswers>,
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
    /// Reads the volumes that are mounted, and starts the tasks `plugin manager`, `driver limits`,
    /// `node volumes`, `attachments` and `volumes`. All end with `stop`; nothing is unmounted then.
    ///
    /// # Errors
    /// Fails if a directory cannot be read.
    pub async fn start(inputs: VolumeTasksContext, stop: CancellationToken) -> std::io::Result<Self> {
        let root = Root::new(&inputs.root_dir);
        let (read_root, root_dir) = (root.clone(), inputs.root_dir.clone());
        let disk = task::blocking(move || {
            let mut disk = found::read(&read_root)?;
            found::read_in_tree(&root_dir, &mut disk)?;
            disk.direct = pod_sync_direct_volumes::found::read(&root_dir)?;
            Ok::<_, std::io::Error>(disk)
        });
        let disk = disk.await?;
        let metrics = Box::new(Metrics::default());
        metrics.reconstructed(disk.volumes.len().saturating_add(disk.direct.len()), disk.unreadable.len());
        let mut state = ManagerState::default();
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
        let mut handlers = inputs.plugin_handlers;
        handlers.insert(pod_sync_csi::PLUGIN_TYPE.to_owned(), handler);
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
            file_label: match inputs.selinux_root {
                Some(selinux_root) => task::blocking(move || FileLabel::read(&selinux_root)).await,
                None => None,
            }
            .map(|label| label.for_all_modes(inputs.selinux_mount)),
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
            health: Arc::default(),
        }));
        drop(task::spawn("volumes", Arc::clone(&tasks.0).run(stop)));
        Ok(tasks)
    }

    /// Reads the objects of a pod's volumes that tasks mount, and makes the volumes desired, unless `cancel`
    /// is cancelled before. Does not wait for their mounts. A pod without such volumes costs nothing.
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
            tools.metrics.found(finding, &provided, tools.enforces_labels(&provided));
        }
    }

    /// Declares a pod at rest again, in a task of its own since the API server may be slow: if `due` says
    /// that its sync is due, if it was not declared since the start, or if its volumes are not known.
    pub fn refresh(&self, pod: &Arc<Pod>, uid: &PodUid, due: bool) {
        let has_volumes = pods::spec(pod).volumes.iter().flatten().any(|volume| !is_direct(volume));
        let state = self.0.state.lock();
        let is_needed = state.desired.is_incomplete(uid) || has_volumes && (due || !state.is_open(uid));
        drop(state);
        if is_needed {
            let tasks = self.clone();
            let pod = Arc::clone(pod);
            let uid = uid.clone();
            let declare = async move { tasks.declare(&pod, &uid, &CancellationToken::new()).await };
            drop(task::spawn_contained("volume declaration", None, declare));
        }
    }

    /// Waits until the volumes of a declared pod whose direct volumes were set up are mounted, at most 2m3s
    /// and until `cancel` is cancelled (`WaitForAttachAndMount`). Returns them by their names in the pod.
    /// `show` receives the names of those that are not mounted, and the call in flight or the last error.
    ///
    /// # Errors
    /// Fails at once if a volume could not be resolved, which is an event of the pod, too, or if a direct
    /// volume is not set up. Else fails after the limit.
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

    /// Returns the error of a pod whose volumes are not mounted. Looks up whether the node has room for those
    /// that are not attached.
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

    /// Removes the subpaths and the direct volumes of a pod whose containers have stopped. Then makes its
    /// other volumes undesired, and waits until they are unmounted and no operation for the pod is in flight,
    /// at most 2m3s (`WaitForUnmount`).
    ///
    /// # Errors
    /// Fails at once if a subpath or a direct volume cannot be removed. Else fails after the limit, with the
    /// last error of an unmount. The unmounts go on, and the call can be repeated.
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

    /// Returns the mounted volumes of a pod that tasks mount, without those that have no file system of their
    /// own: block volumes and paths of the node.
    #[must_use]
    pub fn file_systems(&self, uid: &PodUid) -> Vec<MountedFileSystem> {
        let state = self.0.state.lock();
        let file_system = |(name, desired): (&str, &DesiredVolume)| {
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
        state.desired.by_tasks_of(uid).filter_map(file_system).collect()
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
    pub fn views(&self, shown: Option<&PodUid>) -> Vec<VolumeView> {
        views::of(&self.0.state.lock(), shown, Instant::now())
    }
}

impl Shared {
    /// Changes the state, and wakes waiters and the task.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut ManagerState) -> T) -> T {
        let changed = change(&mut self.state.lock());
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
        changed
    }
}

/// Returns the mounts of a pod whose volumes are mounted.
fn mounted_volumes(state: &ManagerState, tools: &Tools, uid: &PodUid) -> MountedVolumes {
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
            let spec_name = spec_name.clone();
            mounted.insert(name.to_owned(), MountedVolume { spec_name, host_path, read_only, relabel });
            continue;
        }
        let relabel = !read_only && desired.label.is_none();
        let path = match volume.provided.is_block {
            true => root.pod_device(uid.as_str(), spec_name),
            false => root.mount(uid.as_str(), spec_name),
        };
        let (Ok(host_path), spec_name) = (path, spec_name.clone()) else { continue };
        mounted.insert(name.to_owned(), MountedVolume { spec_name, host_path, read_only, relabel });
    }
    mounted
}
