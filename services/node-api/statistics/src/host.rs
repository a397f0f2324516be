//! Network and pressure statistics of the node, from `/proc`. This module parses and does no I/O.

use serde_json::{Map, Value, json};

/// The default interface, whose statistics are those of the node or of a pod (`pkg/kubelet/stats`).
pub(crate) const DEFAULT_INTERFACE: &str = "eth0";
/// Name prefixes of interfaces that are not counted for the node: the loopback and the host ends of pod
/// interfaces.
const EXCLUDED_PREFIXES: [&str; 2] = ["lo", "veth"];

/// Returns the network statistics of the node from `/proc/net/dev`, or null without an interface. `route` is
/// `/proc/net/route`.
#[must_use]
pub(crate) fn network(dev: &str, route: &str, time: &str) -> Value {
    let interfaces: Vec<Map<String, Value>> = interfaces(dev).map(fields).collect();
    if interfaces.is_empty() {
        return Value::Null;
    }
    let named = |name: &str| interfaces.iter().find(|i| i["name"] == name);
    let default = named(DEFAULT_INTERFACE).or_else(|| default_route(route).and_then(named));
    let mut out = default.cloned().unwrap_or_default();
    out.insert("time".to_owned(), json!(time));
    out.insert("interfaces".to_owned(), json!(interfaces));
    Value::Object(out)
}

/// Counters of one direction of an interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
    pub(crate) errors: u64,
    pub(crate) dropped: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) received: Traffic,
    pub(crate) sent: Traffic,
}

/// Returns the interfaces in `/proc/net/dev`, except for the loopback and the host's ends of the pods'
/// interfaces.
pub(crate) fn interfaces(dev: &str) -> impl Iterator<Item = Interface> {
    dev.lines().skip(2).filter_map(interface)
}

/// `eth0: RXBYTES PACKETS ERRORS DROPPED … TXBYTES PACKETS ERRORS …`
fn interface(line: &str) -> Option<Interface> {
    let (name, figures) = line.split_once(':')?;
    let name = name.trim();
    if EXCLUDED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
        return None;
    }
    let figures: Vec<u64> = figures.split_whitespace().filter_map(|f| f.parse().ok()).collect();
    let traffic = |at: usize| match figures.get(at..at.saturating_add(4))? {
        [bytes, packets, errors, dropped] => {
            Some(Traffic { bytes: *bytes, packets: *packets, errors: *errors, dropped: *dropped })
        }
        _ => None,
    };
    Some(Interface { name: name.to_owned(), received: traffic(0)?, sent: traffic(8)? })
}

fn fields(interface: Interface) -> Map<String, Value> {
    let Interface { name, received, sent } = interface;
    let figures = [
        ("rxBytes", received.bytes),
        ("rxErrors", received.errors),
        ("txBytes", sent.bytes),
        ("txErrors", sent.errors),
    ];
    let figures = figures.map(|(field, n)| (field.to_owned(), json!(n)));
    [("name".to_owned(), json!(name))].into_iter().chain(figures).collect()
}

fn default_route(route: &str) -> Option<&str> {
    route.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let interface = fields.next()?;
        (fields.next()? == "00000000").then_some(interface)
    })
}

/// Returns pressure stall statistics from a file of `/proc/pressure`, or null if the kernel has none.
#[must_use]
pub(crate) fn pressure(text: &str) -> Value {
    let line = |kind: &str| {
        let figures = text.lines().find_map(|line| line.strip_prefix(kind))?;
        let mut out = Map::new();
        for (name, value) in figures.split_whitespace().filter_map(|figure| figure.split_once('=')) {
            // The kernel reports microseconds; the summary has nanoseconds.
            let value = match name {
                "total" => json!(value.parse::<u64>().ok()?.saturating_mul(1000)),
                _ => json!(value.parse::<f64>().ok()?),
            };
            out.insert(name.to_owned(), value);
        }
        Some(Value::Object(out))
    };
    // Before Linux 5.13, the CPU pressure of a machine has no line `full`.
    let none = || json!({"total": 0, "avg10": 0.0, "avg60": 0.0, "avg300": 0.0});
    line("some ")
        .map_or(Value::Null, |some| json!({"some": some, "full": line("full ").unwrap_or_else(none)}))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEV: &str = "Inter-|   Receive                                                |  Transmit\n \
        face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
        lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0\n  \
        ens3: 5000      50    1    2    0     0          0         0     7000      70    3    4    0     0       0          0\n\
        veth12:     9       1    0    0    0     0          0         0        9       1    0    0    0     0       0          0\n  \
        cni0:     20       2    0    0    0     0          0         0       30       3    0    0    0     0       0          0\n";
    const ROUTE: &str = "Iface\tDestination\tGateway\ncni0\t0005000A\t0\nens3\t00000000\t010200C0\n";

    #[test]
    fn network_statistics_of_the_node_are_those_of_its_default_interface() {
        let network = network(DEV, ROUTE, "now");
        assert_eq!(
            network,
            json!({
                "time": "now", "name": "ens3", "rxBytes": 5000, "rxErrors": 1, "txBytes": 7000, "txErrors": 3,
                "interfaces": [
                    {"name": "ens3", "rxBytes": 5000, "rxErrors": 1, "txBytes": 7000, "txErrors": 3},
                    {"name": "cni0", "rxBytes": 20, "rxErrors": 0, "txBytes": 30, "txErrors": 0},
                ],
            })
        );
        let eth0 = super::network(&DEV.replace("cni0", "eth0"), ROUTE, "now");
        assert_eq!((&eth0["name"], &eth0["rxBytes"]), (&json!("eth0"), &json!(20)));
        assert_eq!(super::network("", "", "now"), Value::Null);
        assert_eq!(super::network(DEV, "", "now")["name"], Value::Null, "no default, no figures of one");
    }

    #[test]
    fn pressure_is_reported_in_nanoseconds() {
        let both = "some avg10=1.50 avg60=0.20 avg300=0.00 total=12\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=3\n";
        assert_eq!(
            pressure(both),
            json!({
                "some": {"avg10": 1.5, "avg60": 0.2, "avg300": 0.0, "total": 12000},
                "full": {"avg10": 0.0, "avg60": 0.0, "avg300": 0.0, "total": 3000},
            })
        );
        assert_eq!(pressure("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n")["full"]["total"], 0);
        assert_eq!((pressure(""), pressure("some avg10=x")), (Value::Null, Value::Null));
    }
}
