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

/// Returns the internal pod as JSON, with the keys of the public types. A quantity is a text, or a list of
/// texts whose sum it is.
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

/// Returns the resources of the pod with their defaults (`pkg/apis/core/v1: defaultHugePagePodLimits`,
/// `defaultPodRequests`).
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
    let mut sums: BTreeMap<String, Added> = BTreeMap::new();
    for (name, quantity) in containers.iter().flat_map(list) {
        sums.entry(name).or_default().add(quantity.0);
    }
    let mut sidecars: BTreeMap<String, Added> = BTreeMap::new();
    let mut largest: BTreeMap<String, Needed> = BTreeMap::new();
    for container in init {
        let is_sidecar = container.restart_policy.as_deref() == Some("Always");
        // What is needed of other resources is not larger than before.
        for (name, quantity) in list(container) {
            let of_sidecars = sidecars.entry(name.clone()).or_default();
            let needed = if is_sidecar {
                sums.entry(name.clone()).or_default().add(quantity.0.clone());
                of_sidecars.add(quantity.0);
                Needed { own: None, sidecars: of_sidecars.texts.len(), total: of_sidecars.total.clone() }
            } else {
                let mut total = Added::default();
                total.add(quantity.0.clone());
                total.add_total(&of_sidecars.total);
                Needed { own: Some(quantity.0), sidecars: of_sidecars.texts.len(), total: total.total }
            };
            if largest.get(&name).is_none_or(|before| exceeds(&needed.total, &before.total)) {
                largest.insert(name, needed);
            }
        }
    }
    for (name, needed) in largest {
        if sums.get(&name).is_none_or(|sum| exceeds(&needed.total, &sum.total)) {
            let of_sidecars = sidecars.remove(&name).unwrap_or_default().texts;
            let texts = needed.own.into_iter().chain(of_sidecars.into_iter().take(needed.sidecars)).collect();
            sums.insert(name, Added { texts, total: needed.total });
        }
    }
    sums.into_iter().map(|(name, sum)| (name, sum.texts.into())).collect()
}

/// A sum of quantities; `None` if nothing was added.
type Total = Option<Result<GoQuantity, NoQuantity>>;

/// Quantities of a resource in the order in which they are added. The sum is that so far, so that no text is
/// parsed again.
#[derive(Default)]
struct Added {
    texts: Vec<String>,
    total: Total,
}

impl Added {
    fn add(&mut self, text: String) {
        self.add_total(&Some(GoQuantity::parse(&text)));
        self.texts.push(text);
    }

    fn add_total(&mut self, other: &Total) {
        let Some(other) = other else { return };
        self.total = Some(match self.total.take() {
            None => other.clone(),
            Some(total) => total.and_then(|total| total.plus(other.as_ref().map_err(|error| *error)?)),
        });
    }
}

/// Counts the quantities of a resource that an init container and the sidecars before it need together.
struct Needed {
    /// The quantity of the container unless it is a sidecar.
    own: Option<String>,
    /// Number of quantities of sidecars.
    sidecars: usize,
    total: Total,
}

fn exceeds(first: &Total, second: &Total) -> bool {
    let (Some(Ok(first)), Some(Ok(second))) = (first, second) else { return false };
    first.exceeds(second).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::super::quantity::PARSED;
    use super::*;

    #[test]
    fn sums_of_many_init_containers_parse_each_quantity_a_few_times() {
        const COUNT: usize = 2000;
        let container = |index: usize| {
            let limits = json!({"hugepages-2Mi": "2Mi", (format!("hugepages-{index}Ki")): "1Mi"});
            let policy = if index.is_multiple_of(2) { json!("Always") } else { Value::Null };
            let name = format!("i{index}");
            json!({"name": name, "restartPolicy": policy, "resources": {"limits": limits}})
        };
        let init: Vec<Value> = (0..COUNT).map(container).collect();
        let own = json!({"limits": {"cpu": "1"}});
        let pod = json!({"metadata": {"name": "web"}, "spec": {"initContainers": init, "containers": []}});
        let (pod, own) = (serde_json::from_value(pod).unwrap(), serde_json::from_value(own).unwrap());
        let before = PARSED.get();
        let internal = internal(&pod, Some(&own), KubeletVersion::NEWEST);
        let parsed = PARSED.get().checked_sub(before).unwrap();
        assert!(parsed <= 5 * COUNT, "{parsed}");
        let limits = &internal["spec"]["resources"]["limits"];
        // All sidecars, and the last container, which is none.
        assert_eq!(limits["hugepages-2Mi"].as_array().unwrap().len(), COUNT / 2 + 1);
        assert_eq!(limits.as_object().unwrap().len(), COUNT + 2);
    }
}
