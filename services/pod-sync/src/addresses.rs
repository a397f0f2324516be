//! The node's addresses, found anew now and then: they may come after this process, and change (pkg/kubelet/nodestatus/setters.go).

use std::net::IpAddr;
use std::time::Duration;

use pod_sync_cri_config::node_ips::NodeIps;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How often they are looked up.
const PERIOD: Duration = Duration::from_secs(10);
/// While there are none.
const RETRY: Duration = Duration::from_secs(1);
/// How long the node's name is looked up for; a resolver that hangs is no reason to have no address.
const LOOKUP: Duration = Duration::from_secs(2);
/// The same for the first time, when the Node waits for an address.
const FIRST_LOOKUP: Duration = Duration::from_millis(250);

/// What addresses are chosen from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// Addresses of the interfaces that are up.
    pub addresses: Vec<(String, IpAddr)>,
    /// Interface of the default route of IPv4.
    pub route_v4: Option<String>,
    /// The same of IPv6.
    pub route_v6: Option<String>,
    /// What the node's name resolves to.
    pub resolved: Vec<IpAddr>,
}

impl Machine {
    /// This one, without what needs a resolver.
    #[must_use]
    pub fn read() -> Self {
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

    /// An address of the interface that the default route of a family leaves by.
    fn by_route(&self, v4: bool) -> Option<IpAddr> {
        let out = if v4 { self.route_v4.as_ref() } else { self.route_v6.as_ref() }?;
        self.global().find(|(name, ip)| *name == out && ip.is_ipv4() == v4).map(|(_, ip)| ip)
    }

    fn global(&self) -> impl Iterator<Item = (&String, IpAddr)> {
        self.addresses.iter().filter(|(_, ip)| unusable(*ip).is_none()).map(|(name, ip)| (name, *ip))
    }
}

/// The interface of the default route in `/proc/net/route`.
fn default_v4(text: &str) -> Option<String> {
    text.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let interface = fields.next()?;
        (fields.next()? == "00000000" && fields.nth(5)? == "00000000").then(|| interface.to_owned())
    })
}

/// The same in `/proc/net/ipv6_route`, where the kernel lists its own refusals on `lo`.
fn default_v6(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [destination, length, .., interface] = fields.as_slice() else { return None };
        let default = destination.bytes().all(|b| b == b'0') && *length == "00";
        (default && *interface != "lo").then(|| (*interface).to_owned())
    })
}

/// Why an address is no node's.
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

/// Checks what was given: one address, an unspecified one included, or one of each family.
///
/// # Errors
/// It is neither.
pub fn check(given: &[IpAddr]) -> Result<(), String> {
    match given {
        [] | [_] => Ok(()),
        [one, two] if one.is_ipv4() == two.is_ipv4() => {
            Err(format!("node IPs {one} and {two} are of one family: want one, or one of each family"))
        }
        [one, two] if one.is_unspecified() || two.is_unspecified() => {
            Err(format!("node IPs {one} and {two}: the unspecified address stands alone"))
        }
        [_, _] => Ok(()),
        more => Err(format!("{} node IPs: want one, or one of each family", more.len())),
    }
}

/// The node's addresses: those given if they are the machine's, else that of its name, else that of the default route.
///
/// An unspecified one that was given only says which family goes first.
///
/// # Errors
/// There is none.
pub fn choose(given: &[IpAddr], name: &str, machine: &Machine) -> Result<Vec<IpAddr>, String> {
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
        // Without any way out, pods of a node that stands alone are still told where they are.
        .or_else(|| machine.global().find(|(_, ip)| ip.is_ipv4() == v4).map(|(_, ip)| ip))
        .map(|ip| vec![ip])
        .ok_or_else(|| "there is no route out and no address".to_owned())
}

/// What can be said at once, before the node's name was looked up.
#[must_use]
pub fn at_start(given: &[IpAddr], name: &str) -> NodeIps {
    choose(given, name, &Machine::read()).unwrap_or_default().into()
}

/// Keeps the addresses up to date until told to stop; `found` has them once they were looked up.
pub async fn follow(
    given: Vec<IpAddr>,
    name: String,
    ips: NodeIps,
    found: watch::Sender<Option<Vec<IpAddr>>>,
    stop: CancellationToken,
) {
    let mut told = None;
    let mut limit = FIRST_LOOKUP;
    loop {
        let mut machine = Machine::read();
        if given.iter().all(IpAddr::is_unspecified) && name.parse::<IpAddr>().is_err() {
            machine.resolved = lookup(&name, std::mem::replace(&mut limit, LOOKUP)).await;
        }
        let wait = match choose(&given, &name, &machine) {
            Ok(chosen) => {
                told = None;
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
                if told.as_ref() != Some(&why) {
                    tracing::warn!("can't get ip address of node {name}. error: {why}");
                    told = Some(why);
                }
                RETRY
            }
        };
        // Both only wait.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

async fn lookup(name: &str, limit: Duration) -> Vec<IpAddr> {
    match tokio::time::timeout(limit, tokio::net::lookup_host((name, 0))).await {
        Ok(Ok(found)) => found.map(|a| a.ip()).collect(),
        // A name that nobody knows is usual.
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
    fn the_nodes_addresses_are_chosen_as_the_kubelet_chooses_them() {
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
            // What is said in /etc/hosts or by DNS counts where it is the machine's.
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
    fn two_addresses_are_one_of_each_family() {
        for (given, good) in [
            (&[][..], true),
            (&["::"], true),
            (&["10.0.0.1", "fd00::1"], true),
            (&["10.0.0.1", "10.0.0.2"], false),
            (&["0.0.0.0", "fd00::1"], false),
            (&["10.0.0.1", "fd00::1", "fd00::2"], false),
        ] {
            assert_eq!(check(&ips(given)).is_ok(), good, "{given:?}");
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
    async fn what_is_given_and_not_there_is_told_to_nobody() {
        let (found, seen) = watch::channel(None);
        let (stop, ips) = (CancellationToken::new(), NodeIps::default());
        let follow = quintlet_kit::task::spawn(
            "addresses",
            follow(self::ips(&["192.0.2.77"]), "n".to_owned(), ips.clone(), found, stop.clone()),
        );
        tokio::task::yield_now().await;
        assert_eq!((seen.borrow().clone(), ips.get()), (None, vec![]));
        stop.cancel();
        follow.await.unwrap();
    }
}
