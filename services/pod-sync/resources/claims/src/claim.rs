//! A claim, as far as this node needs it.

use std::collections::BTreeSet;
use std::fmt;

/// Namespace and name of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimKey {
    /// Namespace of the claim, and of its pods.
    pub namespace: String,
    /// Name, unique in the namespace.
    pub name: String,
}

impl fmt::Display for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One device of an allocation: driver, pool, device, and request.
pub(crate) type AllocatedDevice = (String, String, String, String);

/// A claim that the pod may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Namespace and name of the claim.
    pub key: ClaimKey,
    /// UID of the claim.
    pub uid: String,
    /// Devices that the scheduler has selected.
    pub devices: BTreeSet<AllocatedDevice>,
}

impl AllocatedClaim {
    /// Returns the names of the drivers.
    #[must_use]
    pub fn drivers(&self) -> BTreeSet<&str> {
        self.devices.iter().map(|(driver, ..)| driver.as_str()).collect()
    }
}
