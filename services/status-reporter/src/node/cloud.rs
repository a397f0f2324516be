//! The parts of the Node that an external cloud controller owns (`pkg/kubelet/nodestatus: NodeAddress`). No
//! I/O.

use std::net::IpAddr;

use serde_json::{Map, Value, json};

use crate::status::list;

/// Annotation with the addresses of `--node-ip`, which the cloud controller prefers.
const PROVIDED_IPS: &str = "alpha.kubernetes.io/provided-node-ip";

/// Taint of a Node that no cloud controller has initialized.
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";

/// The cloud that the node is in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CloudProvider {
    /// No cloud.
    #[default]
    None,
    /// A cloud controller in the cluster sets the addresses of the Node.
    External {
        /// Addresses of the node that the administrator has given.
        node_ips: Vec<IpAddr>,
    },
}

impl CloudProvider {
    /// Returns the taint of a Node that is created.
    #[must_use]
    pub fn taint(&self) -> Option<Value> {
        match self {
            Self::None => None,
            Self::External { .. } => {
                Some(json!({"key": UNINITIALIZED, "value": "true", "effect": "NoSchedule"}))
            }
        }
    }

    /// Sets the addresses of the Node and the annotation about them. `node` has the addresses that the node
    /// found.
    ///
    /// Addresses that the Node has stay, since the cloud controller sets them. Without `--node-ip` a new Node
    /// has its host name only, until the cloud controller sets addresses.
    pub fn set_addresses(&self, node: &mut Value, live: &Value) {
        self.set_annotation(node);
        let Self::External { node_ips } = self else { return };
        let set = list(&live["status"], "addresses");
        if !set.is_empty() {
            node["status"]["addresses"] = json!(set);
        } else if node_ips.is_empty()
            && let Some(addresses) = node["status"]["addresses"].as_array_mut()
        {
            addresses.retain(|address| address["type"] == "Hostname");
        }
    }

    /// Lets a patch of addresses fail if the Node has changed since `live`, as the cloud controller may have
    /// set them meanwhile.
    pub fn guard_addresses(&self, patch: &mut Value, live: &Value) {
        let is_external = matches!(self, Self::External { .. });
        if is_external && patch["status"].get("addresses").is_some() {
            patch["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"].clone();
        }
    }

    fn set_annotation(&self, node: &mut Value) {
        let specified: Vec<String> = match self {
            Self::None => Vec::new(),
            Self::External { node_ips } => match node_ips.as_slice() {
                [first, ..] if first.is_unspecified() => Vec::new(),
                ips => ips.iter().filter(|ip| !ip.is_unspecified()).map(IpAddr::to_string).collect(),
            },
        };
        if specified.is_empty() {
            if let Some(annotations) = node["metadata"]["annotations"].as_object_mut() {
                annotations.remove(PROVIDED_IPS);
            }
            return;
        }
        let annotations = &mut node["metadata"]["annotations"];
        if !annotations.is_object() {
            *annotations = Value::Object(Map::new());
        }
        annotations[PROVIDED_IPS] = json!(specified.join(","));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn external(ips: &[&str]) -> CloudProvider {
        CloudProvider::External { node_ips: ips.iter().map(|ip| ip.parse().unwrap()).collect() }
    }

    /// Returns the addresses and the annotation of a Node with these addresses in the API server.
    fn set(cloud: &CloudProvider, live: &[&str]) -> (Vec<String>, Option<String>) {
        let address = |text: &&str| {
            let (kind, address) = text.split_once(' ').unwrap();
            json!({"type": kind, "address": address})
        };
        let live = json!({"status": {"addresses": live.iter().map(address).collect::<Vec<_>>()}});
        let found = ["InternalIP 10.0.0.1", "Hostname n1"].iter().map(address).collect::<Vec<_>>();
        let mut node =
            json!({"metadata": {"annotations": {PROVIDED_IPS: "stale"}}, "status": {"addresses": found}});
        cloud.set_addresses(&mut node, &live);
        let text = |address: &Value| {
            format!("{} {}", address["type"].as_str().unwrap(), address["address"].as_str().unwrap())
        };
        let annotation = node["metadata"]["annotations"][PROVIDED_IPS].as_str().map(str::to_owned);
        (list(&node["status"], "addresses").iter().map(text).collect(), annotation)
    }

    #[test]
    fn only_a_patch_of_the_addresses_of_a_cloud_node_depends_on_the_version() {
        let addresses = json!({"status": {"addresses": []}});
        let labels = json!({"metadata": {"labels": {}}, "status": {}});
        for (cloud, patch, version) in [
            (CloudProvider::None, &addresses, Value::Null),
            (external(&[]), &labels, Value::Null),
            (external(&[]), &addresses, json!("7")),
        ] {
            let mut guarded = patch.clone();
            cloud.guard_addresses(&mut guarded, &json!({"metadata": {"resourceVersion": "7"}}));
            assert_eq!(guarded["metadata"]["resourceVersion"], version, "{cloud:?} {patch}");
        }
    }

    #[test]
    fn the_cloud_controller_sets_the_addresses_of_its_nodes() {
        let owned = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let both = owned(&["InternalIP 10.0.0.1", "Hostname n1"]);
        let given = |text: &str| Some(text.to_owned());
        for (cloud, live, addresses, annotation) in [
            (CloudProvider::None, &["InternalIP 10.9.9.9"][..], both.clone(), None),
            (external(&[]), &[], owned(&["Hostname n1"]), None),
            (external(&["10.0.0.1"]), &[], both.clone(), given("10.0.0.1")),
            (external(&["10.0.0.1", "fd00::1"]), &[], both.clone(), given("10.0.0.1,fd00::1")),
            (external(&["0.0.0.0"]), &[], both, None),
            (
                external(&["10.0.0.1"]),
                &["ExternalIP 192.0.2.1"],
                owned(&["ExternalIP 192.0.2.1"]),
                given("10.0.0.1"),
            ),
        ] {
            assert_eq!(set(&cloud, live), (addresses, annotation), "{cloud:?} {live:?}");
        }
    }
}
