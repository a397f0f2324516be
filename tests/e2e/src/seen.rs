//! A pod as somebody shows it.

use std::collections::BTreeMap;
use std::fmt;

use quintlet_proto::podsync::v1::PodView;
use serde_json::Value;

/// A container in a pod's status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSeen {
    /// With its scheme: `containerd://…`.
    pub id: String,
    /// When the instance started, for one that runs or has run.
    pub started_at: String,
    /// Restarts.
    pub restarts: i64,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether its startup probe has passed.
    pub started: bool,
    /// running, waiting: REASON, or terminated: REASON.
    pub state: String,
}

/// What a settled pod shows and a fault must not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steady {
    /// UID.
    pub uid: String,
    /// Phase.
    pub phase: String,
    /// Status and last transition of each condition.
    pub conditions: BTreeMap<String, (String, String)>,
    /// Containers of all kinds, by name.
    pub containers: BTreeMap<String, ContainerSeen>,
}

/// A pod at one moment.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The pod, with its status.
    pub pod: Value,
    /// What pod-sync adds; default when the API server showed it.
    pub view: PodView,
}

impl Seen {
    /// As pod-sync shows it.
    #[must_use]
    pub fn from_view(mut view: PodView) -> Self {
        let pod = serde_json::from_slice(&std::mem::take(&mut view.pod)).unwrap_or_default();
        Self { pod, view }
    }

    /// As the API server has it.
    #[must_use]
    pub fn from_api(pod: Value) -> Self {
        Self { pod, view: PodView::default() }
    }

    /// UID.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }

    /// Name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    /// Text at a JSON pointer, empty where there is none.
    #[must_use]
    pub fn text(&self, pointer: &str) -> &str {
        self.pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// Phase.
    #[must_use]
    pub fn phase(&self) -> &str {
        self.text("/status/phase")
    }

    /// First address.
    #[must_use]
    pub fn ip(&self) -> &str {
        self.text("/status/podIP")
    }

    /// Status and last transition of a condition; both empty where it is not there.
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

    /// Whether its condition Ready is true.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.condition("Ready").0 == "True"
    }

    /// Containers of all kinds, by name.
    #[must_use]
    pub fn containers(&self) -> BTreeMap<String, ContainerSeen> {
        let lists = ["/status/initContainerStatuses", "/status/containerStatuses"];
        let all = lists.iter().filter_map(|l| self.pod.pointer(l)?.as_array()).flatten();
        all.map(|c| (c["name"].as_str().unwrap_or_default().to_owned(), container(c))).collect()
    }

    /// One container.
    ///
    /// # Panics
    /// The status has none of this name.
    #[must_use]
    pub fn container(&self, name: &str) -> ContainerSeen {
        self.containers().remove(name).unwrap_or_else(|| panic!("no container {name} in {self:?}"))
    }

    /// What must stay.
    #[must_use]
    pub fn steady(&self) -> Steady {
        Steady {
            uid: self.uid().to_owned(),
            phase: self.phase().to_owned(),
            conditions: self.conditions(),
            containers: self.containers(),
        }
    }

    /// Reason of the wait, empty when it waits for nothing.
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
