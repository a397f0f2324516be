//! Converts messages of `quintlet.status.v1` to the types of this crate, and back.

use std::sync::Arc;

use quintlet_model::ids::PodUid;
use quintlet_proto::common::v1::Trace;
use quintlet_proto::status::v1 as wire;
use serde_json::Value;
use tonic::Status;

use crate::node::volumes::{Driver, LastNode, StorageCondition, Volumes};
use crate::status::{list, text};
use crate::update::{Ack, Stamp, Update, UpdateOutcome};

/// Parses an update.
///
/// # Errors
/// INVALID_ARGUMENT with the name of the field.
pub(crate) fn update(wire: wire::PodStatusUpdate, trace: Option<Trace>) -> Result<Update, Status> {
    let uid = PodUid::parse(&wire.uid).map_err(|e| invalid("update.uid", &e.to_string()))?;
    Ok(Update {
        uid,
        api_uid: wire.api_uid,
        namespace: segment("update.namespace", wire.namespace)?,
        name: segment("update.name", wire.name)?,
        stamp: Stamp { epoch: wire.owner_epoch, version: wire.version },
        base: Arc::new(object("update.base_status", &wire.base_status)?),
        base_version: wire.base_resource_version.parse().unwrap_or(0),
        desired: object("update.desired_status", &wire.desired_status)?,
        could_run: wire.could_run,
        finished: wire.finished,
        deleting: wire.deleting,
        mirror: wire.mirror,
        trace,
    })
}

/// Converts an ack to its message.
#[must_use]
pub(crate) fn ack(ack: Ack) -> wire::Ack {
    let (kind, resource_version, detail) = match ack.verdict {
        UpdateOutcome::Written(rv) => (wire::AckKind::Written, rv, String::new()),
        UpdateOutcome::Shortened { version, without } => {
            (wire::AckKind::Written, version, without.to_string())
        }
        UpdateOutcome::Gone => (wire::AckKind::Gone, String::new(), String::new()),
        UpdateOutcome::UidMismatch(detail) => (wire::AckKind::UidMismatch, String::new(), detail),
        UpdateOutcome::Refused(detail) => (wire::AckKind::Refused, String::new(), detail),
        UpdateOutcome::Retrying(detail) => (wire::AckKind::Retrying, String::new(), detail),
        UpdateOutcome::NoApi => (wire::AckKind::NoApi, String::new(), String::new()),
        UpdateOutcome::Queued(detail) => (wire::AckKind::Queued, String::new(), detail),
        UpdateOutcome::Deleted => (wire::AckKind::Deleted, String::new(), String::new()),
    };
    wire::Ack {
        uid: ack.uid.into(),
        owner_epoch: ack.stamp.epoch,
        version: ack.stamp.version,
        kind: kind.into(),
        resource_version,
        detail,
    }
}

/// Parses the volumes of the node.
///
/// # Errors
/// INVALID_ARGUMENT with the name of the field.
pub(crate) fn volumes(wire: wire::NodeVolumesRequest) -> Result<Volumes, Status> {
    let driver = |driver: wire::CsiDriver| {
        let name = segment("drivers.name", driver.name)?;
        if driver.node_id.is_empty() {
            return Err(invalid("drivers.node_id", "empty"));
        }
        let topology = driver.topology.into_iter().collect();
        let storage_health = driver
            .storage_health
            .map(|health| health.conditions.into_iter().map(storage_condition).collect());
        let (node_id, allocatable) = (driver.node_id, driver.allocatable);
        Ok((name, Driver { node_id, topology, allocatable, storage_health }))
    };
    Ok(Volumes {
        drivers: wire.drivers.into_iter().map(driver).collect::<Result<_, _>>()?,
        removed: wire.removed_drivers.into_iter().collect(),
        in_use: wire.in_use.map(|volumes| volumes.names.into_iter().collect()),
    })
}

fn storage_condition(wire: wire::StorageHealthCondition) -> StorageCondition {
    StorageCondition {
        status: wire.status,
        reason: wire.reason,
        message: wire.message,
        access_mode: wire.access_mode,
        volume_mode: wire.volume_mode,
        last_transition_time: None,
    }
}

/// Converts the volumes of a Node to their message, without a generation.
#[must_use]
pub(crate) fn node_volumes(seen: &LastNode) -> wire::NodeVolumesReply {
    let (metadata, status) = (&seen.node["metadata"], &seen.node["status"]);
    let attached = |volume: &Value| wire::AttachedVolume {
        name: text(volume, "name").to_owned(),
        device_path: text(volume, "devicePath").to_owned(),
    };
    wire::NodeVolumesReply {
        resource_version: text(metadata, "resourceVersion").to_owned(),
        volumes_in_use: list(status, "volumesInUse")
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect(),
        volumes_attached: list(status, "volumesAttached").iter().map(attached).collect(),
        ..wire::NodeVolumesReply::default()
    }
}

/// Parses a JSON object. No bytes are an empty object.
///
/// # Errors
/// INVALID_ARGUMENT with the name of the field.
pub(crate) fn object(field: &str, bytes: &[u8]) -> Result<Value, Status> {
    if bytes.is_empty() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    let value: Value = serde_json::from_slice(bytes).map_err(|e| invalid(field, &e.to_string()))?;
    if value.is_object() { Ok(value) } else { Err(invalid(field, "not a JSON object")) }
}

/// Validates a name for use in a URL path.
///
/// # Errors
/// INVALID_ARGUMENT with the name of the field.
pub(crate) fn segment(field: &str, text: String) -> Result<String, Status> {
    let ok = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b':');
    if text.is_empty() || text.len() > 253 || text.starts_with('.') || !text.bytes().all(ok) {
        return Err(invalid(field, "not a name of an object"));
    }
    Ok(text)
}

fn invalid(field: &str, problem: &str) -> Status {
    Status::invalid_argument(format!("{field}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_fields_are_named() {
        let good = wire::PodStatusUpdate {
            uid: "u".into(),
            name: "web".into(),
            namespace: "default".into(),
            desired_status: b"{}".to_vec(),
            base_resource_version: "17".into(),
            ..Default::default()
        };
        assert_eq!(update(good.clone(), None).unwrap().base_version, 17);
        let cases: [(&str, wire::PodStatusUpdate); 5] = [
            ("update.uid", wire::PodStatusUpdate { uid: "../x".into(), ..good.clone() }),
            ("update.name", wire::PodStatusUpdate { name: "a/b".into(), ..good.clone() }),
            ("update.namespace", wire::PodStatusUpdate { namespace: "..".into(), ..good.clone() }),
            (
                "update.desired_status",
                wire::PodStatusUpdate { desired_status: b"[]".to_vec(), ..good.clone() },
            ),
            ("update.base_status", wire::PodStatusUpdate { base_status: b"{".to_vec(), ..good }),
        ];
        for (field, bad) in cases {
            let error = update(bad, None).unwrap_err();
            assert!(error.message().starts_with(field), "{error}");
        }
    }
    #[test]
    fn bad_drivers_are_named() {
        let driver = |name: &str, node_id: &str| wire::CsiDriver {
            name: name.into(),
            node_id: node_id.into(),
            ..Default::default()
        };
        let request = |driver| wire::NodeVolumesRequest { drivers: vec![driver], ..Default::default() };
        assert_eq!(volumes(request(driver("d.csi", "n"))).unwrap().drivers["d.csi"].node_id, "n");
        for (field, bad) in [("drivers.name", driver("../x", "n")), ("drivers.node_id", driver("d", ""))] {
            let error = volumes(request(bad)).unwrap_err();
            assert!(error.message().starts_with(field), "{error}");
        }
    }
}
