//! Events: made, correlated, queued and written.

pub mod correlate;
pub mod recorder;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::status::normalize::seconds;

/// Component in the source of every event.
const COMPONENT: &str = "kubelet";

/// What happened to which object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Occurrence {
    /// Pod or Node.
    pub kind: String,
    /// Empty for cluster scope.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// UID; empty for nodes.
    pub uid: String,
    /// Version of the object.
    pub resource_version: String,
    /// `spec.containers{main}`; empty for the whole object.
    pub field_path: String,
    /// Normal or Warning.
    pub event_type: String,
    /// One word.
    pub reason: String,
    /// One sentence.
    pub message: String,
}

impl Occurrence {
    /// Something about the node.
    #[must_use]
    pub fn of_node(node: &str, event_type: &str, reason: &str, message: String) -> Self {
        Self {
            kind: "Node".to_owned(),
            name: node.to_owned(),
            event_type: event_type.to_owned(),
            reason: reason.to_owned(),
            message,
            ..Self::default()
        }
    }

    /// Events of cluster-scoped objects live in `default`.
    #[must_use]
    pub fn event_namespace(&self) -> &str {
        if self.namespace.is_empty() { "default" } else { &self.namespace }
    }

    /// The v1 Event as first written.
    #[must_use]
    pub fn to_event(&self, node: &str, at: Timestamp) -> Value {
        let time = seconds(at);
        let mut object = json!({"apiVersion": "v1", "kind": self.kind, "name": self.name});
        for (field, text) in [
            ("namespace", &self.namespace),
            ("uid", &self.uid),
            ("resourceVersion", &self.resource_version),
            ("fieldPath", &self.field_path),
        ] {
            if !text.is_empty() {
                object[field] = json!(text);
            }
        }
        json!({
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": event_name(&self.name, at), "namespace": self.event_namespace()},
            "involvedObject": object, "type": self.event_type, "reason": self.reason, "message": self.message,
            "source": {"component": COMPONENT, "host": node},
            "reportingComponent": COMPONENT, "reportingInstance": node,
            "firstTimestamp": time, "lastTimestamp": time, "count": 1,
        })
    }
}

/// `<object>.<nanoseconds in hex>`.
fn event_name(object: &str, at: Timestamp) -> String {
    format!("{object}.{:x}", at.as_nanosecond())
}
