//! Limits of what a client may use, and the guards that enforce them.
//!
//! A connection has a slot of one of three kinds ([`ConnectionLimiter`]): untrusted, of a user with a client
//! certificate, or of any other user. No kind takes slots of another one, and no user takes all slots of its
//! kind. Requests in flight are bounded in the same way ([`Slots`]).

mod connections;

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

pub use connections::{ConnectionLimiter, ConnectionSlot, ShareExceeded};
pub use quintlet_kit::slots::{Share, Slot, Slots};

/// A share for each [`Pool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// Limits of [`Pool::Certificates`].
    pub certificates: Share,
    /// Limits of [`Pool::Others`].
    pub others: Share,
}

impl Shares {
    /// Returns the limits of a pool.
    #[must_use]
    pub fn of(&self, pool: Pool) -> Share {
        match pool {
            Pool::Certificates => self.certificates,
            Pool::Others => self.others,
        }
    }
}

/// Limits of one listener.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of untrusted connections. Times [`Limits::header_bytes`], they hold 32 MiB at most.
    pub strangers: usize,
    /// Connections of users: 1,024 together with the untrusted ones. Each exec, attach and port-forward has a
    /// connection of its own. The API server connects with one client certificate, and its share leaves 64
    /// connections to other certificates.
    pub connections: Shares,
    /// Requests in flight, including streams. cri-proxy accepts 4,096 calls at once from this process, and a
    /// request has one or two of them open; gatherings of statistics have more, and are shared.
    pub requests: Shares,
    /// Maximum number of upgraded connections (exec, attach, port-forward). More than [`Limits::connections`]
    /// of users without a client certificate, so that these cannot take all.
    pub upgrades: usize,
    /// Requests that wait for a TokenReview, by network. Times [`Limits::header_bytes`], they hold 32 MiB
    /// more.
    pub reviews: Share,
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
    /// Time limit for the client to read the next bytes of a response. The kubelet has the same limit for a
    /// whole response; `kubectl logs -f | less` reads slowly.
    pub write: Duration,
    /// Maximum size of a request's header. The kubelet accepts 1 MiB, which times the connections is too much
    /// memory. Tokens and exec commands are far smaller.
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
            strangers: 256,
            connections: Shares {
                certificates: Share { all: 512, each: 448 },
                others: Share { all: 256, each: 64 },
            },
            requests: Shares {
                certificates: Share { all: 2048, each: 1792 },
                others: Share { all: 1024, each: 128 },
            },
            upgrades: 512,
            reviews: Share { all: 256, each: 64 },
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

/// The client whose share a connection or request uses.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Client {
    /// The user of a verified client certificate.
    Certificate(String),
    /// The user of a token.
    Token(String),
    /// A client without credentials.
    Anonymous(Network),
}

impl Client {
    /// Returns the slots that the client may use.
    #[must_use]
    pub fn pool(&self) -> Pool {
        match self {
            Self::Certificate(_) => Pool::Certificates,
            Self::Token(_) | Self::Anonymous(_) => Pool::Others,
        }
    }
}

/// Slots of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pool {
    /// Reserved for users with a verified client certificate, such as the API server.
    Certificates,
    /// Clients with a token, and those that are not authenticated yet.
    Others,
}

impl Pool {
    /// Both pools.
    pub const ALL: [Self; 2] = [Self::Certificates, Self::Others];

    /// Returns the label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Certificates => "certificate",
            Self::Others => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_of_a_network_share_one_limit() {
        let networks =
            ["2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:2::1", "::ffff:10.0.0.1", "10.0.0.1"];
        let networks = networks.map(|a| Network::from(a.parse::<IpAddr>().unwrap()));
        assert_eq!(networks[0], networks[1]);
        assert_ne!(networks[0], networks[2]);
        assert_eq!(networks[3], networks[4]);
        assert_ne!(networks[4], Network::from(IpAddr::from([10, 0, 0, 2])));
    }

    #[test]
    fn the_limits_leave_room_for_the_api_server() {
        let limits = Limits::default();
        let Shares { certificates, others } = limits.connections;
        assert_eq!(limits.strangers + certificates.all + others.all, 1024, "as SECURITY.md says");
        assert!(limits.upgrades >= others.all + limits.strangers, "others cannot take all upgrades");
        let requests = limits.requests.certificates.all + limits.requests.others.all;
        assert!(requests + 512 <= 4096, "cri-proxy queues further calls");
        for share in [certificates, others, limits.requests.certificates, limits.requests.others] {
            assert!(share.each < share.all, "{share:?}: no user may take all");
        }
    }
}
