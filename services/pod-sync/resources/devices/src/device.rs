//! Devices of a resource.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// ID of a device, unique in its resource. Cloning is cheap.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(Arc<str>);

impl DeviceId {
    /// Returns the ID.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for DeviceId {
    fn from(id: &str) -> Self {
        Self(Arc::from(id))
    }
}

impl From<String> for DeviceId {
    fn from(id: String) -> Self {
        Self(Arc::from(id))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A set of devices of one resource.
pub type DeviceIds = BTreeSet<DeviceId>;

/// The NUMA node of devices that belong to none (`nodeWithoutTopology`).
pub const NO_NUMA_NODE: i64 = -1;

/// A device, as its plugin lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Whether the plugin reports the device as healthy.
    pub is_healthy: bool,
    /// NUMA nodes of the device; none if it belongs to no node.
    pub numa_nodes: Vec<i64>,
}
