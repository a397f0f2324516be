//! Content of the managed `/etc/hosts` (`pkg/kubelet: ensureHostsFile`).

use std::fmt::Write as _;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::HostAlias;

use super::hostname::PodHostname;

const HEADER: &str = "# Kubernetes-managed hosts file.\n";
const HOST_NETWORK_HEADER: &str = "# Kubernetes-managed hosts file (host network).\n";
const FIXED: &str = "127.0.0.1\tlocalhost\n\
    ::1\tlocalhost ip6-localhost ip6-loopback\n\
    fe00::0\tip6-localnet\n\
    fe00::0\tip6-mcastprefix\n\
    fe00::1\tip6-allnodes\n\
    fe00::2\tip6-allrouters\n";

/// Returns the file for a pod with its own network namespace.
#[must_use]
pub(crate) fn pod_hosts(ips: &[IpAddr], name: &PodHostname, aliases: &[HostAlias]) -> String {
    let mut out = format!("{HEADER}{FIXED}");
    for ip in ips {
        let _ = match &name.domain {
            Some(domain) => writeln!(out, "{ip}\t{}.{domain}\t{}", name.host, name.host),
            None => writeln!(out, "{ip}\t{}", name.host),
        };
    }
    add_aliases(&mut out, aliases);
    out
}

/// Returns the file for a pod with hostNetwork: that of the node with the pod's aliases.
///
/// The node's file may have bytes that are no UTF-8, such as comments in another encoding.
#[must_use]
pub(crate) fn host_network_hosts(node_file: &[u8], aliases: &[HostAlias]) -> Vec<u8> {
    let mut added = String::new();
    add_aliases(&mut added, aliases);
    [HOST_NETWORK_HEADER.as_bytes(), node_file, added.as_bytes()].concat()
}

fn add_aliases(out: &mut String, aliases: &[HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    out.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
        let _ = writeln!(out, "{}\t{names}", alias.ip);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_pod_lists_its_addresses_and_aliases() {
        let aliases = [HostAlias { ip: "1.2.3.4".into(), hostnames: Some(vec!["a".into(), "b".into()]) }];
        let ips: Vec<IpAddr> = vec!["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()];
        let name = PodHostname { host: "web".into(), domain: Some("s.default.svc.cluster.local".into()) };
        assert_eq!(
            pod_hosts(&ips, &name, &aliases),
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n\
             10.0.0.5\tweb.s.default.svc.cluster.local\tweb\nfd00::5\tweb.s.default.svc.cluster.local\tweb\n\
             \n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n"
        );
        let plain = PodHostname { host: "web".into(), domain: None };
        assert!(pod_hosts(&ips[..1], &plain, &[]).ends_with("ip6-allrouters\n10.0.0.5\tweb\n"));
    }

    #[test]
    fn a_pod_with_host_network_has_the_nodes_hosts_file() {
        let aliases = [HostAlias { ip: "1.2.3.4".into(), hostnames: Some(vec!["a".into()]) }];
        assert_eq!(
            host_network_hosts(b"127.0.0.1 me\n", &[]),
            b"# Kubernetes-managed hosts file (host network).\n127.0.0.1 me\n"
        );
        assert_eq!(
            host_network_hosts(b"# caf\xe9\n127.0.0.1 me\n", &aliases),
            b"# Kubernetes-managed hosts file (host network).\n# caf\xe9\n127.0.0.1 me\n\n# Entries added by \
              HostAliases.\n1.2.3.4\ta\n"
        );
    }
}
