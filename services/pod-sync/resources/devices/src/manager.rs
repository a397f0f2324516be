//! The registered plugins, their tasks, and the devices of pods.

mod allocate;
mod registrations;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use pod_sync_clients::WorkerWakeups;
use pod_sync_decisions::device_status::PodDeviceHealth;
use pod_sync_layout::ExtendedResources;
use pod_sync_machine::NumaNodes;
use pod_sync_records::{StateFile, StateWriter};
use pod_sync_topology::{Hints, RequestScope, TopologyAffinityError};
use quintlet_kit::clock::Clock;
use quintlet_kit::{failpoint, task};
use quintlet_model::ids::PodUid;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::{CHECKPOINT, decode, encode};
use crate::error::DeviceError;
use crate::inventory::DeviceInventory;
use crate::metrics::DeviceMetrics;
use crate::names::PluginRefusal;
use crate::options::DeviceOptions;
use crate::plugin::{ConnectedPlugin, DevicePlugin};
use crate::requests::{may_need_devices, requests, resource_names};
use crate::sockets::remove_sockets;

/// Largest number of resources with a plugin. Each has a task and a connection.
const MOST_RESOURCES: usize = 256;
/// Mode of the directory: only root and its group may enter.
const DIR_MODE: u32 = 0o750;
/// Interval between two checks for plugins that stayed away, if no end of a grace period is known.
const EXPIRY_CHECK: Duration = Duration::from_secs(3600);

/// Inputs of [`Devices::open`].
#[derive(Debug)]
pub struct DeviceContext {
    /// Directory of the agent's socket, of the plugins' sockets and of the checkpoint.
    pub dir: PathBuf,
    /// Directory of the copy of the checkpoint, on tmpfs.
    pub copy_dir: PathBuf,
    /// Time.
    pub clock: Clock,
    /// Wakes the workers of pods that wait for a plugin.
    pub wakeups: Arc<WorkerWakeups>,
    /// Ends the tasks.
    pub stop: CancellationToken,
}

/// The answer to the admission of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceAdmission {
    /// The containers of the pod hold all devices that they request.
    Admitted,
    /// A plugin has not registered, or has not listed its devices. The worker of the pod is woken when that
    /// changes.
    Waiting {
        /// Name of the resource.
        resource: String,
        /// CLOCK_BOOTTIME at which the pod is rejected.
        until: Duration,
    },
    /// The pod ended meanwhile.
    Cancelled,
}

/// The devices of the node. Clones share them.
#[derive(Debug, Clone)]
pub struct Devices {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    clock: Clock,
    wakeups: Arc<WorkerWakeups>,
    stop: CancellationToken,
    state: Mutex<ManagerState>,
    capacity: watch::Sender<ExtendedResources>,
    file: StateWriter<StateFile>,
    // A plugin has stopped, so that another grace period may end first.
    stopped: Notify,
    metrics: DeviceMetrics,
}

#[derive(Debug, Default)]
struct ManagerState {
    inventory: DeviceInventory,
    plugins: BTreeMap<String, Arc<DevicePlugin>>,
    // The last error of each plugin.
    errors: BTreeMap<String, String>,
    // Pods that wait for a plugin.
    waiting: BTreeSet<PodUid>,
}

/// Returns the NUMA nodes for the devices of a container; none if any nodes will do.
pub type Alignment<'a> = &'a (dyn Fn(&str) -> Result<Option<NumaNodes>, TopologyAffinityError> + Send + Sync);

impl Devices {
    // Blocks: there is no pod before the start.
    /// Reads the checkpoint and removes the sockets of plugins, so that they register again.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn open(context: DeviceContext) -> std::io::Result<Self> {
        let DeviceContext { dir, copy_dir, clock, wakeups, stop } = context;
        std::fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(&dir)?;
        remove_sockets(&dir)?;
        let copy = copy_dir.join(format!(".{CHECKPOINT}"));
        let (file, checkpoint, _) = StateFile::open_with_copy(dir.join(CHECKPOINT), copy, decode);
        let inventory = DeviceInventory::restored(checkpoint, clock.boot());
        let capacity = watch::Sender::new(inventory.capacity());
        let state = ManagerState { inventory, ..ManagerState::default() };
        let shared = Shared {
            dir,
            clock,
            wakeups,
            stop,
            state: Mutex::new(state),
            capacity,
            file: StateWriter::new("devices", file),
            stopped: Notify::new(),
            metrics: DeviceMetrics::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Removes the resources of plugins that stayed away, until the stop.
    pub async fn expire_resources(self) {
        let Shared { clock, stop, stopped, .. } = &*self.shared;
        loop {
            let next = self.shared.state.lock().inventory.next_expiry();
            let wait = next.map_or(EXPIRY_CHECK, |next| next.saturating_sub(clock.boot()));
            // A whole second more: the grace period must be over.
            let wait = wait.saturating_add(Duration::from_secs(1));
            // Each arm only wakes: dropping it loses nothing.
            tokio::select! {
                () = stop.cancelled() => return,
                () = stopped.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
            let is_changed = self.shared.state.lock().inventory.expire(clock.boot());
            if is_changed {
                self.shared.changed();
                // The health of their devices is no longer known.
                self.shared.wake_holders();
                self.shared.persist_or_log().await;
            }
        }
    }

    /// Returns the directory of the sockets.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// Returns the devices in the Node, as they change.
    #[must_use]
    pub fn capacity(&self) -> watch::Receiver<ExtendedResources> {
        self.shared.capacity.subscribe()
    }

    /// Returns the number of devices that a pod finds on the node, by resource, see
    /// [`DeviceInventory::allocatable_for`].
    #[must_use]
    pub fn allocatable_for(&self, uid: &str) -> BTreeMap<String, usize> {
        self.shared.state.lock().inventory.allocatable_for(uid)
    }

    /// Returns the health of the devices that the containers of a pod hold, see [`DeviceInventory::health`].
    #[must_use]
    pub fn health(&self, uid: &PodUid) -> PodDeviceHealth {
        self.shared.state.lock().inventory.health(uid.as_str())
    }

    /// Runs `read` on the current state, for views of it. `read` gets the socket and the last error of a
    /// resource, too.
    pub fn read<T>(&self, read: impl FnOnce(&DeviceInventory, &dyn Fn(&str) -> PluginView) -> T) -> T {
        let state = self.shared.state.lock();
        let plugin = |resource: &str| PluginView {
            socket: state.plugins.get(resource).map(|plugin| plugin.socket.clone()),
            error: state.errors.get(resource).cloned(),
        };
        read(&state.inventory, &plugin)
    }

    /// Connects to a plugin and registers it for a resource, in place of an earlier one.
    ///
    /// # Errors
    /// The plugin cannot be reached or does not return its options; an earlier one stays.
    pub(crate) async fn connect(&self, resource: &str, socket: PathBuf) -> Result<(), PluginRefusal> {
        self.shared.metrics.registered(resource);
        let connected = match ConnectedPlugin::connect(socket).await {
            Ok(connected) => connected,
            Err(refusal) => {
                self.shared.failed(resource, &refusal.to_string());
                return Err(refusal);
            }
        };
        let plugin = {
            let mut state = self.shared.state.lock();
            if !state.plugins.contains_key(resource) && state.plugins.len() >= MOST_RESOURCES {
                return Err(PluginRefusal::TooMany(MOST_RESOURCES));
            }
            let now = self.shared.clock.boot();
            let number = state.inventory.register(resource, connected.options, now);
            let plugin = Arc::new(connected.registered(number, &self.shared.stop));
            let earlier = state.plugins.insert(resource.to_owned(), Arc::clone(&plugin));
            if let Some(earlier) = earlier {
                earlier.ended.cancel();
            }
            state.errors.remove(resource);
            plugin
        };
        tracing::info!(resource, socket = %plugin.socket.display(), "device plugin registered");
        self.shared.changed();
        let shared = Arc::clone(&self.shared);
        let resource = resource.to_owned();
        drop(task::spawn("device-plugin", async move { shared.follow(&resource, &plugin).await }));
        Ok(())
    }

    /// Ends the registration of the plugin with this socket.
    pub(crate) fn disconnect(&self, resource: &str, socket: &Path) {
        let plugin = self.shared.state.lock().plugins.get(resource).map(Arc::clone);
        if let Some(plugin) = plugin.filter(|plugin| plugin.socket == socket) {
            self.shared.ended(resource, plugin.number, None);
        }
    }

    /// Returns the resources of a pod with the socket or the absence of their plugins, such as
    /// `a.com/gpu (gpu.sock)`, for explanations. `None` if the pod requests no device.
    #[must_use]
    pub fn describe_plugins(&self, pod: &Pod) -> Option<String> {
        let state = self.shared.state.lock();
        let describe = |resource: String| {
            let socket = state.plugins.get(&resource).and_then(|plugin| plugin.socket.file_name());
            let listed = if state.inventory.is_serving(&resource) { "" } else { ", no list of devices yet" };
            match socket {
                Some(socket) => format!("{resource} ({}{listed})", socket.display()),
                None => format!("{resource} (not registered)"),
            }
        };
        let known = resource_names(pod).into_iter().filter(|resource| state.inventory.is_known(resource));
        let all: Vec<String> = known.map(describe).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }

    /// Returns the hints for the devices of a container or of a whole pod, see [`DeviceInventory::hints`].
    #[must_use]
    pub fn hints(&self, uid: &PodUid, pod: &Pod, scope: RequestScope<'_>, machine: NumaNodes) -> Vec<Hints> {
        if !may_need_devices(pod) {
            return Vec::new();
        }
        self.shared.state.lock().inventory.hints(uid.as_str(), &requests(pod), scope, machine)
    }

    /// Gives the containers of a pod their devices. The allocation is on disk when this returns. A pod that
    /// runs was admitted before. `alignment` returns the NUMA nodes of a container, after the devices of the
    /// containers before it are allocated; none if resources are not aligned.
    ///
    /// Cancellation safety: devices of completed calls stay with the pod, the others are free.
    ///
    /// # Errors
    /// Returns the reason for the rejection of the pod, which then holds no devices.
    pub async fn admit(
        &self,
        uid: &PodUid,
        pod: &Pod,
        alignment: Option<Alignment<'_>>,
        cancel: &CancellationToken,
    ) -> Result<DeviceAdmission, DeviceError> {
        if !may_need_devices(pod) {
            return Ok(DeviceAdmission::Admitted);
        }
        // A plugin that is away has no hints, so that the others would be aligned without it.
        if alignment.is_some()
            && let Some((resource, until)) = self.awaits_plugin(uid, pod)
        {
            return Ok(DeviceAdmission::Waiting { resource, until });
        }
        let admitted = self.allocate_all(uid, pod, alignment, None, cancel).await;
        if admitted.is_err() {
            self.release(uid).await;
        }
        admitted
    }

    /// Calls PreStartContainer where the plugins of a container need it, and returns what the container needs
    /// to use its devices. A container of an admitted pod that has no devices yet gets them: its plugin may
    /// have registered after the admission.
    ///
    /// # Errors
    /// A call failed, or the devices are not available; another attempt may succeed.
    pub async fn prepare_container(
        &self,
        uid: &PodUid,
        pod: &Pod,
        container: &str,
        cancel: &CancellationToken,
    ) -> Result<DeviceOptions, DeviceError> {
        let name = container;
        let all = requests(pod);
        let Some(request) = all.iter().find(|request| request.name == name) else {
            // Ephemeral containers have no resources.
            return Ok(DeviceOptions::default());
        };
        if request.resources.is_empty() {
            return Ok(DeviceOptions::default());
        }
        match self.allocate_all(uid, pod, None, Some(name), cancel).await? {
            DeviceAdmission::Admitted => {}
            DeviceAdmission::Waiting { resource, .. } => return Err(DeviceError::Stopped(resource)),
            DeviceAdmission::Cancelled => return Err(DeviceError::PreStart("the pod is ending".to_owned())),
        }
        for resource in request.resources.keys() {
            self.pre_start(uid, name, resource, cancel).await?;
        }
        let state = self.shared.state.lock();
        let allocations = state.inventory.held().container(uid.as_str(), name);
        Ok(allocations.map(DeviceOptions::of).unwrap_or_default())
    }

    /// Frees the devices of a pod whose containers have ended.
    pub async fn release(&self, uid: &PodUid) {
        let is_released = {
            let mut state = self.shared.state.lock();
            state.waiting.remove(uid);
            state.inventory.release(uid.as_str())
        };
        if is_released {
            self.shared.persist_or_log().await;
        }
    }

    /// Frees the devices of pods that are not known. Returns whether there were any: the checkpoint is then
    /// to be written.
    #[must_use]
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) -> bool {
        let mut state = self.shared.state.lock();
        let held = state.inventory.held().pods();
        let gone: Vec<String> = held.filter(|pod| !is_known(pod)).map(str::to_owned).collect();
        for pod in &gone {
            state.inventory.release(pod);
        }
        !gone.is_empty()
    }

    /// Writes the checkpoint, if it has changed. An error is logged.
    pub async fn write_checkpoint(&self) {
        self.shared.persist_or_log().await;
    }
}

/// The plugin of a resource, for views.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginView {
    /// Socket of the registered plugin.
    pub socket: Option<PathBuf>,
    /// The last error of the plugin.
    pub error: Option<String>,
}

impl Shared {
    /// Writes the checkpoint, if it has changed.
    async fn persist(&self) -> std::io::Result<()> {
        let checkpoint = || Ok(self.state.lock().inventory.checkpoint());
        let written = self.file.write_state(checkpoint, |file, checkpoint| {
            let bytes = encode(&checkpoint).map_err(std::io::Error::other)?;
            if file.has(&bytes) {
                return Ok(());
            }
            failpoint::file!("device checkpoint written", || file.write(bytes))
        });
        written.await
    }

    async fn persist_or_log(&self) {
        self.file.log(self.persist().await);
    }
}
