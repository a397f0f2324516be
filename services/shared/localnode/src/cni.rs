//! The pod network of an instance: its configuration and its iptables rules.

use std::path::Path;

use serde_json::json;

/// Names on the machine that contain the instance's index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    index: u8,
}

impl Names {
    /// Returns the names of the instance with this index.
    pub fn new(index: u8) -> Self {
        Self { index }
    }

    /// Returns the name of the CNI network, which is in the comment of each iptables rule of the plugins.
    pub fn network(self) -> String {
        format!("quintlet-{}", self.index)
    }

    /// Returns the name of the bridge. An interface name has at most 15 bytes.
    pub fn bridge(self) -> String {
        format!("quintlet{}", self.index)
    }

    /// Returns whether an interface is the bridge of an instance.
    pub(crate) fn is_bridge(interface: &str) -> bool {
        interface.strip_prefix("quintlet").is_some_and(|index| index.parse::<u8>().is_ok())
    }

    /// Returns the IPv4 address range of the pods.
    pub fn subnet(self) -> String {
        format!("10.77.{}.0/24", self.index)
    }

    /// Returns the IPv6 address range of the pods.
    pub fn subnet_v6(self) -> String {
        format!("fd77:0:0:{:x}::/64", self.index)
    }

    /// Returns the root of all cgroups of this node, in every controller.
    pub fn cgroup_root(self) -> String {
        format!("/quintlet-{}", self.index)
    }
}

/// Address families of pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Families {
    /// An IPv4 address.
    #[default]
    V4,
    /// An IPv6 address.
    V6,
    /// An address of each family.
    Dual,
}

/// Returns the network configuration list for containerd.
///
/// `masquerade` gives pods access to other networks, and `ports` adds host ports. Both need iptables.
pub fn conflist(
    names: Names,
    families: Families,
    data_dir: &Path,
    masquerade: bool,
    ports: bool,
) -> serde_json::Value {
    let v4 = (names.subnet(), "0.0.0.0/0");
    let v6 = (names.subnet_v6(), "::/0");
    let networks = match families {
        Families::V4 => vec![v4],
        Families::V6 => vec![v6],
        Families::Dual => vec![v4, v6],
    };
    let ranges: Vec<_> = networks.iter().map(|(subnet, _)| json!([{ "subnet": subnet }])).collect();
    let routes: Vec<_> = networks.iter().map(|(_, route)| json!({ "dst": route })).collect();
    let mut plugins = vec![json!({
        "type": "bridge",
        "bridge": names.bridge(),
        "isGateway": true,
        "ipMasq": masquerade,
        "hairpinMode": true,
        "ipam": {
            "type": "host-local",
            "dataDir": data_dir,
            "ranges": ranges,
            "routes": routes,
        },
    })];
    if ports {
        plugins.push(json!({ "type": "portmap", "capabilities": { "portMappings": true } }));
    }
    json!({ "cniVersion": "1.0.0", "name": names.network(), "plugins": plugins })
}

/// Rules and chains of a network in the nat table, in the output of `iptables-save -t nat`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NatRules {
    /// Rules in shared chains, as saved (`-A CHAIN …`).
    pub rules: Vec<String>,
    /// Chains that only these rules refer to.
    pub chains: Vec<String>,
}

impl NatRules {
    /// Finds the rules and chains that the plugins created for a network.
    pub fn find(saved: &str, names: Names) -> Self {
        // Comments are quoted, so the quote after the name distinguishes quintlet-1 from quintlet-10.
        let mark = format!("name: \\\"{}\\\"", names.network());
        let rules: Vec<String> =
            saved.lines().filter(|l| l.starts_with("-A ") && l.contains(&mark)).map(str::to_owned).collect();
        let mut chains: Vec<String> = rules
            .iter()
            .flat_map(|rule| [word_after(rule, "-A"), word_after(rule, "-j")])
            .flatten()
            .filter(|chain| is_per_pod(chain))
            .map(str::to_owned)
            .collect();
        chains.sort();
        chains.dedup();
        let rules = rules.into_iter().filter(|r| !word_after(r, "-A").is_some_and(is_per_pod)).collect();
        Self { rules, chains }
    }

    /// Returns whether there is neither a rule nor a chain.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.chains.is_empty()
    }

    /// Returns input for `iptables-restore --noflush` that removes the rules and chains.
    pub fn removal(&self) -> String {
        let mut script = String::from("*nat\n");
        for rule in &self.rules {
            script.push_str(&rule.replacen("-A ", "-D ", 1));
            script.push('\n');
        }
        for command in ["-F", "-X"] {
            for chain in &self.chains {
                script.push_str(&format!("{command} {chain}\n"));
            }
        }
        script.push_str("COMMIT\n");
        script
    }
}

/// Chains that the portmap plugin creates once for all networks, with the rules that refer to them.
const SHARED_CHAINS: [&str; 3] = ["CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"];

/// Returns input that removes the portmap plugin's shared chains, if no network has a host port in them.
pub fn unused_shared_chains(saved: &str) -> Option<String> {
    let in_use = saved.lines().any(|l| l.starts_with("-A CNI-HOSTPORT-DNAT ") || l.starts_with("-A CNI-DN-"));
    let present: Vec<&str> = SHARED_CHAINS
        .into_iter()
        .filter(|chain| saved.lines().any(|l| l.starts_with(&format!(":{chain} "))))
        .collect();
    if in_use || present.is_empty() {
        return None;
    }
    let rules = saved
        .lines()
        .filter(|l| {
            l.starts_with("-A ") && word_after(l, "-j").is_some_and(|target| SHARED_CHAINS.contains(&target))
        })
        .map(str::to_owned)
        .collect();
    Some(NatRules { rules, chains: present.into_iter().map(str::to_owned).collect() }.removal())
}

fn word_after<'a>(rule: &'a str, flag: &str) -> Option<&'a str> {
    rule.split(' ').skip_while(|word| *word != flag).nth(1)
}

/// `CNI-<hash>` (masquerade) and `CNI-DN-<hash>` (host ports) belong to one sandbox.
fn is_per_pod(chain: &str) -> bool {
    chain.starts_with("CNI-") && !chain.starts_with("CNI-HOSTPORT-")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = r#"*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-1111 - [0:0]
:CNI-2222 - [0:0]
:CNI-DN-aaaa - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A POSTROUTING -s 10.77.1.2/32 -m comment --comment "name: \"quintlet-1\" id: \"abc\"" -j CNI-1111
-A POSTROUTING -s 10.77.10.2/32 -m comment --comment "name: \"quintlet-10\" id: \"def\"" -j CNI-2222
-A CNI-1111 -d 10.77.1.0/24 -m comment --comment "name: \"quintlet-1\" id: \"abc\"" -j ACCEPT
-A CNI-1111 ! -d 224.0.0.0/4 -m comment --comment "name: \"quintlet-1\" id: \"abc\"" -j MASQUERADE
-A CNI-2222 -d 10.77.10.0/24 -m comment --comment "name: \"quintlet-10\" id: \"def\"" -j ACCEPT
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"quintlet-1\" id: \"abc\"" -m multiport --dports 8080 -j CNI-DN-aaaa
-A CNI-DN-aaaa -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.77.1.2:80
COMMIT
"#;

    #[test]
    fn only_the_rules_of_one_network_are_removed() {
        let found = NatRules::find(SAVED, Names::new(1));
        assert_eq!(found.chains, ["CNI-1111", "CNI-DN-aaaa"]);
        assert_eq!(
            found.removal(),
            r#"*nat
-D POSTROUTING -s 10.77.1.2/32 -m comment --comment "name: \"quintlet-1\" id: \"abc\"" -j CNI-1111
-D CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"quintlet-1\" id: \"abc\"" -m multiport --dports 8080 -j CNI-DN-aaaa
-F CNI-1111
-F CNI-DN-aaaa
-X CNI-1111
-X CNI-DN-aaaa
COMMIT
"#
        );
        assert!(NatRules::find(SAVED, Names::new(2)).is_empty());
    }

    #[test]
    fn shared_chains_are_removed_only_with_the_last_host_port() {
        assert_eq!(unused_shared_chains(SAVED), None);
        let without: String = SAVED
            .lines()
            .filter(|l| !l.contains("-dn-") && !l.contains("CNI-DN-"))
            .map(|l| format!("{l}\n"))
            .collect();
        let script = unused_shared_chains(&without).unwrap();
        assert!(
            script.contains("-D PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT\n"),
            "{script}"
        );
        assert!(script.contains("-X CNI-HOSTPORT-MASQ\n"), "{script}");
        assert_eq!(unused_shared_chains("*nat\nCOMMIT\n"), None);
    }

    #[test]
    fn the_network_bridge_and_subnet_contain_the_index() {
        let list = conflist(Names::new(7), Families::V4, Path::new("/n/cni/data"), true, true);
        assert_eq!(list["name"], "quintlet-7");
        assert_eq!(list["plugins"][0]["bridge"], "quintlet7");
        assert_eq!(list["plugins"][0]["ipam"]["ranges"][0][0]["subnet"], "10.77.7.0/24");
        assert_eq!(list["plugins"][0]["ipam"]["dataDir"], "/n/cni/data");
        assert_eq!(list["plugins"][1]["type"], "portmap");
        assert_eq!(
            conflist(Names::new(7), Families::V4, Path::new("/d"), false, false)["plugins"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
    }
}
