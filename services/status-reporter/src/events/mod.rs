//! Events: their form, correlation, queue and writes.

pub mod correlate;
mod recent;
pub mod recorder;

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::status::normalize::seconds;

/// Component in the source of events.
const COMPONENT: &str = "kubelet";

/// Maximum length of an object's name, in bytes.
const MAX_NAME: usize = 253;

/// An event of an object, before correlation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Occurrence {
    /// Kind of the object: Pod or Node.
    pub kind: String,
    /// Namespace; empty for a cluster-scoped object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// UID of the object. Events of the node get it from [`recorder::Recorder::set_node_uid`].
    pub uid: String,
    /// `resourceVersion` of the object.
    pub resource_version: String,
    /// Field path, as `spec.containers{main}`; empty for the whole object.
    pub field_path: String,
    /// `Normal` or `Warning`.
    pub event_type: String,
    /// Reason in CamelCase, such as `BackOff`.
    pub reason: String,
    /// Description for people.
    pub message: String,
    /// Annotations of the Event object.
    pub annotations: BTreeMap<String, String>,
    /// Time of the occurrence; `None`: when the event is queued.
    pub at: Option<Timestamp>,
}

impl Occurrence {
    /// Creates an event of the node.
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

    /// Returns the namespace of the event, which is `default` for cluster-scoped objects.
    #[must_use]
    pub fn event_namespace(&self) -> &str {
        if self.namespace.is_empty() { "default" } else { &self.namespace }
    }

    /// Returns the v1 Event of the first occurrence, which was `at`
    /// (`client-go/tools/record: recorderImpl.makeEvent`).
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
        let mut metadata = json!({"name": event_name(&self.name, at), "namespace": self.event_namespace()});
        if !self.annotations.is_empty() {
            metadata["annotations"] = json!(self.annotations);
        }
        json!({
            "apiVersion": "v1", "kind": "Event",
            "metadata": metadata,
            "involvedObject": object, "type": self.event_type, "reason": self.reason, "message": self.message,
            "source": {"component": COMPONENT, "host": node},
            "reportingComponent": COMPONENT, "reportingInstance": node,
            "firstTimestamp": time, "lastTimestamp": time, "count": 1,
        })
    }
}

/// Returns `<object>.<nanoseconds in hex>`, or a random name where that is longer than an object's name may
/// be (client-go/tools/internal/events: GenerateEventName).
fn event_name(object: &str, at: Timestamp) -> String {
    let name = format!("{object}.{:x}", at.as_nanosecond());
    if name.len() > MAX_NAME { format!("{:032x}", rand::random::<u128>()) } else { name }
}
