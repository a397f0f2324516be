//! Converts messages of `quintlet.status.v1` to the types of this crate, and back.

use quintlet_model::ids::PodUid;
use quintlet_proto::common::v1::Trace;
use quintlet_proto::status::v1 as wire;
use serde_json::Value;
use tonic::Status;

use crate::update::{Ack, Stamp, Update, Verdict};

/// Parses an update.
///
/// # Errors
/// INVALID_ARGUMENT with the name of the field.
pub fn update(wire: wire::PodStatusUpdate, trace: Option<Trace>) -> Result<Update, Status> {
    let uid = PodUid::parse(&wire.uid).map_err(|e| invalid("update.uid", &e.to_string()))?;
    Ok(Update {
        uid,
        api_uid: wire.api_uid,
        namespace: segment("update.namespace", wire.namespace)?,
        name: segment("update.name", wire.name)?,
        stamp: Stamp { epoch: wire.owner_epoch, version: wire.version },
        base: object("update.base_status", &wire.base_status)?,
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
pub fn ack(ack: Ack) -> wire::Ack {
    let (kind, resource_version, detail) = match ack.verdict {
        Verdict::Written(rv) => (wire::AckKind::Written, rv, String::new()),
        Verdict::Gone => (wire::AckKind::Gone, String::new(), String::new()),
        Verdict::UidMismatch(detail) => (wire::AckKind::UidMismatch, String::new(), detail),
        Verdict::Refused(detail) => (wire::AckKind::Refused, String::new(), detail),
        Verdict::NoApi => (wire::AckKind::NoApi, String::new(), String::new()),
        Verdict::Queued(detail) => (wire::AckKind::Queued, String::new(), detail),
        Verdict::Deleted => (wire::AckKind::Deleted, String::new(), String::new()),
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

/// Parses a JSON object. No bytes are an empty object.
///
/// # Errors
/// INVALID_ARGUMENT with the name of the field.
pub fn object(field: &str, bytes: &[u8]) -> Result<Value, Status> {
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
pub fn segment(field: &str, text: String) -> Result<String, Status> {
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
}
