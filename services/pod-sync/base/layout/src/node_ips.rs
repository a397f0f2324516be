//! Addresses of the node that may change while pods run.

use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::RwLock;

/// The current addresses of the node, primary first; at most one per family. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct NodeIps(Arc<RwLock<Vec<IpAddr>>>);

impl From<Vec<IpAddr>> for NodeIps {
    fn from(ips: Vec<IpAddr>) -> Self {
        Self(Arc::new(RwLock::new(ips)))
    }
}

impl NodeIps {
    /// Returns the current addresses.
    #[must_use]
    pub fn get(&self) -> Vec<IpAddr> {
        self.0.read().clone()
    }

    /// Returns the primary address.
    #[must_use]
    pub fn first(&self) -> Option<IpAddr> {
        self.0.read().first().copied()
    }

    /// Replaces the addresses.
    pub fn set(&self, ips: &[IpAddr]) {
        *self.0.write() = ips.to_vec();
    }
}
