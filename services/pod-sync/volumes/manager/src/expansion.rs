//! Expansion of volumes on the node (`pkg/volume/util/operationexecutor: NodeExpander`).
//!
//! [`decide`] is a plain function of the claim. [`expand`] reads the claim, calls the driver or enlarges the
//! file system of a `local` volume, and writes the claim's status.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pod_sync_clients::EventType;
use pod_sync_csi::client::ExpansionFailure;
use pod_sync_csi::error::{Certainty, CsiError};
use pod_sync_csi::mount::Expand;
use quintlet_model::ids::PodUid;
use quintlet_model::quantity::Quantity;
use serde_json::{Value, json};

use crate::claims::{Sizes, Source, storage};
use crate::resolve::Resolved;
use crate::tools::{SecretError, Tools, secrets};

/// Annotation of a claim whose volume other nodes need not expand.
const NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";
/// Condition of a claim whose expansion on the node failed.
const NODE_RESIZE_ERROR: &str = "NodeResizeError";
/// Conditions of a claim that describe its expansion.
const RESIZE_CONDITIONS: [&str; 4] =
    ["FileSystemResizePending", "Resizing", "ControllerResizeError", NODE_RESIZE_ERROR];
const PENDING: &str = "NodeResizePending";
const IN_PROGRESS: &str = "NodeResizeInProgress";
const INFEASIBLE: &str = "NodeResizeInfeasible";

/// Result of an expansion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expanded {
    /// The volume has this size in bytes.
    Done(u64),
    /// The controller has not requested the expansion on the node yet.
    NotRequested,
    /// The driver does not expand volumes in use.
    InUse,
}

/// An expansion that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotExpanded {
    /// The kubelet's text.
    pub(crate) text: String,
    /// The driver has certainly stopped working on the expansion.
    pub(crate) is_final: bool,
}

impl From<String> for NotExpanded {
    fn from(text: String) -> Self {
        Self { text, is_final: false }
    }
}

/// The next action for a volume whose claim is smaller than its PersistentVolume.
#[derive(Debug, Clone, PartialEq)]
enum Decision {
    /// The volume has this size.
    Done(ApiQuantity),
    /// The controller has not requested the expansion on the node yet.
    NotRequested,
    /// Call the driver.
    Call {
        size: ApiQuantity,
        update: Update,
        /// The claim requests another size meanwhile, so that a failure is left to the controller.
        give_up_on_failure: bool,
    },
}

/// Writes to the status of the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Update {
    /// The claim has the size and is not written.
    None,
    /// The claim gets the size at the end, since the controller does not track expansions on nodes.
    Size,
    /// The claim gets progress, failures and the size.
    Progress,
}

/// Returns what to do about a claim whose volume is to have `capacity` (`NodeExpander.runPreCheck`,
/// `checkForRecoveryFromExpansion`).
fn decide(claim: &PersistentVolumeClaim, capacity: &ApiQuantity, failed_before: bool) -> Decision {
    let status = claim.status.clone().unwrap_or_default();
    let spec = claim.spec.clone().unwrap_or_default();
    let state = status.allocated_resource_statuses.as_ref().and_then(|all| all.get("storage"));
    let state = state.map(String::as_str).unwrap_or_default();
    let current = storage(status.capacity.as_ref());
    if state.is_empty() && status.allocated_resources.is_none() {
        let update = if current >= Quantity::of(capacity) { Update::None } else { Update::Size };
        return Decision::Call { size: capacity.clone(), update, give_up_on_failure: false };
    }
    let allocated =
        status.allocated_resources.as_ref().and_then(|all| all.get("storage")).cloned().unwrap_or_default();
    let size = Quantity::of(&allocated);
    let is_expanded = current >= size && state.is_empty();
    let has_many_nodes = spec.access_modes.iter().flatten().any(|mode| mode == "ReadWriteMany");
    let is_required = !claim.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(NOT_REQUIRED));
    let requested = spec.resources.and_then(|resources| resources.requests);
    let give_up_on_failure = failed_before && storage(requested.as_ref()) != size;
    match state {
        _ if is_expanded && has_many_nodes && is_required => {
            Decision::Call { size: allocated, update: Update::None, give_up_on_failure }
        }
        _ if is_expanded => Decision::Done(allocated),
        PENDING | IN_PROGRESS => {
            Decision::Call { size: allocated, update: Update::Progress, give_up_on_failure }
        }
        _ => Decision::NotRequested,
    }
}

/// Returns the merge patch of a claim whose expansion begins, or `None` if it has begun before.
fn begun(claim: &PersistentVolumeClaim) -> Option<Value> {
    let statuses = claim.status.as_ref().and_then(|status| status.allocated_resource_statuses.as_ref());
    let is_known = statuses.and_then(|all| all.get("storage")).is_some_and(|state| state == IN_PROGRESS);
    (!is_known).then(|| patch(claim, json!({"allocatedResourceStatuses": {"storage": IN_PROGRESS}})))
}

/// Returns the merge patch of a claim whose volume is expanded (`MarkNodeExpansionFinishedWithRecovery`).
fn finished(claim: &PersistentVolumeClaim, size: &ApiQuantity) -> Value {
    let kept: Vec<_> =
        conditions(claim).into_iter().filter(|c| !RESIZE_CONDITIONS.contains(&&*c.type_)).collect();
    let mut status = json!({"capacity": {"storage": size.0}, "conditions": kept});
    let status_of = claim.status.as_ref();
    if status_of.is_some_and(|status| status.allocated_resource_statuses.is_some()) {
        status["allocatedResourceStatuses"] = json!({"storage": null});
    }
    patch(claim, status)
}

/// Returns the merge patch of a claim whose expansion failed (`MarkNodeExpansionFailedCondition`,
/// `MarkNodeExpansionInfeasible`).
fn failed(claim: &PersistentVolumeClaim, error: &str, infeasible: bool, now: Timestamp) -> Value {
    let mut conditions = conditions(claim);
    // The time and message of a condition that is true already stay.
    if !conditions.iter().any(|c| c.type_ == NODE_RESIZE_ERROR && c.status == "True") {
        conditions.retain(|c| c.type_ != NODE_RESIZE_ERROR);
        conditions.push(PersistentVolumeClaimCondition {
            type_: NODE_RESIZE_ERROR.to_owned(),
            status: "True".to_owned(),
            last_transition_time: Some(Time(now)),
            message: Some(format!("failed to expand pvc with {error}")),
            ..PersistentVolumeClaimCondition::default()
        });
    }
    let mut status = json!({"conditions": conditions});
    if infeasible {
        status["allocatedResourceStatuses"] = json!({"storage": INFEASIBLE});
    }
    patch(claim, status)
}

fn conditions(claim: &PersistentVolumeClaim) -> Vec<PersistentVolumeClaimCondition> {
    claim.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default()
}

/// Returns a patch of this version of the claim, so that a concurrent write is not lost.
fn patch(claim: &PersistentVolumeClaim, status: Value) -> Value {
    json!({"metadata": {"resourceVersion": claim.metadata.resource_version}, "status": status})
}

fn bytes(size: &ApiQuantity) -> u64 {
    u64::try_from(Quantity::of(size).value()).unwrap_or(0)
}

/// Expands a mounted volume to the size of its PersistentVolume. With `at_mount`, a volume whose claim has
/// the size already is not expanded again.
pub(crate) async fn expand(
    tools: &Tools,
    volume: &Resolved,
    sizes: &Sizes,
    uid: &PodUid,
    at_mount: bool,
    failed_before: bool,
) -> Result<Expanded, NotExpanded> {
    let Some(objects) = &tools.objects else { return Ok(Expanded::NotRequested) };
    let claim = objects.claim(&sizes.namespace, &sizes.claim).await;
    let claim = claim.map_err(|e| format!("mountVolume.NodeExpandVolume get PVC failed : {e}"))?;
    let current = storage(claim.status.as_ref().and_then(|status| status.capacity.as_ref()));
    let current = u64::try_from(current.value()).unwrap_or(0);
    if at_mount && current >= bytes(&sizes.capacity) {
        return Ok(Expanded::Done(current));
    }
    let event = |kind: EventType, reason: &str, prefix: &str, suffix: &str| {
        let message = format!("{prefix} for volume {:?} {suffix}", volume.desired.spec_name);
        tools.events.pod(&volume.pod, kind, reason, &message, "");
        tools.events.claim(&claim, kind, reason, &message);
    };
    if volume.provided.source.is_read_only() {
        let prefix = "MountVolume.NodeExpandVolume failed";
        event(EventType::Warning, "FileSystemResizeFailed", prefix, "requested read-only file system");
        return Ok(Expanded::Done(current));
    }
    let (size, update, give_up_on_failure) = match decide(&claim, &sizes.capacity, failed_before) {
        Decision::Done(size) => return Ok(Expanded::Done(bytes(&size))),
        Decision::NotRequested => return Ok(Expanded::NotRequested),
        Decision::Call { size, update, give_up_on_failure } => (size, update, give_up_on_failure),
    };
    let write = async |patch: Value| objects.patch_claim_status(&sizes.namespace, &sizes.claim, patch).await;
    let mut claim = claim.clone();
    if update == Update::Progress
        && let Some(patch) = begun(&claim)
    {
        let written = write(patch).await;
        claim = written.map_err(|e| format!("patchPVCStatus failed to patch PVC {:?}: {e}", sizes.claim))?;
    }
    match call(tools, volume, uid, &size).await {
        Ok(()) => {}
        Err(CallFailure::Transient(text)) => return Err(text.into()),
        Err(CallFailure::Driver(CsiError::Unsupported { .. })) if update != Update::Progress => {
            return Ok(Expanded::Done(bytes(&size)));
        }
        Err(failed_call) => {
            let (failure, text, is_final) = match &failed_call {
                CallFailure::Driver(error) => {
                    let failure = match error {
                        CsiError::Call(call) => ExpansionFailure::of(call),
                        _ => ExpansionFailure::Other,
                    };
                    (failure, text(error, failure), error.certainty() == Certainty::Finished)
                }
                CallFailure::Final(text) | CallFailure::Transient(text) => {
                    (ExpansionFailure::Other, text.clone(), true)
                }
            };
            if is_final && update == Update::Progress {
                let infeasible = failure == ExpansionFailure::Infeasible || give_up_on_failure;
                if let Err(error) = write(failed(&claim, &text, infeasible, tools.clock.wall())).await {
                    tracing::info!(
                        claim = sizes.claim,
                        %error,
                        "failed to write the failed expansion to the claim"
                    );
                }
            }
            return match failure {
                ExpansionFailure::InUse => {
                    tracing::info!(
                        volume = volume.desired.spec_name,
                        error = text,
                        "volume in use is not expanded"
                    );
                    Ok(Expanded::InUse)
                }
                ExpansionFailure::Infeasible | ExpansionFailure::Other => Err(NotExpanded { text, is_final }),
            };
        }
    }
    let prefix = "MountVolume.NodeExpandVolume succeeded";
    event(EventType::Normal, "FileSystemResizeSuccessful", prefix, &tools.node);
    if update != Update::None {
        let written = write(finished(&claim, &size)).await;
        written.map_err(|e| format!("mountVolume.NodeExpandVolume update pvc status failed: {e}"))?;
    }
    Ok(Expanded::Done(bytes(&size)))
}

/// A call of the driver, or of a file system's tool, that failed.
enum CallFailure {
    /// The driver was not called.
    Transient(String),
    Driver(CsiError),
    /// The file system was not enlarged.
    Final(String),
}

async fn call(tools: &Tools, volume: &Resolved, uid: &PodUid, size: &ApiQuantity) -> Result<(), CallFailure> {
    let csi = match &volume.provided.source {
        Source::Csi(csi) => csi,
        Source::InTree(in_tree) => {
            let expanded = tools.in_tree.expand(in_tree).await;
            return expanded.map_err(|error| CallFailure::Final(error.to_string()));
        }
    };
    let bytes = required_bytes(size).map_err(|error| {
        CallFailure::Final(format!("Expander.NodeExpand failed to expand the volume : {error}"))
    })?;
    let secrets = secrets(tools, volume.provided.expand_secret.as_ref()).await.map_err(|failed| {
        let SecretError { name, error } = failed;
        let claim = format!("{}/{}", name.namespace, name.name);
        CallFailure::Transient(format!(
            "expander.NodeExpand failed to get NodeExpandSecretRef {claim}: {error}"
        ))
    })?;
    let expand = Expand {
        volume: csi.clone(),
        pod: uid.to_string(),
        is_block: volume.provided.is_block,
        bytes,
        secrets,
    };
    tools.mounter.expand(&expand).await.map(drop).map_err(CallFailure::Driver)
}

/// Returns the size that a driver is asked for. More than 64 bits hold is their maximum, as in kubelet 1.38,
/// which no driver fulfils. The sign is that of the quantity, whatever its size (k/k#141181).
fn required_bytes(size: &ApiQuantity) -> Result<i64, &'static str> {
    let size = Quantity::of(size);
    if size.is_positive() || size.is_zero() { Ok(size.value()) } else { Err("size can not be less than 0") }
}

/// Returns the kubelet's text (`nodeExpandWithClient`).
fn text(error: &CsiError, failure: ExpansionFailure) -> String {
    match (error, failure) {
        (CsiError::Call(call), ExpansionFailure::Infeasible) => {
            format!("Expander.NodeExpand failed to expand the volume {call}")
        }
        (CsiError::Call(call), ExpansionFailure::InUse | ExpansionFailure::Other) => {
            format!("Expander.NodeExpand failed to expand the volume : {call}")
        }
        (other, _) => other.text(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn claim(change: Value) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": {"name": "data", "resourceVersion": "7"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}},
            "status": {"capacity": {"storage": "1Gi"}},
        });
        json_patch(&mut claim, change);
        serde_json::from_value(claim).unwrap()
    }

    fn json_patch(into: &mut Value, change: Value) {
        match (into, change) {
            (Value::Object(into), Value::Object(change)) => {
                for (key, value) in change {
                    json_patch(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, change) => *into = change,
        }
    }

    #[test]
    fn the_driver_is_called_when_the_controller_has_done_its_part() {
        let tracked = |state: &str, capacity: &str| {
            let statuses = if state.is_empty() { json!({}) } else { json!({"storage": state}) };
            json!({"status": {"capacity": {"storage": capacity}, "allocatedResources": {"storage": "2Gi"},
                "allocatedResourceStatuses": statuses}})
        };
        let with = |mut object: Value, more: Value| {
            json_patch(&mut object, more);
            object
        };
        let many = json!({"spec": {"accessModes": ["ReadWriteMany"]}});
        let required_elsewhere = json!({"metadata": {"annotations": {NOT_REQUIRED: "true"}}});
        let smaller = json!({"spec": {"resources": {"requests": {"storage": "1500Mi"}}}});
        let two = ApiQuantity("2Gi".to_owned());
        let call =
            |update, give_up_on_failure| Decision::Call { size: two.clone(), update, give_up_on_failure };
        for (change, failed_before, expected) in [
            (json!({}), false, call(Update::Size, false)),
            (json!({"status": {"capacity": {"storage": "2Gi"}}}), false, call(Update::None, false)),
            (tracked(PENDING, "1Gi"), false, call(Update::Progress, false)),
            (tracked(IN_PROGRESS, "1Gi"), true, call(Update::Progress, false)),
            (with(tracked(PENDING, "1Gi"), smaller.clone()), true, call(Update::Progress, true)),
            (with(tracked(PENDING, "1Gi"), smaller), false, call(Update::Progress, false)),
            (tracked("ControllerResizeInProgress", "1Gi"), false, Decision::NotRequested),
            (tracked(INFEASIBLE, "1Gi"), false, Decision::NotRequested),
            (tracked("", "1Gi"), false, Decision::NotRequested),
            (tracked("", "2Gi"), false, Decision::Done(two.clone())),
            (with(tracked("", "2Gi"), many.clone()), false, call(Update::None, false)),
            (with(with(tracked("", "2Gi"), many), required_elsewhere), false, Decision::Done(two.clone())),
        ] {
            assert_eq!(
                decide(&claim(change.clone()), &two, failed_before),
                expected,
                "{change} {failed_before}"
            );
        }
    }

    #[test]
    fn a_size_below_zero_is_refused_and_one_beyond_64_bits_is_the_largest() {
        let negative = Err("size can not be less than 0");
        for (size, want) in [
            ("2Gi", Ok(2 << 30)),
            ("0", Ok(0)),
            ("9223372036854775807", Ok(i64::MAX)),
            ("9223372036854775808", Ok(i64::MAX)),
            ("100E", Ok(i64::MAX)),
            ("1e30", Ok(i64::MAX)),
            ("-1", negative),
            ("-1m", negative),
            ("-9.5Gi", negative),
            ("-100E", negative),
            ("-1e30", negative),
        ] {
            assert_eq!(required_bytes(&ApiQuantity(size.to_owned())), want, "{size}");
        }
    }

    #[test]
    fn the_status_of_the_claim_follows_the_expansion_and_keeps_foreign_conditions() {
        let conditions = json!([{"type": "Resizing", "status": "True"}, {"type": "Mine", "status": "True"}]);
        let statuses = json!({"storage": PENDING});
        let object =
            claim(json!({"status": {"conditions": conditions, "allocatedResourceStatuses": statuses}}));
        assert_eq!(
            begun(&object).unwrap(),
            json!({"metadata": {"resourceVersion": "7"}, "status": {"allocatedResourceStatuses": {"storage": IN_PROGRESS}}})
        );
        assert_eq!(
            finished(&object, &ApiQuantity("2Gi".to_owned()))["status"],
            json!({"capacity": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": null},
                "conditions": [{"type": "Mine", "status": "True"}]})
        );
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let patch = failed(&object, "boom", true, now);
        assert_eq!(patch["status"]["allocatedResourceStatuses"], json!({"storage": INFEASIBLE}));
        assert_eq!(
            patch["status"]["conditions"][2],
            json!({"type": NODE_RESIZE_ERROR, "status": "True", "message": "failed to expand pvc with boom",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        );
        let mut again = object.clone();
        let list = serde_json::from_value(patch["status"]["conditions"].clone()).unwrap();
        again.status.as_mut().unwrap().conditions = list;
        assert_eq!(
            failed(&again, "other", false, now)["status"],
            json!({"conditions": patch["status"]["conditions"]})
        );
        again.status.as_mut().unwrap().allocated_resource_statuses =
            Some(BTreeMap::from([("storage".to_owned(), IN_PROGRESS.to_owned())]));
        assert_eq!(begun(&again), None);
    }
}
