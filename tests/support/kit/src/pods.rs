//! Pods and runtime states for tests of decisions.
#![allow(clippy::unwrap_used, reason = "data of a test that does not parse is a mistake in that test")]

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::{ContainerId, PodRef, PodUid, SandboxId};
use quintlet_model::labels;
use quintlet_model::runtime::{Container, ContainerState, Cursor, PodRuntime, Sandbox, SandboxState};
use serde_json::{Value, json};

/// Returns 2026-01-01T00:00:00Z plus `seconds`.
pub fn at(seconds: i64) -> jiff::Timestamp {
    jiff::Timestamp::from_second(1_767_225_600 + seconds).unwrap()
}

/// Like [`at`], as a time of the API.
pub fn time(seconds: i64) -> Time {
    Time(at(seconds))
}

/// Returns a pod `web` in `default` with this spec, as from the API server.
pub fn pod_json(spec: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default", "uid": "u1", "generation": 1,
            "annotations": {"kubernetes.io/config.source": "api"}},
        "spec": spec,
    }))
    .unwrap()
}

/// Like [`pod_json`], with the defaults that CRI configurations rely on.
pub fn pod_of(mut spec: Value) -> Pod {
    if spec.get("enableServiceLinks").is_none() {
        spec["enableServiceLinks"] = json!(true);
    }
    if spec.get("securityContext").is_none() {
        spec["securityContext"] = json!({});
    }
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default", "uid": "u1",
            "annotations": {"kubernetes.io/config.source": "api"}},
        "spec": spec,
    }))
    .unwrap()
}

/// Parses the status of a pod.
pub fn status_json(status: Value) -> PodStatus {
    serde_json::from_value(status).unwrap()
}

/// Builds a runtime state; each container call adds a newer instance.
#[derive(Clone)]
pub struct RuntimeBuilder {
    runtime: PodRuntime,
    clock: i64,
}

impl RuntimeBuilder {
    /// Starts with a pod that does not exist in the runtime.
    pub fn none() -> Self {
        let pod =
            PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() };
        Self { runtime: PodRuntime::empty(pod, Cursor::default(), Duration::ZERO), clock: 0 }
    }

    /// Starts with one ready sandbox that has an address.
    pub fn ready() -> Self {
        Self::none().sandbox(SandboxState::Ready)
    }

    /// Adds a sandbox, which is the newest.
    pub fn sandbox(mut self, state: SandboxState) -> Self {
        self.clock += 1;
        let attempt = u32::try_from(self.runtime.sandboxes.len()).unwrap();
        self.runtime.sandboxes.push(Sandbox {
            id: SandboxId::parse(&format!("s{attempt}")).unwrap(),
            attempt,
            state,
            created_unix_ns: self.clock,
            ips: vec!["10.0.0.5".parse().unwrap()],
            has_network: true,
            host_network: false,
            runtime_handler: String::new(),
            labels: Default::default(),
            annotations: Default::default(),
        });
        self
    }

    /// Changes the newest sandbox.
    pub fn edit_sandbox(mut self, edit: impl FnOnce(&mut Sandbox)) -> Self {
        edit(self.runtime.sandboxes.last_mut().unwrap());
        self
    }

    /// Adds an instance of a container to the newest sandbox.
    pub fn add(mut self, name: &str, state: ContainerState, exit_code: i32) -> Self {
        self.clock += 1;
        let attempt = u32::try_from(self.runtime.instances(name).count()).unwrap();
        let base = at(0).as_nanosecond() as i64;
        let (started, finished) = match state {
            ContainerState::Created => (0, 0),
            ContainerState::Running => (base + self.clock * 1_000_000_000, 0),
            ContainerState::Exited | ContainerState::Unknown => {
                (base + self.clock * 1_000_000_000, base + self.clock * 1_000_000_000 + 500_000_000)
            }
        };
        self.runtime.containers.push(Container {
            id: ContainerId::parse(&format!("{name}-{attempt}")).unwrap(),
            sandbox_id: self
                .runtime
                .sandboxes
                .last()
                .map_or_else(|| SandboxId::parse("gone").unwrap(), |s| s.id.clone()),
            name: name.to_owned(),
            attempt,
            state,
            created_unix_ns: self.clock,
            started_unix_ns: started,
            finished_unix_ns: finished,
            exit_code,
            reason: match (state, exit_code) {
                (ContainerState::Exited, 0) => "Completed".to_owned(),
                (ContainerState::Exited, _) => "Error".to_owned(),
                _ => String::new(),
            },
            message: String::new(),
            image: "i".to_owned(),
            image_ref: "i@sha256:1".to_owned(),
            image_id: "sha256:1".to_owned(),
            log_path: String::new(),
            labels: Default::default(),
            annotations: [
                (labels::CONTAINER_HASH.to_owned(), container_hash(name, "i")),
                (labels::RESTART_COUNT.to_owned(), attempt.to_string()),
            ]
            .into(),
            mounts: Vec::new(),
            resources: None,
            user: None,
            stop_signal: String::new(),
        });
        self
    }

    /// Changes the newest instance.
    pub fn edit(mut self, edit: impl FnOnce(&mut Container)) -> Self {
        edit(self.runtime.containers.last_mut().unwrap());
        self
    }

    /// Adds a running instance.
    pub fn running(self, name: &str) -> Self {
        self.add(name, ContainerState::Running, 0)
    }

    /// Adds an instance that was created but not started.
    pub fn created(self, name: &str) -> Self {
        self.add(name, ContainerState::Created, 0)
    }

    /// Adds an instance whose state is unknown to the runtime.
    pub fn unknown(self, name: &str) -> Self {
        self.add(name, ContainerState::Unknown, 0)
    }

    /// Adds an exited instance.
    pub fn exited(self, name: &str, exit_code: i32) -> Self {
        self.add(name, ContainerState::Exited, exit_code)
    }

    /// Returns the runtime state, newest first.
    pub fn build(mut self) -> PodRuntime {
        self.runtime.sort();
        self.runtime
    }
}

/// Parses the ID of a container.
pub fn id(text: &str) -> ContainerId {
    ContainerId::parse(text).unwrap()
}
