//! The postStart hooks of containers (`pkg/kubelet/kuberuntime: startContainer`).

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod};
use pod_sync_clients::EventType;
use pod_sync_decisions::waiting::{Hook, StartFailure, Waiting};
use quintlet_model::ids::ContainerId;
use quintlet_model::outcome::Outcome;
use quintlet_model::runtime::ContainerState;

use super::container_stop::find;
use super::halt::Halt;
use super::hooks::{HookError, command, run};
use super::pass::Pass;
use super::start::{FailedInstance, FailedStart, NotStarted, Starts};
use super::stop::{Kill, Progress};

/// Waits for a postStart hook, which has no time limit in the kubelet either, or for the end of its pod.
/// Returns none if the pod ends first; the hook is then dropped.
async fn unless_ending<T>(hook: impl Future<Output = T>, ending: impl Future<Output = ()>) -> Option<T> {
    tokio::select! {
        done = hook => Some(done),
        () = ending => None,
    }
}

/// Returns the message of a failed postStart hook, with the text of the kubelet
/// (`pkg/kubelet/lifecycle/handlers.go`).
fn failure_text(hook: &LifecycleHandler, container: &str, pod: &str, error: &str, output: &str) -> String {
    let cause = format!("for Container {container:?} in Pod {pod:?} failed - error: {error}");
    if let Some(exec) = &hook.exec {
        return format!("Exec lifecycle hook ([{}]) {cause}, message: {output:?}", command(exec).join(" "));
    }
    if let Some(get) = &hook.http_get {
        return format!("HTTP lifecycle hook ({}) {cause}", get.path.as_deref().unwrap_or_default());
    }
    format!("Cannot run handler: {error}")
}

impl Starts<'_> {
    /// Runs the postStart hook, or waits for one that an earlier pod-sync started. If the hook fails, the
    /// container is stopped, with its preStop hook
    /// (`pkg/kubelet/kuberuntime: startContainer, killContainer`). The caller records the end of the hook.
    pub(super) async fn post_start(
        &mut self,
        pod: &Pod,
        container: &Container,
        id: &ContainerId,
        ips: &[IpAddr],
        field_path: &str,
    ) -> Result<(), NotStarted> {
        let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else {
            return Ok(());
        };
        self.tracker
            .view
            .meanwhile(Waiting::HookRunning { container: container.name.clone(), hook: Hook::PostStart });
        self.tracker.report_sandbox_ready();
        let now = self.clock.boot();
        let began = self.tracker.record.post_starts.get(id.as_str()).copied().flatten();
        self.tracker.record.update(|record| {
            record.starting.remove(&container.name);
            record.post_starts.insert(id.to_string(), Some(began.unwrap_or(now)));
        });
        // If the pod terminates meanwhile, the runtime ends a command with its container, and a request is
        // dropped.
        let stopping = self.stop_context();
        let ran = run(&stopping, Some(pod), Some(container), hook, id, ips, began);
        let Some(ran) = unless_ending(ran, self.until_ending()).await else { return Err(NotStarted::Ends) };
        let why = match ran {
            Ok(()) => return Ok(()),
            Err(HookError::Interrupted(e)) => {
                // The hook never started: a later pass runs it.
                if e.outcome == Outcome::NotDispatched && began.is_none() {
                    self.tracker.record.update(|record| record.post_starts.insert(id.to_string(), None));
                }
                return Err(Halt::interrupted(&e).into());
            }
            Err(HookError::Failed { error, output }) => {
                failure_text(hook, &container.name, &self.tracker.pod_ref.to_string(), &error, &output)
            }
        };
        self.reporting.events.pod(
            pod,
            EventType::Warning,
            "FailedPostStartHook",
            "PostStartHook failed",
            field_path,
        );
        let instance = (id, container.name.as_str());
        let kill = Kill {
            message: "FailedPostStartHook",
            reason: None,
            override_seconds: None,
            progress: Progress::Hidden,
        };
        // An interrupted stop is repeated with the hook, whose result cri-proxy keeps. The kubelet ignores a
        // refusal.
        if let Err(halt @ (Halt::Interrupted(_) | Halt::NetworkNotReady(_) | Halt::Cancelled)) =
            self.stops().kill_named(pod, instance, ips, kill).await
        {
            return Err(halt.into());
        }
        let reason = StartFailure::PostStartHookError.with_message(why);
        let instance = FailedInstance::HookFailed(id.clone());
        Err(NotStarted::Waits(FailedStart { instance, ..reason.into() }))
    }

    /// Takes wake-ups of any cause. None is lost, since another pass follows each hook.
    async fn until_ending(&self) {
        while !self.is_ending() {
            self.wakeup.notified().await;
        }
    }

    /// Finishes the postStart hooks of containers that an earlier pod-sync started. Returns whether there
    /// were any.
    pub(super) async fn finish_post_starts(&mut self, pass: &Pass) -> Result<bool, Halt> {
        let running = pass.runtime.containers.iter().filter(|c| c.state == ContainerState::Running);
        let owed: Vec<_> = running
            .filter(|c| self.tracker.record.post_starts.contains_key(c.id.as_str()))
            .cloned()
            .collect();
        for instance in &owed {
            let (Some(container), kind) = find(&pass.pod, &instance.name) else {
                self.tracker.record.update(|record| record.post_starts.remove(instance.id.as_str()));
                continue;
            };
            let path = kind.field_path(&instance.name);
            match self.post_start(&pass.pod, container, &instance.id, pass.runtime.ips(), &path).await {
                Ok(()) => {
                    self.tracker.record.update(|record| record.post_starts.remove(instance.id.as_str()));
                }
                Err(NotStarted::Waits(failed)) => self.record_failed_start(container, failed),
                Err(NotStarted::Ends) => return Ok(true),
                Err(NotStarted::Halt(halt)) => return Err(halt),
            }
        }
        Ok(!owed.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pod_sync_clients::ExecOutput;
    use serde_json::json;

    use super::*;
    use crate::worker::hooks::check_output;

    #[tokio::test(start_paused = true)]
    async fn a_post_start_hook_may_take_a_day_and_ends_with_its_pod() {
        let day = Duration::from_secs(24 * 3600);
        let hook = |takes| async move { tokio::time::sleep(takes).await };
        assert_eq!(unless_ending(hook(day), std::future::pending()).await, Some(()));
        let ending = tokio::time::sleep(Duration::from_secs(1));
        assert_eq!(unless_ending(hook(day), ending).await, None);
    }

    #[test]
    fn a_failed_hook_reads_as_with_the_kubelet() {
        let output = ExecOutput { exit_code: 7, stdout: b"out \"x\"\n".to_vec(), stderr: b"err".to_vec() };
        let hook = |v: serde_json::Value| serde_json::from_value::<LifecycleHandler>(v).unwrap();
        let exec = hook(json!({"exec": {"command": ["sh", "-c", "exit 7"]}}));
        let Err(HookError::Failed { error, output }) = check_output(exec.exec.as_ref().unwrap(), output)
        else {
            panic!("it failed")
        };
        assert_eq!(
            failure_text(&exec, "main", "p_ns(uid)", &error, &output),
            r#"Exec lifecycle hook ([sh -c exit 7]) for Container "main" in Pod "p_ns(uid)" failed - error: command 'sh -c exit 7' exited with 7: err, message: "out \"x\"\nerr""#
        );
        let get = hook(json!({"httpGet": {"path": "/x", "port": 1}}));
        assert_eq!(
            failure_text(&get, "main", "p_ns(uid)", "no", ""),
            r#"HTTP lifecycle hook (/x) for Container "main" in Pod "p_ns(uid)" failed - error: no"#
        );
    }
}
