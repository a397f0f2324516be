//! Reads the limits of drivers again at the interval of their CSIDriver objects
//! (`pkg/volume/csi/csi_node_updater.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pod_sync_csi::drivers::Drivers;
use quintlet_kit::task;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::claims::DriverRules;
use crate::objects::VolumeObjects;

/// The intervals of the registered drivers. A driver without an interval has its limit from its registration.
#[derive(Debug)]
pub(crate) struct LimitUpdates {
    drivers: Arc<Drivers>,
    periods: watch::Sender<BTreeMap<String, Duration>>,
}

impl LimitUpdates {
    pub(crate) fn new(drivers: Arc<Drivers>) -> Self {
        Self { drivers, periods: watch::Sender::default() }
    }

    /// Sets the interval of a driver, as its CSIDriver object was read last.
    pub(crate) fn set_period(&self, driver: &str, period: Option<Duration>) {
        self.periods.send_if_modified(|periods| {
            let before = match period {
                Some(period) => periods.insert(driver.to_owned(), period),
                None => periods.remove(driver),
            };
            before != period
        });
    }

    /// Runs a task named `driver limit` for each driver with an interval, until `stop`. Reads the CSIDriver
    /// of each driver that registers; later changes of it are noticed when a pod with a volume of the driver
    /// is declared.
    pub(crate) async fn run(self: Arc<Self>, objects: Arc<dyn VolumeObjects>, stop: CancellationToken) {
        let (mut registered, mut periods) = (self.drivers.csi_node(), self.periods.subscribe());
        let mut known: BTreeSet<String> = BTreeSet::new();
        let mut updates: BTreeMap<String, (Duration, CancellationToken)> = BTreeMap::new();
        loop {
            let names: BTreeSet<String> = registered.borrow_and_update().drivers.keys().cloned().collect();
            for name in names.difference(&known) {
                // The read has no effect.
                let object = tokio::select! {
                    object = objects.driver(name) => object,
                    () = stop.cancelled() => return,
                };
                match object {
                    Ok(object) => self.set_period(name, DriverRules::of(object.as_ref()).limit_period),
                    Err(error) => tracing::info!(driver = name, %error, "failed to read a CSIDriver"),
                }
            }
            known = names;
            let wanted = periods.borrow_and_update().clone();
            updates.retain(|name, (period, ends)| {
                let stays = known.contains(name) && wanted.get(name) == Some(period);
                if !stays {
                    ends.cancel();
                }
                stays
            });
            for (name, period) in wanted.into_iter().filter(|(name, _)| known.contains(name)) {
                updates.entry(name).or_insert_with_key(|name| {
                    let ends = stop.child_token();
                    let update = update(Arc::clone(&self.drivers), name.clone(), period, ends.clone());
                    drop(task::spawn("driver limit", update));
                    (period, ends)
                });
            }
            // A dropped wait loses nothing: the next pass reads both.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = registered.changed() => {}
                _ = periods.changed() => {}
            }
        }
    }
}

async fn update(drivers: Arc<Drivers>, name: String, period: Duration, ends: CancellationToken) {
    loop {
        // A read that is dropped changes nothing.
        tokio::select! {
            () = ends.cancelled() => return,
            () = async {
                tokio::time::sleep(period).await;
                if let Err(error) = drivers.refresh(&name).await {
                    tracing::info!(driver = name, error = error.text(), "failed to update the limit of a driver");
                }
            } => {}
        }
    }
}
