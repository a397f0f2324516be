//! What the runtime says of a pod.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::ids::{ContainerId, PodRef, SandboxId};
use crate::labels;

/// A place in pleg-service's sequence of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Cursor {
    /// Run of pleg-service; later runs have larger epochs.
    pub epoch: u64,
    /// Change within the run.
    pub rev: u64,
}

/// State of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SandboxState {
    /// Its pause process runs.
    Ready,
    /// Stopped.
    NotReady,
}

/// State of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContainerState {
    /// Made, not started.
    Created,
    /// Its process runs.
    Running,
    /// Its process ended.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// One sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Id.
    pub id: SandboxId,
    /// CRI metadata.attempt.
    pub attempt: u32,
    /// State.
    pub state: SandboxState,
    /// Runtime's wall clock, nanoseconds since 1970.
    pub created_unix_ns: i64,
    /// Primary first.
    pub ips: Vec<IpAddr>,
    /// The runtime reported network status at all.
    pub has_network: bool,
    /// Network namespace of the node.
    pub host_network: bool,
    /// Runtime handler.
    pub runtime_handler: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// A mount of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Path inside.
    pub container_path: String,
    /// Path on the node.
    pub host_path: String,
    /// Read only.
    pub readonly: bool,
}

/// Resources as the runtime reports them; 0 is "not reported".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resources {
    /// cpu.shares.
    pub cpu_shares: i64,
    /// Microseconds per period; -1: no limit.
    pub cpu_quota: i64,
    /// Microseconds.
    pub cpu_period: i64,
    /// Bytes.
    pub memory_limit_bytes: i64,
}

/// User a container runs as.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct User {
    /// User id.
    pub uid: i64,
    /// Group id.
    pub gid: i64,
    /// Supplemental groups.
    pub supplemental_groups: Vec<i64>,
}

/// One container instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Id.
    pub id: ContainerId,
    /// Sandbox it belongs to.
    pub sandbox_id: SandboxId,
    /// Name in the pod's spec.
    pub name: String,
    /// CRI metadata.attempt.
    pub attempt: u32,
    /// State.
    pub state: ContainerState,
    /// Runtime's wall clock, nanoseconds since 1970.
    pub created_unix_ns: i64,
    /// 0: never.
    pub started_unix_ns: i64,
    /// 0: not yet.
    pub finished_unix_ns: i64,
    /// Of an exited one.
    pub exit_code: i32,
    /// The runtime's word: Completed, Error, OOMKilled…
    pub reason: String,
    /// The runtime's message.
    pub message: String,
    /// Image as asked for.
    pub image: String,
    /// Image as resolved.
    pub image_ref: String,
    /// Image id, where the runtime has the field.
    pub image_id: String,
    /// Log file on the node.
    pub log_path: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations, the kubelet's among them.
    pub annotations: BTreeMap<String, String>,
    /// Mounts.
    pub mounts: Vec<Mount>,
    /// Resources, if reported.
    pub resources: Option<Resources>,
    /// User, if reported.
    pub user: Option<User>,
}

impl Container {
    /// Hash of the definition it was made from; empty where the annotation is missing.
    #[must_use]
    pub fn hash(&self) -> &str {
        self.annotations.get(labels::CONTAINER_HASH).map(String::as_str).unwrap_or_default()
    }

    /// Restart count it was made with; 0 where the annotation is missing or unreadable.
    #[must_use]
    pub fn restart_count(&self) -> u32 {
        self.annotations.get(labels::RESTART_COUNT).and_then(|v| v.parse().ok()).unwrap_or(0)
    }
}

/// Everything the runtime said of one pod in one inspection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRuntime {
    /// The pod.
    pub pod: PodRef,
    /// Newest first: attempt, creation time, id.
    pub sandboxes: Vec<Sandbox>,
    /// Newest first: attempt, creation time, id.
    pub containers: Vec<Container>,
    /// The last inspection failed with this text; the rest is from the last that succeeded.
    pub error: Option<String>,
    /// CLOCK_BOOTTIME at which the inspection began.
    pub observed: Duration,
    /// Position.
    pub cursor: Cursor,
}

impl PodRuntime {
    /// A pod the runtime knows nothing of.
    #[must_use]
    pub fn empty(pod: PodRef, cursor: Cursor, observed: Duration) -> Self {
        Self { pod, sandboxes: Vec::new(), containers: Vec::new(), error: None, observed, cursor }
    }

    /// Puts sandboxes and containers in their order, newest first. The attempt goes before the creation time: a clock
    /// stepped back must not make a dead instance the newest.
    pub fn sort(&mut self) {
        self.sandboxes.sort_by(|a, b| {
            (b.attempt, b.created_unix_ns).cmp(&(a.attempt, a.created_unix_ns)).then_with(|| a.id.cmp(&b.id))
        });
        self.containers.sort_by(|a, b| {
            (b.attempt, b.created_unix_ns).cmp(&(a.attempt, a.created_unix_ns)).then_with(|| a.id.cmp(&b.id))
        });
    }

    /// The newest sandbox, if it is ready.
    #[must_use]
    pub fn active_sandbox(&self) -> Option<&Sandbox> {
        self.sandboxes.first().filter(|s| s.state == SandboxState::Ready)
    }

    /// Addresses of the active sandbox.
    #[must_use]
    pub fn ips(&self) -> &[IpAddr] {
        self.active_sandbox().map(|s| s.ips.as_slice()).unwrap_or_default()
    }

    /// The newest instance of a container.
    #[must_use]
    pub fn newest(&self, name: &str) -> Option<&Container> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// All instances of a container, newest first.
    pub fn instances<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Container> + 'a {
        self.containers.iter().filter(move |c| c.name == name)
    }

    /// Containers of the active sandbox.
    pub fn active_containers(&self) -> impl Iterator<Item = &Container> {
        let id = self.active_sandbox().map(|s| s.id.clone());
        self.containers.iter().filter(move |c| Some(&c.sandbox_id) == id.as_ref())
    }

    /// No container runs and no sandbox is ready. While the pod cannot be inspected, nobody knows.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.error.is_none()
            && self.containers.iter().all(|c| c.state != ContainerState::Running)
            && self.sandboxes.iter().all(|s| s.state != SandboxState::Ready)
    }

    /// Every id in it, for the next observation.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        self.sandboxes
            .iter()
            .map(|s| s.id.as_str().to_owned())
            .chain(self.containers.iter().map(|c| c.id.as_str().to_owned()))
            .collect()
    }
}

/// Sandboxes and containers of one pod, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// Sandboxes.
    pub sandboxes: BTreeSet<SandboxId>,
    /// Containers, each with its sandbox.
    pub containers: BTreeMap<ContainerId, SandboxId>,
}

impl Known {
    /// Those of a record.
    #[must_use]
    pub fn of(pod: &PodRuntime) -> Self {
        Self {
            sandboxes: pod.sandboxes.iter().map(|s| s.id.clone()).collect(),
            containers: pod.containers.iter().map(|c| (c.id.clone(), c.sandbox_id.clone())).collect(),
        }
    }

    /// These too.
    pub fn add(&mut self, other: &Self) {
        self.sandboxes.extend(other.sandboxes.iter().cloned());
        self.containers.extend(other.containers.iter().map(|(c, s)| (c.clone(), s.clone())));
    }

    /// All ids.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        let sandboxes = self.sandboxes.iter().map(ToString::to_string);
        sandboxes.chain(self.containers.keys().map(ToString::to_string)).collect()
    }
}

/// Shared, since many readers hold one inspection.
pub type SharedPodRuntime = Arc<PodRuntime>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PodUid;

    #[test]
    fn a_pod_that_cannot_be_inspected_is_not_known_to_be_quiet() {
        let uid = PodUid::parse("u").unwrap();
        let pod = PodRef { uid, namespace: "default".into(), name: "web".into() };
        let mut runtime = PodRuntime::empty(pod, Cursor::default(), Duration::ZERO);
        assert!(runtime.is_quiet());
        runtime.error = Some("no answer".to_owned());
        assert!(!runtime.is_quiet());
    }
}
