//! Whether the API server responds, as seen by all watches of one kind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, watch};

/// Interval between the attempts of one watch while the API server does not respond.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// Ends the back-off of all watches when one of them reaches the API server again. One watch at a time
/// attempts that every [`RETRY`], so that a return is noticed soon and the number of attempts does not grow
/// with the number of watches.
#[derive(Debug, Default)]
pub(super) struct Reachability {
    is_lost: AtomicBool,
    returns: watch::Sender<u64>,
    attempts: Mutex<()>,
}

impl Reachability {
    /// Records a request without a response.
    pub(super) fn lost(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }

    /// Records a response.
    pub(super) fn responded(&self) {
        if self.is_lost.swap(false, Ordering::Relaxed) {
            self.returns.send_modify(|n| *n = n.wrapping_add(1));
        }
    }

    /// Returns a receiver that changes at each return of the API server.
    pub(super) fn returns(&self) -> watch::Receiver<u64> {
        self.returns.subscribe()
    }

    /// Returns a guard for the watch that may retry every [`RETRY`]; none while another watch has it.
    pub(super) fn attempt(&self) -> Option<MutexGuard<'_, ()>> {
        self.attempts.try_lock().ok()
    }
}
