//! Builds the CRI configuration of a pod's sandbox (`pkg/kubelet/kuberuntime: generatePodSandboxConfig`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_layout::{HandlerFeatures, NodeSettings, paths};
use pod_sync_node_decisions::admission::normal_sysctl;
use quintlet_cri_api::v1::{
    DnsConfig, LinuxPodSandboxConfig, PodSandboxConfig, PodSandboxMetadata, PortMapping, Protocol,
    UserNamespace,
};
use quintlet_model::ids::PodRef;
use quintlet_model::sysctl::{self, SysctlNamespace};
use quintlet_model::{labels, pod};

use super::error::ConfigError;
use super::hostname::{kernel_hostname, pod_hostname};
use super::{resources, security};

/// Input of [`sandbox_config`].
#[derive(Debug, Clone, Copy)]
pub struct SandboxInput<'a> {
    /// The pod, with its allocated resources in the spec.
    pub pod: &'a Pod,
    /// Name, namespace and UID.
    pub names: &'a PodRef,
    /// Attempt of the sandbox.
    pub attempt: u32,
    /// Directories and settings of the node.
    pub node: &'a NodeSettings,
    /// Parent cgroup in the form of the cgroup driver; empty without pod cgroups.
    pub cgroup_parent: &'a str,
    /// DNS configuration of [`super::dns::pod_dns`].
    pub dns: &'a DnsConfig,
    /// Handler of the pod's RuntimeClass; empty for the default.
    pub runtime_handler: &'a str,
    /// Features of that handler.
    pub features: HandlerFeatures,
    /// ID mappings of the pod, if it has a user namespace.
    pub userns: Option<&'a UserNamespace>,
    /// Supplemental groups that the PersistentVolumes of the pod add.
    pub volume_groups: &'a [i64],
    /// A container of the pod has exclusive CPUs.
    pub has_exclusive_cpus: bool,
}

/// Returns the configuration of a sandbox.
///
/// # Errors
/// The spec is invalid. The caller adds the prefix `Failed to generate sandbox config for pod %q: `.
pub fn sandbox_config(input: SandboxInput<'_>) -> Result<PodSandboxConfig, ConfigError> {
    let SandboxInput { pod, names, node, .. } = input;
    let meta = &pod.metadata;
    let mut all_labels: HashMap<String, String> =
        meta.labels.clone().unwrap_or_default().into_iter().collect();
    all_labels.extend([
        (labels::POD_NAME.to_owned(), names.name.to_string()),
        (labels::POD_NAMESPACE.to_owned(), names.namespace.to_string()),
        (labels::POD_UID.to_owned(), names.uid.to_string()),
    ]);
    let mut annotations: HashMap<String, String> =
        meta.annotations.clone().unwrap_or_default().into_iter().collect();
    annotations.insert(labels::OWNER_NODE.to_owned(), node.node_name.clone());

    let hostname = if pod::host_network(pod) {
        String::new()
    } else {
        kernel_hostname(pod, &pod_hostname(pod, &node.cluster_domain)?)?
    };
    let namespaces = security::namespaces(pod, input.features, input.runtime_handler, input.userns)?;
    let mut ports = Vec::new();
    for container in &pod::spec(pod).containers {
        ports.extend(port_mappings(container)?);
    }
    Ok(PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: names.name.to_string(),
            uid: names.uid.to_string(),
            namespace: names.namespace.to_string(),
            attempt: input.attempt,
        }),
        hostname,
        log_directory: paths::pod_log_dir(&node.pod_logs_dir, names).display().to_string(),
        dns_config: Some(input.dns.clone()),
        port_mappings: ports,
        labels: all_labels,
        annotations,
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: input.cgroup_parent.to_owned(),
            security_context: Some(security::sandbox_context(pod, namespaces, input.volume_groups)?),
            sysctls: sysctls(pod, &node.default_sysctls),
            overhead: Some(resources::sandbox_overhead(pod, node)),
            resources: Some(resources::sandbox_resources(pod, node, input.has_exclusive_cpus)),
        }),
        ..PodSandboxConfig::default()
    })
}

/// Returns the sysctls of a pod and those of the node that it does not set (`pkg/kubelet/sysctl:
/// ConvertPodSysctlsVariableToDotsSeparator`, `pkg/kubelet/kuberuntime: applyPodSysctls`).
fn sysctls(pod: &Pod, defaults: &BTreeMap<String, String>) -> HashMap<String, String> {
    let context = pod::spec(pod).security_context.as_ref();
    let own = context.and_then(|c| c.sysctls.as_ref()).into_iter().flatten();
    let own = own.map(|s| (normal_sysctl(&s.name), s.value.clone()));
    let defaults = defaults.iter().map(|(name, value)| (normal_sysctl(name), value.clone()));
    defaults.filter(|(name, _)| is_namespaced(pod, name)).chain(own).collect()
}

/// Returns whether a sysctl of the node belongs to a namespace that the pod has for itself. Others are
/// ignored.
fn is_namespaced(pod: &Pod, name: &str) -> bool {
    let spec = pod::spec(pod);
    match sysctl::namespace_of(name) {
        Some(SysctlNamespace::Ipc) => spec.host_ipc != Some(true),
        Some(SysctlNamespace::Network | SysctlNamespace::Uts) => !pod::host_network(pod),
        Some(SysctlNamespace::User) => spec.host_users == Some(false),
        None => false,
    }
}

/// Returns the port mappings of a container, each name or each unnamed mapping once.
///
/// # Errors
/// A port of the host has an unknown protocol. The kubelet opens it for TCP.
pub fn port_mappings(container: &Container) -> Result<Vec<PortMapping>, ConfigError> {
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    for port in container.ports.iter().flatten() {
        let host_ip = port.host_ip.clone().unwrap_or_default();
        let host_port = port.host_port.unwrap_or(0);
        let protocol = port.protocol.as_deref().filter(|p| !p.is_empty()).unwrap_or("TCP");
        let key = match port.name.as_deref().filter(|n| !n.is_empty()) {
            Some(name) => name.to_owned(),
            None => {
                let family = match host_ip.parse::<IpAddr>() {
                    Ok(IpAddr::V4(_)) => "v4",
                    Ok(IpAddr::V6(_)) => "v6",
                    Err(_) => "any",
                };
                format!("{family}-{protocol}-{host_ip}:{}:{host_port}", port.container_port)
            }
        };
        if !seen.insert(key) {
            continue;
        }
        let protocol = match protocol {
            "UDP" => Protocol::Udp,
            "SCTP" => Protocol::Sctp,
            "TCP" => Protocol::Tcp,
            // Without a port of the host, the mapping has no effect.
            _ if host_port == 0 => Protocol::Tcp,
            other => {
                let name = &container.name;
                return Err(ConfigError::invalid(format!(
                    "unknown protocol {other:?} of host port {host_port} of container {name:?}"
                )));
            }
        };
        out.push(PortMapping {
            protocol: protocol as i32,
            container_port: port.container_port,
            host_port,
            host_ip,
        });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    fn build(spec: Value) -> Result<PodSandboxConfig, ConfigError> {
        let mut p = pod_of(spec);
        p.metadata.labels = Some([("app".into(), "web".into())].into());
        let node = NodeSettings {
            node_name: "n1".into(),
            cluster_domain: "cluster.local".into(),
            ..NodeSettings::default()
        };
        sandbox_config(SandboxInput {
            pod: &p,
            names: &pod::pod_ref(&p).unwrap(),
            attempt: 2,
            node: &node,
            cgroup_parent: "/kubepods/besteffort/podu1",
            dns: &DnsConfig { servers: vec!["1.1.1.1".into()], ..DnsConfig::default() },
            runtime_handler: "",
            features: HandlerFeatures::default(),
            userns: None,
            volume_groups: &[4711],
            has_exclusive_cpus: false,
        })
    }

    #[test]
    fn a_sandbox_has_the_pods_names_labels_and_owner() {
        let c = build(json!({"containers": [{"name": "c"}], "subdomain": "s",
            "securityContext": {"sysctls": [{"name": "net/core/somaxconn", "value": "7"},
                {"name": "net/ipv4/conf/eno2.100/forwarding", "value": "1"}, {"name": "net.ipv4.conf.eno2/100.mtu", "value": "2"}],
                "fsGroup": 5, "supplementalGroups": [6]}}))
        .unwrap();
        let m = c.metadata.unwrap();
        assert_eq!(
            (m.name.as_str(), m.uid.as_str(), m.namespace.as_str(), m.attempt),
            ("web", "u1", "default", 2)
        );
        assert_eq!(c.log_directory, "/var/log/pods/default_web_u1");
        assert_eq!(c.hostname, "web");
        assert_eq!(c.labels["app"], "web");
        assert_eq!(c.labels[labels::POD_UID], "u1");
        assert_eq!(c.annotations[labels::CONFIG_SOURCE], "api");
        assert_eq!(c.annotations[labels::OWNER_NODE], "n1");
        let linux = c.linux.unwrap();
        assert_eq!(linux.security_context.as_ref().unwrap().supplemental_groups, [5, 4711, 6]);
        assert_eq!(linux.cgroup_parent, "/kubepods/besteffort/podu1");
        assert_eq!(linux.sysctls["net.core.somaxconn"], "7");
        assert_eq!(linux.sysctls["net.ipv4.conf.eno2/100.forwarding"], "1");
        assert_eq!(linux.sysctls["net.ipv4.conf.eno2/100.mtu"], "2");
        assert_eq!(linux.resources.unwrap().cpu_shares, 2);
        assert_eq!(c.dns_config.unwrap().servers, ["1.1.1.1"]);
    }

    #[test]
    fn sysctls_of_the_node_apply_to_the_namespaces_of_a_pod_and_not_to_those_of_the_node() {
        let defaults = [
            ("kernel/shmmax", "1"),
            ("fs.mqueue.msg_max", "2"),
            ("net.core.somaxconn", "3"),
            ("kernel.domainname", "d"),
            ("user.max_user_namespaces", "4"),
            ("kernel.hostname", "ignored"),
            ("vm.swappiness", "ignored"),
        ];
        let node = NodeSettings {
            default_sysctls: defaults.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            ..NodeSettings::default()
        };
        let names = |more: Value| {
            let mut spec = json!({"containers": [{"name": "c"}]});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let set = sysctls(&pod_of(spec), &node.default_sysctls);
            let mut list: Vec<String> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
            list.sort();
            list.join(" ")
        };
        let (ipc, network) = ("fs.mqueue.msg_max=2", "net.core.somaxconn=3");
        let memory = "kernel.shmmax=1";
        assert_eq!(names(json!({})), format!("{ipc} kernel.domainname=d {memory} {network}"));
        assert_eq!(names(json!({"hostNetwork": true})), format!("{ipc} {memory}"));
        assert_eq!(names(json!({"hostIPC": true})), format!("kernel.domainname=d {network}"));
        assert_eq!(
            names(json!({"hostUsers": false})),
            format!("{ipc} kernel.domainname=d {memory} {network} user.max_user_namespaces=4")
        );
        let own = json!({"sysctls": [{"name": "net/core/somaxconn", "value": "9"}]});
        assert_eq!(
            names(json!({"securityContext": own})),
            format!("{ipc} kernel.domainname=d {memory} net.core.somaxconn=9"),
            "the pod's own value wins"
        );
    }

    #[test]
    fn a_pod_with_host_network_has_no_hostname() {
        let c = build(json!({"containers": [], "hostNetwork": true})).unwrap();
        assert_eq!(c.hostname, "");
        assert!(build(json!({"containers": [], "hostname": "X"})).is_err());
    }

    #[test]
    fn a_host_port_of_an_unknown_protocol_is_not_opened_for_another_one() {
        let protocol_of = |port: Value| {
            let config = build(json!({"containers": [{"name": "a", "ports": [port]}]}));
            config.map(|c| c.port_mappings[0].protocol).map_err(|e| e.to_string())
        };
        let host = |protocol: &str| json!({"containerPort": 80, "hostPort": 8080, "protocol": protocol});
        for (protocol, want) in [("", 0), ("TCP", 0), ("UDP", 1), ("SCTP", 2)] {
            assert_eq!(protocol_of(host(protocol)), Ok(want), "{protocol}");
        }
        for protocol in ["QUIC", "udp"] {
            let want = format!("unknown protocol {protocol:?} of host port 8080 of container \"a\"");
            assert_eq!(protocol_of(host(protocol)), Err(want));
            assert_eq!(protocol_of(json!({"containerPort": 80, "protocol": protocol})), Ok(0));
        }
    }

    #[test]
    fn ports_of_regular_containers_are_mapped_once() {
        let c = build(json!({
            "initContainers": [{"name": "i", "ports": [{"containerPort": 1}]}],
            "containers": [{"name": "a", "ports": [
                {"containerPort": 80},
                {"containerPort": 80, "protocol": "TCP"},
                {"containerPort": 53, "protocol": "UDP", "hostPort": 5353, "hostIP": "127.0.0.1"},
                {"name": "x", "containerPort": 9, "protocol": "SCTP"},
                {"name": "x", "containerPort": 10}]},
                {"name": "b", "ports": [{"containerPort": 80}]}]}))
        .unwrap();
        let got: Vec<(i32, i32, i32, &str)> = c
            .port_mappings
            .iter()
            .map(|p| (p.protocol, p.container_port, p.host_port, p.host_ip.as_str()))
            .collect();
        assert_eq!(got, [(0, 80, 0, ""), (1, 53, 5353, "127.0.0.1"), (2, 9, 0, ""), (0, 80, 0, "")]);
    }
}
