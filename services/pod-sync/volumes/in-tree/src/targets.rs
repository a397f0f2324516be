//! One lock per iSCSI target: a login must not overlap the decision to log out.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// The locks of targets with an operation in flight.
#[derive(Clone, Default)]
pub(crate) struct Targets(Arc<Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>>);

impl Targets {
    /// Returns the lock of a target.
    pub(crate) fn of(&self, iqn: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = self.0.lock();
        // A lock with one reference is neither held nor awaited.
        all.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(all.entry(iqn.to_owned()).or_default())
    }
}
