//! Whether the node takes a pod (pod-sync.md §8.1), first refusal wins.

use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, Taint, Toleration};
use quintlet_model::pod;

use super::qos::{self, QosClass, ResourceList};

/// A refusal: reason of event and status, and its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// E.g. `OutOfcpu`.
    pub reason: String,
    /// Text; the status puts `Pod was rejected: ` before it.
    pub message: String,
}

/// A resource of which there is not enough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    /// Name of the resource.
    pub resource: String,
    /// Asked for (CPU in thousandths, else whole units).
    pub requested: i64,
    /// Taken by the other pods.
    pub used: i64,
    /// Allocatable.
    pub capacity: i64,
}

impl Shortage {
    /// How much has to be freed.
    #[must_use]
    pub fn missing(&self) -> i64 {
        self.requested.saturating_sub(self.capacity.saturating_sub(self.used))
    }

    /// The refusal it makes.
    #[must_use]
    pub fn rejection(&self) -> Rejection {
        Rejection {
            reason: format!("OutOf{}", self.resource),
            message: format!(
                "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
                self.resource, self.requested, self.used, self.capacity
            ),
        }
    }
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Take it.
    Admit,
    /// Refuse it for good.
    Reject(Rejection),
    /// A critical pod that fits once others make room for it.
    MakeRoom(Vec<Shortage>),
}

/// A pressure of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// MemoryPressure.
    Memory,
    /// DiskPressure.
    Disk,
    /// PIDPressure.
    Pid,
}

impl Pressure {
    fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pid => "PIDPressure",
        }
    }
}

/// The node as admission sees it.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    /// The Node object, or the one that would be registered; `None` refuses every pod.
    pub node: Option<&'a Node>,
    /// Allocatable, `pods` among it.
    pub allocatable: &'a ResourceList,
    /// Pressures right now.
    pub pressure: &'a [Pressure],
    /// `allowedUnsafeSysctls`; a `*` at the end stands for anything.
    pub allowed_sysctls: &'a [String],
    /// Kernel (major, minor).
    pub kernel: (u32, u32),
    /// The runtime can apply supplementalGroupsPolicy Strict.
    pub strict_groups: bool,
    /// The node shuts down.
    pub shutting_down: bool,
}

fn reject(reason: &str, message: impl Into<String>) -> Verdict {
    Verdict::Reject(Rejection { reason: reason.to_owned(), message: message.into() })
}

/// Decides. `others` are the active pods with their allocated resources, without the pod itself.
#[must_use]
pub fn admit(pod: &Pod, others: &[&Pod], view: &NodeView<'_>) -> Verdict {
    let critical = pod::is_critical(pod);
    if let Some(refused) = under_pressure(pod, view.pressure, critical) {
        return refused;
    }
    if let Some(sysctl) = forbidden_sysctl(pod, view) {
        return reject("SysctlForbidden", format!("forbidden sysctl: {sysctl}"));
    }
    let Some(node) = view.node else { return reject("InvalidNodeInfo", "Kubelet cannot get node info.") };
    if let Some(refused) = wrong_os(pod, node) {
        return refused;
    }
    let policy =
        pod::spec(pod).security_context.as_ref().and_then(|s| s.supplemental_groups_policy.as_deref());
    if policy == Some("Strict") && !view.strict_groups {
        return reject(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        );
    }
    let short = shortages(pod, others, view.allocatable);
    let other = mismatch(pod, others, node);
    match (short.first(), other) {
        // A critical pod is not refused for want of room, others go for it; nothing else can be helped.
        (Some(_), None) if critical => return Verdict::MakeRoom(short),
        (_, Some(other)) if critical => return Verdict::Reject(other),
        (Some(short), _) => return Verdict::Reject(short.rejection()),
        (None, Some(other)) => return Verdict::Reject(other),
        (None, None) => {}
    }
    if view.shutting_down {
        return reject("NodeShutdown", "Pod was rejected as the node is shutting down.");
    }
    Verdict::Admit
}

fn under_pressure(pod: &Pod, pressure: &[Pressure], critical: bool) -> Option<Verdict> {
    if pressure.is_empty() || critical {
        return None;
    }
    if pressure == [Pressure::Memory] {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        let tolerated = pod::spec(pod).tolerations.iter().flatten().any(|t| tolerates(t, &taint));
        if qos::qos_class(pod) != QosClass::BestEffort || tolerated {
            return None;
        }
    }
    let names: Vec<_> = pressure.iter().map(|p| p.as_str()).collect();
    Some(reject("Evicted", format!("The node had condition: [{}]. ", names.join(" "))))
}

// Name, and the kernel from which on it is safe.
const SAFE_SYSCTLS: [(&str, (u32, u32)); 12] = [
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 6)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
];

fn forbidden_sysctl(pod: &Pod, view: &NodeView<'_>) -> Option<String> {
    let spec = pod::spec(pod);
    let host_ipc = spec.host_ipc.unwrap_or(false);
    for sysctl in spec.security_context.iter().flat_map(|s| s.sysctls.iter().flatten()) {
        let name = normal_sysctl(&sysctl.name);
        let safe = SAFE_SYSCTLS.iter().any(|(n, from)| *n == name && view.kernel >= *from);
        let allowed = view.allowed_sysctls.iter().any(|pattern| {
            let pattern = normal_sysctl(pattern);
            match pattern.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => pattern == name,
            }
        });
        let ipc = name == "kernel.sem"
            || ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|p| name.starts_with(p));
        let net = name.starts_with("net.");
        if !safe && !allowed {
            return Some(format!("{name:?} not allowlisted"));
        }
        if ipc && host_ipc {
            return Some(format!("{name:?} not allowed with host ipc enabled"));
        }
        if net && pod::host_network(pod) {
            return Some(format!("{name:?} not allowed with host net enabled"));
        }
    }
    None
}

// Both separators are accepted; what comes first says which one separates.
fn normal_sysctl(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(i) if name.as_bytes()[i] == b'/' => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                c => c,
            })
            .collect(),
        Some(_) | None => name.to_owned(),
    }
}

fn wrong_os(pod: &Pod, node: &Node) -> Option<Verdict> {
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

/// Resources of which there is not enough, in the order in which they are reported.
#[must_use]
pub fn shortages(pod: &Pod, others: &[&Pod], allocatable: &ResourceList) -> Vec<Shortage> {
    let amount = |l: &ResourceList, name: &str| {
        let q = l.get(name).copied().unwrap_or_default();
        if name == "cpu" { q.milli_value() } else { q.value() }
    };
    let mut short = Vec::new();
    let pods = amount(allocatable, "pods");
    let used = i64::try_from(others.len()).unwrap_or(i64::MAX);
    if used.saturating_add(1) > pods {
        short.push(Shortage { resource: "pods".to_owned(), requested: 1, used, capacity: pods });
    }
    let wanted = qos::pod_requests(pod);
    let taken: Vec<ResourceList> = others.iter().map(|p| qos::pod_requests(p)).collect();
    let fixed = ["cpu", "memory", "ephemeral-storage"];
    let scalar = wanted.keys().map(String::as_str).filter(|n| !fixed.contains(n));
    for name in fixed.into_iter().chain(scalar) {
        let requested = amount(&wanted, name);
        // A resource the node does not know is somebody else's to give out.
        if requested <= 0 || (!fixed.contains(&name) && !allocatable.contains_key(name)) {
            continue;
        }
        let capacity = amount(allocatable, name);
        let used = taken.iter().map(|l| amount(l, name)).fold(0_i64, i64::saturating_add);
        if requested > capacity.saturating_sub(used) {
            short.push(Shortage { resource: name.to_owned(), requested, used, capacity });
        }
    }
    short
}

fn predicate(name: &str, why: &str) -> Rejection {
    Rejection { reason: name.to_owned(), message: format!("Predicate {name} failed: {why}") }
}

/// What else does not fit: affinity, name, ports, taints. A refusal for NodeAffinity is worth a fresh look at the Node.
#[must_use]
pub fn mismatch(pod: &Pod, others: &[&Pod], node: &Node) -> Option<Rejection> {
    if !matches_node(pod, node) {
        return Some(predicate("NodeAffinity", "node(s) didn't match Pod's node affinity/selector"));
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

/// A toleration covers a taint.
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
    let field = |key: &str| node.metadata.name.as_deref().filter(|_| key == "metadata.name");
    required.node_selector_terms.iter().any(|term| matches_term(term, &label, &field))
}

fn matches_term<'a>(
    term: &NodeSelectorTerm,
    label: &impl Fn(&str) -> Option<&'a str>,
    field: &impl Fn(&str) -> Option<&'a str>,
) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // A term that asks nothing matches nothing.
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|r| meets(r, label(&r.key)))
        && fields.iter().all(|r| meets(r, field(&r.key)))
}

fn meets(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = |v: &str| values.iter().any(|x| x == v);
    let compare = |ok: fn(i64, i64) -> bool| match (value.map(str::parse), values) {
        (Some(Ok(value)), [bound]) => bound.parse().is_ok_and(|bound| ok(value, bound)),
        _ => false,
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compare(|v, b| v > b),
        "Lt" => compare(|v, b| v < b),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::quantity::Quantity;
    use crate::decide::testing::pod_json;
    use serde_json::{Value, json};

    fn node() -> Node {
        serde_json::from_value(json!({"metadata": {"name": "n1", "labels": {"kubernetes.io/os": "linux", "zone": "a", "size": "4"}},
            "spec": {}}))
        .unwrap()
    }

    fn allocatable() -> ResourceList {
        [
            ("cpu", "2"),
            ("memory", "1Gi"),
            ("ephemeral-storage", "10Gi"),
            ("pods", "3"),
            ("example.com/gpu", "1"),
        ]
        .into_iter()
        .map(|(k, v)| (k.to_owned(), Quantity::parse(v).unwrap()))
        .collect()
    }

    fn view<'a>(node: Option<&'a Node>, allocatable: &'a ResourceList) -> NodeView<'a> {
        NodeView {
            node,
            allocatable,
            pressure: &[],
            allowed_sysctls: &[],
            kernel: (6, 1),
            strict_groups: false,
            shutting_down: false,
        }
    }

    fn requesting(resources: Value) -> Pod {
        pod_json(json!({"containers": [{"name": "c", "image": "i", "resources": {"requests": resources}}]}))
    }

    fn plain() -> Pod {
        requesting(json!({}))
    }

    fn with(edit: impl FnOnce(&mut Value)) -> Pod {
        let mut spec = json!({"containers": [{"name": "c", "image": "i"}]});
        edit(&mut spec);
        pod_json(spec)
    }

    fn reason(verdict: &Verdict) -> &str {
        match verdict {
            Verdict::Admit => "",
            Verdict::Reject(r) => &r.reason,
            Verdict::MakeRoom(_) => "make room",
        }
    }

    fn message(verdict: &Verdict) -> &str {
        match verdict {
            Verdict::Reject(r) => &r.message,
            Verdict::Admit | Verdict::MakeRoom(_) => "",
        }
    }

    #[test]
    fn a_pod_must_fit_beside_the_others() {
        let (n, a) = (node(), allocatable());
        let v = view(Some(&n), &a);
        let one = requesting(json!({"cpu": "1500m", "memory": "512Mi", "example.com/gpu": "1"}));
        for (name, pod, others, want) in [
            ("empty node", requesting(json!({"cpu": "2", "memory": "1Gi"})), vec![], ""),
            ("cpu", requesting(json!({"cpu": "501m"})), vec![&one], "OutOfcpu"),
            ("cpu just fits", requesting(json!({"cpu": "500m"})), vec![&one], ""),
            ("memory", requesting(json!({"memory": "513Mi"})), vec![&one], "OutOfmemory"),
            ("storage", requesting(json!({"ephemeral-storage": "11Gi"})), vec![], "OutOfephemeral-storage"),
            ("extended", requesting(json!({"example.com/gpu": "1"})), vec![&one], "OutOfexample.com/gpu"),
            ("unknown to the node", requesting(json!({"example.com/other": "1"})), vec![], ""),
            ("pods", plain(), vec![&one, &one, &one], "OutOfpods"),
            ("nothing asked for on a full node", plain(), vec![&one, &one], ""),
        ] {
            assert_eq!(reason(&admit(&pod, &others, &v)), want, "{name}");
        }
        assert_eq!(
            message(&admit(&requesting(json!({"cpu": "501m"})), &[&one], &v)),
            "Node didn't have enough resource: cpu, requested: 501, used: 1500, capacity: 2000"
        );
    }

    #[test]
    fn a_critical_pod_gets_room_unless_something_else_stands_against_it() {
        let (n, a) = (node(), allocatable());
        let v = view(Some(&n), &a);
        let mut p = requesting(json!({"cpu": "3"}));
        p.spec.as_mut().unwrap().priority = Some(2_000_000_000);
        let Verdict::MakeRoom(short) = admit(&p, &[], &v) else { panic!("room is made") };
        assert_eq!((short[0].resource.as_str(), short[0].missing()), ("cpu", 1000));
        p.spec.as_mut().unwrap().node_name = Some("other".into());
        assert_eq!(reason(&admit(&p, &[], &v)), "NodeName");
    }

    #[test]
    fn selector_and_affinity_must_match_the_nodes_labels() {
        let (n, a) = (node(), allocatable());
        let v = view(Some(&n), &a);
        let affinity = |terms: Value| {
            with(|s| {
                s["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                    json!({"nodeSelectorTerms": terms});
            })
        };
        let e = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        for (name, pod, admitted) in [
            ("selector", with(|s| s["nodeSelector"] = json!({"zone": "a"})), true),
            ("other value", with(|s| s["nodeSelector"] = json!({"zone": "b"})), false),
            ("missing label", with(|s| s["nodeSelector"] = json!({"x": ""})), false),
            ("In", affinity(json!([e("zone", "In", &["a", "b"])])), true),
            ("not In", affinity(json!([e("zone", "In", &["b"])])), false),
            ("NotIn", affinity(json!([e("zone", "NotIn", &["b"])])), true),
            ("NotIn without the label", affinity(json!([e("x", "NotIn", &["b"])])), true),
            ("Exists", affinity(json!([e("zone", "Exists", &[])])), true),
            ("DoesNotExist", affinity(json!([e("zone", "DoesNotExist", &[])])), false),
            ("Gt", affinity(json!([e("size", "Gt", &["3"])])), true),
            ("Lt", affinity(json!([e("size", "Lt", &["4"])])), false),
            ("Gt of text", affinity(json!([e("zone", "Gt", &["3"])])), false),
            ("any term", affinity(json!([e("zone", "In", &["b"]), e("zone", "In", &["a"])])), true),
            ("empty term", affinity(json!([{}])), false),
            (
                "field",
                affinity(
                    json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]),
                ),
                true,
            ),
            (
                "other field",
                affinity(
                    json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]),
                ),
                false,
            ),
        ] {
            let want = if admitted { "" } else { "NodeAffinity" };
            assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
        }
    }

    #[test]
    fn host_ports_are_given_once() {
        let (n, a) = (node(), allocatable());
        let v = view(Some(&n), &a);
        let port = |p: Value| with(|s| s["containers"][0]["ports"] = json!([p]));
        let taken = port(json!({"containerPort": 80, "hostPort": 80}));
        let on_one = port(json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}));
        for (name, pod, other, want) in [
            ("same", port(json!({"containerPort": 8080, "hostPort": 80})), &taken, "NodePorts"),
            ("no host port", port(json!({"containerPort": 80})), &taken, ""),
            (
                "other protocol",
                port(json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"})),
                &taken,
                "",
            ),
            (
                "one address of all",
                port(json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"})),
                &taken,
                "NodePorts",
            ),
            (
                "another address",
                port(json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"})),
                &on_one,
                "",
            ),
        ] {
            assert_eq!(reason(&admit(&pod, &[other], &v)), want, "{name}");
        }
    }

    #[test]
    fn only_untolerated_no_execute_taints_refuse_and_never_a_static_pod() {
        let a = allocatable();
        let mut n = node();
        let taint = |effect: &str| Taint {
            key: "k".into(),
            value: Some("v".into()),
            effect: effect.into(),
            time_added: None,
        };
        n.spec.as_mut().unwrap().taints = Some(vec![taint("NoSchedule")]);
        assert_eq!(reason(&admit(&plain(), &[], &view(Some(&n), &a))), "");
        n.spec.as_mut().unwrap().taints = Some(vec![taint("NoExecute")]);
        let v = view(Some(&n), &a);
        let tolerating = |t: Value| with(|s| s["tolerations"] = json!([t]));
        for (name, pod, want) in [
            ("none", plain(), "TaintToleration"),
            ("all", tolerating(json!({"operator": "Exists"})), ""),
            ("key", tolerating(json!({"key": "k", "operator": "Exists", "effect": "NoExecute"})), ""),
            ("value", tolerating(json!({"key": "k", "value": "v"})), ""),
            ("other value", tolerating(json!({"key": "k", "value": "w"})), "TaintToleration"),
            (
                "other effect",
                tolerating(json!({"key": "k", "operator": "Exists", "effect": "NoSchedule"})),
                "TaintToleration",
            ),
            (
                "unknown operator",
                tolerating(json!({"key": "k", "operator": "Gt", "value": "v"})),
                "TaintToleration",
            ),
        ] {
            assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
        }
        let mut p = plain();
        p.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
        assert_eq!(admit(&p, &[], &v), Verdict::Admit);
    }

    #[test]
    fn the_os_must_be_the_nodes() {
        let (n, a) = (node(), allocatable());
        let v = view(Some(&n), &a);
        assert_eq!(
            reason(&admit(&with(|s| s["os"] = json!({"name": "windows"})), &[], &v)),
            "PodOSNotSupported"
        );
        assert_eq!(reason(&admit(&with(|s| s["os"] = json!({"name": "linux"})), &[], &v)), "");
        let mut p = plain();
        p.metadata.labels = Some([("kubernetes.io/os".to_owned(), "windows".to_owned())].into());
        assert_eq!(reason(&admit(&p, &[], &v)), "PodOSSelectorNodeLabelDoesNotMatch");
        assert_eq!(reason(&admit(&plain(), &[], &view(None, &a))), "InvalidNodeInfo");
    }

    #[test]
    fn what_the_runtime_cannot_do_is_refused() {
        let (n, a) = (node(), allocatable());
        let strict = with(|s| s["securityContext"] = json!({"supplementalGroupsPolicy": "Strict"}));
        assert_eq!(reason(&admit(&strict, &[], &view(Some(&n), &a))), "SupplementalGroupsPolicyNotSupported");
        let v = NodeView { strict_groups: true, ..view(Some(&n), &a) };
        assert_eq!(admit(&strict, &[], &v), Verdict::Admit);
        let v = NodeView { shutting_down: true, ..view(Some(&n), &a) };
        assert_eq!(reason(&admit(&plain(), &[], &v)), "NodeShutdown");
    }

    #[test]
    fn under_pressure_only_some_pods_are_taken() {
        let (n, a) = (node(), allocatable());
        let burstable = requesting(json!({"cpu": "1m"}));
        let tolerant = with(|s| {
            s["tolerations"] = json!([{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"}]);
        });
        let critical = with(|s| s["priority"] = json!(2_000_000_000));
        let memory: &[Pressure] = &[Pressure::Memory];
        let disk: &[Pressure] = &[Pressure::Disk];
        for (name, pod, pressure, want) in [
            ("memory, best effort", plain(), memory, "Evicted"),
            ("memory, burstable", burstable.clone(), memory, ""),
            ("memory, tolerated", tolerant.clone(), memory, ""),
            ("disk, burstable", burstable, disk, "Evicted"),
            ("disk, tolerated", tolerant, disk, "Evicted"),
            ("disk, critical", critical, disk, ""),
        ] {
            let v = NodeView { pressure, ..view(Some(&n), &a) };
            assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
        }
        let v = NodeView { pressure: &[Pressure::Memory, Pressure::Disk], ..view(Some(&n), &a) };
        assert_eq!(
            message(&admit(&plain(), &[], &v)),
            "The node had condition: [MemoryPressure DiskPressure]. "
        );
    }

    #[test]
    fn sysctls_are_safe_allowed_or_refused() {
        let (n, a) = (node(), allocatable());
        let set = |name: &str, more: fn(&mut Value)| {
            with(|s| {
                s["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]});
                more(s);
            })
        };
        let allowed = ["kernel.msg*".to_owned(), "net.core.somaxconn".to_owned()];
        let v = NodeView { allowed_sysctls: &allowed, kernel: (4, 4), ..view(Some(&n), &a) };
        for (name, pod, want) in [
            ("safe", set("kernel.shm_rmid_forced", |_| {}), ""),
            ("safe, with slashes", set("net/ipv4/tcp_syncookies", |_| {}), ""),
            ("too new for the kernel", set("net.ipv4.tcp_rmem", |_| {}), "SysctlForbidden"),
            ("unsafe", set("kernel.panic", |_| {}), "SysctlForbidden"),
            ("allowed by pattern", set("kernel.msgmax", |_| {}), ""),
            ("allowed by name", set("net.core.somaxconn", |_| {}), ""),
            (
                "host network",
                set("net.core.somaxconn", |s| s["hostNetwork"] = json!(true)),
                "SysctlForbidden",
            ),
            ("host ipc", set("kernel.msgmax", |s| s["hostIPC"] = json!(true)), "SysctlForbidden"),
        ] {
            assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
        }
    }
}
