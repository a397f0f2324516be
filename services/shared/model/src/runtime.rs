//! The state of a pod as the container runtime reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::ids::{ContainerId, PodRef, SandboxId};
use crate::labels;

/// A position in the sequence of changes that pleg-service reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Cursor {
    /// The run of pleg-service. Later runs have larger epochs.
    pub epoch: u64,
    /// Number of the change within the run.
    pub rev: u64,
}

/// The state of a pod sandbox (`runtime.v1.PodSandboxState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SandboxState {
    /// The sandbox is running.
    Ready,
    /// The sandbox is stopped.
    NotReady,
}

/// The state of a container (`runtime.v1.ContainerState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContainerState {
    /// The container is created but not started.
    Created,
    /// The process of the container is running.
    Running,
    /// The process of the container has exited.
    Exited,
    /// The runtime cannot determine the state.
    Unknown,
}

/// A pod sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Id in the runtime.
    pub id: SandboxId,
    /// `metadata.attempt` of the CRI: number of earlier instances.
    pub attempt: u32,
    /// Current state.
    pub state: SandboxState,
    /// Creation time by the runtime's clock, in nanoseconds since the Unix epoch.
    pub created_unix_ns: i64,
    /// Pod addresses, the primary one first.
    pub ips: Vec<IpAddr>,
    /// The runtime reported a network status.
    pub has_network: bool,
    /// The pod uses the node's network namespace.
    pub host_network: bool,
    /// Name of the runtime handler (RuntimeClass); empty for the default.
    pub runtime_handler: String,
    /// Labels, including the kubelet's.
    pub labels: BTreeMap<String, String>,
    /// Annotations, including the kubelet's.
    pub annotations: BTreeMap<String, String>,
}

/// A mount of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Path in the container.
    pub container_path: String,
    /// Path on the node.
    pub host_path: String,
    /// The mount is read-only.
    pub readonly: bool,
}

/// Resource limits as the runtime reports them. 0 means "not reported".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resources {
    /// Relative CPU weight (`cpu.shares` of cgroup v1).
    pub cpu_shares: i64,
    /// CPU time per period in microseconds; -1 means no limit.
    pub cpu_quota: i64,
    /// Length of the CPU period in microseconds.
    pub cpu_period: i64,
    /// Memory limit in bytes.
    pub memory_limit_bytes: i64,
}

/// The user that a container runs as.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct User {
    /// User id.
    pub uid: i64,
    /// Group id.
    pub gid: i64,
    /// IDs of further groups of the process.
    pub supplemental_groups: Vec<i64>,
}

/// A container instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Id in the runtime.
    pub id: ContainerId,
    /// Id of the container's sandbox.
    pub sandbox_id: SandboxId,
    /// Name in the pod's spec.
    pub name: String,
    /// `metadata.attempt` of the CRI: number of earlier instances.
    pub attempt: u32,
    /// Current state.
    pub state: ContainerState,
    /// Creation time by the runtime's clock, in nanoseconds since the Unix epoch.
    pub created_unix_ns: i64,
    /// Start time in nanoseconds since the Unix epoch; 0 if the container was never started.
    pub started_unix_ns: i64,
    /// Exit time in nanoseconds since the Unix epoch; 0 if the container has not exited.
    pub finished_unix_ns: i64,
    /// Exit code of an exited container.
    pub exit_code: i32,
    /// Reason from the runtime: `Completed`, `Error`, `OOMKilled`…
    pub reason: String,
    /// Message from the runtime.
    pub message: String,
    /// Image as requested.
    pub image: String,
    /// Image reference that the runtime resolved, usually a digest.
    pub image_ref: String,
    /// Image id; empty if the runtime does not report it.
    pub image_id: String,
    /// Path of the log file on the node.
    pub log_path: String,
    /// Labels, including the kubelet's.
    pub labels: BTreeMap<String, String>,
    /// Annotations, including the kubelet's.
    pub annotations: BTreeMap<String, String>,
    /// Volume mounts.
    pub mounts: Vec<Mount>,
    /// Resource limits, if reported.
    pub resources: Option<Resources>,
    /// User, if reported.
    pub user: Option<User>,
    /// Signal that stops the container, such as `SIGTERM`; empty if the runtime does not report it.
    pub stop_signal: String,
}

impl Container {
    /// Returns the hash of the container's definition. Empty if the annotation is missing.
    #[must_use]
    pub fn hash(&self) -> &str {
        self.annotations.get(labels::CONTAINER_HASH).map(String::as_str).unwrap_or_default()
    }

    /// Returns the restart count of this instance. 0 if the annotation is missing or invalid.
    #[must_use]
    pub fn restart_count(&self) -> u32 {
        self.annotations.get(labels::RESTART_COUNT).and_then(|v| v.parse().ok()).unwrap_or(0)
    }
}

/// All sandboxes and containers of a pod, from one inspection of the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRuntime {
    /// UID, namespace and name of the pod.
    pub pod: PodRef,
    /// Newest first, ordered by attempt, creation time and id.
    pub sandboxes: Vec<Sandbox>,
    /// Newest first, ordered by attempt, creation time and id.
    pub containers: Vec<Container>,
    /// Error of the last inspection if it failed. The other fields are then those of the last successful
    /// inspection.
    pub error: Option<String>,
    /// Start of the inspection, by CLOCK_BOOTTIME.
    pub observed: Duration,
    /// Position in pleg-service's sequence of changes.
    pub cursor: Cursor,
}

impl PodRuntime {
    /// Returns the state of a pod that has no sandboxes or containers.
    #[must_use]
    pub fn empty(pod: PodRef, cursor: Cursor, observed: Duration) -> Self {
        Self { pod, sandboxes: Vec::new(), containers: Vec::new(), error: None, observed, cursor }
    }

    /// Sorts sandboxes and containers, newest first. The attempt precedes the creation time, so that an old
    /// instance does not become the newest when the clock is set back.
    pub fn sort(&mut self) {
        self.sandboxes.sort_by(|a, b| {
            (b.attempt, b.created_unix_ns).cmp(&(a.attempt, a.created_unix_ns)).then_with(|| a.id.cmp(&b.id))
        });
        self.containers.sort_by(|a, b| {
            (b.attempt, b.created_unix_ns).cmp(&(a.attempt, a.created_unix_ns)).then_with(|| a.id.cmp(&b.id))
        });
    }

    /// Returns the newest sandbox, if it is ready.
    #[must_use]
    pub fn active_sandbox(&self) -> Option<&Sandbox> {
        self.sandboxes.first().filter(|s| s.state == SandboxState::Ready)
    }

    /// Returns the addresses of the active sandbox.
    #[must_use]
    pub fn ips(&self) -> &[IpAddr] {
        self.active_sandbox().map(|s| s.ips.as_slice()).unwrap_or_default()
    }

    /// Returns the newest instance of a container.
    #[must_use]
    pub fn newest(&self, name: &str) -> Option<&Container> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// Returns all instances of a container, newest first.
    pub fn instances<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Container> + 'a {
        self.containers.iter().filter(move |c| c.name == name)
    }

    /// Returns the containers of the active sandbox.
    pub fn active_containers(&self) -> impl Iterator<Item = &Container> {
        let id = self.active_sandbox().map(|s| s.id.clone());
        self.containers.iter().filter(move |c| Some(&c.sandbox_id) == id.as_ref())
    }

    /// Returns whether no container is running and no sandbox is ready. False while the pod cannot be
    /// inspected.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.error.is_none()
            && self.containers.iter().all(|c| c.state != ContainerState::Running)
            && self.sandboxes.iter().all(|s| s.state != SandboxState::Ready)
    }

    /// Returns the ids of all sandboxes and containers.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        self.sandboxes
            .iter()
            .map(|s| s.id.as_str().to_owned())
            .chain(self.containers.iter().map(|c| c.id.as_str().to_owned()))
            .collect()
    }
}

/// Ids of the sandboxes and containers of a pod that a client has seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// Sandboxes by their runtime IDs.
    pub sandboxes: BTreeSet<SandboxId>,
    /// Ids of containers, each with the id of its sandbox.
    pub containers: BTreeMap<ContainerId, SandboxId>,
}

impl Known {
    /// Returns the ids in a pod's state.
    #[must_use]
    pub fn of(pod: &PodRuntime) -> Self {
        Self {
            sandboxes: pod.sandboxes.iter().map(|s| s.id.clone()).collect(),
            containers: pod.containers.iter().map(|c| (c.id.clone(), c.sandbox_id.clone())).collect(),
        }
    }

    /// Adds the ids of `other`.
    pub fn add(&mut self, other: &Self) {
        self.sandboxes.extend(other.sandboxes.iter().cloned());
        self.containers.extend(other.containers.iter().map(|(c, s)| (c.clone(), s.clone())));
    }

    /// Returns the ids of sandboxes and containers as text.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        let sandboxes = self.sandboxes.iter().map(ToString::to_string);
        sandboxes.chain(self.containers.keys().map(ToString::to_string)).collect()
    }
}

/// A shared state of a pod, since many readers hold the same inspection.
pub type SharedPodRuntime = Arc<PodRuntime>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PodUid;

    #[test]
    fn a_pod_that_cannot_be_inspected_does_not_count_as_stopped() {
        let uid = PodUid::parse("u").unwrap();
        let pod = PodRef { uid, namespace: "default".into(), name: "web".into() };
        let mut runtime = PodRuntime::empty(pod, Cursor::default(), Duration::ZERO);
        assert!(runtime.is_quiet());
        runtime.error = Some("no answer".to_owned());
        assert!(!runtime.is_quiet());
    }
}
