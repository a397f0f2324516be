//! The node that an agent serves, as far as two agents of one node can be recognized by it.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;

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
        Self { name: name.trim().to_lowercase(), servers: servers(&text) }
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

/// The fields of a kubeconfig that identify its clusters.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Kubeconfig {
    clusters: Option<Vec<NamedCluster>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NamedCluster {
    cluster: Option<Cluster>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Cluster {
    server: Option<String>,
}

/// Returns the addresses of the API servers of a kubeconfig, which is YAML or JSON. Any other text has none.
fn servers(text: &str) -> BTreeSet<String> {
    let config: Kubeconfig = serde_saphyr::from_str(text).unwrap_or_default();
    let clusters = config.clusters.into_iter().flatten();
    let servers = clusters.filter_map(|named| named.cluster?.server);
    servers.map(|server| server.trim_end_matches('/').to_owned()).filter(|s| s.contains("://")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_a_kubeconfig_are_found_in_each_of_its_forms() {
        for (text, want) in [
            (
                "clusters:\n- name: a\n  cluster:\n    server: https://10.0.0.1:6443\n- name: b\n  cluster:\n    tls-server-name: https://c\n    server: 'https://b/'\n",
                &["https://10.0.0.1:6443", "https://b"][..],
            ),
            ("clusters:\n  - cluster: {server: \"https://a:6443/\", x: y}", &["https://a:6443"]),
            (
                r#"{"clusters":[{"cluster":{"server":"http://127.0.0.1:8001"},"name":"c"}], "users": []}"#,
                &["http://127.0.0.1:8001"],
            ),
            ("clusters:\n- cluster:\n    server:\n- cluster:\n- name: n\n", &[]),
            ("clusters:\n", &[]),
            ("clusters: [", &[]),
            ("", &[]),
        ] {
            assert!(servers(text).iter().eq(want), "{text}: {:?}", servers(text));
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
