//! Stopping containers and pods (`pkg/kubelet/kuberuntime: killContainer, killPodWithSyncResult`).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod};
use parking_lot::Mutex;
use pod_sync_clients::EventType;
use pod_sync_cri_config::paths;
use pod_sync_decisions::actions::KillReason;
use pod_sync_decisions::grace::{self, PodGrace};
use pod_sync_decisions::waiting::{Hook, Waiting, WaitingFor};
use quintlet_kit::{clock, failpoint, task};
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::outcome::Outcome;
use quintlet_model::runtime::{Container as RuntimeContainer, PodRuntime};
use quintlet_model::{labels, pod as pods};
use tokio::sync::watch;

use super::hooks::{self, HookError};
use super::pending_starts::{ContainerKind, described};
use super::{Halt, Step, Worker, runtime_files};
use crate::context::StopContext;
use pod_sync_views as view;

/// Interval of retries on the socket of cri-proxy.
const RETRY: Duration = Duration::from_millis(100);

/// One container to stop.
struct ContainerStop<'a> {
    ctx: &'a StopContext,
    // None if the spec is lost; the annotations of the container then give hook and grace period.
    pod: Option<&'a Pod>,
    container: Option<&'a Container>,
    instance: &'a RuntimeContainer,
    field_path: String,
    message: String,
    grace: i64,
    ips: &'a [IpAddr],
    // CLOCK_BOOTTIME of an earlier try, whose hook may have run.
    began: Option<Duration>,
    hooks: &'a RunningHooks<'a>,
}

/// The running preStop hooks of a pod. The view shows the wait for them.
struct RunningHooks<'a> {
    ctx: &'a StopContext,
    uid: &'a PodUid,
    // The wait that the view showed before the first hook.
    otherwise: Option<view::Waiting>,
    containers: Mutex<BTreeSet<String>>,
}

impl<'a> RunningHooks<'a> {
    fn new(ctx: &'a StopContext, uid: &'a PodUid) -> Self {
        let otherwise = ctx.reporting.views.get(uid).and_then(|v| v.waiting.clone());
        Self { ctx, uid, otherwise, containers: Mutex::default() }
    }

    fn begin(&self, container: &str) {
        self.containers.lock().insert(container.to_owned());
        self.show();
    }

    fn end(&self, container: &str) {
        self.containers.lock().remove(container);
        self.show();
    }

    fn show(&self) {
        let first = self.containers.lock().first().cloned();
        let Some(container) = first else {
            return self.ctx.reporting.views.set_waiting(self.uid, self.otherwise.clone());
        };
        let what = Waiting::HookRunning { container, hook: Hook::PreStop };
        let wait = WaitingFor { what, since: None, until: None };
        self.ctx.reporting.views.set_waiting(self.uid, Some(view::Waiting::of(&wait, self.ctx.clock.wall())));
    }
}

impl ContainerStop<'_> {
    // Runs the preStop hook, then waits for `after`, then stops the container.
    async fn run(&self, after: impl Future<Output = ()>) -> Result<(), Halt> {
        let ctx = self.ctx;
        let event = |kind, reason: &str, message: &str| {
            if let Some(pod) = self.pod {
                ctx.reporting.events.pod(pod, kind, reason, message, &self.field_path);
            }
        };
        if self.began.is_none() {
            event(EventType::Normal, "Killing", &self.message);
        }
        let began = ctx.clock.boot();
        // An earlier try has most likely sent the request, and spent most of its time in the stop itself: no second request.
        let hook = self.pre_stop().filter(|hook| hook.http_get.is_none() || self.began.is_none());
        if let Some(hook) = hook.filter(|_| self.grace > 0) {
            let limit = clock::seconds(self.grace);
            let id = &self.instance.id;
            // A command that did not reach cri-proxy runs when cri-proxy is back. The container stops after it.
            let run = async {
                loop {
                    match hooks::run(ctx, self.pod, self.container, &hook, id, self.ips, self.began).await {
                        Err(HookError::Interrupted(e)) if e.outcome == Outcome::NotDispatched => {
                            tokio::time::sleep(RETRY).await;
                        }
                        ran => return ran,
                    }
                }
            };
            self.hooks.begin(&self.instance.name);
            let ran = tokio::time::timeout(limit, run).await;
            self.hooks.end(&self.instance.name);
            let failed = match ran {
                Ok(Ok(())) => None,
                Ok(Err(HookError::Failed { error, .. })) => Some(error),
                Ok(Err(HookError::Interrupted(e))) => {
                    tracing::info!(container.id = %id, error = %e, "outcome of preStop hook is unknown");
                    None
                }
                // A command ends with its container, which is a failure. Other hooks have no further outcome.
                Err(_) if hook.exec.is_some() => Some(format!("it did not end within {}s", self.grace)),
                Err(_) => None,
            };
            if let Some(why) = failed {
                tracing::info!(container.id = %id, why, "preStop hook failed");
                event(EventType::Warning, "FailedPreStopHook", "PreStopHook failed");
            }
        }
        let left = |now: Duration| grace::remaining_after(self.grace, now.saturating_sub(began));
        let wait = clock::seconds(left(ctx.clock.boot()));
        // After its grace period, the container stops even if `after` has not ended.
        let _ = tokio::time::timeout(wait, after).await;
        let timeout = grace::stop_timeout(left(ctx.clock.boot()));
        ctx.runtime
            .calls
            .stop_container(&self.instance.id, timeout)
            .await
            .map_err(|e| Halt::of(&e, Step::StopContainer))
    }

    fn pre_stop(&self) -> Option<LifecycleHandler> {
        match self.container {
            Some(c) => c.lifecycle.as_ref()?.pre_stop.clone(),
            None => serde_json::from_str(self.instance.annotations.get(labels::PRE_STOP_HANDLER)?).ok(),
        }
    }
}

pub(super) fn find<'a>(pod: &'a Pod, name: &str) -> (Option<&'a Container>, ContainerKind) {
    let spec = pods::spec(pod);
    if let Some(c) = spec.containers.iter().find(|c| c.name == name) {
        return (Some(c), ContainerKind::Regular);
    }
    match pods::init_containers(pod).iter().find(|c| c.name == name) {
        Some(c) => (Some(c), ContainerKind::Init),
        None => (None, ContainerKind::Ephemeral),
    }
}

impl Worker {
    /// Stops one container. A container that no longer exists counts as stopped.
    pub(super) async fn kill_one(
        &mut self,
        pod: &Pod,
        runtime: &PodRuntime,
        id: &ContainerId,
        message: &str,
        reason: Option<KillReason>,
        override_seconds: Option<i64>,
    ) -> Result<(), Halt> {
        let Some(instance) = runtime.containers.iter().find(|c| c.id == *id) else { return Ok(()) };
        let (container, kind) = find(pod, &instance.name);
        let began = self.stops_begin([id]).remove(id.as_str());
        let stopping = self.ctx.stop_context();
        let stop = ContainerStop {
            ctx: &stopping,
            pod: Some(pod),
            container,
            instance,
            field_path: kind.field_path(&instance.name),
            message: message.to_owned(),
            grace: grace::container_grace(PodGrace::of_pod(pod), container, reason, override_seconds),
            ips: runtime.ips(),
            began,
            hooks: &RunningHooks::new(&stopping, &self.pod_ref.uid),
        };
        let stopped = stop.run(std::future::ready(())).await;
        self.acted();
        stopped
    }

    /// Stops all containers in order, then all sandboxes. Every stop is tried; the first error is returned.
    pub(super) async fn kill_pod(
        &mut self,
        runtime: &PodRuntime,
        override_seconds: Option<i64>,
    ) -> Result<(), Halt> {
        let pod = Arc::clone(&self.pod);
        let plan = grace::termination_plan(Some(&pod), runtime);
        let begun = self.stops_begin(plan.iter().map(|stop| &stop.id));
        let result = stop_all_containers(
            &self.ctx.stop_context(),
            Some(&pod),
            runtime,
            &plan,
            override_seconds,
            &begun,
        )
        .await;
        self.acted();
        if let Err(Halt::Failed { error, .. }) = &result {
            self.ctx.reporting.events.pod(
                &pod,
                EventType::Warning,
                "FailedKillPod",
                &format!("error killing pod: {error}"),
                "",
            );
        }
        result
    }

    // Records the start of these stops. Returns the start times of stops that are already in progress, by container ID.
    fn stops_begin<'a>(
        &mut self,
        ids: impl IntoIterator<Item = &'a ContainerId>,
    ) -> BTreeMap<String, Duration> {
        let now = self.ctx.clock.boot();
        let mut begun = self.record.stops.clone();
        let stops = match self.record.termination.as_mut() {
            Some(termination) => &mut termination.stops,
            None => &mut self.record.stops,
        };
        begun.extend(stops.clone());
        for id in ids {
            if !begun.contains_key(id.as_str()) {
                stops.insert(id.to_string(), now);
            }
        }
        self.save();
        begun
    }

    /// Removes a dead container, and its logs if `with_logs`.
    pub(super) async fn remove_container(
        &self,
        pod: &Pod,
        runtime: &PodRuntime,
        id: &ContainerId,
        with_logs: bool,
    ) -> Result<(), Halt> {
        let Some(instance) = runtime.containers.iter().find(|c| c.id == *id) else { return Ok(()) };
        let log = with_logs.then(|| PathBuf::from(&instance.log_path));
        let logs = paths::pod_log_dir(&self.ctx.node.settings.pod_logs_dir, &self.pod_ref);
        let links = self.ctx.node.container_logs_dir.as_ref();
        let link =
            links.map(|dir| dir.join(paths::legacy_log_name(&self.pod_ref, &instance.name, id.as_str())));
        task::blocking(move || {
            if let Some(log) = log
                && let Err(error) = runtime_files::remove_logs(&logs, &log)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::info!(log = %log.display(), %error, "failed to remove logs of removed container");
            }
            if let Some(link) = link {
                let _ = failpoint::file!("log link removed", || std::fs::remove_file(link));
            }
        })
        .await;
        tracing::debug!(pod = described(pod), container.id = %id, "container removed");
        self.ctx.runtime.calls.remove_container(id).await.map_err(|e| Halt::of(&e, Step::RemoveContainer))
    }
}

/// Stops the containers of a plan, each after those that it waits for, then all sandboxes.
pub async fn stop_all_containers(
    ctx: &StopContext,
    pod: Option<&Pod>,
    runtime: &PodRuntime,
    plan: &[grace::ContainerStop],
    override_seconds: Option<i64>,
    begun: &BTreeMap<String, Duration>,
) -> Result<(), Halt> {
    let (stopped, _) = watch::channel(HashSet::<ContainerId>::new());
    let hooks = &RunningHooks::new(ctx, &runtime.pod.uid);
    let stops = plan.iter().filter_map(|step| {
        let instance = runtime.containers.iter().find(|c| c.id == step.id)?;
        let (container, kind) = pod.map_or((None, ContainerKind::Regular), |p| find(p, &instance.name));
        let of = pod.map_or_else(|| PodGrace::of_record(instance), PodGrace::of_pod);
        let stop = ContainerStop {
            ctx,
            pod,
            container,
            instance,
            field_path: kind.field_path(&instance.name),
            message: format!("Stopping container {}", instance.name),
            grace: grace::container_grace(of, container, None, override_seconds),
            ips: runtime.ips(),
            began: begun.get(step.id.as_str()).copied(),
            hooks,
        };
        let after: HashSet<&str> = step.after.iter().map(String::as_str).collect();
        let waits_for: Vec<ContainerId> =
            plan.iter().filter(|s| after.contains(s.name.as_str())).map(|s| s.id.clone()).collect();
        let mut others = stopped.subscribe();
        let stopped = &stopped;
        Some(async move {
            let after = async move {
                let _ = others.wait_for(|done| waits_for.iter().all(|id| done.contains(id))).await;
            };
            let result = stop.run(after).await;
            // A failed stop never signals: the containers after it wait for their whole grace period.
            if result.is_ok() {
                stopped.send_modify(|done| {
                    done.insert(step.id.clone());
                });
            }
            result
        })
    });
    let containers = join_all(stops).await;
    // An interrupted stop is repeated with the remaining grace period, which a stop of the sandbox would cut short.
    if let Some(i) = containers.iter().position(|stopped| matches!(stopped, Err(Halt::Interrupted(_)))) {
        return containers.into_iter().nth(i).unwrap_or(Ok(()));
    }
    let sandboxes = join_all(runtime.sandboxes.iter().map(|s| async {
        ctx.runtime.calls.stop_sandbox(&s.id).await.map_err(|e| Halt::of(&e, Step::StopSandbox))
    }))
    .await;
    containers.into_iter().chain(sandboxes).collect()
}
