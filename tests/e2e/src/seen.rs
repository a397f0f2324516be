//! A pod as shown by pod-sync or the API server.

use std::collections::BTreeMap;
use std::fmt;

use quintlet_proto::podsync::v1::PodView;
use serde_json::Value;

/// Status of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSeen {
    /// ID with its scheme: `containerd://…`.
    pub id: String,
    /// Start time of the instance, if it has started.
    pub started_at: String,
    /// `restartCount` of the status.
    pub restarts: i64,
    /// Whether the readiness probe passed.
    pub ready: bool,
    /// Whether the startup probe passed.
    pub started: bool,
    /// `running`, `waiting: REASON`, or `terminated: REASON`.
    pub state: String,
}

/// The part of a settled pod's status that a fault must not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steady {
    /// `metadata.uid`.
    pub uid: String,
    /// `status.phase`.
    pub phase: String,
    /// Status and last transition time of each condition.
    pub conditions: BTreeMap<String, (String, String)>,
    /// Containers of all kinds, by name.
    pub containers: BTreeMap<String, ContainerSeen>,
}

/// A pod at one moment. Missing fields read as empty.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The pod with its status.
    pub pod: Value,
    /// Fields that only pod-sync shows; default for a pod of the API server.
    pub view: PodView,
}

impl Seen {
    /// Reads a pod of podsync.v1.
    #[must_use]
    pub fn from_view(mut view: PodView) -> Self {
        let pod = serde_json::from_slice(&std::mem::take(&mut view.pod)).unwrap_or_default();
        Self { pod, view }
    }

    /// Reads a pod of the API server.
    #[must_use]
    pub fn from_api(pod: Value) -> Self {
        Self { pod, view: PodView::default() }
    }

    /// Returns `metadata.uid`.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }

    /// Returns `metadata.name`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    /// Returns the text at a JSON pointer, or an empty one.
    #[must_use]
    pub fn text(&self, pointer: &str) -> &str {
        self.pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns `status.phase`.
    #[must_use]
    pub fn phase(&self) -> &str {
        self.text("/status/phase")
    }

    /// Returns the primary IP address.
    #[must_use]
    pub fn ip(&self) -> &str {
        self.text("/status/podIP")
    }

    /// Returns status and last transition time of a condition; empty if it does not exist.
    #[must_use]
    pub fn condition(&self, kind: &str) -> (String, String) {
        self.conditions().remove(kind).unwrap_or_default()
    }

    fn conditions(&self) -> BTreeMap<String, (String, String)> {
        let list = self.pod.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
        list.map(|c| {
            let text = |field: &str| c[field].as_str().unwrap_or_default().to_owned();
            (text("type"), (text("status"), text("lastTransitionTime")))
        })
        .collect()
    }

    /// Returns whether the condition Ready is True.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.condition("Ready").0 == "True"
    }

    /// Returns the containers of all kinds, by name.
    #[must_use]
    pub fn containers(&self) -> BTreeMap<String, ContainerSeen> {
        let lists = ["/status/initContainerStatuses", "/status/containerStatuses"];
        let all = lists.iter().filter_map(|l| self.pod.pointer(l)?.as_array()).flatten();
        all.map(|c| (c["name"].as_str().unwrap_or_default().to_owned(), container(c))).collect()
    }

    /// Returns a container.
    ///
    /// # Panics
    /// The status does not have it.
    #[must_use]
    pub fn container(&self, name: &str) -> ContainerSeen {
        self.containers().remove(name).unwrap_or_else(|| panic!("no container {name} in {self:?}"))
    }

    /// Returns the part that a fault must not change.
    #[must_use]
    pub fn steady(&self) -> Steady {
        Steady {
            uid: self.uid().to_owned(),
            phase: self.phase().to_owned(),
            conditions: self.conditions(),
            containers: self.containers(),
        }
    }

    /// Returns the waiting reason; empty if the pod waits for nothing.
    #[must_use]
    pub fn waits_for(&self) -> &str {
        self.view.waiting.as_ref().map_or("", |w| w.reason.as_str())
    }
}

fn container(c: &Value) -> ContainerSeen {
    let at = |pointer: &str| c.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    let kind = ["running", "waiting", "terminated"].into_iter().find(|k| c["state"][*k].is_object());
    let kind = kind.unwrap_or("none");
    let reason = at(&format!("/state/{kind}/reason"));
    ContainerSeen {
        id: at("/containerID"),
        started_at: at(&format!("/state/{kind}/startedAt")),
        restarts: c["restartCount"].as_i64().unwrap_or(0),
        ready: c["ready"] == true,
        started: c["started"] == true,
        state: if reason.is_empty() { kind.to_owned() } else { format!("{kind}: {reason}") },
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.view.waiting.as_ref();
        write!(
            f,
            "{} {} {} ready {:?} worker {} waits {:?}",
            self.name(),
            self.uid(),
            self.phase(),
            self.condition("Ready"),
            self.view.worker,
            waiting.map(|w| (&w.reason, &w.message)),
        )?;
        for (name, c) in self.containers() {
            write!(
                f,
                "\n    {name}: {} restarts {} ready {} started {} since {} {}",
                c.state, c.restarts, c.ready, c.started, c.started_at, c.id
            )?;
        }
        Ok(())
    }
}
