//! What the handle of the claims and its tasks share.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::resource::v1::ResourceClaim;
use parking_lot::Mutex;
use pod_sync_clients::WorkerWakeups;
use pod_sync_records::{StateFile, StateWriter};
use quintlet_kit::clock::Clock;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::driver::DriverPlugin;
use crate::error::{ClaimError, FetchError};
use crate::health::{HealthState, PluginHealth};
use crate::inventory::{ClaimInventory, PreparedDevice};
use crate::metrics::ClaimMetrics;
use crate::plugins::{PluginList, PluginNumber};

/// Reads claims.
#[async_trait]
pub trait ClaimSource: Send + Sync + fmt::Debug {
    /// Returns the current claim.
    ///
    /// # Errors
    /// There is no such claim, or it cannot be read.
    async fn get(&self, namespace: &str, name: &str) -> Result<ResourceClaim, FetchError>;
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) wakeups: Arc<WorkerWakeups>,
    pub(crate) source: Arc<dyn ClaimSource>,
    pub(crate) stop: CancellationToken,
    pub(crate) state: Mutex<ManagerState>,
    pub(crate) file: StateWriter<StateFile>,
    // The checkpoint was missing or unusable: pods may run without a record. The copy may be older than what
    // another agent has recorded.
    pub(crate) lacks_pods: bool,
    // A claim is no longer busy.
    pub(crate) idle: Notify,
    // An operation on a claim has begun or ended.
    pub(crate) operations: watch::Sender<()>,
    // A plugin has come, gone, connected or disconnected.
    pub(crate) changed: Notify,
    pub(crate) metrics: ClaimMetrics,
}

#[derive(Debug)]
pub(crate) struct ManagerState {
    pub(crate) inventory: ClaimInventory,
    // The file does not have the inventory.
    pub(crate) is_unwritten: bool,
    pub(crate) plugins: PluginList,
    pub(crate) registered: BTreeMap<PluginNumber, Arc<DriverPlugin>>,
    pub(crate) health: BTreeMap<PluginNumber, PluginHealth>,
    // The last error of each driver that has registered.
    pub(crate) errors: BTreeMap<String, String>,
    // CLOCK_BOOTTIME before which no reconciliation begins.
    pub(crate) next_reconciliation: Duration,
}

impl ManagerState {
    pub(crate) fn plugin(&self, driver: &str) -> Result<Arc<DriverPlugin>, ClaimError> {
        if driver.is_empty() {
            return Err(ClaimError::NoDriverName);
        }
        let number = self.plugins.pick(driver);
        let plugin = number.and_then(|number| self.registered.get(&number));
        plugin.map(Arc::clone).ok_or_else(|| ClaimError::NotRegistered(driver.to_owned()))
    }

    /// Returns the health of a device: that which the plugin reports that is called, or else the latest one
    /// that reports.
    pub(crate) fn health(
        &self,
        driver: &str,
        device: &PreparedDevice,
        now: Duration,
    ) -> (HealthState, Option<String>) {
        let picked = self.plugins.pick(driver).and_then(|number| self.health.get(&number));
        let others = self.registered.values().rev().filter(|plugin| plugin.driver == driver);
        let mut others = others.filter_map(|plugin| self.health.get(&plugin.number));
        match picked.or_else(|| others.next()) {
            Some(health) => {
                let (state, message) = health.of(&device.pool, &device.device, now);
                (state, message.map(str::to_owned))
            }
            None => (HealthState::Unknown, None),
        }
    }
}
