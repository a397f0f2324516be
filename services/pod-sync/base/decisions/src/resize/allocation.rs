//! Resources of a pod and its containers, as allocated or actuated.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodStatus, ResourceRequirements, Volume};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use quintlet_model::pod;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

/// Resources that a resize can change.
const RESIZABLE: [&str; 2] = ["cpu", "memory"];

type Amounts = BTreeMap<String, ApiQuantity>;

/// Resources of a pod. Field names are those of the kubelet's checkpoints.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PodResources {
    /// Resources of regular and init containers, by name.
    #[serde(rename = "ContainerResources", default, deserialize_with = "or_default")]
    pub containers: BTreeMap<String, ResourceRequirements>,
    /// `spec.resources`.
    #[serde(rename = "PodLevelResources", default)]
    pub pod_level: Option<ResourceRequirements>,
    /// `sizeLimit` of memory-backed emptyDir volumes, by name. Empty while the feature gate is off. Kubelets
    /// before 1.37 ignore it.
    #[serde(
        rename = "EmptyDirVolumeLimits",
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub size_limits: Amounts,
}

// Go writes a nil map as `null`.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod::init_containers(pod).iter().chain(&pod::spec(pod).containers)
}

/// Returns the resources in the spec of a pod.
#[must_use]
pub fn of_pod(pod: &Pod) -> PodResources {
    PodResources {
        containers: containers(pod)
            .map(|c| (c.name.clone(), c.resources.clone().unwrap_or_default()))
            .collect(),
        pod_level: pod::spec(pod).resources.clone(),
        size_limits: volumes(pod)
            .filter_map(|v| Some((v.name.clone(), memory_size_limit(v)?.clone())))
            .collect(),
    }
}

fn volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    pod::spec(pod).volumes.iter().flatten()
}

/// Returns the `sizeLimit` of a memory-backed emptyDir volume
/// (`pkg/kubelet/allocation: VolHasMemoryBackedEmptyDirSizeLimit`). `None` for other volumes, and without a
/// limit.
#[must_use]
pub fn memory_size_limit(volume: &Volume) -> Option<&ApiQuantity> {
    let source = volume.empty_dir.as_ref().filter(|source| source.medium.as_deref() == Some("Memory"))?;
    source.size_limit.as_ref().filter(|limit| !Quantity::of(limit).is_zero())
}

/// Returns whether a resize changes the size limit of a volume.
#[must_use]
pub fn resizes_volumes(desired: &Pod, allocated: &Pod) -> bool {
    let size_limits = |pod: &Pod| -> BTreeMap<String, Quantity> {
        volumes(pod).filter_map(|v| Some((v.name.clone(), Quantity::of(memory_size_limit(v)?)))).collect()
    };
    size_limits(desired) != size_limits(allocated)
}

fn same_amounts(a: Option<&Amounts>, b: Option<&Amounts>) -> bool {
    let list = |l: Option<&Amounts>| -> BTreeMap<String, Quantity> {
        l.into_iter().flatten().map(|(k, v)| (k.clone(), Quantity::of(v))).collect()
    };
    list(a) == list(b)
}

/// Returns whether all amounts are equal, however they are written.
#[must_use]
pub fn same(a: &ResourceRequirements, b: &ResourceRequirements) -> bool {
    same_amounts(a.limits.as_ref(), b.limits.as_ref())
        && same_amounts(a.requests.as_ref(), b.requests.as_ref())
        && a.claims == b.claims
}

/// Returns the pod with its allocated resources. Containers without an allocation are unchanged. Borrowed if
/// nothing changes.
#[must_use]
pub fn apply<'a>(pod: &'a Pod, allocated: &PodResources) -> Cow<'a, Pod> {
    let empty = ResourceRequirements::default();
    let differs = |c: &Container| {
        allocated
            .containers
            .get(&c.name)
            .is_some_and(|granted| !same(granted, c.resources.as_ref().unwrap_or(&empty)))
    };
    let pod_level = pod::spec(pod).resources.as_ref();
    let pod_level_differs = match (pod_level, &allocated.pod_level) {
        (Some(a), Some(b)) => !same(a, b),
        (None, None) => false,
        (Some(_), None) | (None, Some(_)) => true,
    };
    let size_limit = |volume: &Volume| {
        let granted = allocated.size_limits.get(&volume.name)?;
        (Quantity::of(granted) != Quantity::of(memory_size_limit(volume)?)).then(|| granted.clone())
    };
    let volumes_differ = volumes(pod).any(|v| size_limit(v).is_some());
    if !pod_level_differs && !volumes_differ && !containers(pod).any(differs) {
        return Cow::Borrowed(pod);
    }
    let mut pod = pod.clone();
    if let Some(spec) = pod.spec.as_mut() {
        if pod_level_differs {
            spec.resources.clone_from(&allocated.pod_level);
        }
        for c in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            if differs(c) {
                c.resources = allocated.containers.get(&c.name).cloned();
            }
        }
        for volume in spec.volumes.iter_mut().flatten() {
            if let Some(granted) = size_limit(volume)
                && let Some(source) = volume.empty_dir.as_mut()
            {
                source.size_limit = Some(granted);
            }
        }
    }
    Cow::Owned(pod)
}

/// Returns the pod with the larger of its requests and those in `actuated`, for CPU and memory: a shrunk pod
/// holds what it had until the runtime has reduced it (`k8s.io/component-helpers/resource: PodRequests` with
/// `UseStatusResources`). Borrowed if nothing is larger.
#[must_use]
pub fn larger<'a>(pod: &'a Pod, actuated: &PodResources) -> Cow<'a, Pod> {
    let mut all = of_pod(pod);
    let mut is_larger = false;
    for (name, own) in &mut all.containers {
        if let Some(had) = actuated.containers.get(name) {
            is_larger |= raise(&mut own.requests, had.requests.as_ref());
        }
    }
    if let (Some(own), Some(had)) = (&mut all.pod_level, &actuated.pod_level) {
        is_larger |= raise(&mut own.requests, had.requests.as_ref());
    }
    if is_larger { apply(pod, &all) } else { Cow::Borrowed(pod) }
}

/// Returns whether any request of `actuated`, for CPU or memory, is larger than that of the pod. Allocates
/// nothing.
#[must_use]
pub fn is_any_larger(pod: &Pod, actuated: &PodResources) -> bool {
    let is_larger = |own: Option<&ResourceRequirements>, had: Option<&ResourceRequirements>| {
        let own = own.and_then(|own| own.requests.as_ref());
        had.is_some_and(|had| exceeding(own, had.requests.as_ref()).next().is_some())
    };
    containers(pod).any(|c| is_larger(c.resources.as_ref(), actuated.containers.get(&c.name)))
        || is_larger(pod::spec(pod).resources.as_ref(), actuated.pod_level.as_ref())
}

/// Returns the amounts of CPU and memory in `had` that are larger than those in `own`.
fn exceeding<'a>(
    own: Option<&'a Amounts>,
    had: Option<&'a Amounts>,
) -> impl Iterator<Item = (&'a String, &'a ApiQuantity)> {
    had.into_iter().flatten().filter(move |(name, had)| {
        let has = || own.and_then(|own| own.get(*name)).map(Quantity::of).unwrap_or_default();
        RESIZABLE.contains(&name.as_str()) && Quantity::of(had) > has()
    })
}

fn raise(own: &mut Option<Amounts>, had: Option<&Amounts>) -> bool {
    let larger: Vec<_> =
        exceeding(own.as_ref(), had).map(|(name, had)| (name.clone(), had.clone())).collect();
    let is_larger = !larger.is_empty();
    if is_larger {
        own.get_or_insert_default().extend(larger);
    }
    is_larger
}

/// Derives the allocation from a status, if the checkpoint is lost. `None` if the status has no resources of
/// any container.
#[must_use]
pub fn of_status(pod: &Pod, status: &PodStatus) -> Option<PodResources> {
    let statuses =
        || status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    statuses().next()?;
    let mut all = of_pod(pod);
    for (name, resources) in &mut all.containers {
        if let Some(status) = statuses().find(|s| s.name == *name && s.allocated_resources.is_some()) {
            take_from_status(resources, status);
        }
    }
    if let (Some(own), Some(allocated)) = (all.pod_level.as_mut(), &status.allocated_resources) {
        take_over(own.requests.as_mut(), allocated);
    }
    if let (Some(own), Some(allocated)) =
        (all.pod_level.as_mut(), status.resources.as_ref().and_then(|r| r.limits.as_ref()))
    {
        take_over(own.limits.as_mut(), allocated);
    }
    Some(all)
}

// The status has the allocated requests. Its limits are those of the runtime: the allocated ones or the
// previous ones. Both are correct, since a difference to the spec is decided again.
fn take_from_status(resources: &mut ResourceRequirements, status: &ContainerStatus) {
    if let Some(allocated) = &status.allocated_resources {
        take_over(resources.requests.as_mut(), allocated);
    }
    if let Some(allocated) = status.resources.as_ref().and_then(|r| r.limits.as_ref()) {
        take_over(resources.limits.as_mut(), allocated);
    }
}

fn take_over(own: Option<&mut Amounts>, allocated: &Amounts) {
    let Some(own) = own else { return };
    for name in RESIZABLE {
        if let (Some(own), Some(allocated)) = (own.get_mut(name), allocated.get(name)) {
            // An equal amount keeps the spelling of the spec.
            if Quantity::of(own) != Quantity::of(allocated) {
                own.clone_from(allocated);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::{pod_json, status_json};
    use serde_json::{Value, json};

    fn pod(resources: Value) -> Pod {
        pod_json(json!({
            "initContainers": [{"name": "i", "image": "i", "resources": {"requests": {"cpu": "10m"}}}],
            "containers": [{"name": "a", "image": "i", "resources": resources}, {"name": "b", "image": "i"}],
        }))
    }

    fn cpu(milli: &str) -> Value {
        json!({"requests": {"cpu": milli, "memory": "64Mi"}, "limits": {"cpu": milli, "memory": "64Mi"}})
    }

    #[test]
    fn a_pod_whose_spec_equals_its_allocation_is_not_changed() {
        let given = of_pod(&pod(cpu("500m")));
        assert!(matches!(apply(&pod(cpu("500m")), &given), Cow::Borrowed(_)));
        let written_otherwise = pod(cpu("0.5"));
        assert!(matches!(apply(&written_otherwise, &given), Cow::Borrowed(_)));
    }

    #[test]
    fn a_pod_with_a_pending_resize_keeps_its_allocated_resources() {
        let (before, mut after) = (pod(cpu("500m")), pod(cpu("2")));
        after.metadata.generation = Some(7);
        let got = apply(&after, &of_pod(&before)).into_owned();
        assert_eq!(got.spec, before.spec);
        assert_eq!(got.metadata.generation, Some(7), "all else is the source's");

        let level = |cpu: &str| {
            let mut p = pod(json!({}));
            p.spec.as_mut().unwrap().resources =
                Some(serde_json::from_value(json!({"limits": {"cpu": cpu}})).unwrap());
            p
        };
        let got = apply(&level("2"), &of_pod(&level("1"))).into_owned();
        assert_eq!(got.spec, level("1").spec);

        // A container without an allocation, such as an ephemeral one, uses its spec.
        let unknown = PodResources::default();
        assert!(matches!(apply(&before, &unknown), Cow::Borrowed(_)));
    }

    #[test]
    fn a_pod_that_has_shrunk_requests_what_it_had() {
        for (name, own, had, requests) in [
            ("equal", cpu("500m"), cpu("0.5"), None),
            ("grown", cpu("1"), cpu("500m"), None),
            ("shrunk", cpu("500m"), cpu("1"), Some(json!({"cpu": "1", "memory": "64Mi"}))),
            ("without requests", json!({}), cpu("1"), Some(json!({"cpu": "1", "memory": "64Mi"}))),
            ("of another resource", json!({}), json!({"requests": {"example.com/device": "1"}}), None),
        ] {
            let (own, had) = (pod(own), of_pod(&pod(had)));
            let got = larger(&own, &had);
            assert_eq!(is_any_larger(&own, &had), requests.is_some(), "{name}");
            assert_eq!(matches!(got, Cow::Owned(_)), requests.is_some(), "{name}");
            if let Some(requests) = requests {
                let container = &quintlet_model::pod::spec(&got).containers[0];
                let got = container.resources.as_ref().unwrap().requests.as_ref().unwrap();
                assert_eq!(serde_json::to_value(got).unwrap(), requests, "{name}");
            }
        }
    }

    #[test]
    fn a_memory_backed_volume_keeps_its_allocated_size_limit() {
        let pod = |memory: &str, zero: &str, disk: &str| {
            pod_json(json!({"containers": [{"name": "a", "image": "i"}], "volumes": [
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": memory}},
                {"name": "zero", "emptyDir": {"medium": "Memory", "sizeLimit": zero}},
                {"name": "none", "emptyDir": {"medium": "Memory"}},
                {"name": "disk", "emptyDir": {"sizeLimit": disk}},
            ]}))
        };
        let before = pod("64Mi", "0", "1Gi");
        let had = of_pod(&before);
        assert_eq!(had.size_limits.keys().collect::<Vec<_>>(), ["memory"], "others have no limit to resize");
        assert_eq!(apply(&pod("128Mi", "0", "1Gi"), &had).into_owned().spec, before.spec);
        assert!(
            matches!(apply(&pod("65536Ki", "0", "2Gi"), &had), Cow::Borrowed(_)),
            "equal or not resizable"
        );
        let without = PodResources { size_limits: Amounts::new(), ..had };
        assert!(matches!(apply(&pod("128Mi", "0", "1Gi"), &without), Cow::Borrowed(_)), "without a record");
        for (desired, want) in [
            (pod("65536Ki", "0", "2Gi"), false),
            (pod("128Mi", "0", "1Gi"), true),
            (pod("64Mi", "1Mi", "1Gi"), true),
        ] {
            assert_eq!(resizes_volumes(&desired, &before), want);
        }
    }

    #[test]
    fn the_allocation_is_derived_from_a_status() {
        let asks = pod(cpu("2"));
        let status = status_json(json!({"containerStatuses": [{
            "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "allocatedResources": {"cpu": "500m", "memory": "64Mi"},
            "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "500m", "memory": "64Mi"}},
        }]}));
        let got = of_status(&asks, &status).unwrap();
        assert_eq!(got, of_pod(&pod(cpu("500m"))));
        assert_eq!(of_status(&asks, &PodStatus::default()), None, "a pod that never ran has no allocation");
        // The status of a container that was not created yet has no resources; it uses its spec.
        let silent = status_json(json!({"containerStatuses": [{
            "name": "a", "image": "", "imageID": "", "ready": false, "restartCount": 0}]}));
        assert_eq!(of_status(&asks, &silent).unwrap(), of_pod(&asks));
    }
}
