//! Limits of what a client may use, and the guards that enforce them.
//!
//! A connection is untrusted until a request on it is authorized. Untrusted connections have few slots and a short deadline, and a new
//! one displaces an old one, so that a client that fills the slots does not lock others out.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Limits of one listener.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of connections. The API server keeps a few; each `kubectl exec` and `logs -f` has one.
    pub connections: usize,
    /// Maximum number of untrusted connections. Times [`Limits::header_bytes`], they hold 32 MiB at most.
    pub strangers: usize,
    /// Maximum number of connections from one network (an IPv4 address, an IPv6 /64). kubectl port-forward opens one per command, not
    /// one per forwarded connection.
    pub per_address: usize,
    /// Maximum number of upgraded connections (exec, attach, port-forward).
    pub upgrades: usize,
    /// Maximum number of requests that wait for a TokenReview. Times [`Limits::header_bytes`], they hold 32 MiB more.
    pub reviews: usize,
    /// The same for one network.
    pub reviews_per_address: usize,
    /// Time limit from accepting a connection to the end of the TLS handshake.
    pub handshake: Duration,
    /// Time limit for the header of a request, including idle time on a kept-alive HTTP/1 connection.
    pub header: Duration,
    /// Time limit from accepting a connection to its first authorized request.
    pub stranger: Duration,
    /// Time limit for closing a connection.
    pub linger: Duration,
    /// Time after which a connection without a request in flight is closed, as in the kubelet.
    pub idle: Duration,
    /// Time limit for the client to read the next bytes of a response. The kubelet has the same limit for a whole response; `kubectl logs
    /// -f | less` reads slowly.
    pub write: Duration,
    /// Maximum size of a request's header. The kubelet accepts 1 MiB, which times the connections is too much memory. Tokens and exec
    /// commands are far smaller.
    pub header_bytes: usize,
    /// Maximum size of a request's body. Only forms have one.
    pub body_bytes: usize,
    /// Time limit for a request's body.
    pub body: Duration,
    /// Maximum number of concurrent requests on one HTTP/2 connection.
    pub streams: u32,
    /// Time limit from the start of an upgrade to the runtime's response.
    pub upgrade: Duration,
    /// How long one direction of an upgraded connection may continue after the other one ended.
    pub half_open: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            strangers: 256,
            per_address: 512,
            upgrades: 512,
            reviews: 256,
            reviews_per_address: 64,
            handshake: Duration::from_secs(10),
            header: Duration::from_secs(30),
            stranger: Duration::from_secs(60),
            linger: Duration::from_secs(5),
            idle: Duration::from_secs(90),
            write: Duration::from_secs(4 * 3600),
            header_bytes: 128 << 10,
            body_bytes: 64 << 10,
            body: Duration::from_secs(30),
            streams: 100,
            upgrade: Duration::from_secs(30),
            half_open: Duration::from_secs(10),
        }
    }
}

/// A client with one address of the /64 usually has all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Network(IpAddr);

impl From<IpAddr> for Network {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => {
                let [a, b, c, d, ..] = v6.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
            v4 => v4,
        })
    }
}

#[derive(Debug)]
struct Connection {
    network: Network,
    trusted: bool,
    displaced: CancellationToken,
}

#[derive(Debug, Default)]
struct Count {
    /// Id of the next connection. Ids grow, so the smallest is the oldest.
    next: u64,
    open: HashMap<u64, Connection>,
}

impl Count {
    /// Returns the oldest untrusted connection of these networks.
    fn oldest(&self, within: impl Fn(Network) -> bool) -> Option<u64> {
        let strangers = self.open.iter().filter(|(_, c)| !c.trusted && within(c.network));
        strangers.map(|(id, _)| *id).min()
    }

    /// Returns the network with the most untrusted connections. Of several, it returns the one with the oldest connection.
    fn fullest(&self) -> Option<Network> {
        let mut of: HashMap<Network, (usize, u64)> = HashMap::new();
        for (id, connection) in self.open.iter().filter(|(_, c)| !c.trusted) {
            let (many, oldest) = of.entry(connection.network).or_insert((0, *id));
            (*many, *oldest) = (many.saturating_add(1), (*oldest).min(*id));
        }
        of.into_iter()
            .max_by_key(|(_, (many, oldest))| (*many, u64::MAX.saturating_sub(*oldest)))
            .map(|(network, _)| network)
    }

    fn displace(&mut self, id: Option<u64>) -> bool {
        let displaced = id.and_then(|id| self.open.remove(&id));
        displaced.inspect(|connection| connection.displaced.cancel()).is_some()
    }
}

/// The open connections.
#[derive(Debug, Clone, Default)]
pub struct ConnectionLimiter(Arc<Mutex<Count>>);

/// An open connection. Its slot is free when this is dropped or displaced.
#[derive(Debug)]
pub struct ConnectionSlot {
    gate: ConnectionLimiter,
    id: u64,
    displaced: CancellationToken,
}

impl ConnectionLimiter {
    /// Admits a connection, if necessary in place of an untrusted one. Returns none if all connections are trusted.
    #[must_use]
    pub fn enter(&self, address: IpAddr, limits: &Limits) -> Option<ConnectionSlot> {
        let network = Network::from(address);
        let mut count = self.0.lock();
        let of_network = count.open.values().filter(|c| c.network == network).count();
        let strangers = count.open.values().filter(|c| !c.trusted).count();
        if of_network >= limits.per_address {
            let oldest = count.oldest(|n| n == network);
            if !count.displace(oldest) {
                return None;
            }
        } else if count.open.len() >= limits.connections || strangers >= limits.strangers {
            let fullest = count.fullest();
            let oldest = count.oldest(|n| Some(n) == fullest);
            if !count.displace(oldest) {
                return None;
            }
        }
        let id = count.next;
        count.next = count.next.saturating_add(1);
        let displaced = CancellationToken::new();
        count.open.insert(id, Connection { network, trusted: false, displaced: displaced.clone() });
        Some(ConnectionSlot { gate: self.clone(), id, displaced })
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.lock().open.len()
    }
}

impl ConnectionSlot {
    /// Marks the connection as trusted, so that it is not displaced.
    pub fn trust(&self) {
        if let Some(connection) = self.gate.0.lock().open.get_mut(&self.id) {
            connection.trusted = true;
        }
    }

    /// Completes when another connection takes the slot.
    pub async fn displaced(&self) {
        self.displaced.cancelled().await;
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.gate.0.lock().open.remove(&self.id);
    }
}

/// The requests that wait for a TokenReview.
#[derive(Debug, Clone, Default)]
pub struct ReviewQueue(Arc<Mutex<HashMap<Network, usize>>>);

/// A waiting request. Its slot is free when this is dropped.
#[derive(Debug)]
pub struct ReviewSlot {
    waiting: ReviewQueue,
    network: Network,
}

impl ReviewQueue {
    /// Takes a slot. Returns none if too many requests wait.
    #[must_use]
    pub fn enter(&self, network: Network, limits: &Limits) -> Option<ReviewSlot> {
        let mut waiting = self.0.lock();
        let of_network = waiting.get(&network).copied().unwrap_or(0);
        if of_network >= limits.reviews_per_address || waiting.values().sum::<usize>() >= limits.reviews {
            return None;
        }
        waiting.insert(network, of_network.saturating_add(1));
        Some(ReviewSlot { waiting: self.clone(), network })
    }
}

impl Drop for ReviewSlot {
    fn drop(&mut self) {
        let mut waiting = self.waiting.0.lock();
        if let Some(n) = waiting.get_mut(&self.network) {
            *n = n.saturating_sub(1);
            if *n == 0 {
                waiting.remove(&self.network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    #[test]
    fn trusted_connections_of_one_network_do_not_take_the_slots_of_other_networks() {
        let limits = Limits { connections: 3, per_address: 2, ..Limits::default() };
        let gate = ConnectionLimiter::default();
        let enter = |address| gate.enter(address, &limits).inspect(ConnectionSlot::trust);
        let first = enter(v4(1)).unwrap();
        let _second = enter(v4(1)).unwrap();
        assert!(enter(v4(1)).is_none());
        let _third = enter(v4(2)).unwrap();
        assert!(enter(v4(3)).is_none());
        drop(first);
        assert_eq!(gate.open(), 2);
        assert!(enter(v4(1)).is_some());
    }

    #[test]
    fn a_new_connection_displaces_the_oldest_untrusted_one_of_the_network_with_the_most() {
        let limits = Limits { connections: 9, strangers: 5, per_address: 4, ..Limits::default() };
        let gate = ConnectionLimiter::default();
        let enter = |address| gate.enter(address, &limits).unwrap();
        let displaced = |passes: &[&ConnectionSlot]| {
            passes.iter().map(|p| p.displaced.is_cancelled()).collect::<Vec<bool>>()
        };
        let trusted = enter(v4(1));
        trusted.trust();
        let (a, b, c) = (enter(v4(1)), enter(v4(1)), enter(v4(1)));
        assert_eq!(displaced(&[&trusted, &a, &b, &c]), [false; 4]);
        // The limit of this network is reached.
        let d = enter(v4(1));
        assert_eq!(displaced(&[&trusted, &a, &b, &c, &d]), [false, true, false, false, false]);
        // The limit of untrusted connections is reached; the first network has the most.
        let (other, another) = (enter(v4(2)), enter(v4(2)));
        assert_eq!(displaced(&[&b, &c, &d, &other, &another]), [false; 5]);
        let third = enter(v4(3));
        assert_eq!(
            displaced(&[&trusted, &b, &c, &d, &other, &another, &third]),
            [false, true, false, false, false, false, false]
        );
        assert_eq!(gate.open(), 6);
        // A displaced connection has returned its slot already.
        drop((a, b));
        assert_eq!(gate.open(), 6);
    }

    #[test]
    fn all_addresses_of_a_network_share_one_limit() {
        let networks =
            ["2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:2::1", "::ffff:10.0.0.1", "10.0.0.1"];
        let networks = networks.map(|a| Network::from(a.parse::<IpAddr>().unwrap()));
        assert_eq!(networks[0], networks[1]);
        assert_ne!(networks[0], networks[2]);
        assert_eq!(networks[3], networks[4]);
        assert_ne!(networks[4], Network::from(v4(2)));
    }

    #[test]
    fn requests_that_wait_for_a_review_are_limited_in_total_and_per_network() {
        let limits = Limits { reviews: 3, reviews_per_address: 2, ..Limits::default() };
        let waiting = ReviewQueue::default();
        let [one, two, three] = [1, 2, 3].map(|n| Network::from(v4(n)));
        let (first, _second) = (waiting.enter(one, &limits).unwrap(), waiting.enter(one, &limits).unwrap());
        assert!(waiting.enter(one, &limits).is_none());
        let _third = waiting.enter(two, &limits).unwrap();
        assert!(waiting.enter(three, &limits).is_none());
        drop(first);
        assert!(waiting.enter(three, &limits).is_some());
        assert!(waiting.enter(one, &limits).is_some());
    }
}
