//! Runs lifecycle hooks: exec, httpGet, sleep (`pkg/kubelet/lifecycle`).

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ExecAction, LifecycleHandler, Pod};
use pod_sync_clients::{CallError, EventType, ExecOutput};
use quintlet_kit::clock;
use quintlet_model::ids::ContainerId;
use quintlet_model::text::HOOK_OUTPUT;

use super::hook_http::{self, Sent};
use crate::context::StopContext;

/// The error of a hook.
#[derive(Debug)]
pub(super) enum HookError {
    Failed {
        /// Error text.
        error: String,
        /// Output of the command, stdout first.
        output: String,
    },
    /// The call was interrupted: whether the hook ran is unknown, and the pod is not at fault.
    Interrupted(CallError),
}

impl HookError {
    fn failed(error: impl Into<String>) -> Self {
        Self::Failed { error: error.into(), output: String::new() }
    }
}

/// Runs one hook to its end. `began` (CLOCK_BOOTTIME) is given if an earlier pod-sync recorded the start of
/// the hook and not its end: the hook may have run, may be running, or may never have started.
///
/// - A command runs once: cri-proxy knows which of the three holds. If cri-proxy was restarted, too, the
///   command is taken as started, since it runs on without its callers.
/// - An HTTP request is sent again. Kubernetes promises at-least-once delivery of hooks.
/// - A sleep lasts for the rest of its time.
///
/// # Errors
/// The hook failed, or its call was interrupted.
pub(super) async fn run(
    ctx: &StopContext,
    pod: Option<&Pod>,
    container: Option<&Container>,
    hook: &LifecycleHandler,
    id: &ContainerId,
    ips: &[IpAddr],
    began: Option<Duration>,
) -> Result<(), HookError> {
    if let Some(exec) = &hook.exec {
        let output = match began {
            None => ctx.runtime.calls.exec(id, &command(exec), None).await.map(Some),
            Some(began) => ctx.runtime.calls.exec_once(id, &command(exec), began).await,
        };
        return match output {
            Ok(Some(output)) => check_output(exec, output),
            Ok(None) => Ok(()),
            Err(e) if e.is_refused_by_runtime() => Err(failed(&e)),
            Err(e) => Err(HookError::Interrupted(e)),
        };
    }
    if let Some(sleep) = &hook.sleep {
        let slept = began.map_or(Duration::ZERO, |began| ctx.clock.boot().saturating_sub(began));
        tokio::time::sleep(clock::seconds(sleep.seconds).saturating_sub(slept)).await;
        return Ok(());
    }
    if let Some(get) = &hook.http_get {
        let ip = ips.first().map(ToString::to_string);
        let sent = hook_http::get(get, container, ip).await.map_err(HookError::failed)?;
        if let Sent::Plain(host) = sent {
            ctx.reporting.metrics.http_fallbacks.inc();
            if let Some(pod) = pod {
                let text = format!(
                    "request to HTTPS lifecycle hook {host} got HTTP response, retry with HTTP succeeded"
                );
                ctx.reporting.events.pod(pod, EventType::Warning, "LifecycleHTTPFallback", &text, "");
            }
        }
        return Ok(());
    }
    Err(HookError::failed("invalid handler"))
}

pub(super) fn command(exec: &ExecAction) -> Vec<String> {
    exec.command.clone().unwrap_or_default()
}

fn failed(e: &CallError) -> HookError {
    HookError::failed(e.to_string())
}

pub(super) fn check_output(exec: &ExecAction, output: ExecOutput) -> Result<(), HookError> {
    if output.exit_code == 0 {
        return Ok(());
    }
    let shown = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(HOOK_OUTPUT)]).into_owned();
    let (words, stderr) = (command(exec).join(" "), shown(&output.stderr));
    let error = format!("command '{words}' exited with {}: {stderr}", output.exit_code);
    Err(HookError::Failed { error, output: shown(&[output.stdout, output.stderr].concat()) })
}
