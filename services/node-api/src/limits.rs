//! How much anybody may take, and the guards that count it.
//!
//! A connection begins as a stranger's and is trusted from the first request on whose user may do what they asked for.
//! Strangers have few places, for a short time, and one more displaces another: whoever fills their places keeps nobody out.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// What one listener allows.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections in all: the API server keeps a few, every `kubectl exec` and `logs -f` one.
    pub connections: usize,
    /// Of them, those on which nobody has shown yet that they may do something. Times [`Limits::header_bytes`], that is 32 MiB:
    /// what people without any right can make the node keep.
    pub strangers: usize,
    /// Connections of one network (an IPv4 address, an IPv6 /64): the rest stays for the others. kubectl port-forward opens
    /// one per forwarding, not per connection through it.
    pub per_address: usize,
    /// Upgraded connections (exec, attach, port-forward) in all.
    pub upgrades: usize,
    /// Requests that wait for a review of their token, in all. Times [`Limits::header_bytes`], that is 32 MiB more.
    pub reviews: usize,
    /// The same of one network.
    pub reviews_per_address: usize,
    /// From accepting to the end of the TLS handshake.
    pub handshake: Duration,
    /// For the header of a request, idle time on a kept HTTP/1 connection included.
    pub header: Duration,
    /// From accepting to the first request that is let in.
    pub stranger: Duration,
    /// What may still be said on a connection that is to end.
    pub linger: Duration,
    /// Without a request in flight, as the kubelet's.
    pub idle: Duration,
    /// For the next bytes of an answer to be taken, as the kubelet's for a whole one: `kubectl logs -f | less` reads slowly.
    pub write: Duration,
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

/// Whoever has one address of it has them all.
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
    /// Of the next connection: they grow, so that the least is the oldest.
    next: u64,
    open: HashMap<u64, Connection>,
}

impl Count {
    /// The oldest stranger of these networks.
    fn oldest(&self, within: impl Fn(Network) -> bool) -> Option<u64> {
        let strangers = self.open.iter().filter(|(_, c)| !c.trusted && within(c.network));
        strangers.map(|(id, _)| *id).min()
    }

    /// The network that has the most strangers, the one with the oldest of several.
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

/// Connections that are open.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<Mutex<Count>>);

/// One open connection; it counts until dropped or displaced.
#[derive(Debug)]
pub struct Pass {
    gate: Gate,
    id: u64,
    displaced: CancellationToken,
}

impl Gate {
    /// Lets a connection in, in place of a stranger if need be; none if only the trusted are there.
    #[must_use]
    pub fn enter(&self, address: IpAddr, limits: &Limits) -> Option<Pass> {
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
        Some(Pass { gate: self.clone(), id, displaced })
    }

    /// Connections open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.lock().open.len()
    }
}

impl Pass {
    /// From now on nobody takes its place.
    pub fn trust(&self) {
        if let Some(connection) = self.gate.0.lock().open.get_mut(&self.id) {
            connection.trusted = true;
        }
    }

    /// Somebody has taken its place.
    pub async fn displaced(&self) {
        self.displaced.cancelled().await;
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gate.0.lock().open.remove(&self.id);
    }
}

/// Requests that wait for the API server's word on who they are from.
#[derive(Debug, Clone, Default)]
pub struct Waiting(Arc<Mutex<HashMap<Network, usize>>>);

/// One of them; it counts until dropped.
#[derive(Debug)]
pub struct Turn {
    waiting: Waiting,
    network: Network,
}

impl Waiting {
    /// A place to wait; none if there are too many who do.
    #[must_use]
    pub fn enter(&self, network: Network, limits: &Limits) -> Option<Turn> {
        let mut waiting = self.0.lock();
        let of_network = waiting.get(&network).copied().unwrap_or(0);
        if of_network >= limits.reviews_per_address || waiting.values().sum::<usize>() >= limits.reviews {
            return None;
        }
        waiting.insert(network, of_network.saturating_add(1));
        Some(Turn { waiting: self.clone(), network })
    }
}

impl Drop for Turn {
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
    fn the_trusted_of_one_network_cannot_take_the_places_of_the_others() {
        let limits = Limits { connections: 3, per_address: 2, ..Limits::default() };
        let gate = Gate::default();
        let enter = |address| gate.enter(address, &limits).inspect(Pass::trust);
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
    fn a_newcomer_takes_the_place_of_the_oldest_stranger_where_there_are_most() {
        let limits = Limits { connections: 9, strangers: 5, per_address: 4, ..Limits::default() };
        let gate = Gate::default();
        let enter = |address| gate.enter(address, &limits).unwrap();
        let displaced =
            |passes: &[&Pass]| passes.iter().map(|p| p.displaced.is_cancelled()).collect::<Vec<bool>>();
        let trusted = enter(v4(1));
        trusted.trust();
        let (a, b, c) = (enter(v4(1)), enter(v4(1)), enter(v4(1)));
        assert_eq!(displaced(&[&trusted, &a, &b, &c]), [false; 4]);
        // One more of this network is too many for it.
        let d = enter(v4(1));
        assert_eq!(displaced(&[&trusted, &a, &b, &c, &d]), [false, true, false, false, false]);
        // And one more of others is too many strangers: the most are of the first.
        let (other, another) = (enter(v4(2)), enter(v4(2)));
        assert_eq!(displaced(&[&b, &c, &d, &other, &another]), [false; 5]);
        let third = enter(v4(3));
        assert_eq!(
            displaced(&[&trusted, &b, &c, &d, &other, &another, &third]),
            [false, true, false, false, false, false, false]
        );
        assert_eq!(gate.open(), 6);
        // A displaced one has given its place back already.
        drop((a, b));
        assert_eq!(gate.open(), 6);
    }

    #[test]
    fn who_has_a_network_of_addresses_has_one_share() {
        let networks =
            ["2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:2::1", "::ffff:10.0.0.1", "10.0.0.1"];
        let networks = networks.map(|a| Network::from(a.parse::<IpAddr>().unwrap()));
        assert_eq!(networks[0], networks[1]);
        assert_ne!(networks[0], networks[2]);
        assert_eq!(networks[3], networks[4]);
        assert_ne!(networks[4], Network::from(v4(2)));
    }

    #[test]
    fn few_requests_wait_for_a_review_and_fewer_of_one_network() {
        let limits = Limits { reviews: 3, reviews_per_address: 2, ..Limits::default() };
        let waiting = Waiting::default();
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
