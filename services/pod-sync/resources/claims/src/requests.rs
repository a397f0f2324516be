//! The claims that a pod and its containers need. Plain functions of the objects.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use quintlet_model::pod as pods;
use quintlet_model::quantity::Quantity;

use crate::claim::{AllocatedClaim, ClaimKey};
use crate::error::ClaimError;

/// Prefix of the resource that requests devices of a class.
const DEVICE_CLASS: &str = "deviceclass.resource.kubernetes.io/";
/// Part of the name of a resource of Kubernetes itself.
const NATIVE: &str = "kubernetes.io/";
/// Prefix of the name of a quota, which no resource has.
const QUOTA: &str = "requests.";
/// API group of pod groups.
const SCHEDULING: &str = "scheduling.k8s.io";

/// A claim that a pod needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NeededClaim {
    /// Name of the claim.
    pub name: String,
    /// Whether the claim was created from a template for this pod, so that the pod must own it.
    pub is_of_template: bool,
}

/// Returns whether the pod has claims.
#[must_use]
pub fn has_claims(pod: &Pod) -> bool {
    pods::spec(pod).resource_claims.as_ref().is_some_and(|claims| !claims.is_empty())
        || extended_claim(pod).is_some()
}

/// Returns the claims that a pod needs, in the order of its spec, without those that intentionally do not
/// exist (`resourceclaim.Name`). The claim for its extended resources is the last one.
///
/// # Errors
/// A claim has not been created yet, or an entry has no supported field.
pub(crate) fn needed_claims(pod: &Pod) -> Result<Vec<NeededClaim>, ClaimError> {
    let mut needed = Vec::new();
    for claim in pods::spec(pod).resource_claims.iter().flatten() {
        needed.extend(claim_name(pod, &claim.name)?);
    }
    let extended = extended_claim(pod).map(str::to_owned);
    needed.extend(extended.map(|name| NeededClaim { name, is_of_template: false }));
    Ok(needed)
}

/// Returns the claim of an entry of the pod's spec. None: the entry does not exist, or needs no claim.
///
/// # Errors
/// The claim has not been created yet, or the entry has no supported field.
pub(crate) fn claim_name(pod: &Pod, entry: &str) -> Result<Option<NeededClaim>, ClaimError> {
    let mut claims = pods::spec(pod).resource_claims.iter().flatten();
    let Some(claim) = claims.find(|claim| claim.name == entry) else { return Ok(None) };
    let (namespace, name) = (text(&pod.metadata.namespace), text(&pod.metadata.name));
    if let Some(claim) = &claim.resource_claim_name {
        return Ok(Some(NeededClaim { name: claim.clone(), is_of_template: false }));
    }
    if claim.resource_claim_template_name.is_none() {
        return Err(ClaimError::Unsupported { namespace, pod: name, entry: entry.to_owned() });
    }
    let statuses = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    match statuses.into_iter().flatten().find(|status| status.name == entry) {
        Some(status) => {
            let name = status.resource_claim_name.clone();
            Ok(name.map(|name| NeededClaim { name, is_of_template: true }))
        }
        None => Err(ClaimError::NotCreated { namespace, pod: name }),
    }
}

fn extended_claim(pod: &Pod) -> Option<&str> {
    let claim = pod.status.as_ref()?.extended_resource_claim_status.as_ref()?;
    Some(claim.resource_claim_name.as_str())
}

/// Checks that the pod may use the claim, and returns its devices. Devices with admin access need no other
/// check here: the API server and the scheduler decide on them.
///
/// # Errors
/// Returns the kubelet's reason: the claim belongs to another pod, is not reserved for this one, or has no
/// devices.
pub(crate) fn allocated_claim(
    pod: &Pod,
    needed: &NeededClaim,
    claim: &ResourceClaim,
) -> Result<AllocatedClaim, ClaimError> {
    if needed.is_of_template {
        check_owner(pod, claim)?;
    }
    let status = claim.status.as_ref();
    let mut reserved = status.and_then(|status| status.reserved_for.as_ref()).into_iter().flatten();
    let (uid, group) = (text(&pod.metadata.uid), pod_group(pod));
    let is_reserved = reserved.any(|consumer| {
        let is_group = consumer.api_group.as_deref() == Some(SCHEDULING) && consumer.resource == "podgroups";
        consumer.uid == uid || (is_group && group == Some(consumer.name.as_str()))
    });
    if !is_reserved {
        return Err(ClaimError::NotReserved {
            pod: text(&pod.metadata.name),
            pod_uid: uid,
            name: text(&claim.metadata.name),
            uid: text(&claim.metadata.uid),
        });
    }
    let allocation = status.and_then(|status| status.allocation.as_ref());
    let Some(allocation) = allocation else {
        return Err(ClaimError::NotAllocated(text(&claim.metadata.name)));
    };
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    let devices = results
        .map(|result| {
            (result.driver.clone(), result.pool.clone(), result.device.clone(), result.request.clone())
        })
        .collect();
    let key = ClaimKey { namespace: text(&claim.metadata.namespace), name: text(&claim.metadata.name) };
    Ok(AllocatedClaim { key, uid: text(&claim.metadata.uid), devices })
}

/// Checks that a claim was created for this pod, or for its pod group (`resourceclaim.IsForPod`).
fn check_owner(pod: &Pod, claim: &ResourceClaim) -> Result<(), ClaimError> {
    let (of_claim, of_pod) = (path(&claim.metadata), path(&pod.metadata));
    if claim.metadata.namespace != pod.metadata.namespace {
        let reason = format!("ResourceClaim {of_claim} is not in the same namespace as Pod {of_pod}");
        return Err(ClaimError::NotForPod(reason));
    }
    let mut owners = claim.metadata.owner_references.iter().flatten();
    let controller = owners.find(|owner| owner.controller == Some(true));
    if controller.is_some_and(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref()) {
        return Ok(());
    }
    let reason = match pod_group(pod) {
        None => "Pod is not owner".to_owned(),
        Some(group) => {
            let is_group = controller.is_some_and(|owner| {
                let in_group = owner.api_version.strip_prefix(SCHEDULING).is_some_and(|v| v.starts_with('/'));
                owner.kind == "PodGroup" && owner.name == group && in_group
            });
            if is_group {
                return Ok(());
            }
            format!("neither Pod nor PodGroup {group} is the owner")
        }
    };
    Err(ClaimError::NotForPod(format!(
        "ResourceClaim {of_claim} was not created for Pod {of_pod} ({reason})"
    )))
}

fn pod_group(pod: &Pod) -> Option<&str> {
    pods::spec(pod).scheduling_group.as_ref()?.pod_group_name.as_deref()
}

fn path(metadata: &ObjectMeta) -> String {
    format!("{}/{}", text(&metadata.namespace), text(&metadata.name))
}

fn text(value: &Option<String>) -> String {
    value.clone().unwrap_or_default()
}

/// Returns the requests of a container by claim. An empty request stands for all devices of the claim.
///
/// # Errors
/// A claim has not been created yet, or its entry in the pod's spec has no supported field.
pub fn container_requests(
    pod: &Pod,
    container: &Container,
) -> Result<BTreeMap<String, Vec<String>>, ClaimError> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let resources = container.resources.as_ref();
    for claim in resources.and_then(|resources| resources.claims.as_ref()).into_iter().flatten() {
        if let Some(needed) = claim_name(pod, &claim.name)? {
            all.entry(needed.name).or_default().push(claim.request.clone().unwrap_or_default());
        }
    }
    let status = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    let Some(status) = status else { return Ok(all) };
    let requests = resources.and_then(|resources| resources.requests.as_ref()).into_iter().flatten();
    let extended: BTreeSet<&str> = requests
        .filter(|(name, amount)| !Quantity::of(amount).is_zero() && is_extended(name))
        .map(|(name, _)| name.as_str())
        .collect();
    for mapping in &status.request_mappings {
        if mapping.container_name == container.name && extended.contains(mapping.resource_name.as_str()) {
            all.entry(status.resource_claim_name.clone()).or_default().push(mapping.request_name.clone());
        }
    }
    Ok(all)
}

/// Returns whether a driver of dynamic resource allocation may provide the resource
/// (`IsDRAExtendedResourceName`).
fn is_extended(name: &str) -> bool {
    name.starts_with(DEVICE_CLASS)
        || (name.contains('/') && !name.contains(NATIVE) && !name.starts_with(QUOTA))
}

/// Returns whether a device with this request belongs to the request of a container. A device of a
/// prioritized list may have `<request>/<subrequest>`, and a container refers to the request. Drivers in Go
/// remove the second part.
#[must_use]
pub(crate) fn is_request(named: &str, reported: &str) -> bool {
    if named == reported {
        return true;
    }
    let base = |name: &str| name.split('/').next().unwrap_or_default().to_owned();
    base(named) == base(reported) && (!named.contains('/') || !reported.contains('/'))
}

#[cfg(test)]
mod tests;
