//! The Node object, as far as pod-sync is its source.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use k8s_openapi::api::core::v1::{
    DaemonEndpoint, Node, NodeAddress, NodeDaemonEndpoints, NodeSpec, NodeStatus, NodeSwapStatus,
    NodeSystemInfo,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use pod_sync_layout::{NodeSettings, RuntimeState};
use quintlet_model::kubernetes::KUBELET_VERSION;

use crate::resources::{allocatable, capacity, swap_bytes};
use crate::{machine, status};

/// Label of a Node on a machine that has a kubelet, too. It keeps the chart's DaemonSets off that Node.
const BESIDE_KUBELET: &str = "quintlet.dev/beside-kubelet";
/// Annotation of the Node with the version of Quintlet. It is no label, since a kubelet that takes over the
/// Node keeps labels.
const VERSION: &str = "quintlet.dev/version";
/// Labels that are restored when others change them. All other labels are only set when the Node is created.
const MANAGED_LABELS: [&str; 3] = ["kubernetes.io/os", "kubernetes.io/arch", BESIDE_KUBELET];

/// Returns the Node object for updates, with only the labels that pod-sync restores.
#[must_use]
pub fn managed_node(
    settings: &NodeSettings,
    labels: &BTreeMap<String, String>,
    runtime: &RuntimeState,
) -> Node {
    let mut node = node_object(settings, labels, runtime);
    if let Some(labels) = &mut node.metadata.labels {
        labels.retain(|key, _| MANAGED_LABELS.contains(&key.as_str()));
    }
    node
}

/// Returns the Node object that is registered.
#[must_use]
pub fn node_object(
    settings: &NodeSettings,
    labels: &BTreeMap<String, String>,
    runtime: &RuntimeState,
) -> Node {
    let name = settings.node_name.clone();
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let mut all: BTreeMap<String, String> = [
        ("kubernetes.io/hostname", name.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", arch),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .collect();
    all.extend(labels.clone());
    let root = Path::new("/");
    let read = |path: &str| std::fs::read_to_string(path).map(|s| s.trim().to_owned()).unwrap_or_default();
    let os_image = read("/etc/os-release")
        .lines()
        .find_map(|l| l.strip_prefix("PRETTY_NAME=").map(|v| v.trim_matches('"').to_owned()))
        .unwrap_or_else(|| "Linux".to_owned());
    let container_runtime = if runtime.name.is_empty() {
        "Unknown".to_owned()
    } else {
        format!("{}://{}", runtime.name, status::plain_version(&runtime.version))
    };
    let capacity = capacity(settings);
    Node {
        metadata: ObjectMeta {
            name: Some(name),
            labels: Some(all),
            annotations: Some([(VERSION.to_owned(), env!("CARGO_PKG_VERSION").to_owned())].into()),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec::default()),
        status: Some(NodeStatus {
            allocatable: Some(allocatable(settings)),
            capacity: Some(capacity),
            daemon_endpoints: Some(NodeDaemonEndpoints {
                kubelet_endpoint: (settings.node_api_port != 0)
                    .then(|| DaemonEndpoint { port: i32::from(settings.node_api_port) }),
            }),
            node_info: Some(NodeSystemInfo {
                architecture: arch.to_owned(),
                boot_id: quintlet_kit::boot::boot_id(),
                container_runtime_version: container_runtime,
                kernel_version: read("/proc/sys/kernel/osrelease"),
                kubelet_version: KUBELET_VERSION.to_owned(),
                machine_id: machine::machine_id(root),
                operating_system: "linux".to_owned(),
                os_image,
                swap: Some(swap_bytes())
                    .filter(|bytes| *bytes > 0)
                    .map(|bytes| NodeSwapStatus { capacity: Some(bytes) }),
                system_uuid: machine::system_uuid(root),
                ..NodeSystemInfo::default()
            }),
            ..NodeStatus::default()
        }),
    }
}

/// Returns `Node.status.addresses`.
#[must_use]
pub(crate) fn addresses(name: &str, ips: &[IpAddr]) -> Vec<NodeAddress> {
    let address_of_type = |address: String, kind: &str| NodeAddress { address, type_: kind.to_owned() };
    let ips = ips.iter().map(|ip| address_of_type(ip.to_string(), "InternalIP"));
    ips.chain([address_of_type(name.to_owned(), "Hostname")]).collect()
}
