//! Checks whether a pod may run on this node: operating system, node affinity, node name, host ports, taints.

use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};
use quintlet_model::{node_selector, pod};

use super::rejection::Rejection;
use super::result::{AdmitResult, reject};

pub(super) fn wrong_os(pod: &Pod, node: &Node) -> Option<AdmitResult> {
    const OS: &str = "kubernetes.io/os";
    let node_os = node.metadata.labels.as_ref().and_then(|l| l.get(OS)).map_or("linux", String::as_str);
    let label = pod.metadata.labels.as_ref().and_then(|l| l.get(OS));
    if label.is_some_and(|l| l != node_os) {
        return Some(reject(
            "PodOSSelectorNodeLabelDoesNotMatch",
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        ));
    }
    if pod::spec(pod).os.as_ref().is_some_and(|os| os.name != "linux") {
        return Some(reject(
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ));
    }
    None
}

/// Reason for a pod whose node selector or affinity does not match. The Node may be stale, so it is read
/// again before the pod is rejected.
pub const NODE_AFFINITY: &str = "NodeAffinity";

fn predicate(name: &str, why: &str) -> Rejection {
    Rejection { reason: name.to_owned(), message: format!("Predicate {name} failed: {why}") }
}

/// Returns the first predicate that fails: node affinity, node name, host ports or taints.
#[must_use]
pub fn predicate_failure(pod: &Pod, others: &[&Pod], node: &Node) -> Option<Rejection> {
    if !matches_node(pod, node) {
        return Some(predicate(NODE_AFFINITY, "node(s) didn't match Pod's node affinity/selector"));
    }
    let wanted = pod::spec(pod).node_name.as_deref().filter(|n| !n.is_empty());
    if wanted.is_some_and(|n| Some(n) != node.metadata.name.as_deref()) {
        return Some(predicate("NodeName", "node(s) didn't match the requested node name"));
    }
    let mine = host_ports(pod);
    if others.iter().flat_map(|p| host_ports(p)).any(|theirs| mine.iter().any(|m| m.conflicts(&theirs))) {
        return Some(predicate("NodePorts", "node(s) didn't have free ports for the requested pod ports"));
    }
    let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    let tolerations = pod::spec(pod).tolerations.as_deref().unwrap_or_default();
    let untolerated = taints
        .filter(|t| t.effect == "NoExecute")
        .any(|taint| !tolerations.iter().any(|t| tolerates(t, taint)));
    if untolerated && !pod::is_static(pod) {
        return Some(predicate("TaintToleration", "node(s) had taints that the pod didn't tolerate"));
    }
    None
}

struct HostPort {
    ip: String,
    protocol: String,
    port: i32,
}

impl HostPort {
    fn conflicts(&self, other: &Self) -> bool {
        let any = |ip: &str| ip == "0.0.0.0";
        self.port == other.port
            && self.protocol == other.protocol
            && (self.ip == other.ip || any(&self.ip) || any(&other.ip))
    }
}

fn host_ports(pod: &Pod) -> Vec<HostPort> {
    let sidecars = pod::init_containers(pod).iter().filter(|c| pod::is_sidecar(c));
    pod::spec(pod)
        .containers
        .iter()
        .chain(sidecars)
        .flat_map(|c| c.ports.iter().flatten())
        .filter_map(|p| {
            Some(HostPort {
                ip: p.host_ip.clone().filter(|ip| !ip.is_empty()).unwrap_or_else(|| "0.0.0.0".to_owned()),
                protocol: p.protocol.clone().filter(|p| !p.is_empty()).unwrap_or_else(|| "TCP".to_owned()),
                port: p.host_port.filter(|p| *p > 0)?,
            })
        })
        .collect()
}

/// Returns whether a toleration tolerates a taint.
#[must_use]
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let key = toleration.key.as_deref().unwrap_or_default();
    let effect = toleration.effect.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    if !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "Exists" => true,
        "" | "Equal" => {
            !key.is_empty()
                && toleration.value.as_deref().unwrap_or_default()
                    == taint.value.as_deref().unwrap_or_default()
        }
        _ => false,
    }
}

fn matches_node(pod: &Pod, node: &Node) -> bool {
    let spec = pod::spec(pod);
    let label = |key: &str| node.metadata.labels.as_ref().and_then(|l| l.get(key)).map(String::as_str);
    if spec.node_selector.iter().flatten().any(|(k, v)| label(k) != Some(v.as_str())) {
        return false;
    }
    let required = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref())
        .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    let Some(required) = required else { return true };
    node_selector::matches(required, node.metadata.labels.as_ref(), node.metadata.name.as_deref())
}
