//! Bytes of requests and answers that are held at once, bounded for each socket.
//!
//! A request is held from its first byte until its call has ended, an answer until its caller has read it. The shares are
//! apart, so that a caller that reads nothing holds up those of its own socket only.
use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::policy::Socket;

const MIB: usize = 1 << 20;

/// Returns the bytes that the calls of one socket may hold. The largest request and the largest answer have 16 MiB, and their
/// usual size is some KiB.
#[must_use]
pub fn share(socket: Socket) -> usize {
    match socket {
        // The pods of a full node start at once: 500 answers of 64 KiB, and room for four of the largest.
        Socket::Sync => 96 * MIB,
        // pleg-service reads lists as streams, which are bounded by themselves, and inspects pods.
        Socket::Read => 64 * MIB,
        Socket::Admin | Socket::NodeApi => 48 * MIB,
        // The output of a probe's command is cut to some KiB where it is read.
        Socket::Probe => 48 * MIB,
    }
}

/// The share of one socket. Clones share it.
#[derive(Debug, Clone)]
pub struct Budget {
    free: Arc<Semaphore>,
    total: usize,
    refused: Counter,
}

/// No room is left for a request or an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the calls of this socket hold all of their {total} bytes; try again")]
pub struct Exhausted {
    total: usize,
}

/// What one request or answer holds of a budget; dropping the last clone gives it back. The default holds nothing.
#[derive(Debug, Clone, Default)]
pub struct Held {
    _permit: Option<Arc<OwnedSemaphorePermit>>,
}

impl Budget {
    /// A budget of `total` bytes, which counts what it refuses.
    #[must_use]
    pub fn new(total: usize, refused: Counter) -> Self {
        let total = total.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(total)), total, refused }
    }

    /// Returns the bytes that are not held.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.available_permits()
    }

    /// Adds `bytes` to what `held` holds.
    ///
    /// # Errors
    /// They are not free; `held` is as before.
    pub fn hold(&self, held: &mut Growing, bytes: usize) -> Result<(), Exhausted> {
        let permit = u32::try_from(bytes).ok().and_then(|n| self.free.clone().try_acquire_many_owned(n).ok());
        let Some(permit) = permit else {
            self.refused.inc();
            return Err(Exhausted { total: self.total });
        };
        match &mut held.0 {
            Some(all) => all.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }
}

/// What a body holds while it is being read.
#[derive(Debug, Default)]
pub struct Growing(Option<OwnedSemaphorePermit>);

impl Growing {
    /// The body is whole.
    #[must_use]
    pub fn done(self) -> Held {
        Held { _permit: self.0.map(Arc::new) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_comes_back_with_the_last_clone() {
        let refused = Counter::default();
        let budget = Budget::new(10, refused.clone());
        let mut growing = Growing::default();
        budget.hold(&mut growing, 6).unwrap();
        budget.hold(&mut growing, 3).unwrap();
        assert_eq!(budget.hold(&mut growing, 2), Err(Exhausted { total: 10 }));
        assert_eq!((budget.free(), refused.get()), (1, 1));
        let held = growing.done();
        let other = held.clone();
        drop(held);
        assert_eq!(budget.free(), 1);
        drop(other);
        assert_eq!(budget.free(), 10);
        drop(Growing::default().done());
        assert_eq!(budget.free(), 10);
    }

    #[test]
    fn every_socket_has_room_for_the_largest_request_and_its_answer() {
        for socket in Socket::ALL {
            assert!(share(socket) > 2 * 16 * MIB, "{socket:?}");
        }
    }
}
