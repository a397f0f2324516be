//! Stops containers, each after those that it waits for, with their preStop hooks
//! (`pkg/kubelet/kuberuntime: killContainer, killContainersWithSyncResult`).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod};
use parking_lot::Mutex;
use pod_sync_clients::EventType;
use pod_sync_decisions::grace::{self, PodGrace};
use pod_sync_decisions::starts::ContainerKind;
use pod_sync_decisions::waiting::{Hook, Waiting, WaitingFor};
use pod_sync_views as view;
use quintlet_kit::clock;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::outcome::Outcome;
use quintlet_model::runtime::PodRuntime;
use quintlet_model::{labels, pod as pods};
use tokio::sync::watch;

use super::halt::{Halt, RuntimeCall};
use super::hooks::{self, HookError};
use crate::context::StopContext;

/// One container to stop.
pub(super) struct ContainerStop<'a> {
    pub(super) ctx: &'a StopContext,
    /// The pod. Without its spec, the annotations of the container give hook and grace period.
    pub(super) pod: Option<&'a Pod>,
    pub(super) container: Option<&'a Container>,
    pub(super) id: &'a ContainerId,
    pub(super) name: &'a str,
    /// The preStop hook in the annotations of the instance.
    pub(super) recorded_hook: Option<&'a str>,
    pub(super) field_path: String,
    pub(super) message: String,
    pub(super) grace: i64,
    pub(super) ips: &'a [IpAddr],
    /// CLOCK_BOOTTIME of an earlier try, whose hook may have run.
    pub(super) began: Option<Duration>,
    pub(super) hooks: &'a RunningHooks<'a>,
    /// Containers of the pod that have ended by themselves, as far as they are observed during the stop.
    pub(super) ended: Ended,
}

/// The containers of a pod that have ended since its stop began.
pub(super) type Ended = watch::Receiver<HashSet<ContainerId>>;

/// The running preStop hooks of a pod. The view shows the wait for them.
pub(super) struct RunningHooks<'a> {
    ctx: &'a StopContext,
    uid: &'a PodUid,
    // The wait that the view showed before the first hook.
    otherwise: Option<view::Waiting>,
    containers: Mutex<BTreeSet<String>>,
}

impl<'a> RunningHooks<'a> {
    pub(super) fn new(ctx: &'a StopContext, uid: &'a PodUid) -> Self {
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
    /// Runs the preStop hook, then waits for `after`, then stops the container.
    pub(super) async fn run(&self, after: impl Future<Output = ()>) -> Result<(), Halt> {
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
        // An earlier try has most likely sent the request, and spent most of its time in the stop itself: no
        // second request.
        let hook = self.pre_stop().filter(|hook| hook.http_get.is_none() || self.began.is_none());
        if let Some(hook) = hook.filter(|_| self.grace > 0) {
            let limit = clock::seconds(self.grace);
            let id = self.id;
            // A command that did not reach cri-proxy runs when cri-proxy is back. The container stops after
            // it.
            let run = async {
                loop {
                    match hooks::run(ctx, self.pod, self.container, &hook, id, self.ips, self.began).await {
                        Err(HookError::Interrupted(e)) if e.outcome == Outcome::NotDispatched => {
                            tokio::time::sleep(CONNECT_INTERVAL).await;
                        }
                        ran => return ran,
                    }
                }
            };
            self.hooks.begin(self.name);
            let ran = tokio::time::timeout(limit, self.unless_ended(&hook, run)).await;
            self.hooks.end(self.name);
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
            .stop_container(self.id, timeout)
            .await
            .map_err(|e| Halt::of(&e, RuntimeCall::StopContainer))
    }

    fn pre_stop(&self) -> Option<LifecycleHandler> {
        match self.container {
            Some(c) => c.lifecycle.as_ref()?.pre_stop.clone(),
            None => serde_json::from_str(self.recorded_hook?).ok(),
        }
    }

    /// Waits for a hook. A sleep ends with its container, like a command that the runtime ends. With kubelet
    /// 1.36 it does not (`pkg/kubelet/lifecycle: handlerRunner.runSleepHandler`).
    async fn unless_ended(
        &self,
        hook: &LifecycleHandler,
        run: impl Future<Output = Result<(), HookError>>,
    ) -> Result<(), HookError> {
        let is_sleep = hook.exec.is_none() && hook.sleep.is_some();
        let mut ended = self.ended.clone();
        let has_ended = async {
            // Without a sender, the containers are not observed.
            if ended.wait_for(|ended| ended.contains(self.id)).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            ran = run => ran,
            // The sleep has no further effect.
            () = has_ended, if is_sleep => {
                self.ctx.reporting.metrics.operations.sleeps_ended.inc();
                Ok(())
            }
        }
    }
}

/// Returns a container of the spec, and the list that it is in. Only ephemeral containers are in neither of
/// the others.
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

/// Stops the containers of a plan, each after those that it waits for, then all sandboxes.
pub async fn stop_all_containers(
    ctx: &StopContext,
    pod: Option<&Pod>,
    runtime: &PodRuntime,
    plan: &[grace::ContainerStop],
    override_seconds: Option<i64>,
    begun: &BTreeMap<String, Duration>,
) -> Result<(), Halt> {
    let nothing_ended = watch::Sender::default().subscribe();
    stop_observed(ctx, pod, runtime, plan, override_seconds, begun, &nothing_ended).await
}

/// Like [`stop_all_containers`], with the containers that have ended by themselves meanwhile.
pub(super) async fn stop_observed(
    ctx: &StopContext,
    pod: Option<&Pod>,
    runtime: &PodRuntime,
    plan: &[grace::ContainerStop],
    override_seconds: Option<i64>,
    begun: &BTreeMap<String, Duration>,
    ended: &Ended,
) -> Result<(), Halt> {
    let (stopped, _) = watch::channel(HashSet::<ContainerId>::new());
    let hooks = &RunningHooks::new(ctx, &runtime.pod.uid);
    let stops = plan.iter().filter_map(|step| {
        let instance = runtime.containers.iter().find(|c| c.id == step.id)?;
        let (container, kind) = pod.map_or((None, ContainerKind::Regular), |p| find(p, &instance.name));
        let pod_grace = pod.map_or_else(|| PodGrace::of_record(instance), PodGrace::of_pod);
        let stop = ContainerStop {
            ctx,
            pod,
            container,
            id: &instance.id,
            name: &instance.name,
            recorded_hook: instance.annotations.get(labels::PRE_STOP_HANDLER).map(String::as_str),
            field_path: kind.field_path(&instance.name),
            message: format!("Stopping container {}", instance.name),
            grace: grace::container_grace(pod_grace, container, step.reason, override_seconds),
            ips: runtime.ips(),
            began: begun.get(step.id.as_str()).copied(),
            hooks,
            ended: ended.clone(),
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
    // An interrupted stop is repeated with the remaining grace period, which a stop of the sandbox would cut
    // short.
    if let Some(i) = containers.iter().position(|stopped| matches!(stopped, Err(Halt::Interrupted(_)))) {
        return containers.into_iter().nth(i).unwrap_or(Ok(()));
    }
    let sandboxes = join_all(runtime.sandboxes.iter().map(|s| async {
        ctx.runtime.calls.stop_sandbox(&s.id).await.map_err(|e| Halt::of(&e, RuntimeCall::StopSandbox))
    }))
    .await;
    containers.into_iter().chain(sandboxes).collect()
}
