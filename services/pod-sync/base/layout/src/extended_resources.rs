//! Extended resources that this node provides.

use std::collections::BTreeMap;

/// Number of devices of a resource in the Node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResourceCount {
    /// All devices.
    pub capacity: usize,
    /// Healthy devices.
    pub allocatable: usize,
}

/// The extended resources of the node, by name. A resource whose provider has gone for good is in it with
/// zero, which replaces the value of the Node.
pub type ExtendedResources = BTreeMap<String, ResourceCount>;
