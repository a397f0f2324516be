//! Changes to an object before it is stored: defaults, admission, validation.

use base64::Engine;
use rand::RngExt;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::resources::Resource;

/// Mount path of a pod's service account token.
const TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Returns five characters, as in generated names.
pub(crate) fn suffix() -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut rng = rand::rng();
    (0..5).map(|_| char::from(ALPHABET[rng.random_range(0..ALPHABET.len())])).collect()
}

/// Sets a field unless it exists.
fn default(object: &mut Value, field: &str, value: Value) {
    if object[field].is_null() {
        object[field] = value;
    }
}

fn each<'a>(object: &'a mut Value, lists: &'a [&'a str]) -> impl Iterator<Item = &'a mut Value> {
    object
        .as_object_mut()
        .into_iter()
        .flat_map(|map| map.iter_mut())
        .filter(|(key, _)| lists.contains(&key.as_str()))
        .filter_map(|(_, list)| list.as_array_mut())
        .flatten()
}

/// The lists of containers of every kind.
pub(crate) const CONTAINER_LISTS: &[&str] = &["initContainers", "containers", "ephemeralContainers"];

/// The defaults of `pkg/apis/core/v1/defaults.go` that a node agent reads.
pub(crate) fn default_pod(pod: &mut Value) {
    default(pod, "spec", json!({}));
    let spec = &mut pod["spec"];
    for (field, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("securityContext", json!({})),
        ("schedulerName", json!("default-scheduler")),
        ("enableServiceLinks", json!(true)),
    ] {
        default(spec, field, value);
    }
    let host_network = spec["hostNetwork"] == json!(true);
    for container in each(spec, CONTAINER_LISTS) {
        default_container(container, host_network);
    }
    for volume in each(spec, &["volumes"]) {
        default_volume(volume);
    }
    // Indexing a missing field for writing leaves nulls behind.
    drop_nulls(pod);
}

fn default_container(container: &mut Value, host_network: bool) {
    let image = container["image"].as_str().unwrap_or_default().to_owned();
    let policy = match image.rsplit_once(':') {
        _ if image.contains('@') => "IfNotPresent",
        Some((_, "latest")) => "Always",
        Some((_, tag)) if !tag.contains('/') => "IfNotPresent",
        _ => "Always",
    };
    for (field, value) in [
        ("terminationMessagePath", json!("/dev/termination-log")),
        ("terminationMessagePolicy", json!("File")),
        ("imagePullPolicy", json!(policy)),
        ("resources", json!({})),
    ] {
        default(container, field, value);
    }
    // Limits are the default of requests.
    if let Some(limits) = container["resources"]["limits"].as_object().cloned() {
        let resources = &mut container["resources"];
        default(resources, "requests", json!({}));
        for (name, quantity) in limits {
            default(&mut resources["requests"], &name, quantity);
        }
    }
    for port in each(container, &["ports"]) {
        default(port, "protocol", json!("TCP"));
        if host_network {
            let number = port["containerPort"].clone();
            default(port, "hostPort", number);
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if container[probe].is_object() {
            let probe = &mut container[probe];
            for (field, value) in [
                ("timeoutSeconds", 1),
                ("periodSeconds", 10),
                ("successThreshold", 1),
                ("failureThreshold", 3),
            ] {
                if probe[field].as_i64().unwrap_or(0) == 0 {
                    probe[field] = json!(value);
                }
            }
            default_http_get(probe);
            if probe["grpc"].is_object() {
                default(&mut probe["grpc"], "service", json!(""));
            }
        }
    }
    for hook in ["postStart", "preStop"] {
        if container["lifecycle"][hook].is_object() {
            default_http_get(&mut container["lifecycle"][hook]);
        }
    }
    for env in each(container, &["env"]) {
        if env["valueFrom"]["fieldRef"].is_object() {
            default(&mut env["valueFrom"]["fieldRef"], "apiVersion", json!("v1"));
        }
    }
}

fn default_http_get(handler: &mut Value) {
    if handler["httpGet"].is_object() {
        let get = &mut handler["httpGet"];
        default(get, "path", json!("/"));
        default(get, "scheme", json!("HTTP"));
    }
}

fn default_volume(volume: &mut Value) {
    for kind in ["configMap", "secret", "downwardAPI", "projected"] {
        if volume[kind].is_object() {
            default(&mut volume[kind], "defaultMode", json!(0o644));
        }
    }
    if volume["hostPath"].is_object() {
        default(&mut volume["hostPath"], "type", json!(""));
    }
    for item in each(&mut volume["downwardAPI"], &["items"]) {
        if item["fieldRef"].is_object() {
            default(&mut item["fieldRef"], "apiVersion", json!("v1"));
        }
    }
    for source in each(&mut volume["projected"], &["sources"]) {
        if source["serviceAccountToken"].is_object() {
            default(&mut source["serviceAccountToken"], "expirationSeconds", json!(3600));
        }
        for item in each(&mut source["downwardAPI"], &["items"]) {
            if item["fieldRef"].is_object() {
                default(&mut item["fieldRef"], "apiVersion", json!("v1"));
            }
        }
    }
}

/// Runs the admission plugins for pods: service account, priority, tolerations.
pub(crate) fn admit_pod(
    pods: &Resource,
    pod: &mut Value,
    account: impl Fn(&str) -> Option<Value>,
) -> Result<(), ApiError> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let namespace = pod["metadata"]["namespace"].as_str().unwrap_or_default().to_owned();
    let mirror = pod["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_string();
    let spec = &mut pod["spec"];
    default(spec, "priority", json!(0));
    default(spec, "preemptionPolicy", json!("PreemptLowerPriority"));
    add_tolerations(spec);
    if mirror {
        if spec["serviceAccountName"].as_str().is_some_and(|n| !n.is_empty()) {
            return Err(ApiError::forbidden(pods, &name, "a mirror pod may not reference service accounts"));
        }
        return Ok(());
    }
    if spec["serviceAccountName"].as_str().unwrap_or_default().is_empty() {
        spec["serviceAccountName"] = json!("default");
    }
    let account_name = spec["serviceAccountName"].as_str().unwrap_or_default().to_owned();
    spec["serviceAccount"] = json!(account_name);
    let Some(account) = account(&account_name) else {
        let why = format!(
            "error looking up service account {namespace}/{account_name}: serviceaccount {account_name:?} not found"
        );
        return Err(ApiError::forbidden(pods, &name, &why));
    };
    let automount = match (&spec["automountServiceAccountToken"], &account["automountServiceAccountToken"]) {
        (Value::Bool(pod), _) => *pod,
        (_, Value::Bool(account)) => *account,
        _ => true,
    };
    if automount {
        mount_token(spec);
    }
    if spec["imagePullSecrets"].is_null()
        && account["imagePullSecrets"].as_array().is_some_and(|s| !s.is_empty())
    {
        spec["imagePullSecrets"] = account["imagePullSecrets"].clone();
    }
    Ok(())
}

fn add_tolerations(spec: &mut Value) {
    default(spec, "tolerations", json!([]));
    let Some(tolerations) = spec["tolerations"].as_array_mut() else { return };
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let tolerated = tolerations.iter().any(|t| {
            (t["key"] == json!(key) || t["key"].as_str().unwrap_or_default().is_empty())
                && (t["effect"] == json!("NoExecute") || t["effect"].as_str().unwrap_or_default().is_empty())
        });
        if !tolerated {
            tolerations.push(
                json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}),
            );
        }
    }
}

fn mount_token(spec: &mut Value) {
    let name = format!("kube-api-access-{}", suffix());
    let mut used = false;
    for container in each(spec, &["initContainers", "containers"]) {
        let mounts = container.as_object_mut().map(|c| c.entry("volumeMounts").or_insert_with(|| json!([])));
        let Some(Value::Array(mounts)) = mounts else { continue };
        if mounts.iter().all(|m| m["mountPath"] != json!(TOKEN_PATH)) {
            mounts.push(json!({"name": name, "mountPath": TOKEN_PATH, "readOnly": true}));
            used = true;
        }
    }
    if !used {
        return;
    }
    default(spec, "volumes", json!([]));
    let volume = json!({"name": name, "projected": {"defaultMode": 0o644, "sources": [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
    ]}});
    if let Some(volumes) = spec["volumes"].as_array_mut() {
        volumes.push(volume);
    }
}

/// Returns `BestEffort`, `Guaranteed` or `Burstable`, from CPU and memory of the pod level, or else of init
/// and regular containers (`pkg/apis/core/helper/qos: ComputePodQOS`).
pub(crate) fn qos(spec: &Value) -> &'static str {
    let containers = ["initContainers", "containers"].into_iter().filter_map(|list| spec[list].as_array());
    let all: Vec<&Value> = match &spec["resources"] {
        Value::Null => containers.flatten().map(|container| &container["resources"]).collect(),
        own => vec![own],
    };
    let (mut any, mut guaranteed) = (false, true);
    for resources in all {
        for name in ["cpu", "memory"] {
            let (limit, request) = (&resources["limits"][name], &resources["requests"][name]);
            any |= !limit.is_null() || !request.is_null();
            guaranteed &= !limit.is_null() && (request.is_null() || request == limit);
        }
    }
    match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

pub(crate) fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && !name.is_empty() && name.split('.').all(is_label)
}

fn is_label(label: &str) -> bool {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !label.is_empty() && label.bytes().all(ok) && !label.starts_with('-') && !label.ends_with('-')
}

type Causes = Vec<(&'static str, String, String)>;

pub(crate) fn validate_name(resource: &Resource, object: &Value) -> Result<(), ApiError> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    if name.is_empty() {
        let message = "Required value: name or generateName is required".to_owned();
        return Err(ApiError::invalid(
            resource,
            name,
            &[("FieldValueRequired", "metadata.name".to_owned(), message)],
        ));
    }
    // Any name that a path can have (`ValidateCertificateRequestName`).
    let is_free = resource.plural == "certificatesigningrequests" && !name.contains(['/', '%']);
    if !is_free && !is_subdomain(name) {
        let message = format!(
            "Invalid value: {name:?}: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
        );
        return Err(ApiError::invalid(
            resource,
            name,
            &[("FieldValueInvalid", "metadata.name".to_owned(), message)],
        ));
    }
    Ok(())
}

pub(crate) fn validate_pod(pods: &Resource, pod: &Value) -> Result<(), ApiError> {
    let mut causes: Causes = Vec::new();
    let spec = &pod["spec"];
    if spec["containers"].as_array().is_none_or(Vec::is_empty) {
        causes.push(("FieldValueRequired", "spec.containers".to_owned(), "Required value".to_owned()));
    }
    let mut names: Vec<&str> = Vec::new();
    for list in ["containers", "initContainers"] {
        for (at, container) in spec[list].as_array().into_iter().flatten().enumerate() {
            let path = |field: &str| format!("spec.{list}[{at}].{field}");
            let name = container["name"].as_str().unwrap_or_default();
            if name.is_empty() {
                causes.push(("FieldValueRequired", path("name"), "Required value".to_owned()));
            } else if names.contains(&name) {
                causes.push(("FieldValueDuplicate", path("name"), format!("Duplicate value: {name:?}")));
            }
            names.push(name);
            if container["image"].as_str().unwrap_or_default().is_empty() {
                causes.push(("FieldValueRequired", path("image"), "Required value".to_owned()));
            }
            for mount in container["volumeMounts"].as_array().into_iter().flatten() {
                let known =
                    spec["volumes"].as_array().into_iter().flatten().any(|v| v["name"] == mount["name"]);
                if !known {
                    causes.push((
                        "FieldValueNotFound",
                        path("volumeMounts[0].name"),
                        format!("Not found: {}", mount["name"]),
                    ));
                }
            }
        }
    }
    if !matches!(spec["restartPolicy"].as_str(), Some("Always" | "OnFailure" | "Never")) {
        let message = format!(
            "Unsupported value: {}: supported values: \"Always\", \"OnFailure\", \"Never\"",
            spec["restartPolicy"]
        );
        causes.push(("FieldValueNotSupported", "spec.restartPolicy".to_owned(), message));
    }
    if causes.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid(pods, pod["metadata"]["name"].as_str().unwrap_or_default(), &causes))
}

/// Rejects updates of fields of a pod's spec that are immutable.
pub(crate) fn validate_pod_update(
    pods: &Resource,
    subresource: &str,
    old: &Value,
    new: &Value,
) -> Result<(), ApiError> {
    let frozen = |pod: &Value| {
        let mut spec = pod["spec"].clone();
        if let Some(fields) = spec.as_object_mut() {
            for field in
                ["activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates"]
            {
                fields.remove(field);
            }
            if subresource == "ephemeralcontainers" {
                fields.remove("ephemeralContainers");
            }
            if subresource == "binding" {
                fields.remove("nodeName");
            }
            if subresource == "resize" {
                fields.remove("resources");
                // With the gate InPlacePodVerticalScalingMemoryBackedVolumes.
                for volume in fields.get_mut("volumes").and_then(Value::as_array_mut).into_iter().flatten() {
                    if let Some(source) = volume["emptyDir"]
                        .as_object_mut()
                        .filter(|s| s.get("medium") == Some(&json!("Memory")))
                    {
                        source.remove("sizeLimit");
                    }
                }
            }
        }
        for container in each(&mut spec, &["initContainers", "containers"]) {
            if let Some(container) = container.as_object_mut() {
                match subresource {
                    "" => drop(container.remove("image")),
                    "resize" => {
                        container.remove("resources");
                        container.remove("resizePolicy");
                    }
                    _ => {}
                }
            }
        }
        spec
    };
    let name = old["metadata"]["name"].as_str().unwrap_or_default();
    let class = qos(&new["spec"]);
    if subresource == "resize" && class != qos(&old["spec"]) {
        let message =
            format!("Invalid value: \"{class}\": Pod QOS Class may not change as a result of resizing");
        return Err(ApiError::invalid(pods, name, &[("FieldValueInvalid", "spec".to_owned(), message)]));
    }
    if frozen(old) == frozen(new) {
        return Ok(());
    }
    let message = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";
    Err(ApiError::invalid(pods, name, &[("FieldValueForbidden", "spec".to_owned(), message.to_owned())]))
}

/// Rejects a status in which a terminated container that may not be restarted runs again.
pub(crate) fn validate_pod_status(pods: &Resource, old: &Value, new: &Value) -> Result<(), ApiError> {
    let policy = old["spec"]["restartPolicy"].as_str().unwrap_or("Always");
    if policy == "Always" {
        return Ok(());
    }
    let mut causes: Causes = Vec::new();
    for list in ["initContainerStatuses", "containerStatuses"] {
        for (at, before) in old["status"][list].as_array().into_iter().flatten().enumerate() {
            let terminated = &before["state"]["terminated"];
            let sidecar = list == "initContainerStatuses"
                && old["spec"]["initContainers"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .any(|c| c["name"] == before["name"] && c["restartPolicy"] == json!("Always"));
            if terminated.is_null()
                || sidecar
                || (policy == "OnFailure" && terminated["exitCode"] != json!(0))
            {
                continue;
            }
            let revived = new["status"][list]
                .as_array()
                .into_iter()
                .flatten()
                .any(|after| after["name"] == before["name"] && after["state"]["terminated"].is_null());
            if revived {
                let message = "Forbidden: may not be transitioned to non-terminated state".to_owned();
                causes.push(("FieldValueForbidden", format!("status.{list}[{at}].state"), message));
            }
        }
    }
    if causes.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid(pods, old["metadata"]["name"].as_str().unwrap_or_default(), &causes))
}

/// Checks that the declared features of a node are sorted and unique.
pub(crate) fn validate_node(nodes: &Resource, node: &Value) -> Result<(), ApiError> {
    let declared = node["status"]["declaredFeatures"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Vec<&str> = declared.iter().filter_map(Value::as_str).collect();
    let Some(pair) = names.windows(2).find(|pair| pair[0] >= pair[1]) else { return Ok(()) };
    let message =
        format!("Invalid value: {:?}: must be sorted and unique, comes after {:?}", pair[1], pair[0]);
    let cause = ("FieldValueInvalid", "status.declaredFeatures".to_owned(), message);
    Err(ApiError::invalid(nodes, node["metadata"]["name"].as_str().unwrap_or_default(), &[cause]))
}

/// Makes `podIP` and `podIPs[0]` equal: the older field takes precedence, as in the conversion of v1.
pub(crate) fn align_ips(status: &mut Value) {
    for (one, many) in [("podIP", "podIPs"), ("hostIP", "hostIPs")] {
        let ip = status[one].as_str().unwrap_or_default().to_owned();
        let first = status[many][0]["ip"].as_str().unwrap_or_default().to_owned();
        if !ip.is_empty() && ip != first {
            status[many] = json!([{ "ip": ip }]);
        } else if ip.is_empty() && !first.is_empty() && one == "podIP" {
            status[one] = json!(first);
        }
        if let Some(status) = status.as_object_mut() {
            status.retain(|key, value| !(key == one || key == many) || !value.is_null());
        }
    }
}

/// Sets the defaults of the other kinds.
pub(crate) fn default_other(
    resource: &Resource,
    object: &mut Value,
    next_cluster_ip: impl FnOnce() -> String,
) {
    match resource.plural {
        "secrets" => {
            default(object, "type", json!("Opaque"));
            if let Some(Value::Object(plain)) = object.as_object_mut().and_then(|o| o.remove("stringData")) {
                default(object, "data", json!({}));
                for (key, value) in plain {
                    let text = value.as_str().unwrap_or_default();
                    object["data"][key] = json!(base64::engine::general_purpose::STANDARD.encode(text));
                }
            }
        }
        "services" => {
            default(object, "spec", json!({}));
            let spec = &mut object["spec"];
            default(spec, "type", json!("ClusterIP"));
            default(spec, "sessionAffinity", json!("None"));
            if spec["type"] != json!("ExternalName") {
                if spec["clusterIP"].as_str().unwrap_or_default().is_empty() {
                    spec["clusterIP"] = json!(next_cluster_ip());
                }
                let ip = spec["clusterIP"].clone();
                default(spec, "clusterIPs", json!([ip]));
            }
            for port in each(spec, &["ports"]) {
                default(port, "protocol", json!("TCP"));
                let number = port["port"].clone();
                default(port, "targetPort", number);
            }
            default(object, "status", json!({"loadBalancer": {}}));
        }
        "namespaces" => {
            let name = object["metadata"]["name"].clone();
            default(&mut object["metadata"], "labels", json!({}));
            object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
            object["spec"] = json!({"finalizers": ["kubernetes"]});
            object["status"] = json!({"phase": "Active"});
        }
        "nodes" => {
            // Admission plugin TaintNodesByCondition. A controller removes the taint once the node is ready.
            default(object, "spec", json!({}));
            default(&mut object["spec"], "taints", json!([]));
            let not_ready = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
            if let Some(taints) = object["spec"]["taints"].as_array_mut()
                && !taints.contains(&not_ready)
            {
                taints.push(not_ready);
            }
        }
        _ => {}
    }
}

/// Removes fields that are null.
pub(crate) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns an empty object.
pub(crate) fn empty() -> Value {
    Value::Object(Map::new())
}
