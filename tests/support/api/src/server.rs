//! State that all requests share.

use std::time::Duration;

use crate::faults::{Faults, Traffic};
use crate::store::Store;

/// State that all requests share.
pub(crate) struct Server {
    pub(crate) store: Store,
    pub(crate) faults: Faults,
    pub(crate) traffic: Traffic,
    pub(crate) bookmark_every: Duration,
    pub(crate) access: crate::reviews::Access,
}
