//! Environment variables of services (`pkg/kubelet/envvars`).

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;

/// Service whose variables every container has.
pub(crate) const MASTER_SERVICE: &str = "kubernetes";
/// Namespace of [`MASTER_SERVICE`].
pub(crate) const MASTER_NAMESPACE: &str = "default";

/// Returns the variables for a pod of `namespace`. With `links` they include all services of that namespace.
#[must_use]
pub(crate) fn service_variables(
    services: &[Arc<Service>],
    namespace: &str,
    links: bool,
) -> BTreeMap<String, String> {
    // A service of the pod's own namespace takes precedence over one in `default` with the same name.
    let mut seen: BTreeMap<&str, &Service> = BTreeMap::new();
    for service in services {
        let name = service.metadata.name.as_deref().unwrap_or_default();
        let own = service.metadata.namespace.as_deref().unwrap_or_default();
        let ip = service.spec.as_ref().and_then(|s| s.cluster_ip.as_deref()).unwrap_or_default();
        if ip.is_empty() || ip == "None" {
            continue;
        }
        if own == namespace && links {
            seen.insert(name, service);
        } else if own == MASTER_NAMESPACE && name == MASTER_SERVICE {
            seen.entry(name).or_insert(service);
        }
    }
    let mut out = BTreeMap::new();
    for (name, service) in seen {
        variables_of(name, service, &mut out);
    }
    out
}

fn upper(text: &str) -> String {
    text.to_uppercase().replace('-', "_")
}

fn variables_of(name: &str, service: &Service, out: &mut BTreeMap<String, String>) {
    let Some(spec) = &service.spec else { return };
    let ip = spec.cluster_ip.clone().unwrap_or_default();
    let prefix = upper(name);
    let ports = spec.ports.as_deref().unwrap_or_default();
    out.insert(format!("{prefix}_SERVICE_HOST"), ip.clone());
    if let Some(first) = ports.first() {
        out.insert(format!("{prefix}_SERVICE_PORT"), first.port.to_string());
    }
    for port in ports {
        if let Some(port_name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            out.insert(format!("{prefix}_SERVICE_PORT_{}", upper(port_name)), port.port.to_string());
        }
    }
    let host = if ip.contains(':') { format!("[{ip}]") } else { ip.clone() };
    for (i, port) in ports.iter().enumerate() {
        let protocol = port.protocol.as_deref().filter(|p| !p.is_empty()).unwrap_or("TCP");
        let url = format!("{}://{host}:{}", protocol.to_lowercase(), port.port);
        if i == 0 {
            out.insert(format!("{prefix}_PORT"), url.clone());
        }
        let of_port = format!("{prefix}_PORT_{}_{}", port.port, protocol.to_uppercase());
        out.insert(of_port.clone(), url);
        out.insert(format!("{of_port}_PROTO"), protocol.to_lowercase());
        out.insert(format!("{of_port}_PORT"), port.port.to_string());
        out.insert(format!("{of_port}_ADDR"), ip.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn service(namespace: &str, name: &str, ip: &str, ports: serde_json::Value) -> Arc<Service> {
        Arc::new(
            serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name},
                "spec": {"clusterIP": ip, "ports": ports}}))
            .unwrap(),
        )
    }

    #[test]
    fn a_service_has_all_of_its_environment_variables() {
        let all = [service(
            "shop",
            "my-db",
            "10.0.0.7",
            json!([{"name": "sql-main", "port": 5432, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]),
        )];
        let got: Vec<String> =
            service_variables(&all, "shop", true).into_iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(
            got,
            [
                "MY_DB_PORT=tcp://10.0.0.7:5432",
                "MY_DB_PORT_53_UDP=udp://10.0.0.7:53",
                "MY_DB_PORT_53_UDP_ADDR=10.0.0.7",
                "MY_DB_PORT_53_UDP_PORT=53",
                "MY_DB_PORT_53_UDP_PROTO=udp",
                "MY_DB_PORT_5432_TCP=tcp://10.0.0.7:5432",
                "MY_DB_PORT_5432_TCP_ADDR=10.0.0.7",
                "MY_DB_PORT_5432_TCP_PORT=5432",
                "MY_DB_PORT_5432_TCP_PROTO=tcp",
                "MY_DB_SERVICE_HOST=10.0.0.7",
                "MY_DB_SERVICE_PORT=5432",
                "MY_DB_SERVICE_PORT_SQL_MAIN=5432",
            ]
        );
    }

    #[test]
    fn which_services_count_depends_on_namespace_links_and_address() {
        let port = json!([{"port": 1}]);
        let all = [
            service("default", "kubernetes", "10.0.0.1", port.clone()),
            service("default", "other", "10.0.0.2", port.clone()),
            service("shop", "headless", "None", port.clone()),
            service("shop", "pending", "", port.clone()),
            service("shop", "db", "fd00::1", port.clone()),
        ];
        let hosts = |links| {
            service_variables(&all, "shop", links)
                .into_iter()
                .filter(|(k, _)| k.ends_with("_SERVICE_HOST"))
                .map(|(_, v)| v)
                .collect::<Vec<_>>()
        };
        assert_eq!(hosts(true), ["fd00::1", "10.0.0.1"]);
        assert_eq!(hosts(false), ["10.0.0.1"]);
        assert_eq!(service_variables(&all, "shop", true)["DB_PORT"], "tcp://[fd00::1]:1");
        let own = [all[0].clone(), service("shop", "kubernetes", "10.9.9.9", port)];
        assert_eq!(service_variables(&own, "shop", true)["KUBERNETES_SERVICE_HOST"], "10.9.9.9");
        assert_eq!(service_variables(&own, "shop", false)["KUBERNETES_SERVICE_HOST"], "10.0.0.1");
    }
}
