//! Limits the bytes of requests and replies in memory, per socket.
//!
//! A request is counted from its first byte until its call has completed, a reply until the caller has read
//! it. Each socket has its own limit, so that a caller that does not read blocks only callers of its own
//! socket.
use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::policy::Socket;

const MIB: usize = 1 << 20;

/// Returns the limit of a socket. Requests and replies have 16 MiB at most and a few KiB usually.
#[must_use]
pub fn limit(socket: Socket) -> usize {
    match socket {
        // The pods of a full node start at once: 500 replies of 64 KiB, and four of the largest size.
        Socket::Sync => 96 * MIB,
        // pleg-service inspects pods and reads lists as streams, which have a bound of their own.
        Socket::Read => 64 * MIB,
        Socket::Admin | Socket::NodeApi => 48 * MIB,
        // Requests, and a few KiB of output per probe: the rest is dropped as it is read.
        Socket::Probe => 48 * MIB,
    }
}

/// The byte limit of one socket. Clones share it.
#[derive(Debug, Clone)]
pub struct ByteBudget {
    permits: Arc<Semaphore>,
    total: usize,
    refused: Counter,
}

/// No bytes are left for a request or reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("calls on this socket have reached the limit of {total} bytes in memory, retry")]
pub struct Exhausted {
    total: usize,
}

/// Bytes reserved for a request or reply. They are released when the last clone is dropped. The default
/// reserves nothing.
#[derive(Debug, Clone, Default)]
pub struct Reservation {
    _permit: Option<Arc<OwnedSemaphorePermit>>,
}

impl ByteBudget {
    /// Creates a budget of `total` bytes. `refused` counts failed reservations.
    #[must_use]
    pub fn new(total: usize, refused: Counter) -> Self {
        let total = total.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(total)), total, refused }
    }

    /// Returns the bytes that are not reserved.
    #[must_use]
    pub fn available(&self) -> usize {
        self.permits.available_permits()
    }

    /// Adds `bytes` to a reservation.
    ///
    /// # Errors
    /// Fails without a change if they are not available.
    pub fn reserve(&self, held: &mut GrowingReservation, bytes: usize) -> Result<(), Exhausted> {
        let permit =
            u32::try_from(bytes).ok().and_then(|n| self.permits.clone().try_acquire_many_owned(n).ok());
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

/// The reservation of a body that is being read.
#[derive(Debug, Default)]
pub struct GrowingReservation(Option<OwnedSemaphorePermit>);

impl GrowingReservation {
    /// Returns the reservation of the complete body.
    #[must_use]
    pub fn finish(self) -> Reservation {
        Reservation { _permit: self.0.map(Arc::new) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_released_with_its_last_clone() {
        let refused = Counter::default();
        let budget = ByteBudget::new(10, refused.clone());
        let mut growing = GrowingReservation::default();
        budget.reserve(&mut growing, 6).unwrap();
        budget.reserve(&mut growing, 3).unwrap();
        assert_eq!(budget.reserve(&mut growing, 2), Err(Exhausted { total: 10 }));
        assert_eq!((budget.available(), refused.get()), (1, 1));
        let held = growing.finish();
        let other = held.clone();
        drop(held);
        assert_eq!(budget.available(), 1);
        drop(other);
        assert_eq!(budget.available(), 10);
        drop(GrowingReservation::default().finish());
        assert_eq!(budget.available(), 10);
    }

    #[test]
    fn the_limit_of_every_socket_allows_the_largest_request_and_reply() {
        for socket in Socket::ALL {
            assert!(limit(socket) > 2 * 16 * MIB, "{socket:?}");
        }
    }
}
