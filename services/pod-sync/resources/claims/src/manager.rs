//! The claims of pods, the registered plugins, and their tasks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceStatus};
use parking_lot::Mutex;
use pod_sync_clients::WorkerWakeups;
use pod_sync_records::{StateFile, StateOrigin, StateWriter};
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::checkpoint::{CHECKPOINT, decode};
use crate::claim::ClaimKey;
use crate::driver::DriverPlugin;
use crate::error::{ClaimError, FetchError};
use crate::health::{DeviceName, PluginHealth, resource_health};
use crate::inventory::ClaimInventory;
use crate::metrics::ClaimMetrics;
use crate::monitor;
use crate::plugins::{HealthVersion, PluginList, PluginServices, WIPE_DELAY};
use crate::preparation::{claim_keys, users};
use crate::requests::{allocated_claim, container_requests, has_claims, needed_claims};
use crate::shared::{ClaimSource, ManagerState, Shared};
use crate::status::resource_statuses;

/// Largest number of registered plugins. Each has two tasks and up to three connections.
const MOST_PLUGINS: usize = 256;
/// Shortest time between two reconciliations (`defaultReconcilePeriod`).
const RECONCILE_PERIOD: Duration = Duration::from_secs(60);
/// Wait before the stream of the health of devices is opened again.
const HEALTH_RETRY: Duration = Duration::from_secs(5);
/// Interval between two checks for devices whose health has timed out, if none is known.
const HEALTH_CHECK: Duration = Duration::from_secs(3600);

/// Reads and removes the ResourceSlices of this node.
#[async_trait]
pub trait SliceWiper: Send + Sync + fmt::Debug {
    /// Returns the drivers with ResourceSlices.
    ///
    /// # Errors
    /// Returns the text of the error.
    async fn drivers(&self) -> Result<BTreeSet<String>, String>;

    /// Removes the ResourceSlices of a driver. That there are none is a success.
    ///
    /// # Errors
    /// Returns the text of the error.
    async fn wipe(&self, driver: &str) -> Result<(), String>;
}

/// Inputs of [`Claims::open`].
#[derive(Debug)]
pub struct ClaimContext {
    /// Directory of the checkpoint.
    pub dir: PathBuf,
    /// Directory of the copy of the checkpoint, on tmpfs.
    pub copy_dir: PathBuf,
    /// Time.
    pub clock: Clock,
    /// Wakes the workers of pods whose devices change their health.
    pub wakeups: Arc<WorkerWakeups>,
    /// Reads claims.
    pub source: Arc<dyn ClaimSource>,
    /// Ends the tasks.
    pub stop: CancellationToken,
}

/// A driver, for views.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverView {
    /// Endpoints of its plugins, the latest last, and whether a process listens at each.
    pub endpoints: Vec<(PathBuf, bool)>,
    /// The last error of a call.
    pub error: Option<String>,
}

/// The claims of the node. Clones share them.
#[derive(Debug, Clone)]
pub struct Claims {
    pub(crate) shared: Arc<Shared>,
}

impl Claims {
    /// Reads the checkpoint. Blocks: there is no pod before the start.
    #[must_use]
    pub fn open(context: ClaimContext) -> Self {
        let ClaimContext { dir, copy_dir, clock, wakeups, source, stop } = context;
        let copy = copy_dir.join(format!(".{CHECKPOINT}"));
        let (file, records, origin) = StateFile::open_with_copy(dir.join(CHECKPOINT), copy, decode);
        let state = ManagerState {
            inventory: ClaimInventory::restored(records),
            is_unwritten: false,
            plugins: PluginList::new(WIPE_DELAY),
            registered: BTreeMap::new(),
            health: BTreeMap::new(),
            errors: BTreeMap::new(),
            next_reconciliation: Duration::ZERO,
        };
        let metrics = ClaimMetrics::default();
        metrics.show_in_use(state.inventory.in_use());
        let shared = Shared {
            clock,
            wakeups,
            source,
            stop,
            state: Mutex::new(state),
            file: StateWriter::new("claims", file),
            lacks_pods: origin != StateOrigin::File,
            idle: Notify::new(),
            operations: watch::Sender::new(()),
            changed: Notify::new(),
            metrics,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Prepares the claims of a pod: before its sandbox, and for a pod that runs if [`Claims::has_devices`]
    /// is false. The record is on disk before the first call and when this returns. Claims that this process
    /// has prepared need no call.
    ///
    /// Cancellation safety: the operation ends by itself, and the pod stays recorded. Without a record,
    /// nothing begins any more.
    ///
    /// # Errors
    /// Returns the kubelet's reason. The pod may be recorded for some claims, and needs
    /// [`Claims::unprepare`].
    pub async fn prepare(
        &self,
        uid: &PodUid,
        pod: &Pod,
        cancel: &CancellationToken,
    ) -> Result<(), ClaimError> {
        if !has_claims(pod) {
            return Ok(());
        }
        let gone = CancellationToken::new();
        // Dropping this future cancels it.
        let _guard = gone.clone().drop_guard();
        let shared = Arc::clone(&self.shared);
        let (uid, pod) = (uid.clone(), pod.clone());
        let prepared = task::spawn("prepare-claims", async move {
            shared.measured("PrepareResources", shared.prepare(&uid, &pod, &gone)).await
        });
        tokio::select! {
            prepared = prepared => prepared.unwrap_or(Err(ClaimError::Ending)),
            () = cancel.cancelled() => Err(ClaimError::Ending),
        }
    }

    /// Returns whether pods may run whose claims are not recorded: this process has found no usable
    /// checkpoint, or only its copy.
    #[must_use]
    pub fn lacks_pods(&self) -> bool {
        self.shared.lacks_pods
    }

    /// Records the claims of a pod that has run without a record, for [`Claims::unprepare`]. There is no
    /// call. Claims that no longer exist, or are not reserved for the pod, are left out: their devices are
    /// free, and the driver cannot be named.
    ///
    /// Cancellation safety: as if it was not called.
    ///
    /// # Errors
    /// A claim cannot be read, or an operation on it does not end. Another attempt is needed before the pod
    /// has ended.
    pub async fn recover(&self, uid: &PodUid, pod: &Pod) -> Result<(), ClaimError> {
        if !has_claims(pod) || self.holds_all(uid, pod) {
            return Ok(());
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut claims = Vec::new();
        // A claim that was not created was not prepared.
        for needed in needed_claims(pod).unwrap_or_default() {
            let claim = match self.shared.source.get(namespace, &needed.name).await {
                Ok(claim) => allocated_claim(pod, &needed, &claim).map_err(|error| error.to_string()),
                Err(FetchError::NotFound(reason)) => Err(reason),
                Err(error @ FetchError::Failed(_)) => {
                    let (name, reason) = (needed.name, error.to_string());
                    return Err(ClaimError::Fetch { name, reason });
                }
            };
            match claim {
                Ok(claim) => claims.push(claim),
                Err(reason) => {
                    tracing::warn!(pod.uid = %uid, claim = needed.name, reason, "claim of a pod without a record not unprepared");
                }
            }
        }
        self.shared.begin(|state| Ok(state.inventory.adopt(uid.as_str(), &claims))).await.map(drop)
    }

    /// Unprepares the claims of a pod whose containers have ended. Claims that other pods use stay prepared:
    /// those recorded, and `others`, which may run without a record.
    ///
    /// Cancellation safety: the operation ends by itself.
    ///
    /// # Errors
    /// Returns the kubelet's reason. The pod is recorded for the claims that a driver still has, and another
    /// attempt is needed before the pod has ended.
    pub async fn unprepare(&self, uid: &PodUid, others: &[Arc<Pod>]) -> Result<(), ClaimError> {
        {
            let state = self.shared.state.lock();
            if !state.inventory.holds_any(uid.as_str()) && !state.is_unwritten {
                return Ok(());
            }
        }
        let (shared, uid) = (Arc::clone(&self.shared), uid.to_string());
        let users = users(others);
        let unprepared = task::spawn("unprepare-claims", async move {
            shared.measured("UnprepareResources", shared.unprepare(&uid, &users)).await
        });
        unprepared.await.unwrap_or(Err(ClaimError::Ending))
    }

    /// Returns the UIDs of all pods with a claim.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        self.shared.state.lock().inventory.pods()
    }

    /// Returns whether [`Claims::reconcile`] is due: it begins at most once a minute.
    #[must_use]
    pub fn begin_reconciliation(&self) -> bool {
        let (mut state, now) = (self.shared.state.lock(), self.shared.clock.boot());
        let is_due = state.next_reconciliation <= now;
        if is_due {
            state.next_reconciliation = now.saturating_add(RECONCILE_PERIOD);
        }
        is_due
    }

    /// Unprepares the claims of those pods of `held` that are not in `known`, as [`Claims::unprepare`] does.
    /// `held` is from [`Claims::pods`] and older than `known`, so that a pod that has just started is in both
    /// or in neither. An error is logged; the next call tries again.
    pub async fn reconcile(&self, held: &BTreeSet<String>, known: &BTreeSet<String>, others: &[Arc<Pod>]) {
        let users = users(others);
        for pod in held.difference(known) {
            if let Err(error) = self.shared.unprepare(pod, &users).await {
                tracing::warn!(pod, %error, "failed to unprepare the claims of a pod that is gone, retrying");
            }
        }
    }

    /// Returns whether all claims of the pod are recorded for it.
    #[must_use]
    pub fn holds_all(&self, uid: &PodUid, pod: &Pod) -> bool {
        let Ok(keys) = claim_keys(pod) else { return false };
        self.shared.state.lock().inventory.holds_all(uid.as_str(), &keys)
    }

    /// Returns whether the devices of all claims of the pod are recorded for it, so that a container can
    /// start.
    #[must_use]
    pub fn has_devices(&self, uid: &PodUid, pod: &Pod) -> bool {
        let Ok(keys) = claim_keys(pod) else { return false };
        self.shared.state.lock().inventory.has_devices(uid.as_str(), &keys)
    }

    /// Returns whether a claim is recorded for the pod, so that the pod has not ended before
    /// [`Claims::unprepare`].
    #[must_use]
    pub fn holds_any(&self, uid: &PodUid) -> bool {
        self.shared.state.lock().inventory.holds_any(uid.as_str())
    }

    /// Returns the CDI devices of a container.
    ///
    /// # Errors
    /// A claim of the container is not prepared for the pod.
    pub fn cdi_devices(
        &self,
        uid: &PodUid,
        pod: &Pod,
        container: &Container,
    ) -> Result<Vec<String>, ClaimError> {
        let requests = container_requests(pod, container)?;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        self.shared.state.lock().inventory.cdi_devices(uid.as_str(), namespace, &requests)
    }

    /// Returns the health of the devices of a container, for `allocatedResourcesStatus`.
    #[must_use]
    pub fn resource_statuses(&self, pod: &Pod, container: &Container) -> Vec<ResourceStatus> {
        let (state, now) = (self.shared.state.lock(), self.shared.clock.boot());
        resource_statuses(&state.inventory, pod, container, |driver, device| {
            let (health, message) = state.health(driver, device, now);
            resource_health(driver, device, health, message.as_deref())
        })
    }

    /// Returns the health of the devices of a pod's containers, by container. None if no claim is recorded
    /// for the pod.
    #[must_use]
    pub fn pod_health(&self, uid: &PodUid, pod: &Pod) -> BTreeMap<String, Vec<ResourceStatus>> {
        if !has_claims(pod) || !self.holds_any(uid) {
            return BTreeMap::new();
        }
        let containers = quintlet_model::pod::spec(pod).containers.iter();
        let health = |container: &Container| (container.name.clone(), self.resource_statuses(pod, container));
        containers.map(health).collect()
    }

    /// Returns the claims of a pod with their drivers, such as `gpu (gpu.example.com)`, for explanations. The
    /// drivers are known once their calls begin.
    #[must_use]
    pub fn describe(&self, pod: &Pod) -> String {
        let needed = needed_claims(pod).unwrap_or_default();
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let state = self.shared.state.lock();
        let describe = |name: String| {
            let key = ClaimKey { namespace: namespace.clone(), name };
            let record = state.inventory.record(&key);
            let drivers = record.map(|record| record.drivers.keys().cloned().collect::<Vec<_>>());
            match drivers.filter(|drivers| !drivers.is_empty()) {
                Some(drivers) => format!("{} ({})", key.name, drivers.join(", ")),
                None => key.name,
            }
        };
        let all: Vec<String> = needed.into_iter().map(|claim| describe(claim.name)).collect();
        all.join(", ")
    }

    /// Returns a receiver that is notified when an operation on a claim begins or ends, so that
    /// [`Claims::describe`] may have another result.
    #[must_use]
    pub fn operations(&self) -> watch::Receiver<()> {
        self.shared.operations.subscribe()
    }

    /// Returns the registered drivers.
    #[must_use]
    pub fn drivers(&self) -> BTreeMap<String, DriverView> {
        let state = self.shared.state.lock();
        let view = |driver: &str| DriverView {
            endpoints: state.plugins.endpoints(driver).map(|(path, up)| (path.to_owned(), up)).collect(),
            error: state.errors.get(driver).cloned(),
        };
        state.plugins.drivers().map(|driver| (driver.to_owned(), view(driver))).collect()
    }

    /// Runs `read` on the current claims, for views of them.
    pub fn read<T>(&self, read: impl FnOnce(&ClaimInventory) -> T) -> T {
        read(&self.shared.state.lock().inventory)
    }

    /// Registers a plugin beside the others of its driver.
    pub(crate) fn add_plugin(
        &self,
        driver: &str,
        endpoint: &Path,
        services: PluginServices,
    ) -> Result<(), String> {
        let plugin = {
            let mut state = self.shared.state.lock();
            if state.registered.len() >= MOST_PLUGINS {
                return Err(format!("{MOST_PLUGINS} plugins of DRA drivers are registered"));
            }
            let number = state.plugins.add(driver, endpoint, self.shared.clock.boot())?;
            let ended = self.shared.stop.child_token();
            let plugin = Arc::new(DriverPlugin::new(driver, number, endpoint, services, ended));
            state.registered.insert(number, Arc::clone(&plugin));
            plugin
        };
        tracing::info!(driver, endpoint = %endpoint.display(), ?services, "plugin of DRA driver registered");
        self.shared.changed.notify_one();
        let (shared, monitored) = (Arc::clone(&self.shared), Arc::clone(&plugin));
        drop(task::spawn("dra-connection", async move { shared.monitor(&monitored).await }));
        if let Some(version) = services.health {
            let shared = Arc::clone(&self.shared);
            drop(task::spawn("dra-health", async move { shared.follow_health(&plugin, version).await }));
        }
        Ok(())
    }

    /// Ends the registration of the plugin with this endpoint.
    pub(crate) fn remove_plugin(&self, driver: &str, endpoint: &Path) {
        {
            let mut state = self.shared.state.lock();
            let Some(number) = state.plugins.remove(driver, endpoint, self.shared.clock.boot()) else {
                return;
            };
            if let Some(plugin) = state.registered.remove(&number) {
                plugin.ended.cancel();
            }
            if state.plugins.pick(driver).is_none() {
                state.errors.remove(driver);
            }
        }
        tracing::info!(driver, endpoint = %endpoint.display(), "plugin of DRA driver removed");
        self.shared.changed.notify_one();
    }
}

impl Shared {
    async fn monitor(&self, plugin: &DriverPlugin) {
        let DriverPlugin { driver, number, endpoint, ended, .. } = plugin;
        monitor::watch(endpoint, ended, |is_connected| {
            tracing::info!(driver, endpoint = %endpoint.display(), is_connected, "connection to DRA driver changed");
            self.state.lock().plugins.set_connected(driver, *number, is_connected, self.clock.boot());
            self.changed.notify_one();
        })
        .await;
    }

    /// Follows the health of devices until the registration ends.
    async fn follow_health(&self, plugin: &DriverPlugin, version: HealthVersion) {
        loop {
            // A report that is dropped belongs to a registration that has ended.
            let end = tokio::select! {
                end = self.health_reports(plugin, version) => end,
                () = plugin.ended.cancelled() => Ok(()),
            };
            let lost = {
                let mut state = self.state.lock();
                state.health.remove(&plugin.number).map(|health| health.names())
            };
            self.wake_users(&plugin.driver, &lost.unwrap_or_default());
            match end {
                // The plugin names a service that it does not have.
                Err(error) if error.code == Code::Unimplemented => return,
                Err(error) => tracing::info!(driver = plugin.driver, %error, "stream of device health ended"),
                Ok(()) => {}
            }
            // Both arms only wait.
            tokio::select! {
                () = tokio::time::sleep(HEALTH_RETRY) => {}
                () = plugin.ended.cancelled() => return,
            }
        }
    }

    async fn health_reports(
        &self,
        plugin: &DriverPlugin,
        version: HealthVersion,
    ) -> Result<(), pod_sync_plugins::call::CallError> {
        let mut reports = plugin.watch_health(version).await?;
        loop {
            let next = {
                let state = self.state.lock();
                state.health.get(&plugin.number).and_then(PluginHealth::next_expiry)
            };
            let wait = next.map_or(HEALTH_CHECK, |next| next.saturating_sub(self.clock.boot()));
            // A whole second more: the timeout must be over.
            let wait = wait.saturating_add(Duration::from_secs(1));
            // A message that has begun to arrive is kept by the stream.
            let report = match tokio::time::timeout(wait, reports.next()).await {
                Ok(report) => match report? {
                    Some(report) => Some(report),
                    None => return Ok(()),
                },
                Err(_) => None,
            };
            let changed = {
                let mut state = self.state.lock();
                let now = self.clock.boot();
                let health = state.health.entry(plugin.number).or_default();
                match report {
                    Some(report) => health.update(report, now),
                    None => health.expire(now),
                }
            };
            self.wake_users(&plugin.driver, &changed);
        }
    }

    fn wake_users(&self, driver: &str, devices: &BTreeSet<DeviceName>) {
        if devices.is_empty() {
            return;
        }
        let pods = self.state.lock().inventory.users_of(driver, devices);
        for pod in pods {
            if let Ok(uid) = PodUid::parse(&pod) {
                self.wakeups.wake(&uid);
            }
        }
    }
}
