//! The addresses of the node. They are looked up periodically, since they may appear after pod-sync starts
//! and may change (pkg/kubelet/nodestatus: NodeAddress).

use std::net::IpAddr;
use std::time::Duration;

use pod_sync_layout::NodeIps;
use quintlet_kit::task::blocking;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Interval between lookups.
const PERIOD: Duration = Duration::from_secs(10);
/// Interval between lookups while the node has no address.
const RETRY: Duration = Duration::from_secs(1);
/// Limit of a lookup of the node's name, so that a resolver that hangs does not leave the node without an
/// address.
const LOOKUP: Duration = Duration::from_secs(2);
/// The same for the first lookup, which delays the first report of the Node.
const FIRST_LOOKUP: Duration = Duration::from_millis(250);

/// Addresses and routes of the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Machine {
    /// Addresses of the interfaces that are up, by interface.
    addresses: Vec<(String, IpAddr)>,
    /// Interface of the IPv4 default route.
    route_v4: Option<String>,
    /// Interface of the IPv6 default route.
    route_v6: Option<String>,
    /// Addresses that the node's name resolves to.
    resolved: Vec<IpAddr>,
}

impl Machine {
    /// Reads interfaces and routes, without resolving the name.
    #[must_use]
    fn read() -> Self {
        let up = |flags: nix::net::if_::InterfaceFlags| flags.contains(nix::net::if_::InterfaceFlags::IFF_UP);
        let addresses = nix::ifaddrs::getifaddrs()
            .into_iter()
            .flatten()
            .filter(|i| up(i.flags))
            .filter_map(|i| {
                let address = i.address?;
                let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
                let ip = v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))?;
                Some((i.interface_name, ip))
            })
            .collect();
        let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            addresses,
            route_v4: default_v4(&file("/proc/net/route")),
            route_v6: default_v6(&file("/proc/net/ipv6_route")),
            resolved: Vec::new(),
        }
    }

    fn has(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|(_, a)| *a == ip)
    }

    /// Returns an address of the interface of the default route.
    fn by_route(&self, v4: bool) -> Option<IpAddr> {
        let out = if v4 { self.route_v4.as_ref() } else { self.route_v6.as_ref() }?;
        self.global().find(|(name, ip)| *name == out && ip.is_ipv4() == v4).map(|(_, ip)| ip)
    }

    fn global(&self) -> impl Iterator<Item = (&String, IpAddr)> {
        self.addresses.iter().filter(|(_, ip)| unusable(*ip).is_none()).map(|(name, ip)| (name, *ip))
    }
}

/// Returns the interface of the default route in `/proc/net/route`.
fn default_v4(text: &str) -> Option<String> {
    text.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let interface = fields.next()?;
        (fields.next()? == "00000000" && fields.nth(5)? == "00000000").then(|| interface.to_owned())
    })
}

/// Returns the interface of the default route in `/proc/net/ipv6_route`, where the kernel lists unreachable
/// routes on `lo`.
fn default_v6(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [destination, length, .., interface] = fields.as_slice() else { return None };
        let default = destination.bytes().all(|b| b == b'0') && *length == "00";
        (default && *interface != "lo").then(|| (*interface).to_owned())
    })
}

/// Returns why an address cannot be a node IP.
fn unusable(ip: IpAddr) -> Option<&'static str> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if ip.is_loopback() {
        Some("a loopback address")
    } else if ip.is_multicast() {
        Some("a multicast address")
    } else if link_local {
        Some("a link-local address")
    } else if ip.is_unspecified() {
        Some("the unspecified address")
    } else {
        None
    }
}

/// The configured node IPs are neither one address nor one of each family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressesError {
    /// Two addresses of IPv4, or two of IPv6.
    #[error("node IPs {0} and {1} are of one family: want one, or one of each family")]
    SameFamily(IpAddr, IpAddr),
    /// One of two addresses is `0.0.0.0` or `::`.
    #[error("node IPs {0} and {1}: the unspecified address must be the only one")]
    Unspecified(IpAddr, IpAddr),
    /// More than two addresses. With their number.
    #[error("{0} node IPs: want one, or one of each family")]
    TooMany(usize),
}

/// Checks the configured node IPs: one address, which may be unspecified, or one of each family.
pub fn check_addresses(given: &[IpAddr]) -> Result<(), AddressesError> {
    match given {
        [] | [_] => Ok(()),
        [one, two] if one.is_ipv4() == two.is_ipv4() => Err(AddressesError::SameFamily(*one, *two)),
        [one, two] if one.is_unspecified() || two.is_unspecified() => {
            Err(AddressesError::Unspecified(*one, *two))
        }
        [_, _] => Ok(()),
        more => Err(AddressesError::TooMany(more.len())),
    }
}

/// Returns the node's addresses: the configured ones, else the address of its name, else that of the default
/// route.
///
/// A configured unspecified address only selects the preferred family.
///
/// # Errors
/// The reason why there is no address.
fn choose(given: &[IpAddr], name: &str, machine: &Machine) -> Result<Vec<IpAddr>, String> {
    let valid = |ip: IpAddr| match unusable(ip) {
        Some(why) => Err(format!("{ip} is {why}")),
        None if !machine.has(ip) => Err(format!("{ip} is on no interface of this machine")),
        None => Ok(ip),
    };
    let specified: Vec<IpAddr> = given.iter().copied().filter(|ip| !ip.is_unspecified()).collect();
    if !specified.is_empty() {
        return specified.into_iter().map(valid).collect();
    }
    let v4 = given.first().is_none_or(IpAddr::is_ipv4);
    if let Ok(ip) = name.parse() {
        return valid(ip).map(|ip| vec![ip]);
    }
    let mut named = machine.resolved.iter().copied().filter(|ip| valid(*ip).is_ok());
    let first = named.clone().next();
    named
        .find(|ip| ip.is_ipv4() == v4)
        .or(first)
        .or_else(|| machine.by_route(v4))
        .or_else(|| machine.by_route(!v4))
        // Without a default route, a node that stands alone still has an address for `status.hostIP`.
        .or_else(|| machine.global().find(|(_, ip)| ip.is_ipv4() == v4).map(|(_, ip)| ip))
        .map(|ip| vec![ip])
        .ok_or_else(|| "there is no route out and no address".to_owned())
}

/// Returns the addresses that are known without resolving the node's name.
#[must_use]
pub fn initial_addresses(given: &[IpAddr], name: &str) -> NodeIps {
    choose(given, name, &Machine::read()).unwrap_or_default().into()
}

/// Looks up the addresses periodically until `stop`. Sets `ips`, and publishes on `found`.
pub async fn follow_addresses(
    given: Vec<IpAddr>,
    name: String,
    ips: NodeIps,
    found: watch::Sender<Option<Vec<IpAddr>>>,
    stop: CancellationToken,
) {
    let mut logged = None;
    let mut limit = FIRST_LOOKUP;
    loop {
        let mut machine = blocking(Machine::read).await;
        if given.iter().all(IpAddr::is_unspecified) && name.parse::<IpAddr>().is_err() {
            machine.resolved = lookup(&name, std::mem::replace(&mut limit, LOOKUP)).await;
        }
        let wait = match choose(&given, &name, &machine) {
            Ok(chosen) => {
                logged = None;
                ips.set(&chosen);
                found.send_if_modified(|old| {
                    let chosen = Some(chosen);
                    let changed = *old != chosen;
                    *old = chosen;
                    changed
                });
                PERIOD
            }
            Err(why) => {
                if logged.as_ref() != Some(&why) {
                    tracing::warn!(
                        node = name,
                        error = why,
                        "failed to find the address of the node, retrying"
                    );
                    logged = Some(why);
                }
                RETRY
            }
        };
        // Each branch only waits.
        tokio::select! {
            () = stop.cancelled() => return,
            () = quintlet_kit::timers::pause(wait) => {}
        }
    }
}

async fn lookup(name: &str, limit: Duration) -> Vec<IpAddr> {
    #[expect(clippy::disallowed_methods, reason = "the name of the node, one lookup at a time")]
    let found = tokio::net::lookup_host((name, 0));
    match tokio::time::timeout(limit, found).await {
        Ok(Ok(found)) => found.map(|a| a.ip()).collect(),
        // Most node names do not resolve.
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(all: &[&str]) -> Vec<IpAddr> {
        all.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    fn machine(
        addresses: &[(&str, &str)],
        routes: (Option<&str>, Option<&str>),
        resolved: &[&str],
    ) -> Machine {
        Machine {
            addresses: addresses.iter().map(|(i, ip)| ((*i).to_owned(), ip.parse().unwrap())).collect(),
            route_v4: routes.0.map(str::to_owned),
            route_v6: routes.1.map(str::to_owned),
            resolved: ips(resolved),
        }
    }

    const USUAL: &[(&str, &str)] = &[
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("cni0", "10.9.0.1"),
        ("eth0", "10.0.0.2"),
        ("eth0", "fe80::2"),
        ("eth0", "fd00::2"),
        ("eth1", "10.1.0.2"),
    ];
    const BOTH: (Option<&str>, Option<&str>) = (Some("eth0"), Some("eth0"));

    #[test]
    fn node_addresses_are_chosen_as_by_the_kubelet() {
        let usual = |resolved: &[&str]| machine(USUAL, BOTH, resolved);
        type Case<'a> = (&'a [&'a str], &'a str, Machine, Result<&'a [&'a str], &'a str>);
        let cases: &[Case<'_>] = &[
            (&[], "n", usual(&[]), Ok(&["10.0.0.2"])),
            (&["0.0.0.0"], "n", usual(&[]), Ok(&["10.0.0.2"])),
            (&["::"], "n", usual(&[]), Ok(&["fd00::2"])),
            (&["10.1.0.2"], "n", usual(&[]), Ok(&["10.1.0.2"])),
            (&["fd00::2", "10.1.0.2"], "n", usual(&[]), Ok(&["fd00::2", "10.1.0.2"])),
            (&["10.7.7.7"], "n", usual(&[]), Err("10.7.7.7 is on no interface of this machine")),
            (&["fd00::2", "10.7.7.7"], "n", usual(&[]), Err("10.7.7.7 is on no interface")),
            (&["127.0.0.1"], "n", usual(&[]), Err("127.0.0.1 is a loopback address")),
            (&["fe80::2"], "n", usual(&[]), Err("fe80::2 is a link-local address")),
            (&["224.0.0.1"], "n", usual(&[]), Err("224.0.0.1 is a multicast address")),
            (&[], "10.1.0.2", usual(&[]), Ok(&["10.1.0.2"])),
            (&[], "10.7.7.7", usual(&[]), Err("10.7.7.7 is on no interface")),
            // An address in /etc/hosts or DNS is used only if the machine has it.
            (&[], "n", usual(&["127.0.1.1", "10.7.7.7", "10.1.0.2"]), Ok(&["10.1.0.2"])),
            (&[], "n", usual(&["fd00::2", "10.1.0.2"]), Ok(&["10.1.0.2"])),
            (&["::"], "n", usual(&["10.1.0.2", "fd00::2"]), Ok(&["fd00::2"])),
            (&[], "n", usual(&["fd00::2"]), Ok(&["fd00::2"])),
            (&[], "n", usual(&["127.0.1.1"]), Ok(&["10.0.0.2"])),
            (&[], "n", machine(USUAL, (None, Some("eth0")), &[]), Ok(&["fd00::2"])),
            (&["::"], "n", machine(USUAL, (Some("eth1"), None), &[]), Ok(&["10.1.0.2"])),
            (&[], "n", machine(USUAL, (None, None), &[]), Ok(&["10.9.0.1"])),
            // Before there is a network: nothing, and never the loopback.
            (&[], "n", machine(&USUAL[..2], (None, None), &["127.0.0.1"]), Err("there is no route out")),
            (
                &[],
                "n",
                machine(&[("eth0", "169.254.1.1")], (Some("eth0"), None), &[]),
                Err("there is no route"),
            ),
        ];
        for (given, name, machine, want) in cases {
            let got = choose(&ips(given), name, machine);
            match (&got, want) {
                (Ok(got), Ok(want)) => assert_eq!(*got, ips(want), "{given:?} {name} {machine:?}"),
                (Err(got), Err(want)) => assert!(got.starts_with(want), "{given:?} {name}: {got}"),
                _ => panic!("{given:?} {name}: {got:?}, want {want:?}"),
            }
        }
    }

    #[test]
    fn two_node_ips_must_be_of_different_families() {
        for (given, good) in [
            (&[][..], true),
            (&["::"], true),
            (&["10.0.0.1", "fd00::1"], true),
            (&["10.0.0.1", "10.0.0.2"], false),
            (&["0.0.0.0", "fd00::1"], false),
            (&["10.0.0.1", "fd00::1", "fd00::2"], false),
        ] {
            assert_eq!(check_addresses(&ips(given)).is_ok(), good, "{given:?}");
        }
    }

    #[test]
    fn the_default_route_is_found_in_both_tables() {
        let v4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                  tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n\
                  eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        assert_eq!(default_v4(v4).as_deref(), Some("eth0"), "half of everything is no default");
        let zero = "0".repeat(32);
        let line = |length: &str, interface: &str| {
            format!("{zero} {length} {zero} 00 {zero} 00000400 00000001 00000000 00000003 {interface:>8}\n")
        };
        assert_eq!(
            default_v6(&(line("00", "lo") + &line("80", "eth1") + &line("00", "eth0"))).as_deref(),
            Some("eth0")
        );
        assert_eq!((default_v4(""), default_v6("")), (None, None));
    }

    #[tokio::test]
    async fn a_configured_address_that_the_machine_lacks_is_not_published() {
        let (found, seen) = watch::channel(None);
        let (stop, ips) = (CancellationToken::new(), NodeIps::default());
        let follow = quintlet_kit::task::spawn(
            "addresses",
            follow_addresses(self::ips(&["192.0.2.77"]), "n".to_owned(), ips.clone(), found, stop.clone()),
        );
        tokio::task::yield_now().await;
        assert_eq!((seen.borrow().clone(), ips.get()), (None, vec![]));
        stop.cancel();
        follow.await.unwrap();
    }
}
