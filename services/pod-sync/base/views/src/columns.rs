//! The columns of `kubectl get pods` (`pkg/printers/internalversion/printers.go: printPod`).

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use quintlet_model::pod;

/// Columns of one pod.
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

/// Returns the columns of a pod with this status. `ends` is whether its source wants the pod to terminate.
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
