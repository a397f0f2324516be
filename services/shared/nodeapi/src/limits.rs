//! How much anybody may take, and the guards that count it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// What one listener allows.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections in all: the API server keeps a few, every `kubectl exec` and `logs -f` one.
    pub connections: usize,
    /// Connections of one address: the rest stays for the others. kubectl port-forward opens one per forwarding, not per
    /// connection through it.
    pub per_address: usize,
    /// Upgraded connections (exec, attach, port-forward) in all.
    pub upgrades: usize,
    /// From accepting to the end of the TLS handshake.
    pub handshake: Duration,
    /// For the header of a request, idle time on a kept connection included.
    pub header: Duration,
    /// Bytes of a request's header. The kubelet takes 1 MiB, which times the connections is more memory than a node has to
    /// spare; tokens and exec commands fit into far less.
    pub header_bytes: usize,
    /// Bytes of a request's body, which only forms have.
    pub body_bytes: usize,
    /// For a request's body.
    pub body: Duration,
    /// Requests at a time on one HTTP/2 connection.
    pub streams: u32,
    /// From the start of an upgrade until the runtime has answered.
    pub upgrade: Duration,
    /// How long the other direction of an upgraded connection may go on after one has ended.
    pub half_open: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            per_address: 512,
            upgrades: 512,
            handshake: Duration::from_secs(10),
            header: Duration::from_secs(30),
            header_bytes: 128 << 10,
            body_bytes: 64 << 10,
            body: Duration::from_secs(30),
            streams: 100,
            upgrade: Duration::from_secs(30),
            half_open: Duration::from_secs(10),
        }
    }
}

#[derive(Debug, Default)]
struct Count {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// Connections that are open.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<Mutex<Count>>);

/// One open connection; it counts until dropped.
#[derive(Debug)]
pub struct Pass {
    gate: Gate,
    address: IpAddr,
}

impl Gate {
    /// Lets a connection in, unless there are too many.
    #[must_use]
    pub fn enter(&self, address: IpAddr, limits: &Limits) -> Option<Pass> {
        let mut count = self.0.lock();
        let of_address = count.by_address.get(&address).copied().unwrap_or(0);
        if count.all >= limits.connections || of_address >= limits.per_address {
            return None;
        }
        count.all += 1;
        count.by_address.insert(address, of_address + 1);
        Some(Pass { gate: self.clone(), address })
    }

    /// Connections open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.lock().all
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut count = self.gate.0.lock();
        count.all -= 1;
        if let Some(n) = count.by_address.get_mut(&self.address) {
            *n -= 1;
            if *n == 0 {
                count.by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_cannot_take_the_places_of_the_others() {
        let limits = Limits { connections: 3, per_address: 2, ..Limits::default() };
        let gate = Gate::default();
        let [one, two, three] = [1, 2, 3].map(|n| IpAddr::from([10, 0, 0, n]));
        let first = gate.enter(one, &limits).unwrap();
        let _second = gate.enter(one, &limits).unwrap();
        assert!(gate.enter(one, &limits).is_none());
        let _third = gate.enter(two, &limits).unwrap();
        assert!(gate.enter(three, &limits).is_none());
        drop(first);
        assert_eq!(gate.open(), 2);
        assert!(gate.enter(one, &limits).is_some());
    }
}
