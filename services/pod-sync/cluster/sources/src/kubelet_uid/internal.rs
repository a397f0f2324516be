//! Makes the internal pod of a kubelet (`pkg/apis/core/v1: Convert_v1_Pod_To_core_Pod`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

use super::layout::KubeletVersion;
use super::quantity::{GoQuantity, NoQuantity};

/// Fields of the spec that are in the security context of the internal pod until 1.36.
const IN_SECURITY_CONTEXT: [&str; 5] =
    ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "hostUsers"];
/// Annotations that old clients sent, and that are dropped.
const DROPPED_ANNOTATIONS: [&str; 4] = [
    "pod.beta.kubernetes.io/init-containers",
    "pod.alpha.kubernetes.io/init-containers",
    "pod.beta.kubernetes.io/init-container-statuses",
    "pod.alpha.kubernetes.io/init-container-statuses",
];

/// Returns the internal pod as JSON, with the keys of the public types. A quantity is a text, or a list of texts whose sum it is.
///
/// `own_resources` are the resources of the pod as a whole in the manifest, without defaults.
pub(super) fn internal(
    pod: &Pod,
    own_resources: Option<&ResourceRequirements>,
    version: KubeletVersion,
) -> Map<String, Value> {
    let resources = own_resources.map(|own| pod_resources(pod, own));
    let Ok(Value::Object(mut pod)) = serde_json::to_value(pod) else { return Map::new() };
    // The internal types have no kind.
    pod.remove("apiVersion");
    pod.remove("kind");
    if let Some(annotations) = pod.get_mut("metadata").and_then(|meta| object(meta, "annotations")) {
        annotations.retain(|key, _| !DROPPED_ANNOTATIONS.contains(&key.as_str()));
    }
    if let Some(spec) = object_in(&mut pod, "spec") {
        internal_spec(spec, version);
        if let Some(resources) = resources {
            spec.insert("resources".to_owned(), resources);
        }
    }
    if let Some(status) = object_in(&mut pod, "status") {
        internal_status(status);
    }
    pod
}

fn internal_spec(spec: &mut Map<String, Value>, version: KubeletVersion) {
    let account = ["serviceAccountName", "serviceAccount"]
        .into_iter()
        .filter_map(|key| spec.get(key).and_then(Value::as_str))
        .find(|name| !name.is_empty())
        .map(str::to_owned);
    if let Some(account) = account {
        spec.insert("serviceAccountName".to_owned(), account.clone().into());
        spec.insert("serviceAccount".to_owned(), account.into());
    }
    if spec.get("terminationGracePeriodSeconds").and_then(Value::as_i64).is_some_and(|seconds| seconds < 0) {
        spec.insert("terminationGracePeriodSeconds".to_owned(), 1.into());
    }
    if version <= KubeletVersion::V1_36 {
        let moved: Vec<(&str, Value)> =
            IN_SECURITY_CONTEXT.into_iter().filter_map(|key| Some((key, spec.remove(key)?))).collect();
        if let Some(context) = object_in(spec, "securityContext") {
            context.extend(moved.into_iter().map(|(key, value)| (key.to_owned(), value)));
        }
    }
    volumes(spec);
}

/// Sets the defaults of volumes that Quintlet leaves as they are (`pkg/apis/core/v1: SetObjectDefaults_Pod`).
fn volumes(spec: &mut Map<String, Value>) {
    let Some(volumes) = spec.get_mut("volumes").and_then(Value::as_array_mut) else { return };
    for volume in volumes {
        let texts: [(&str, &[(&str, &str)]); 3] = [
            ("iscsi", &[("iscsiInterface", "default")]),
            ("rbd", &[("pool", "rbd"), ("user", "admin"), ("keyring", "/etc/ceph/keyring")]),
            ("scaleIO", &[("storageMode", "ThinProvisioned"), ("fsType", "xfs")]),
        ];
        for (source, defaults) in texts {
            let Some(source) = object(volume, source) else { continue };
            for (key, default) in defaults {
                if source.get(*key).and_then(Value::as_str).unwrap_or_default().is_empty() {
                    source.insert((*key).to_owned(), (*default).into());
                }
            }
        }
        if let Some(disk) = object(volume, "azureDisk") {
            let pointers = [
                ("cachingMode", json!("ReadWrite")),
                ("fsType", json!("ext4")),
                ("readOnly", json!(false)),
                ("kind", json!("Shared")),
            ];
            for (key, default) in pointers {
                disk.entry(key).or_insert(default);
            }
        }
        let template = object(volume, "ephemeral").and_then(|source| source.get_mut("volumeClaimTemplate"));
        if let Some(claim) = template.and_then(|template| object(template, "spec")) {
            claim.entry("volumeMode").or_insert(json!("Filesystem"));
        }
    }
}

fn internal_status(status: &mut Map<String, Value>) {
    let first =
        status.get("podIPs").and_then(|ips| ips.pointer("/0/ip")).and_then(Value::as_str).map(str::to_owned);
    match status.get("podIP").and_then(Value::as_str) {
        Some(ip) if !ip.is_empty() => {
            if first.as_deref() != Some(ip) {
                let ips = json!([{"ip": ip}]);
                status.insert("podIPs".to_owned(), ips);
            }
        }
        _ => {
            if let Some(first) = first {
                status.insert("podIP".to_owned(), first.into());
            }
        }
    }
}

fn object<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Map<String, Value>> {
    value.get_mut(key)?.as_object_mut()
}

fn object_in<'a>(map: &'a mut Map<String, Value>, key: &str) -> Option<&'a mut Map<String, Value>> {
    map.get_mut(key)?.as_object_mut()
}

type Resources = Option<BTreeMap<String, Quantity>>;

/// Returns the resources of the pod with their defaults (`pkg/apis/core/v1: defaultHugePagePodLimits`, `defaultPodRequests`).
fn pod_resources(pod: &Pod, own: &ResourceRequirements) -> Value {
    let mut all = serde_json::to_value(own).unwrap_or_default();
    let taken = |all: &Value, key: &str| all.get(key).and_then(Value::as_object).cloned().unwrap_or_default();
    let (mut limits, mut requests) = (taken(&all, "limits"), taken(&all, "requests"));
    if limits.is_empty() && requests.is_empty() {
        return all;
    }
    for (name, sum) in sums(pod, |resources| &resources.limits) {
        if is_huge_pages(&name) && !requests.contains_key(&name) && !limits.contains_key(&name) {
            limits.insert(name, sum);
        }
    }
    if !limits.is_empty() {
        for (name, sum) in sums(pod, |resources| &resources.requests) {
            if ["cpu", "memory"].contains(&name.as_str()) && !requests.contains_key(&name) {
                requests.insert(name, sum);
            }
        }
        for (name, limit) in &limits {
            let is_for_pods = ["cpu", "memory"].contains(&name.as_str()) || is_huge_pages(name);
            if is_for_pods && !requests.contains_key(name) {
                requests.insert(name.clone(), limit.clone());
            }
        }
    }
    for (key, list) in [("limits", limits), ("requests", requests)] {
        if let Some(all) = all.as_object_mut().filter(|_| !list.is_empty()) {
            all.insert(key.to_owned(), Value::Object(list));
        }
    }
    all
}

fn is_huge_pages(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// Returns for each resource the texts of the quantities whose sum all containers need
/// (`component-helpers/resource: AggregateContainerRequests`).
fn sums(pod: &Pod, select: impl Fn(&ResourceRequirements) -> &Resources) -> BTreeMap<String, Value> {
    let spec = pod.spec.as_ref();
    let containers = spec.map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let init = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let list = |container: &Container| {
        container.resources.as_ref().and_then(|r| select(r).clone()).unwrap_or_default()
    };
    let mut sums = Sums::new();
    for container in containers {
        add(&mut sums, list(container));
    }
    let (mut sidecars, mut largest) = (Sums::new(), Sums::new());
    for container in init {
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut sums, list(container));
            add(&mut sidecars, list(container));
            raise(&mut largest, &sidecars);
        } else {
            let mut needed = Sums::new();
            add(&mut needed, list(container));
            for (name, texts) in &sidecars {
                needed.entry(name.clone()).or_default().extend(texts.iter().cloned());
            }
            raise(&mut largest, &needed);
        }
    }
    raise(&mut sums, &largest);
    sums.into_iter().map(|(name, texts)| (name, texts.into())).collect()
}

/// For each resource the texts of the quantities that are added, in order.
type Sums = BTreeMap<String, Vec<String>>;

fn add(sums: &mut Sums, list: BTreeMap<String, Quantity>) {
    for (name, quantity) in list {
        sums.entry(name).or_default().push(quantity.0);
    }
}

/// Replaces smaller sums by larger ones.
fn raise(sums: &mut Sums, others: &Sums) {
    for (name, other) in others {
        let is_larger = sums.get(name).is_none_or(|sum| exceeds(other, sum).unwrap_or(false));
        if is_larger {
            sums.insert(name.clone(), other.clone());
        }
    }
}

fn exceeds(first: &[String], second: &[String]) -> Result<bool, NoQuantity> {
    let sum = |texts: &[String]| GoQuantity::sum(texts.iter().map(String::as_str));
    sum(first)?.exceeds(&sum(second)?)
}
