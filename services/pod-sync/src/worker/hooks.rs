//! Lifecycle hooks: exec, HTTP, sleep (pod-sync.md §6.8).

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, LifecycleHandler, Pod};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use quintlet_model::ids::ContainerId;

use super::Worker;
use super::start::NotStarted;
use crate::clients::events::EventType;
use crate::context::Context;
use crate::decide::container_status::WaitingReason;
use crate::decide::grace::{self, PodGrace};

/// A hook over HTTP has no timeout of its own in the kubelet; one that hangs would hold the worker for good.
const HTTP_LIMIT: Duration = Duration::from_secs(300);

/// Runs one hook to its end.
///
/// # Errors
/// Its text: non-zero exit, no connection, no handler.
pub(super) async fn run(
    ctx: &Context,
    pod: Option<&Pod>,
    container: Option<&Container>,
    hook: &LifecycleHandler,
    id: &ContainerId,
    ips: &[IpAddr],
) -> Result<(), String> {
    if let Some(exec) = &hook.exec {
        let command = exec.command.clone().unwrap_or_default();
        let output = ctx.runtime.exec(id, &command, None).await.map_err(|e| e.to_string())?;
        if output.exit_code == 0 {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.output[..output.output.len().min(1024)]).into_owned();
        return Err(format!("command '{}' exited with {}: {said}", command.join(" "), output.exit_code));
    }
    if let Some(sleep) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))).await;
        return Ok(());
    }
    if let Some(get) = &hook.http_get {
        let ip = ips.first().map(ToString::to_string).or_else(|| pod?.status.as_ref()?.pod_ip.clone());
        return http_get(get, container, ip).await;
    }
    Err("invalid handler".to_owned())
}

async fn http_get(
    get: &HTTPGetAction,
    container: Option<&Container>,
    ip: Option<String>,
) -> Result<(), String> {
    let host =
        get.host.clone().filter(|h| !h.is_empty()).or(ip).ok_or("failed to find networking container")?;
    let port = match &get.port {
        IntOrString::Int(n) => u16::try_from(*n).map_err(|_| format!("invalid port number: {n}"))?,
        IntOrString::String(name) => container
            .and_then(|c| c.ports.iter().flatten().find(|p| p.name.as_deref() == Some(name)))
            .and_then(|p| u16::try_from(p.container_port).ok())
            .or_else(|| name.parse().ok())
            .ok_or_else(|| format!("port {name:?} not found"))?,
    };
    if get.scheme.as_deref().is_some_and(|s| s.eq_ignore_ascii_case("https")) {
        return Err("HTTPS hooks are not supported yet".to_owned());
    }
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let path = get.path.as_deref().unwrap_or("/");
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut request = http::Request::get(format!("http://{host}:{port}{slash}{path}"))
        .header("user-agent", "kube-lifecycle/1.36");
    for header in get.http_headers.iter().flatten() {
        request = request.header(&header.name, &header.value);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(|e| e.to_string())?;
    let client = Client::builder(TokioExecutor::new()).build_http();
    // Any answer is a success.
    match tokio::time::timeout(HTTP_LIMIT, client.request(request)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(e)) => Err(quintlet_kit::error_chain(&e)),
        Err(_) => Err("no answer".to_owned()),
    }
}

impl Worker {
    /// Runs postStart; where it fails the container is stopped.
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
        let Err(why) = run(&self.ctx, Some(pod), Some(container), hook, id, ips).await else { return Ok(()) };
        self.ctx.events.pod(
            pod,
            EventType::Warning,
            "FailedPostStartHook",
            "PostStartHook failed",
            field_path,
        );
        self.ctx.events.pod(pod, EventType::Normal, "Killing", "FailedPostStartHook", field_path);
        let seconds =
            grace::stop_timeout(grace::of_container(PodGrace::of_pod(pod), Some(container), None, None));
        let _ = self.ctx.runtime.stop_container(id, seconds).await;
        self.acted();
        Err(NotStarted::Waits(WaitingReason { reason: "PostStartHookError".to_owned(), message: why }))
    }
}
