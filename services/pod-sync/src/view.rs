//! A pod as others see it: the columns of `kubectl get pods`, and what `explain` tells.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pod_sync_decisions::waiting::WaitingFor;
use pod_sync_sources::SourceKind;
use quintlet_model::ids::PodRef;
use quintlet_model::pod;
use quintlet_model::runtime::Cursor;

/// What a pod waits for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Waiting {
    /// Reason, one of a fixed list.
    pub reason: String,
    /// Message.
    pub message: String,
    /// Container, empty where it is the pod.
    pub container: String,
    /// Since when, nanoseconds since 1970.
    pub since_unix_ns: i64,
    /// Until when; 0 where that is not known.
    pub until_unix_ns: i64,
}

impl Waiting {
    /// As others see it.
    #[must_use]
    pub fn of(wait: &WaitingFor, now: jiff::Timestamp) -> Self {
        Self {
            reason: wait.what.reason().to_owned(),
            message: wait.what.message(),
            container: wait.what.container().unwrap_or_default().to_owned(),
            since_unix_ns: unix_ns(wait.since.unwrap_or(now)),
            until_unix_ns: wait.until.map_or(0, unix_ns),
        }
    }
}

pub(crate) fn unix_ns(t: jiff::Timestamp) -> i64 {
    i64::try_from(t.as_nanosecond()).unwrap_or(i64::MAX)
}

/// What the last pass decided and saw.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// In words.
    pub lines: Vec<String>,
    /// When, nanoseconds since 1970.
    pub at_unix_ns: i64,
    /// The runtime state it saw.
    pub saw: Cursor,
    /// How old that was, milliseconds.
    pub age_ms: f64,
    /// Errors of the last pass.
    pub errors: Vec<String>,
    /// Trace of the last pass that did something.
    pub trace_id: String,
}

/// A pod as others see it.
#[derive(Debug, Clone)]
pub struct View {
    /// Names.
    pub pod_ref: PodRef,
    /// Source.
    pub source: SourceKind,
    /// As its worker has it: what it asks for, or was allocated.
    pub pod: Arc<Pod>,
    /// The newest status; none for the pod's own.
    pub status: Option<Arc<PodStatus>>,
    /// Its source wants its end since then.
    pub deletion: Option<Time>,
    /// Phase of the worker: sync, terminating, terminated, finished; empty before it has one.
    pub worker: &'static str,
    /// Its source no longer has it.
    pub is_removed: bool,
    /// What it waits for.
    pub waiting: Option<Waiting>,
    /// Last decision.
    pub decision: Arc<Decision>,
    /// Wall time the pod was accepted, nanoseconds since 1970.
    pub created_unix_ns: i64,
    /// resourceVersion of the status that was last written to the API server; empty where none was.
    pub resource_version: String,
    /// UID of the API server's copy of a static pod; empty where there is none.
    pub mirror_uid: String,
    /// Number of the change.
    pub version: u64,
}

impl View {
    /// The newest status, empty where there is none.
    #[must_use]
    pub fn status(&self) -> PodStatus {
        self.status.as_deref().or(self.pod.status.as_ref()).cloned().unwrap_or_default()
    }

    /// The pod as others are to see it.
    #[must_use]
    pub fn object(&self) -> Pod {
        let mut pod = (*self.pod).clone();
        if let Some(status) = &self.status {
            pod.status = Some((**status).clone());
        }
        pod.metadata.deletion_timestamp.clone_from(&self.deletion);
        pod
    }
}

/// Columns of a pod as kubectl prints them (pkg/printers/internalversion/printers.go: printPod).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// `1/2`.
    pub ready: String,
    /// `Running`, `CrashLoopBackOff`, `Init:0/1`…
    pub status: String,
    /// Restarts of regular containers and sidecars.
    pub restarts: u32,
    /// When the last restarted instance ended, nanoseconds since 1970; 0 for never.
    pub last_restart_unix_ns: i64,
}

/// Makes the columns of a pod with this status, that its source wants to end or not.
#[must_use]
pub fn columns(pod: &Pod, status: &PodStatus, ends: bool) -> Columns {
    let spec = pod::spec(pod);
    let mut out = Columns {
        ready: String::new(),
        status: status
            .reason
            .clone()
            .filter(|r| !r.is_empty())
            .or_else(|| status.phase.clone())
            .unwrap_or_else(|| "Pending".to_owned()),
        restarts: 0,
        last_restart_unix_ns: 0,
    };
    let (mut ready, mut total) = (0, spec.containers.len());
    let mut count = |s: &ContainerStatus| {
        out.restarts = out.restarts.saturating_add(u32::try_from(s.restart_count).unwrap_or(0));
        if let Some(t) =
            s.last_state.as_ref().and_then(|l| l.terminated.as_ref()).and_then(|t| t.finished_at.as_ref())
        {
            let at = i64::try_from(t.0.as_nanosecond()).unwrap_or(0);
            out.last_restart_unix_ns = out.last_restart_unix_ns.max(at);
        }
    };
    let inits = pod::init_containers(pod);
    let mut initializing = false;
    let mut init_word = String::new();
    for (i, c) in inits.iter().enumerate() {
        let s = status.init_container_statuses.iter().flatten().find(|s| s.name == c.name);
        if pod::is_sidecar(c) {
            total = usize::saturating_add(total, 1);
            if let Some(s) = s {
                count(s);
                if s.ready {
                    ready = usize::saturating_add(ready, 1);
                }
                if s.started == Some(true) {
                    continue;
                }
            }
        }
        let state = s.and_then(|s| s.state.as_ref());
        if state.and_then(|s| s.terminated.as_ref()).is_some_and(|t| t.exit_code == 0) {
            continue;
        }
        if !initializing {
            initializing = true;
            init_word = init_status(s, i, inits.len());
        }
    }
    let mut running = false;
    let mut word = None;
    for c in &spec.containers {
        let Some(s) = status.container_statuses.iter().flatten().find(|s| s.name == c.name) else { continue };
        count(s);
        if s.ready {
            ready = usize::saturating_add(ready, 1);
        }
        let state = s.state.clone().unwrap_or_default();
        if let Some(w) = state.waiting.and_then(|w| w.reason).filter(|r| !r.is_empty()) {
            word = Some(w);
        } else if let Some(t) = state.terminated {
            word = Some(match t.reason.filter(|r| !r.is_empty()) {
                Some(reason) => reason,
                None if t.signal.unwrap_or(0) != 0 => format!("Signal:{}", t.signal.unwrap_or(0)),
                None => format!("ExitCode:{}", t.exit_code),
            });
        } else if s.ready && state.running.is_some() {
            running = true;
        }
    }
    let phase_done = pod::is_terminal_phase(status.phase.as_deref());
    if initializing && !phase_done {
        out.status = init_word;
    } else if let Some(word) = word {
        let own = status.reason.as_deref().unwrap_or_default();
        if own.is_empty() {
            out.status = if word == "Completed" && running { "Running".to_owned() } else { word };
        }
    }
    if ends && !phase_done {
        out.status = "Terminating".to_owned();
    }
    out.ready = format!("{ready}/{total}");
    out
}

fn init_status(s: Option<&ContainerStatus>, index: usize, total: usize) -> String {
    let state = s.and_then(|s| s.state.clone()).unwrap_or_default();
    if let Some(t) = state.terminated {
        return match t.reason.filter(|r| !r.is_empty()) {
            Some(reason) => format!("Init:{reason}"),
            None => format!("Init:ExitCode:{}", t.exit_code),
        };
    }
    match state.waiting.and_then(|w| w.reason) {
        Some(reason) if !reason.is_empty() && reason != "PodInitializing" => format!("Init:{reason}"),
        Some(_) | None => format!("Init:{index}/{total}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_read_as_kubectl_prints_them() {
        let run = |spec: serde_json::Value, status: serde_json::Value| {
            let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap();
            let status: PodStatus = serde_json::from_value(status).unwrap();
            let c = columns(&pod, &status, false);
            format!("{} {} {}", c.ready, c.status, c.restarts)
        };
        let one = json!({"containers": [{"name": "a"}]});
        let container = |state: serde_json::Value, ready: bool, restarts: i32| json!({"name": "a", "ready": ready, "restartCount": restarts, "image": "", "imageID": "", "state": state});
        for (status, want) in [
            (json!({"phase": "Pending"}), "0/1 Pending 0"),
            (
                json!({"phase": "Running", "containerStatuses": [container(json!({"running": {}}), true, 2)]}),
                "1/1 Running 2",
            ),
            (
                json!({"phase": "Running", "containerStatuses": [container(json!({"waiting": {"reason": "CrashLoopBackOff"}}), false, 3)]}),
                "0/1 CrashLoopBackOff 3",
            ),
            (
                json!({"phase": "Succeeded", "containerStatuses": [container(json!({"terminated": {"exitCode": 0, "reason": "Completed"}}), false, 0)]}),
                "0/1 Completed 0",
            ),
            (json!({"phase": "Failed", "reason": "Evicted"}), "0/1 Evicted 0"),
        ] {
            assert_eq!(run(one.clone(), status), want);
        }
        let with_init = json!({"containers": [{"name": "a"}], "initContainers": [{"name": "i"}]});
        assert_eq!(run(with_init.clone(), json!({"phase": "Pending"})), "0/1 Init:0/1 0");
        let failed = json!({"phase": "Pending", "initContainerStatuses": [
            {"name": "i", "ready": false, "restartCount": 1, "image": "", "imageID": "", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}]});
        assert_eq!(run(with_init, failed), "0/1 Init:Error 0");
    }
}
