//! The registered plugins, their tasks, and the devices of pods.

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
use pod_sync_plugins::call::CallError;
use pod_sync_records::StateFile;
use pod_sync_topology::{Hints, RequestScope, TopologyAffinityError};
use prost::Message as _;
use quintlet_kit::clock::Clock;
use quintlet_kit::{error_chain, failpoint, task};
use quintlet_model::ids::PodUid;
use quintlet_plugin_api::device_plugin::ListAndWatchResponse;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::{CHECKPOINT, decode, encode};
use crate::device::{Device, DeviceId, DeviceIds};
use crate::error::DeviceError;
use crate::inventory::{
    DeviceDecision, DeviceInventory, DeviceRequest, PreStartNeed, RegistrationNumber, Reservation,
};
use crate::metrics::DeviceMetrics;
use crate::names::PluginRefusal;
use crate::options::DeviceOptions;
use crate::plugin::{CallEnd, ConnectedPlugin, DevicePlugin};
use crate::requests::{ContainerRequest, may_need_devices, requests, resource_names};
use crate::select::Preference;
use crate::sockets::remove_sockets;

/// Largest number of resources with a plugin. Each has a task and a connection.
const MOST_RESOURCES: usize = 256;
/// Longest ID of a device in bytes. The API says 63; an ID goes into the checkpoint and into each call.
const LONGEST_ID: usize = 1024;
/// Largest number of devices of a resource. Plugins that share memory list one device per MiB.
const MOST_DEVICES: usize = 1 << 17;
/// Mode of the directory: only root and its group may enter.
const DIR_MODE: u32 = 0o750;
/// Value of `health` of a healthy device.
const HEALTHY: &str = "Healthy";
/// Interval between two checks for plugins that stayed away, if no end of a grace period is known.
const EXPIRY_CHECK: Duration = Duration::from_secs(3600);

/// Inputs of [`Devices::open`].
#[derive(Debug)]
pub struct DeviceContext {
    /// Directory of the agent's socket, of the plugins' sockets and of the checkpoint.
    pub dir: PathBuf,
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
    /// A plugin has not registered, or has not listed its devices. The worker of the pod is woken when that changes.
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
    file: tokio::sync::Mutex<Arc<Mutex<StateFile>>>,
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

/// Devices that are reserved until they are given to a container. Dropping frees them.
struct Reserved<'a> {
    shared: &'a Shared,
    reservation: Option<Reservation>,
}

impl Reserved<'_> {
    fn commit(mut self, uid: &PodUid, container: &str, response: Vec<u8>) {
        if let Some(reservation) = self.reservation.take() {
            self.shared.state.lock().inventory.commit(reservation, uid.as_str(), container, response);
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            self.shared.state.lock().inventory.cancel(reservation);
        }
    }
}

/// Returns the NUMA nodes for the devices of a container; none if any nodes will do.
pub type Alignment<'a> = &'a (dyn Fn(&str) -> Result<Option<NumaNodes>, TopologyAffinityError> + Send + Sync);

/// The allocation of the devices of one container.
#[derive(Clone, Copy)]
struct ContainerAllocation<'a> {
    uid: &'a PodUid,
    all: &'a [ContainerRequest],
    request: &'a ContainerRequest,
    // The pod was admitted.
    is_admitted: bool,
    nodes: Option<NumaNodes>,
}

/// The next call for a request.
enum NextCall<'a> {
    None,
    Wait(Duration),
    Prefer(Arc<DevicePlugin>, crate::select::PreferenceQuery),
    Allocate(Arc<DevicePlugin>, DeviceIds, Reserved<'a>),
}

/// The end of the allocation for one container and resource.
enum AllocationEnd {
    // True if the container has new devices.
    Held(bool),
    Waits(Duration),
    Cancelled,
}

impl Devices {
    // Blocks: there is no pod before the start.
    /// Reads the checkpoint and removes the sockets of plugins, so that they register again.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn open(context: DeviceContext) -> std::io::Result<Self> {
        let DeviceContext { dir, clock, wakeups, stop } = context;
        std::fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(&dir)?;
        remove_sockets(&dir)?;
        let (file, checkpoint) = StateFile::open(dir.join(CHECKPOINT), decode);
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
            file: tokio::sync::Mutex::new(Arc::new(Mutex::new(file))),
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

    /// Returns the number of devices that a pod finds on the node, by resource, see [`DeviceInventory::allocatable_for`].
    #[must_use]
    pub fn allocatable_for(&self, uid: &str) -> BTreeMap<String, usize> {
        self.shared.state.lock().inventory.allocatable_for(uid)
    }

    /// Returns the health of the devices that the containers of a pod hold, see [`DeviceInventory::health`].
    #[must_use]
    pub fn health(&self, uid: &PodUid) -> PodDeviceHealth {
        self.shared.state.lock().inventory.health(uid.as_str())
    }

    /// Runs `read` on the current state, for views of it. `read` gets the socket and the last error of a resource, too.
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

    /// Returns the resources of a pod with the socket or the absence of their plugins, such as `a.com/gpu (gpu.sock)`, for explanations.
    /// `None` if the pod requests no device.
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

    /// Gives the containers of a pod their devices. The allocation is on disk when this returns. A pod that runs was admitted before.
    /// `alignment` returns the NUMA nodes of a container, after the devices of the containers before it are allocated; none if resources
    /// are not aligned.
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

    /// Calls PreStartContainer where the plugins of a container need it, and returns what the container needs to use its devices. A
    /// container of an admitted pod that has no devices yet gets them: its plugin may have registered after the admission.
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

    /// Frees the devices of pods that are not known. Returns whether there were any: the checkpoint is then to be written.
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

    // Returns the first resource of a pod whose plugin is away. The pod is woken when that changes.
    fn awaits_plugin(&self, uid: &PodUid, pod: &Pod) -> Option<(String, Duration)> {
        let now = self.shared.clock.boot();
        let mut state = self.shared.state.lock();
        let awaited = resource_names(pod)
            .into_iter()
            .find_map(|resource| Some((state.inventory.awaited(&resource, now)?, resource)));
        let (until, resource) = awaited?;
        state.waiting.insert(uid.clone());
        Some((resource, until))
    }

    // Allocates for all containers of a pod that is admitted, or for one container of a pod that was admitted.
    async fn allocate_all(
        &self,
        uid: &PodUid,
        pod: &Pod,
        alignment: Option<Alignment<'_>>,
        only: Option<&str>,
        cancel: &CancellationToken,
    ) -> Result<DeviceAdmission, DeviceError> {
        let all = requests(pod);
        let is_admitted = only.is_some();
        let mut is_changed = false;
        let mut end = Ok(DeviceAdmission::Admitted);
        'containers: for request in all.iter().filter(|r| only.is_none_or(|only| r.name == only)) {
            let container = ContainerAllocation { uid, all: &all, request, is_admitted, nodes: None };
            let container = match alignment.filter(|_| !request.resources.is_empty()) {
                None => container,
                Some(nodes) => match nodes(&request.name) {
                    Ok(nodes) => ContainerAllocation { nodes, ..container },
                    Err(error) => {
                        end = Err(error.into());
                        break 'containers;
                    }
                },
            };
            for (resource, required) in &request.resources {
                match self.allocate(container, resource, *required, cancel).await {
                    Ok(AllocationEnd::Held(is_new)) => is_changed |= is_new,
                    Ok(AllocationEnd::Waits(until)) => {
                        end = Ok(DeviceAdmission::Waiting { resource: resource.clone(), until });
                        break 'containers;
                    }
                    Ok(AllocationEnd::Cancelled) => {
                        end = Ok(DeviceAdmission::Cancelled);
                        break 'containers;
                    }
                    Err(error) => {
                        end = Err(error);
                        break 'containers;
                    }
                }
            }
        }
        if is_changed {
            self.shared.persist().await.map_err(|error| DeviceError::Checkpoint(error.to_string()))?;
        }
        end
    }

    async fn allocate(
        &self,
        container: ContainerAllocation<'_>,
        resource: &str,
        required: usize,
        cancel: &CancellationToken,
    ) -> Result<AllocationEnd, DeviceError> {
        let mut preferred: Option<DeviceIds> = None;
        let (uid, name) = (container.uid, container.request.name.as_str());
        loop {
            let next = self.next_call(container, resource, required, preferred.as_ref())?;
            match next {
                NextCall::None => return Ok(AllocationEnd::Held(false)),
                NextCall::Wait(until) => return Ok(AllocationEnd::Waits(until)),
                NextCall::Prefer(plugin, query) => match plugin.prefer(query, cancel).await {
                    CallEnd::Answered(ids) => preferred = Some(ids),
                    CallEnd::Failed(error) => {
                        return Err(self.shared.call_failed(resource, error, DeviceError::Preference));
                    }
                    CallEnd::PluginEnded => {}
                    CallEnd::Cancelled => return Ok(AllocationEnd::Cancelled),
                },
                NextCall::Allocate(plugin, ids, reserved) => {
                    let began = self.shared.clock.boot();
                    let answer = plugin.allocate(&ids, cancel).await;
                    let took = self.shared.clock.boot().saturating_sub(began);
                    self.shared.metrics.allocated(resource, took);
                    match answer {
                        CallEnd::Answered(Some(response)) => {
                            reserved.commit(uid, name, response.encode_to_vec());
                            return Ok(AllocationEnd::Held(true));
                        }
                        CallEnd::Answered(None) => {
                            return Err(DeviceError::NoResponse(resource.to_owned()));
                        }
                        CallEnd::Failed(error) => {
                            return Err(self.shared.call_failed(resource, error, DeviceError::Allocate));
                        }
                        // The plugin may register again: the pod waits, or gets devices of the next registration.
                        CallEnd::PluginEnded => {}
                        CallEnd::Cancelled => return Ok(AllocationEnd::Cancelled),
                    }
                }
            }
        }
    }

    // Decides, and reserves the devices in the same moment.
    fn next_call(
        &self,
        allocation: ContainerAllocation<'_>,
        resource: &str,
        required: usize,
        preferred: Option<&DeviceIds>,
    ) -> Result<NextCall<'_>, DeviceError> {
        let mut state = self.shared.state.lock();
        let state = &mut *state;
        let ContainerAllocation { uid, all, request, is_admitted, nodes } = allocation;
        let (pod, container) = (uid.as_str(), request.name.as_str());
        let reusable = state.inventory.held().reusable(pod, all, container, resource);
        let request =
            DeviceRequest { pod, container, resource, required, reusable: &reusable, is_admitted, nodes };
        let preference = preferred.map_or(Preference::Open, Preference::Known);
        let decision = state.inventory.decide(&request, preference, self.shared.clock.boot())?;
        let plugin = |number| {
            let plugin = state.plugins.get(resource).filter(|plugin| plugin.number == number);
            plugin.map(Arc::clone).ok_or_else(|| DeviceError::Stopped(resource.to_owned()))
        };
        match decision {
            DeviceDecision::Nothing => Ok(NextCall::None),
            DeviceDecision::Wait { until } => {
                state.waiting.insert(uid.clone());
                Ok(NextCall::Wait(until))
            }
            DeviceDecision::Query(number, query) => Ok(NextCall::Prefer(plugin(number)?, query)),
            DeviceDecision::Allocate(number, ids) => {
                let plugin = plugin(number)?;
                let reservation = Some(state.inventory.reserve(resource, ids.clone()));
                Ok(NextCall::Allocate(plugin, ids, Reserved { shared: &self.shared, reservation }))
            }
        }
    }

    async fn pre_start(
        &self,
        uid: &PodUid,
        container: &str,
        resource: &str,
        cancel: &CancellationToken,
    ) -> Result<(), DeviceError> {
        let (plugin, ids) = {
            let state = self.shared.state.lock();
            let stopped = || DeviceError::Stopped(resource.to_owned());
            match state.inventory.pre_start(resource) {
                PreStartNeed::None => return Ok(()),
                PreStartNeed::PluginAway => return Err(DeviceError::PreStart(stopped().to_string())),
                PreStartNeed::Call => {}
            }
            let held = state.inventory.held().held(uid.as_str(), container, resource);
            let ids = held.ok_or_else(|| DeviceError::NotHeld {
                pod: uid.to_string(),
                container: container.to_owned(),
                resource: resource.to_owned(),
            })?;
            let plugin = state.plugins.get(resource).map(Arc::clone);
            (plugin.ok_or_else(stopped)?, ids)
        };
        match plugin.pre_start(&ids, cancel).await {
            CallEnd::Answered(()) => Ok(()),
            CallEnd::Failed(error) => {
                let failed = |error: CallError| DeviceError::PreStart(error.to_string());
                Err(self.shared.call_failed(resource, error, failed))
            }
            CallEnd::PluginEnded => {
                Err(DeviceError::PreStart(DeviceError::Stopped(resource.to_owned()).to_string()))
            }
            CallEnd::Cancelled => Err(DeviceError::PreStart("the pod is ending".to_owned())),
        }
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
    // Follows the lists of a plugin until its registration ends.
    async fn follow(&self, resource: &str, plugin: &DevicePlugin) {
        let lists = async {
            let mut lists = plugin.lists().await?;
            while let Some(list) = lists.message().await.map_err(CallError::from)? {
                if !self.listed(resource, plugin.number, list) {
                    break;
                }
                self.persist_or_log().await;
            }
            Ok::<(), CallError>(())
        };
        // A list that is dropped belongs to a registration that has ended.
        let end = tokio::select! {
            end = lists => end,
            () = plugin.ended.cancelled() => Ok(()),
        };
        let error = end.err().map(|error| format!("ListAndWatch ended: {error}"));
        self.ended(resource, plugin.number, error);
    }

    // Takes over a list. Returns false if the registration is no longer the current one.
    fn listed(&self, resource: &str, number: RegistrationNumber, list: ListAndWatchResponse) -> bool {
        let (devices, problem) = usable_devices(list);
        let (all, healthy) = (devices.len(), devices.values().filter(|device| device.is_healthy).count());
        let Some(pods) = self.state.lock().inventory.list(resource, number, devices) else { return false };
        tracing::info!(resource, devices = all, healthy, "device plugin listed its devices");
        if let Some(problem) = problem {
            self.failed(resource, &problem);
        }
        self.changed();
        self.wake(pods);
        true
    }

    // Ends a registration, if it is the current one.
    fn ended(&self, resource: &str, number: RegistrationNumber, error: Option<String>) {
        {
            let mut state = self.state.lock();
            if !state.inventory.stop(resource, number, self.clock.boot()) {
                return;
            }
            if let Some(plugin) = state.plugins.remove(resource) {
                plugin.ended.cancel();
            }
        }
        if self.stop.is_cancelled() {
            return;
        }
        tracing::warn!(resource, error, "device plugin has stopped");
        if let Some(error) = error {
            self.set_error(resource, error);
        }
        self.stopped.notify_one();
        self.changed();
    }

    // Publishes the capacity, and wakes the pods that wait.
    fn changed(&self) {
        let (capacity, waiting) = {
            let mut state = self.state.lock();
            (state.inventory.capacity(), std::mem::take(&mut state.waiting))
        };
        self.capacity.send_if_modified(|current| {
            let is_changed = *current != capacity;
            *current = capacity;
            is_changed
        });
        for uid in waiting {
            self.wakeups.wake(&uid);
        }
    }

    // Wakes the pods that hold devices.
    fn wake_holders(&self) {
        let holders: Vec<String> = self.state.lock().inventory.held().pods().map(str::to_owned).collect();
        self.wake(holders);
    }

    fn wake(&self, pods: impl IntoIterator<Item = String>) {
        for uid in pods.into_iter().filter_map(|pod| PodUid::parse(&pod).ok()) {
            self.wakeups.wake(&uid);
        }
    }

    fn failed(&self, resource: &str, error: &str) {
        tracing::warn!(resource, error, "device plugin failed");
        self.set_error(resource, error.to_owned());
    }

    fn set_error(&self, resource: &str, error: String) {
        let mut state = self.state.lock();
        if state.errors.contains_key(resource) || state.errors.len() < MOST_RESOURCES {
            state.errors.insert(resource.to_owned(), error);
        }
    }

    fn call_failed(
        &self,
        resource: &str,
        error: CallError,
        reason: impl FnOnce(CallError) -> DeviceError,
    ) -> DeviceError {
        self.failed(resource, &error.to_string());
        reason(error)
    }

    /// Writes the checkpoint, if it has changed.
    async fn persist(&self) -> std::io::Result<()> {
        // Held during the write: a later state is written later.
        let file = self.file.lock().await;
        let checkpoint = self.state.lock().inventory.checkpoint();
        let file = Arc::clone(&file);
        task::blocking(move || {
            let bytes = encode(&checkpoint).map_err(std::io::Error::other)?;
            let mut file = file.lock();
            if file.has(&bytes) {
                return Ok(());
            }
            failpoint::file!("device checkpoint written", || file.write(bytes))
        })
        .await
    }

    async fn persist_or_log(&self) {
        if let Err(error) = self.persist().await {
            tracing::error!(error = error_chain(&error), "failed to write device checkpoint");
        }
    }
}

/// Returns the devices of a list that can be used, and the first problem. The last of two devices with one ID counts.
fn usable_devices(list: ListAndWatchResponse) -> (BTreeMap<DeviceId, Device>, Option<String>) {
    let mut devices = BTreeMap::new();
    let mut problem = None;
    for device in list.devices {
        let length = device.id.len();
        if length == 0 || length > LONGEST_ID {
            problem.get_or_insert_with(|| format!("a device with an ID of {length} bytes is ignored"));
            continue;
        }
        if devices.len() >= MOST_DEVICES {
            problem.get_or_insert_with(|| format!("devices after the first {MOST_DEVICES} are ignored"));
            break;
        }
        let nodes = device.topology.into_iter().flat_map(|topology| topology.nodes);
        let is_healthy = device.health == HEALTHY;
        let numa_nodes = nodes.map(|node| node.id).collect();
        devices.insert(DeviceId::from(device.id), Device { is_healthy, numa_nodes });
    }
    (devices, problem)
}
