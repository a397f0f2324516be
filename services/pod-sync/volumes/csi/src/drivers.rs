//! The registered drivers (`pkg/volume/csi: RegistrationHandler`, `nodeinfomanager`).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use pod_sync_plugins::call::Deadline;
use pod_sync_plugins::{HandlerError, Plugin, PluginHandler};
use tokio::sync::watch;

use crate::client::{DriverClient, LIMIT, NodeInfo};
use crate::error::CsiError;
use crate::version::{self, Version};

/// A registered driver.
#[derive(Debug, Clone)]
pub struct Driver {
    /// Name of the registration, which is the driver name in volumes.
    pub name: String,
    /// Highest supported version of CSI.
    pub version: Version,
    /// Socket of the driver's services.
    pub endpoint: PathBuf,
    /// The driver's description of the node.
    pub node: NodeInfo,
    /// Client of the endpoint.
    pub client: DriverClient,
    /// Socket of the registration.
    socket: PathBuf,
}

/// An entry of `CSINode.spec.drivers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsiNodeDriver {
    /// The driver's ID of this node.
    pub node_id: String,
    /// Topology segments, which are also labels of the Node.
    pub topology: BTreeMap<String, String>,
    /// Largest number of volumes, if the driver has a limit.
    pub allocatable: Option<i32>,
}

impl CsiNodeDriver {
    /// Returns the entry for a driver's description of the node. A limit above the largest `i32` becomes that
    /// number, and a negative one is ignored.
    fn of(node: &NodeInfo) -> Self {
        let limit = (node.max_volumes > 0).then(|| i32::try_from(node.max_volumes).unwrap_or(i32::MAX));
        Self { node_id: node.node_id.clone(), topology: node.topology.clone(), allocatable: limit }
    }

    /// Returns the topology keys, sorted.
    #[must_use]
    pub fn topology_keys(&self) -> Vec<String> {
        self.topology.keys().cloned().collect()
    }
}

/// Contribution of the drivers to the CSINode and Node objects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsiNode {
    /// The drivers by name.
    pub drivers: BTreeMap<String, CsiNodeDriver>,
}

/// The registered drivers. A driver may be registered by several sockets: the one with the highest version is
/// used, and the others replace it when its socket is removed.
#[derive(Debug)]
pub struct Drivers {
    by_name: Mutex<BTreeMap<String, Vec<Arc<Driver>>>>,
    csi_node: watch::Sender<CsiNode>,
}

impl Default for Drivers {
    fn default() -> Self {
        Self { by_name: Mutex::default(), csi_node: watch::Sender::new(CsiNode::default()) }
    }
}

impl Drivers {
    /// Returns a driver.
    ///
    /// # Errors
    /// Returns [`CsiError::NotRegistered`] if there is none of that name.
    pub fn get(&self, name: &str) -> Result<Arc<Driver>, CsiError> {
        let by_name = self.by_name.lock();
        let driver = by_name.get(name).and_then(|drivers| current(drivers)).map(Arc::clone);
        driver.ok_or_else(|| CsiError::NotRegistered(name.to_owned()))
    }

    /// Returns the contribution to CSINode, as it changes.
    #[must_use]
    pub fn csi_node(&self) -> watch::Receiver<CsiNode> {
        self.csi_node.subscribe()
    }

    /// Reads the driver's description of the node again (`updateCSIDriver`).
    ///
    /// # Errors
    /// Fails if the driver is not registered, refuses, or has no ID of this node.
    pub async fn refresh(&self, name: &str) -> Result<(), CsiError> {
        let driver = self.get(name)?;
        let node = driver.client.node_info(Deadline::after(LIMIT)).await?;
        if node.node_id.is_empty() {
            return Err(CsiError::NoNodeId);
        }
        let mut by_name = self.by_name.lock();
        for registered in by_name.get_mut(name).into_iter().flatten() {
            // Another socket may have registered the driver meanwhile.
            if Arc::ptr_eq(registered, &driver) {
                *registered = Arc::new(Driver { node: node.clone(), ..Driver::clone(&driver) });
            }
        }
        self.publish(&by_name);
        Ok(())
    }

    /// Returns the highest version of a driver if it may be registered (`validateVersions`).
    fn usable_version(&self, caller: &str, plugin: &Plugin) -> Result<Version, HandlerError> {
        let failed = |reason: String| {
            let name = &plugin.name;
            HandlerError(format!("kubernetes.io/csi: {caller} for CSI driver {name:?} failed. {reason}"))
        };
        if plugin.versions.is_empty() {
            return Err(failed("Plugin returned an empty list for supported versions".to_owned()));
        }
        let highest = version::highest(&plugin.versions).map_err(|error| {
            let quoted: Vec<String> = plugin.versions.iter().map(|v| format!("{v:?}")).collect();
            let list = quoted.join(" ");
            failed(format!("None of the versions specified [{list}] are supported. err={error}"))
        })?;
        let by_name = self.by_name.lock();
        let existing = by_name.get(&plugin.name).and_then(|drivers| current(drivers));
        match existing.filter(|driver| driver.socket != plugin.socket && driver.version >= highest) {
            None => Ok(highest),
            Some(driver) => Err(failed(format!(
                "Another driver with the same name is already registered with a higher supported version: \"{}\"",
                driver.version
            ))),
        }
    }

    fn publish(&self, by_name: &BTreeMap<String, Vec<Arc<Driver>>>) {
        let only_driver = |(name, drivers): (&String, &Vec<Arc<Driver>>)| {
            Some((name.clone(), CsiNodeDriver::of(&current(drivers)?.node)))
        };
        let drivers = by_name.iter().filter_map(only_driver).collect();
        self.csi_node.send_if_modified(|node| {
            let changed = node.drivers != drivers;
            node.drivers = drivers;
            changed
        });
    }
}

/// Returns the registration with the highest version.
fn current(drivers: &[Arc<Driver>]) -> Option<&Arc<Driver>> {
    drivers.iter().max_by(|a, b| a.version.cmp(&b.version))
}

#[async_trait]
impl PluginHandler for Drivers {
    fn validate(&self, plugin: &Plugin) -> Result<(), HandlerError> {
        let (name, endpoint) = (&plugin.name, plugin.endpoint.display());
        let failed = |reason: String| {
            HandlerError(format!("validation failed for CSI Driver {name} at endpoint {endpoint}: {reason}"))
        };
        if name.is_empty() {
            return Err(failed("driver name is empty".to_owned()));
        }
        if !plugin.endpoint.is_absolute() {
            return Err(failed("the endpoint is not an absolute path".to_owned()));
        }
        self.usable_version("ValidatePlugin", plugin).map(drop).map_err(|error| failed(error.0))
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), HandlerError> {
        self.usable_version("RegisterPlugin", plugin)?;
        let client = DriverClient::new(plugin.name.clone(), plugin.endpoint.clone());
        let node = client
            .node_info(Deadline::after(LIMIT))
            .await
            .map_err(|error| HandlerError(error.to_string()))?;
        if node.node_id.is_empty() {
            return Err(HandlerError(format!("error adding CSI driver node info: {}", CsiError::NoNodeId)));
        }
        if node.max_volumes < 0 {
            let limit = node.max_volumes;
            tracing::warn!(
                driver = plugin.name,
                limit,
                "driver reported a negative limit of volumes, ignored"
            );
        }
        // Another socket may have registered the same driver meanwhile.
        let version = self.usable_version("RegisterPlugin", plugin)?;
        let driver = Driver {
            name: plugin.name.clone(),
            version,
            endpoint: plugin.endpoint.clone(),
            node,
            client,
            socket: plugin.socket.clone(),
        };
        let mut by_name = self.by_name.lock();
        let registrations = by_name.entry(plugin.name.clone()).or_default();
        registrations.retain(|other| other.socket != plugin.socket);
        registrations.push(Arc::new(driver));
        self.publish(&by_name);
        Ok(())
    }

    async fn deregister(&self, plugin: &Plugin) {
        let mut by_name = self.by_name.lock();
        if let Some(registrations) = by_name.get_mut(&plugin.name) {
            registrations.retain(|driver| driver.socket != plugin.socket);
            if registrations.is_empty() {
                by_name.remove(&plugin.name);
            }
        }
        self.publish(&by_name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(socket: &str, versions: &[&str]) -> Plugin {
        Plugin {
            kind: crate::PLUGIN_TYPE.to_owned(),
            name: "d".to_owned(),
            endpoint: PathBuf::from("/nonexistent/csi.sock"),
            versions: versions.iter().map(|v| (*v).to_owned()).collect(),
            socket: PathBuf::from(socket),
        }
    }

    fn put(drivers: &Drivers, socket: &str, version: &str, node_id: &str) {
        let node = NodeInfo { node_id: node_id.to_owned(), max_volumes: i64::MAX, ..NodeInfo::default() };
        let endpoint = PathBuf::from("/nonexistent/csi.sock");
        let driver = Driver {
            name: "d".to_owned(),
            version: Version::parse(version).unwrap(),
            client: DriverClient::new("d".to_owned(), endpoint.clone()),
            endpoint,
            node,
            socket: PathBuf::from(socket),
        };
        let mut by_name = drivers.by_name.lock();
        by_name.entry("d".to_owned()).or_default().push(Arc::new(driver));
        drivers.publish(&by_name);
    }

    #[tokio::test]
    async fn the_highest_version_is_used_and_a_lower_one_returns_when_its_socket_goes() {
        let drivers = Drivers::default();
        let node = drivers.csi_node();
        put(&drivers, "/r/low.sock", "1.2", "low");
        drivers.validate(&plugin("/r/high.sock", &["1.3.0"])).unwrap();
        put(&drivers, "/r/high.sock", "1.3", "high");
        assert_eq!(node.borrow().drivers["d"].node_id, "high");
        assert_eq!(node.borrow().drivers["d"].allocatable, Some(i32::MAX));
        drivers.deregister(&plugin("/r/high.sock", &[])).await;
        assert_eq!(drivers.get("d").unwrap().node.node_id, "low");
        drivers.deregister(&plugin("/r/low.sock", &[])).await;
        assert_eq!(
            drivers.get("d").unwrap_err().to_string(),
            "driver name d not found in the list of registered CSI drivers"
        );
        assert_eq!(node.borrow().drivers, BTreeMap::new());
    }

    #[tokio::test]
    async fn a_driver_is_refused_with_the_kubelets_texts() {
        let drivers = Drivers::default();
        put(&drivers, "/r/one.sock", "1.2", "n");
        let prefix = "validation failed for CSI Driver d at endpoint /nonexistent/csi.sock: ";
        for (versions, expected) in [
            (
                &[][..],
                "kubernetes.io/csi: ValidatePlugin for CSI driver \"d\" failed. \
                 Plugin returned an empty list for supported versions",
            ),
            (
                &["2.0.0"],
                "kubernetes.io/csi: ValidatePlugin for CSI driver \"d\" failed. None of the versions specified \
                 [\"2.0.0\"] are supported. err=could not find a highest supported version from versions ([2.0.0]) \
                 reported: <nil>",
            ),
            (
                &["1.2.0"],
                "kubernetes.io/csi: ValidatePlugin for CSI driver \"d\" failed. Another driver with the same name is \
                 already registered with a higher supported version: \"1.2\"",
            ),
        ] {
            let error = drivers.validate(&plugin("/r/two.sock", versions)).unwrap_err();
            assert_eq!(error.to_string(), format!("{prefix}{expected}"));
        }
        drivers.validate(&plugin("/r/one.sock", &["1.2.0"])).unwrap();
        let relative = Plugin { endpoint: PathBuf::from("csi.sock"), ..plugin("/r/two.sock", &["1.3.0"]) };
        assert!(drivers.validate(&relative).is_err());
        let nameless = Plugin { name: String::new(), ..plugin("/r/two.sock", &["1.3.0"]) };
        assert!(drivers.validate(&nameless).unwrap_err().0.ends_with("driver name is empty"));
    }
}
