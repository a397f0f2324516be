//! Reads pods and events of the API server.

use std::fmt;
use std::sync::Arc;

use serde_json::Value;

/// Status of a container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerSeen {
    /// ID with its scheme.
    pub id: String,
    /// `restartCount` of the status.
    pub restarts: i64,
    /// Whether the readiness probe passed.
    pub ready: bool,
    /// `running`, `waiting`, `terminated`, or empty.
    pub kind: String,
    /// Reason of the waiting or terminated state.
    pub reason: String,
    /// Message of the waiting or terminated state.
    pub message: String,
    /// Exit code, if it has terminated.
    pub exit_code: Option<i64>,
}

/// A pod at one moment; null if it does not exist.
#[derive(Clone)]
pub struct Seen(pub Arc<Value>);

impl Seen {
    /// Returns the text at a JSON pointer, or an empty one.
    #[must_use]
    pub fn text(&self, pointer: &str) -> &str {
        self.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns `metadata.uid`.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }

    /// Returns `status.phase`.
    #[must_use]
    pub fn phase(&self) -> &str {
        self.text("/status/phase")
    }

    /// Returns whether the pod does not exist.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.0.is_null()
    }

    /// Returns status and last transition time of a condition; empty if it does not exist.
    #[must_use]
    pub fn condition(&self, kind: &str) -> (String, String) {
        let list = self.0.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
        let text = |c: &Value, field: &str| c[field].as_str().unwrap_or_default().to_owned();
        list.filter(|c| c["type"] == kind)
            .map(|c| (text(c, "status"), text(c, "lastTransitionTime")))
            .next()
            .unwrap_or_default()
    }

    /// Returns whether the condition Ready is True.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.condition("Ready").0 == "True"
    }

    /// Returns the status of a container of any kind; empty if there is none.
    #[must_use]
    pub fn container(&self, name: &str) -> ContainerSeen {
        self.containers().find(|c| c["name"] == name).map(container).unwrap_or_default()
    }

    fn containers(&self) -> impl Iterator<Item = &Value> {
        let lists = ["/status/initContainerStatuses", "/status/containerStatuses"];
        lists.into_iter().filter_map(|l| self.0.pointer(l)?.as_array()).flatten()
    }

    /// Returns the sum of all restart counts.
    #[must_use]
    pub fn restarts(&self) -> i64 {
        self.containers().map(|c| container(c).restarts).sum()
    }
}

fn container(c: &Value) -> ContainerSeen {
    let at = |pointer: &str| c.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    let kind = ["running", "waiting", "terminated"].into_iter().find(|k| c["state"][*k].is_object());
    let kind = kind.unwrap_or("none");
    ContainerSeen {
        id: at("/containerID"),
        restarts: c["restartCount"].as_i64().unwrap_or(0),
        ready: c["ready"] == true,
        reason: at(&format!("/state/{kind}/reason")),
        message: at(&format!("/state/{kind}/message")),
        exit_code: c["state"][kind]["exitCode"].as_i64(),
        kind: kind.to_owned(),
    }
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_gone() {
            return f.write_str("no pod");
        }
        let (deleted, status) = (self.text("/metadata/deletionTimestamp"), &self.0["status"]);
        write!(f, "{} {} deleted {deleted:?} {status}", self.text("/metadata/name"), self.uid())
    }
}

/// An Event of the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSeen {
    /// Kind of the involved object.
    pub kind: String,
    /// Reason in CamelCase.
    pub reason: String,
    /// Description for people.
    pub message: String,
    /// Occurrences that the event stands for.
    pub count: i64,
}

impl EventSeen {
    /// Reads an Event.
    #[must_use]
    pub fn of(event: &Value) -> Self {
        let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
        Self {
            kind: text("type"),
            reason: text("reason"),
            message: text("message"),
            count: event["count"].as_i64().unwrap_or(1),
        }
    }
}
