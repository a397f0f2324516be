//! The node that an agent serves, as far as two agents of one node can be recognized by it.

use std::collections::BTreeSet;
use std::path::Path;

/// The name of a node and its API servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    name: String,
    servers: BTreeSet<String>,
}

impl NodeIdentity {
    /// Returns the node with a name, in the clusters of a kubeconfig. A kubeconfig that cannot be read has no
    /// cluster.
    #[must_use]
    pub fn new(name: &str, kubeconfig: &Path) -> Self {
        let text = std::fs::read_to_string(kubeconfig).unwrap_or_default();
        Self { name: name.trim().to_lowercase(), servers: text.lines().filter_map(server).collect() }
    }

    /// Returns the name of the node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the form for a file: the name, and the API servers in further lines.
    #[must_use]
    pub fn to_text(&self) -> String {
        let lines = std::iter::once(self.name.as_str()).chain(self.servers.iter().map(String::as_str));
        lines.map(|line| format!("{line}\n")).collect()
    }

    /// Reads [`NodeIdentity::to_text`].
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let name = lines.next()?.to_owned();
        Some(Self { name, servers: lines.map(str::to_owned).collect() })
    }

    /// Returns whether the names are equal and the clusters have an API server in common. A node without an
    /// API server has no name in a cluster, so it is no other node's.
    pub(crate) fn is_same_node(&self, other: &Self) -> bool {
        self.name == other.name && !self.servers.is_disjoint(&other.servers)
    }
}

/// Returns the address in a line of a kubeconfig with the key `server`, in YAML or in JSON.
fn server(line: &str) -> Option<String> {
    let (_, rest) = line.split_once("server")?;
    let rest = rest.trim_start_matches('"').trim_start().strip_prefix(':')?;
    let address = rest.trim_start().trim_start_matches(['"', '\'']);
    let address = address.split(['"', '\'', ',', ' ', '}']).next()?.trim_end_matches('/');
    address.contains("://").then(|| address.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_a_kubeconfig_are_found_in_each_of_its_forms() {
        for (line, want) in [
            ("    server: https://10.0.0.1:6443", Some("https://10.0.0.1:6443")),
            ("  - cluster: {server: \"https://a:6443/\", x: y}", Some("https://a:6443")),
            (
                r#"{"clusters":[{"cluster":{"server":"http://127.0.0.1:8001"},"name":"c"}]}"#,
                Some("http://127.0.0.1:8001"),
            ),
            ("    tls-server-name: https", None),
            ("    server:", None),
        ] {
            assert_eq!(server(line).as_deref(), want, "{line}");
        }
    }

    #[test]
    fn nodes_are_the_same_with_one_name_and_a_common_server() {
        let identity = |text: &str| NodeIdentity::parse(text).unwrap();
        let first = identity("n1\nhttps://a\nhttps://b\n");
        assert_eq!(identity(&first.to_text()), first);
        for (other, want) in [
            ("n1\nhttps://b\n", true),
            ("n2\nhttps://b\n", false),
            ("n1\nhttps://c\n", false),
            ("n1\n", false),
            ("41", false),
        ] {
            assert_eq!(first.is_same_node(&identity(other)), want, "{other}");
        }
        assert!(!identity("n1\n").is_same_node(&identity("n1\n")), "neither has an API server");
    }
}
