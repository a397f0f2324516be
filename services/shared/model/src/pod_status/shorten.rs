//! Shortens a pod status that the API server does not take.
//!
//! An object of the API server has at most 1.5 MiB (`--max-request-bytes` of etcd), of which the spec may
//! have almost all, and a status repeats parts of the spec. A kubelet tries the same status for ever, and the
//! pod is never deleted.

use std::fmt;

use serde_json::{Map, Value};

use super::{OWNED, text};
use crate::text::shorten;

/// Longest text that [`Part::LongTexts`] leaves, in bytes.
pub const SHORT: usize = 128;

/// The lists of container statuses. Those of regular containers are the last that are left out.
const LISTS: [&str; 3] = ["initContainerStatuses", "ephemeralContainerStatuses", "containerStatuses"];

/// Fields of a container status that repeat the spec or the image.
const REPEATED: [&str; 6] =
    ["allocatedResources", "allocatedResourcesStatus", "resources", "stopSignal", "user", "volumeMounts"];

/// A part of a status that can be left out, together with all parts before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Messages of containers, of the node agent's conditions and of the pod, and names of images: the bytes
    /// after [`SHORT`].
    LongTexts,
    /// Resources, volume mounts, user and stop signal of containers.
    Repeated,
    /// The last termination of each container.
    LastStates,
    /// The messages of containers.
    Messages,
    /// The statuses of init containers and ephemeral containers.
    OtherContainers,
    /// The statuses of all containers.
    Containers,
}

impl Part {
    /// All parts, in the order in which they are left out.
    pub const ALL: [Self; 6] = [
        Self::LongTexts,
        Self::Repeated,
        Self::LastStates,
        Self::Messages,
        Self::OtherContainers,
        Self::Containers,
    ];

    fn leave_out(self, status: &mut Map<String, Value>) {
        match self {
            Self::LongTexts => cut_texts(status),
            Self::Repeated => each_container(status, |container| {
                container.retain(|field, _| !REPEATED.contains(&field.as_str()));
            }),
            Self::LastStates => each_container(status, |container| drop(container.remove("lastState"))),
            Self::Messages => each_container(status, |container| {
                each_state(container, |state| drop(state.remove("message")));
            }),
            Self::OtherContainers => {
                status.remove("initContainerStatuses");
                status.remove("ephemeralContainerStatuses");
            }
            Self::Containers => drop(status.remove("containerStatuses")),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LongTexts => "long messages and names of images",
            Self::Repeated => "resources, volume mounts and users of containers",
            Self::LastStates => "the last states of containers",
            Self::Messages => "the messages of containers",
            Self::OtherContainers => "the statuses of init containers and ephemeral containers",
            Self::Containers => "the statuses of containers",
        })
    }
}

fn each_container(status: &mut Map<String, Value>, mut change: impl FnMut(&mut Map<String, Value>)) {
    for list in LISTS {
        let containers = status.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
        for container in containers.filter_map(Value::as_object_mut) {
            change(container);
        }
    }
}

/// Changes the state and the last state of a container.
fn each_state(container: &mut Map<String, Value>, mut change: impl FnMut(&mut Map<String, Value>)) {
    for field in ["state", "lastState"] {
        let states = container.get_mut(field).and_then(Value::as_object_mut);
        for state in states.into_iter().flat_map(|states| states.values_mut()) {
            if let Some(state) = state.as_object_mut() {
                change(state);
            }
        }
    }
}

fn cut(object: &mut Map<String, Value>, fields: &[&str]) {
    for field in fields {
        if let Some(Value::String(text)) = object.get_mut(*field) {
            shorten(text, SHORT);
        }
    }
}

fn cut_texts(status: &mut Map<String, Value>) {
    cut(status, &["message", "reason"]);
    let conditions = status.get_mut("conditions").and_then(Value::as_array_mut).into_iter().flatten();
    for condition in conditions.filter(|condition| OWNED.contains(&text(condition, "type"))) {
        if let Some(condition) = condition.as_object_mut() {
            cut(condition, &["message", "reason"]);
        }
    }
    each_container(status, |container| {
        cut(container, &["image", "imageID"]);
        each_state(container, |state| cut(state, &["message", "reason"]));
    });
}

/// Counts the bytes that are written.
struct Count(usize);

impl std::io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 = self.0.saturating_add(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the bytes of the JSON of a status.
#[must_use]
pub fn size(status: &Value) -> usize {
    let mut count = Count(0);
    // Neither the writer nor a value fails.
    let _ = serde_json::to_writer(&mut count, status);
    count.0
}

/// Leaves out parts, in the order of [`Part::ALL`], until the JSON of `status` has at most `max` bytes or no
/// part is left. Returns the last part that was left out; none if the status was short enough or has no such
/// part.
pub fn shorten_to(status: &mut Value, max: usize) -> Option<Part> {
    let (mut last, mut before) = (None, size(status));
    for part in Part::ALL {
        if before <= max {
            break;
        }
        if let Some(fields) = status.as_object_mut() {
            part.leave_out(fields);
        }
        let now = size(status);
        if now < before {
            last = Some(part);
        }
        before = now;
    }
    last
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn container(name: &str) -> Value {
        json!({
            "name": name, "image": "i".repeat(500), "imageID": "sha256:1", "ready": false, "restartCount": 1,
            "resources": {"limits": {"cpu": "1"}}, "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "user": {"linux": {"uid": 0, "gid": 0}}, "allocatedResources": {"cpu": "1"},
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "m".repeat(1000)}},
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "t".repeat(1000)}},
        })
    }

    fn status() -> Value {
        json!({
            "phase": "Failed", "reason": "Evicted", "message": "p".repeat(1000), "podIP": "10.0.0.1",
            "conditions": [
                {"type": "Ready", "status": "False", "message": "c".repeat(1000)},
                {"type": "example.com/gate", "status": "True", "message": "g".repeat(1000)},
            ],
            "initContainerStatuses": [container("init")],
            "containerStatuses": [container("main"), container("side")],
        })
    }

    #[test]
    fn parts_are_left_out_in_order_until_the_status_is_short_enough() {
        let mut last = size(&status()) + 1;
        for (at, part) in Part::ALL.into_iter().enumerate() {
            let mut shortened = status();
            assert_eq!(shorten_to(&mut shortened, last - 1), (at > 0).then(|| Part::ALL[at - 1]));
            let before = size(&shortened);
            assert!(before < last, "{part:?}");
            last = before;
        }
        let mut least = status();
        assert_eq!(shorten_to(&mut least, 0), Some(Part::Containers));
        let gate = json!({"type": "example.com/gate", "status": "True", "message": "g".repeat(1000)});
        let ready = json!({"type": "Ready", "status": "False", "message": "c".repeat(SHORT)});
        let want = json!({
            "phase": "Failed", "reason": "Evicted", "message": "p".repeat(SHORT), "podIP": "10.0.0.1",
            "conditions": [ready, gate],
        });
        assert_eq!(least, want, "a condition of another client stays");
    }

    #[test]
    fn each_part_is_of_the_containers() {
        let after = |part: Part| {
            let mut status = status();
            for earlier in Part::ALL.into_iter().filter(|p| *p <= part) {
                earlier.leave_out(status.as_object_mut().unwrap());
            }
            status
        };
        let main = |part| after(part)["containerStatuses"][0].clone();
        let texts = main(Part::LongTexts);
        assert_eq!(texts["image"], "i".repeat(SHORT));
        assert_eq!(texts["state"]["waiting"]["message"], "m".repeat(SHORT));
        assert_eq!(texts["lastState"]["terminated"]["message"], "t".repeat(SHORT));
        assert_eq!(texts["resources"], json!({"limits": {"cpu": "1"}}));
        let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let want = ["image", "imageID", "lastState", "name", "ready", "restartCount", "state"];
        let mut kept = fields(&main(Part::Repeated));
        kept.sort();
        assert_eq!(kept, want);
        assert!(main(Part::LastStates).get("lastState").is_none());
        assert_eq!(main(Part::Messages)["state"], json!({"waiting": {"reason": "CrashLoopBackOff"}}));
        let others = after(Part::OtherContainers);
        assert!(others.get("initContainerStatuses").is_none() && others.get("containerStatuses").is_some());
    }

    #[test]
    fn a_short_status_and_one_without_parts_stay() {
        let mut short = json!({"phase": "Pending", "containerStatuses": [container("main")]});
        let whole = short.clone();
        assert_eq!((shorten_to(&mut short, 10_000), &short), (None, &whole));
        let mut bare = json!({"phase": "Pending"});
        assert_eq!((shorten_to(&mut bare, 3), bare), (None, json!({"phase": "Pending"})));
        assert_eq!(size(&json!({"a": "é"})), r#"{"a":"é"}"#.len());
    }
}
