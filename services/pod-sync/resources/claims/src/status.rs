//! The health of a container's claims in the status of its pod (`UpdateAllocatedResourcesStatus`).

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceHealth, ResourceStatus};

use crate::claim::ClaimKey;
use crate::inventory::{ClaimInventory, PreparedDevice};
use crate::requests::claim_name;

/// Returns an entry for each claim that the container names and that is prepared. `health` returns the entry
/// of a driver's device.
pub(crate) fn resource_statuses(
    inventory: &ClaimInventory,
    pod: &Pod,
    container: &Container,
    health: impl Fn(&str, &PreparedDevice) -> ResourceHealth,
) -> Vec<ResourceStatus> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let claims = container.resources.as_ref().and_then(|resources| resources.claims.as_ref());
    let mut statuses: Vec<ResourceStatus> = Vec::new();
    for claim in claims.into_iter().flatten() {
        let Ok(Some(needed)) = claim_name(pod, &claim.name) else { continue };
        let key = ClaimKey { namespace: namespace.clone(), name: needed.name };
        let Some(record) = inventory.record(&key) else { continue };
        let request = claim.request.as_deref().unwrap_or_default();
        let name = match request {
            "" => format!("claim:{}", claim.name),
            request => format!("claim:{}/{request}", claim.name),
        };
        let mut seen = BTreeSet::new();
        let devices = record.devices_of(request).map(|(driver, device)| health(driver, device));
        let resources: Vec<_> = devices.filter(|entry| seen.insert(entry.resource_id.clone())).collect();
        if !resources.is_empty() && statuses.iter().all(|status| status.name != name) {
            statuses.push(ResourceStatus { name, resources: Some(resources) });
        }
    }
    statuses
}
