//! Computes the DNS configuration of a pod (`pkg/kubelet/network/dns`).

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use k8s_openapi::api::core::v1::{Pod, PodDNSConfig};
use pod_sync_layout::NodeSettings;
use quintlet_cri_api::v1::DnsConfig;
use quintlet_model::ids::PodRef;
use quintlet_model::pod;

use super::error::ConfigError;

const MAX_SERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;
const MAX_NAME: usize = 253;
// Bytes. A larger file is not a resolv.conf.
const MAX_FILE: u64 = 10 << 20;

/// Content of the host's resolv.conf.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResolvConf {
    /// Addresses of the `nameserver` lines, in order.
    pub servers: Vec<String>,
    /// Domains of the last `search` line.
    pub searches: Vec<String>,
    /// Options; the last value of each name.
    pub options: Vec<String>,
}

const NO_CLUSTER_DNS: &str = "kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" \
                              policy. Falling back to \"Default\" policy.";

/// A problem for which the caller emits a Warning event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DnsWarning {
    /// Emitted for the pod and for the node.
    MissingClusterDns,
    /// Emitted for the pod with this message.
    Forming(String),
}

impl DnsWarning {
    /// Returns the reason of the event.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::MissingClusterDns => "MissingClusterDNS",
            Self::Forming(_) => "DNSConfigForming",
        }
    }

    /// Returns the message of the pod's event.
    #[must_use]
    pub fn message(&self, pod: &PodRef) -> String {
        match self {
            Self::MissingClusterDns => format!("pod: \"{pod}\". {NO_CLUSTER_DNS}"),
            Self::Forming(text) => text.clone(),
        }
    }

    /// Returns the message of the node's event, if there is one.
    #[must_use]
    pub fn on_node(&self) -> Option<&'static str> {
        match self {
            Self::MissingClusterDns => Some(NO_CLUSTER_DNS),
            Self::Forming(_) => None,
        }
    }
}

/// Parses a resolv.conf. Words that are no UTF-8 are left out: the CRI has text, and a word with other
/// characters in their place would name another domain.
///
/// # Errors
/// A `nameserver` line has no address.
pub fn parse_resolv_conf(file: &[u8]) -> Result<ResolvConf, ConfigError> {
    let mut out = ResolvConf::default();
    let mut options = Options::default();
    for line in file.split(|byte| *byte == b'\n') {
        let text = String::from_utf8_lossy(line);
        let is_text =
            |word: &str| matches!(text, Cow::Borrowed(_)) || !word.contains(char::REPLACEMENT_CHARACTER);
        let line = text.trim();
        if line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => match words.next() {
                Some(server) if is_text(server) => out.servers.push(server.to_owned()),
                Some(_) => {}
                None => return Err(ConfigError::invalid("nameserver list is empty")),
            },
            Some("search") => {
                out.searches = words
                    .filter(|s| *s != "." && is_text(s))
                    .map(|s| s.strip_suffix('.').unwrap_or(s).to_owned())
                    .collect();
            }
            Some("options") => words.filter(|o| is_text(o)).for_each(|o| options.merge(o)),
            Some(_) | None => {}
        }
    }
    out.options = options.list;
    Ok(out)
}

/// Reads the node's resolv.conf, 10 MiB at most.
///
/// # Errors
/// The file cannot be read or parsed.
pub fn read_resolv_conf(path: &Path) -> Result<ResolvConf, ConfigError> {
    let mut text = Vec::new();
    let read = || -> io::Result<()> {
        std::fs::File::open(path)?.take(MAX_FILE).read_to_end(&mut text)?;
        Ok(())
    };
    let mut read = read;
    read().map_err(|e| ConfigError::io(format!("cannot read {}", path.display()), e))?;
    parse_resolv_conf(&text)
}

/// Returns the message of the event `CheckLimitsForResolvConf` of the node, if its resolv.conf cannot be read
/// or exceeds a limit (`pkg/kubelet/network/dns: CheckLimitsForResolvConf`). The cluster domain takes three
/// of the search domains.
#[must_use]
pub fn limits_problem(
    path: &Path,
    host: &Result<ResolvConf, ConfigError>,
    cluster_domain: &str,
) -> Option<String> {
    let (path, host) = (path.display(), host.as_ref());
    let searches = match host {
        Ok(host) => &host.searches,
        Err(e) => return Some(e.to_string()),
    };
    let most = if cluster_domain.is_empty() { MAX_SEARCHES } else { MAX_SEARCHES.saturating_sub(3) };
    if searches.len() > most {
        return Some(format!(
            "Resolv.conf file '{path}' contains search line consisting of more than {most} domains!"
        ));
    }
    if searches.iter().any(|search| search.len() > MAX_NAME) {
        return Some(format!(
            "Resolv.conf file \"{path}\" contains a search path which length is more than allowed {MAX_NAME} chars!"
        ));
    }
    (searches.join(" ").len() > MAX_SEARCH_CHARS).then(|| {
        format!(
            "Resolv.conf file '{path}' contains search line which length is more than allowed {MAX_SEARCH_CHARS} chars!"
        )
    })
}

/// Options by name. The index keeps the cost linear, since the number of a pod's options is not limited.
#[derive(Default)]
struct Options {
    list: Vec<String>,
    places: HashMap<String, usize>,
}

impl Options {
    /// Adds an option, or replaces the value of the same name in place.
    fn merge(&mut self, new: &str) {
        let name = new.split(':').next().unwrap_or_default();
        match self.places.get(name).and_then(|place| self.list.get_mut(*place)) {
            Some(old) => *old = new.to_owned(),
            None => {
                self.places.insert(name.to_owned(), self.list.len());
                self.list.push(new.to_owned());
            }
        }
    }
}

enum Mode {
    Cluster,
    Host,
    None,
}

fn mode(pod: &Pod) -> Mode {
    let host_network = pod::host_network(pod);
    match pod::spec(pod).dns_policy.as_deref() {
        Some("None") => Mode::None,
        Some("ClusterFirst") | None if host_network => Mode::Host,
        Some("Default") => Mode::Host,
        // ClusterFirst, ClusterFirstWithHostNet, and values that the API server rejects.
        Some(_) | None => Mode::Cluster,
    }
}

/// Returns the configuration for the runtime and the problems to report. `host` is the node's resolv.conf.
#[must_use]
pub fn pod_dns(pod: &Pod, node: &NodeSettings, host: &ResolvConf) -> (DnsConfig, Vec<DnsWarning>) {
    let mut warnings = Vec::new();
    let mut config = match mode(pod) {
        Mode::None => DnsConfig::default(),
        Mode::Cluster if !node.cluster_dns.is_empty() => cluster(pod, node, host),
        Mode::Cluster => {
            warnings.push(DnsWarning::MissingClusterDns);
            from_host(pod, node, host, &mut warnings)
        }
        Mode::Host => from_host(pod, node, host, &mut warnings),
    };
    if let Some(own) = &pod::spec(pod).dns_config {
        append(&mut config, own);
    }
    fit(&mut config, &mut warnings);
    (config, warnings)
}

fn cluster(pod: &Pod, node: &NodeSettings, host: &ResolvConf) -> DnsConfig {
    let domain = &node.cluster_domain;
    let mut searches = Vec::new();
    if !domain.is_empty() {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        searches.extend([format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.clone()]);
    }
    extend_new(&mut searches, &host.searches);
    DnsConfig { servers: node.cluster_dns.clone(), searches, options: vec!["ndots:5".to_owned()] }
}

/// Returns whether a nameserver is a link-local IPv6 address with a zone. The zone is an interface in the
/// network namespace of the node.
fn is_scoped(server: &str) -> bool {
    let Some((address, zone)) = server.split_once('%') else { return false };
    !zone.is_empty() && address.parse::<Ipv6Addr>().is_ok_and(|ip| ip.segments()[0] & 0xffc0 == 0xfe80)
}

// Scoped nameservers are left out in a network namespace of the pod's own, as in kubelet 1.38 (k/k#140880).
fn from_host(pod: &Pod, node: &NodeSettings, host: &ResolvConf, warnings: &mut Vec<DnsWarning>) -> DnsConfig {
    if node.resolv_conf.is_some() {
        let is_usable = |server: &&String| pod::host_network(pod) || !is_scoped(server);
        let servers: Vec<String> = host.servers.iter().filter(is_usable).cloned().collect();
        if servers.is_empty() && !host.servers.is_empty() {
            warnings.push(DnsWarning::Forming(format!(
                "Nameservers with a zone of the node's network have been omitted, and the pod has no nameserver: {}",
                host.servers.join(" ")
            )));
        }
        return DnsConfig { servers, searches: host.searches.clone(), options: host.options.clone() };
    }
    let ips = node.node_ips.get();
    let v4 = ips.is_empty() || ips.iter().any(IpAddr::is_ipv4);
    let v6 = ips.iter().any(IpAddr::is_ipv6);
    let servers = [(v4, "127.0.0.1"), (v6, "::1")];
    DnsConfig {
        servers: servers.into_iter().filter(|(has, _)| *has).map(|(_, s)| s.to_owned()).collect(),
        searches: vec![".".to_owned()],
        options: Vec::new(),
    }
}

fn extend_new(list: &mut Vec<String>, more: &[String]) {
    let mut known: HashSet<String> = list.iter().cloned().collect();
    list.extend(more.iter().filter(|item| known.insert((*item).clone())).cloned());
}

fn append(config: &mut DnsConfig, own: &PodDNSConfig) {
    extend_new(&mut config.servers, own.nameservers.as_deref().unwrap_or_default());
    extend_new(&mut config.searches, own.searches.as_deref().unwrap_or_default());
    let mut options = Options::default();
    config.options.iter().for_each(|option| options.merge(option));
    for option in own.options.iter().flatten() {
        let name = option.name.as_deref().unwrap_or_default();
        let text = match option.value.as_deref().filter(|v| !v.is_empty()) {
            Some(value) => format!("{name}:{value}"),
            None => name.to_owned(),
        };
        options.merge(&text);
    }
    config.options = options.list;
}

fn fit(config: &mut DnsConfig, warnings: &mut Vec<DnsWarning>) {
    if config.servers.len() > MAX_SERVERS {
        config.servers.truncate(MAX_SERVERS);
        warnings.push(DnsWarning::Forming(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            config.servers.join(" ")
        )));
    }
    let before = config.searches.len();
    config.searches.truncate(MAX_SEARCHES);
    config.searches.retain(|s| s.len() <= MAX_NAME);
    while config.searches.join(" ").len() > MAX_SEARCH_CHARS {
        config.searches.pop();
    }
    if config.searches.len() != before {
        warnings.push(DnsWarning::Forming(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            config.searches.join(" ")
        )));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_model::ids::PodUid;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    fn node() -> NodeSettings {
        NodeSettings {
            cluster_domain: "cluster.local".into(),
            cluster_dns: vec!["10.0.0.10".into()],
            node_ips: vec!["192.168.0.1".parse().unwrap()].into(),
            ..NodeSettings::default()
        }
    }

    fn host() -> ResolvConf {
        parse_resolv_conf(b"# c\nnameserver 1.1.1.1\nsearch old\nsearch corp.example. . svc.cluster.local\noptions ndots:1 rotate\noptions ndots:2\n")
            .unwrap()
    }

    fn dns(spec: Value, node: &NodeSettings) -> (Vec<String>, Vec<String>, Vec<String>, Vec<DnsWarning>) {
        let mut spec = spec;
        spec["containers"] = json!([]);
        let (c, w) = pod_dns(&pod_of(spec), node, &host());
        (c.servers, c.searches, c.options, w)
    }

    #[test]
    fn a_resolv_conf_that_exceeds_a_limit_has_the_kubelets_message() {
        let with = |searches: Vec<String>| Ok(ResolvConf { searches, ..ResolvConf::default() });
        let many = |count: usize, length: usize| with(vec!["x".repeat(length); count]);
        let unreadable = || Err(ConfigError::invalid("nameserver list is empty"));
        for (host, domain, want) in [
            (many(29, 1), "cluster.local", None),
            (many(30, 1), "cluster.local", Some("consisting of more than 29 domains!")),
            (many(32, 1), "", None),
            (many(33, 1), "", Some("consisting of more than 32 domains!")),
            (many(1, 253), "", None),
            (many(1, 254), "", Some("a search path which length is more than allowed 253 chars!")),
            (many(8, 253), "", None),
            (many(9, 240), "", Some("search line which length is more than allowed 2048 chars!")),
            (unreadable(), "", Some("nameserver list is empty")),
        ] {
            let got = limits_problem(Path::new("/r"), &host, domain);
            assert_eq!(got.is_some(), want.is_some(), "{got:?} {want:?}");
            assert!(got.unwrap_or_default().ends_with(want.unwrap_or_default()), "{want:?}");
        }
    }

    fn pod_ref() -> PodRef {
        PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() }
    }

    #[test]
    fn the_last_search_line_wins_and_options_merge() {
        let host = host();
        assert_eq!(host.searches, ["corp.example", "svc.cluster.local"]);
        assert_eq!(host.options, ["ndots:2", "rotate"]);
        assert!(parse_resolv_conf(b"nameserver\n").is_err());
        assert_eq!(parse_resolv_conf(b"; x\n\nfoo bar").unwrap(), ResolvConf::default());
        assert_eq!(parse_resolv_conf(b"\t#nameserver 1.1.1.1\r\n").unwrap(), ResolvConf::default());
    }

    #[test]
    fn bytes_that_are_no_text_change_no_other_word() {
        let file = b"# caf\xe9\nnameserver 1.1.1.1\r\nnameserver 1.\xff.1.1\nsearch a.example caf\xe9.example b.example\n\
            options rotate \xff ndots:2\nnameserver fe80::1%eth0 more\n";
        let parsed = parse_resolv_conf(file).unwrap();
        assert_eq!(parsed.servers, ["1.1.1.1", "fe80::1%eth0"]);
        assert_eq!(parsed.searches, ["a.example", "b.example"]);
        assert_eq!(parsed.options, ["rotate", "ndots:2"]);
    }

    #[test]
    fn the_policy_selects_cluster_host_or_nothing() {
        let cluster = (
            vec!["10.0.0.10".to_owned()],
            ["default.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"]
                .map(str::to_owned)
                .to_vec(),
            vec!["ndots:5".to_owned()],
        );
        let from_host = (vec!["1.1.1.1".to_owned()], host().searches, host().options);
        for (spec, want) in [
            (json!({"dnsPolicy": "ClusterFirst"}), cluster.clone()),
            (json!({}), cluster.clone()),
            (json!({"dnsPolicy": "ClusterFirst", "hostNetwork": true}), from_host.clone()),
            (json!({"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true}), cluster.clone()),
            (json!({"dnsPolicy": "Default"}), from_host),
            (json!({"dnsPolicy": "None"}), (vec![], vec![], vec![])),
            (json!({"dnsPolicy": "Strange"}), cluster),
        ] {
            let (servers, searches, options, warnings) = dns(spec.clone(), &node());
            assert_eq!((servers, searches, options), want, "{spec}");
            assert!(warnings.is_empty());
        }
    }

    #[test]
    fn a_scoped_nameserver_of_the_node_is_left_out_in_a_network_namespace_of_the_pod() {
        let scoped = ["fe80::1%eth0", "fe80::1%3", "febf:0::2%eth0.100"];
        // A zone belongs to link-local addresses only, and without one the address may be of any interface.
        let kept = ["1.1.1.1", "fe80::1", "fec0::1%eth0", "2001:db8::1", "fe80::1%"];
        let host = |servers: &[&str]| ResolvConf {
            servers: servers.iter().map(|s| (*s).to_owned()).collect(),
            ..ResolvConf::default()
        };
        let servers = |mut spec: Value, node: &NodeSettings, host: &ResolvConf| {
            spec["containers"] = json!([]);
            let (config, warnings) = pod_dns(&pod_of(spec), node, host);
            (config.servers, warnings.iter().map(|w| w.message(&pod_ref())).collect::<Vec<_>>())
        };
        let (default, in_host) =
            (json!({"dnsPolicy": "Default"}), json!({"dnsPolicy": "Default", "hostNetwork": true}));
        for server in kept {
            assert_eq!(servers(default.clone(), &node(), &host(&[server])).0, [server]);
        }
        for server in scoped {
            let two = host(&[server, "1.1.1.1"]);
            assert_eq!(servers(default.clone(), &node(), &two), (vec!["1.1.1.1".to_owned()], vec![]));
            assert_eq!(servers(in_host.clone(), &node(), &two).0, [server, "1.1.1.1"]);
            let without = NodeSettings { cluster_dns: vec![], ..node() };
            assert_eq!(servers(json!({}), &without, &two).0, ["1.1.1.1"], "the fall-back of ClusterFirst");
            let own = json!({"dnsPolicy": "Default", "dnsConfig": {"nameservers": ["9.9.9.9"]}});
            assert_eq!(servers(own, &node(), &host(&[server])).0, ["9.9.9.9"]);
        }
        // The limit of three counts usable nameservers.
        let many = host(&[scoped[0], "1.0.0.1", "1.0.0.2", "1.0.0.3"]);
        assert_eq!(servers(default.clone(), &node(), &many).0, ["1.0.0.1", "1.0.0.2", "1.0.0.3"]);
        let (none, warnings) = servers(default, &node(), &host(&scoped[..2]));
        assert_eq!(none, [""; 0]);
        assert_eq!(
            warnings,
            [
                "Nameservers with a zone of the node's network have been omitted, and the pod has no nameserver: \
              fe80::1%eth0 fe80::1%3"
            ]
        );
    }

    #[test]
    fn without_cluster_dns_the_hosts_servers_are_used_with_a_warning() {
        let bare = NodeSettings { cluster_dns: vec![], ..node() };
        let (servers, .., warnings) = dns(json!({}), &bare);
        assert_eq!(servers, ["1.1.1.1"]);
        assert_eq!(warnings, [DnsWarning::MissingClusterDns]);
        assert_eq!(
            warnings[0].message(&pod_ref()),
            "pod: \"web_default(u1)\". kubelet does not have ClusterDNS IP configured and cannot create Pod using \
             \"ClusterFirst\" policy. Falling back to \"Default\" policy."
        );
        let none = NodeSettings { resolv_conf: None, ..bare };
        let (servers, searches, ..) = dns(json!({"dnsPolicy": "Default"}), &none);
        assert_eq!((servers, searches), (vec!["127.0.0.1".to_owned()], vec![".".to_owned()]));
    }

    #[test]
    fn the_pods_own_settings_are_added() {
        let spec = json!({"dnsConfig": {"nameservers": ["10.0.0.10", "9.9.9.9"], "searches": ["corp.example", "x"],
            "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]}});
        let (servers, searches, options, _) = dns(spec, &node());
        assert_eq!(servers, ["10.0.0.10", "9.9.9.9"]);
        assert_eq!(searches.last().unwrap(), "x");
        assert_eq!(searches.len(), 5);
        assert_eq!(options, ["ndots:2", "edns0"]);
    }

    #[test]
    fn excess_dns_entries_are_dropped_with_a_warning() {
        let names: Vec<String> = (0..40).map(|i| format!("d{i}")).collect();
        let spec = json!({"dnsPolicy": "None", "dnsConfig": {
            "nameservers": ["1.0.0.1", "1.0.0.2", "1.0.0.3", "1.0.0.4"], "searches": names}});
        let (servers, searches, _, warnings) = dns(spec, &node());
        assert_eq!((servers.len(), searches.len()), (3, 32));
        assert_eq!(
            warnings[0].message(&pod_ref()),
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: \
             1.0.0.1 1.0.0.2 1.0.0.3"
        );
        assert_eq!(warnings.len(), 2);
        let long: Vec<String> = (0..12).map(|i| format!("{i:0>200}")).chain(["y".repeat(254)]).collect();
        let (_, searches, _, warnings) =
            dns(json!({"dnsPolicy": "None", "dnsConfig": {"searches": long}}), &node());
        assert_eq!(searches.len(), 10);
        assert!(searches.join(" ").len() <= 2048);
        assert_eq!(warnings.len(), 1);
    }
}
