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
use pod_sync_decisions::actions::KillReason;
use pod_sync_decisions::grace::{self, PodGrace};
use pod_sync_decisions::waiting::{Hook, Waiting, WaitingFor};
use pod_sync_layout::paths;
use quintlet_kit::{clock, failpoint, task};
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::outcome::Outcome;
use quintlet_model::runtime::{ContainerState, PodRuntime, SharedPodRuntime};
use quintlet_model::{labels, pod as pods};
use tokio::sync::watch;

use super::hooks::{self, HookError};
use super::pending_starts::{ContainerKind, described};
use super::{Halt, Step, Worker, runtime_files};
use crate::context::StopContext;
use pod_sync_views as view;

/// Time from a change during a stop to its report. A pod whose containers all stop quickly has one status.
const SETTLE: Duration = Duration::from_millis(500);
/// Interval of retries on the socket of cri-proxy.
const RETRY: Duration = Duration::from_millis(100);

/// One container to stop.
struct ContainerStop<'a> {
    ctx: &'a StopContext,
    // None if the spec is lost; the annotations of the container then give hook and grace period.
    pod: Option<&'a Pod>,
    container: Option<&'a Container>,
    id: &'a ContainerId,
    name: &'a str,
    // The preStop hook in the annotations of the instance.
    recorded_hook: Option<&'a str>,
    field_path: String,
    message: String,
    grace: i64,
    ips: &'a [IpAddr],
    // CLOCK_BOOTTIME of an earlier try, whose hook may have run.
    began: Option<Duration>,
    hooks: &'a RunningHooks<'a>,
    // Containers of the pod that have ended by themselves, as far as they are observed during the stop.
    ended: Ended,
}

/// The containers of a pod that have ended since its stop began.
pub(super) type Ended = watch::Receiver<HashSet<ContainerId>>;

/// A stop of one container.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kill<'a> {
    /// Message of the event `Killing`.
    pub(super) message: &'a str,
    pub(super) reason: Option<KillReason>,
    pub(super) override_seconds: Option<i64>,
    pub(super) progress: Progress,
}

/// Whether the status of a pod follows its containers while some of them stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Reported,
    /// A container whose postStart hook failed runs, and must not be shown as ready.
    Hidden,
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
            let id = self.id;
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
            .map_err(|e| Halt::of(&e, Step::StopContainer))
    }

    fn pre_stop(&self) -> Option<LifecycleHandler> {
        match self.container {
            Some(c) => c.lifecycle.as_ref()?.pre_stop.clone(),
            None => serde_json::from_str(self.recorded_hook?).ok(),
        }
    }

    /// Waits for a hook. A sleep ends with its container, like a command that the runtime ends. With kubelet 1.36 it does not
    /// (`pkg/kubelet/lifecycle: handlerRunner.runSleepHandler`).
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
        let kill = Kill { message, reason, override_seconds, progress: Progress::Reported };
        self.kill_named(pod, (id, &instance.name), runtime.ips(), kill).await
    }

    /// Stops a container of the spec, which the runtime state need not show yet.
    pub(super) async fn kill_named(
        &mut self,
        pod: &Pod,
        (id, name): (&ContainerId, &str),
        ips: &[IpAddr],
        kill: Kill<'_>,
    ) -> Result<(), Halt> {
        let Kill { message, reason, override_seconds, progress } = kill;
        let (container, kind) = find(pod, name);
        let began = self.stops_begin([id]).remove(id.as_str());
        let (stopping, uid) = (self.ctx.stop_context(), self.pod_ref.uid.clone());
        let ended = watch::Sender::default();
        let stop = ContainerStop {
            ctx: &stopping,
            pod: Some(pod),
            container,
            id,
            name,
            recorded_hook: None,
            field_path: kind.field_path(name),
            message: message.to_owned(),
            grace: grace::container_grace(PodGrace::of_pod(pod), container, reason, override_seconds),
            ips,
            began,
            hooks: &RunningHooks::new(&stopping, &uid),
            ended: ended.subscribe(),
        };
        let stopped = self.observing(&ended, progress, stop.run(std::future::ready(()))).await;
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
        let (stopping, ended) = (self.ctx.stop_context(), watch::Sender::default());
        let seen = ended.subscribe();
        let stops = stop_observed(&stopping, Some(&pod), runtime, &plan, override_seconds, &begun, &seen);
        let result = self.observing(&ended, Progress::Reported, stops).await;
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

    /// Waits for `stops` of containers. Meanwhile, reports what changes, as a pass does: a container that has ended is not ready,
    /// and a failed readiness probe counts. kubelet 1.36 reports nothing of the runtime until all containers have stopped
    /// (`pkg/kubelet: SyncTerminatingPod`).
    async fn observing<T>(
        &mut self,
        ended: &watch::Sender<HashSet<ContainerId>>,
        progress: Progress,
        stops: impl Future<Output = T>,
    ) -> T {
        let wakeup = Arc::clone(&self.work_loop.wakeup);
        let mut is_woken = false;
        let reports = async {
            loop {
                wakeup.notified().await;
                is_woken = true;
                self.note_ended(ended);
                if progress == Progress::Reported {
                    tokio::time::sleep(SETTLE).await;
                    self.report_progress().await;
                }
            }
        };
        let done = tokio::select! {
            biased;
            done = stops => done,
            // The next pass reports again.
            never = reports => never,
        };
        if is_woken {
            // The wake-up was for the next pass, too.
            wakeup.notify_one();
        }
        done
    }

    // Returns the newest runtime state, unless it is older than the one of the pass.
    fn newest(&self) -> Option<SharedPodRuntime> {
        let runtime = self.ctx.runtime.pleg.get(&self.pod_ref.uid)?;
        let is_older = self.observed.last.as_ref().is_some_and(|last| last.cursor > runtime.cursor);
        (!is_older && runtime.error.is_none()).then_some(runtime)
    }

    fn note_ended(&self, ended: &watch::Sender<HashSet<ContainerId>>) {
        let Some(runtime) = self.newest() else { return };
        let exited = runtime.containers.iter().filter(|c| c.state == ContainerState::Exited);
        let exited: HashSet<ContainerId> = exited.map(|c| c.id.clone()).collect();
        ended.send_if_modified(|known| {
            let is_new = *known != exited;
            *known = exited;
            is_new
        });
    }

    async fn report_progress(&mut self) {
        let Some(runtime) = self.newest() else { return };
        self.observed_now(&runtime).await;
        let pass = self.pass_of(runtime, false);
        self.report_killed(&pass, |_| {});
        self.set_targets(&pass, self.record.termination.is_some());
        self.show_progress();
    }

    // Records the start of these stops. Returns the start times of stops that are already in progress, by container ID.
    fn stops_begin<'a>(
        &mut self,
        ids: impl IntoIterator<Item = &'a ContainerId>,
    ) -> BTreeMap<String, Duration> {
        let now = self.ctx.clock.boot();
        self.record.update(|record| {
            let mut begun = record.stops.clone();
            let stops = match record.termination.as_mut() {
                Some(termination) => &mut termination.stops,
                None => &mut record.stops,
            };
            begun.extend(stops.clone());
            for id in ids {
                if !begun.contains_key(id.as_str()) {
                    stops.insert(id.to_string(), now);
                }
            }
            begun
        })
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
    let nothing_ended = watch::Sender::default().subscribe();
    stop_observed(ctx, pod, runtime, plan, override_seconds, begun, &nothing_ended).await
}

async fn stop_observed(
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
        let of = pod.map_or_else(|| PodGrace::of_record(instance), PodGrace::of_pod);
        let stop = ContainerStop {
            ctx,
            pod,
            container,
            id: &instance.id,
            name: &instance.name,
            recorded_hook: instance.annotations.get(labels::PRE_STOP_HANDLER).map(String::as_str),
            field_path: kind.field_path(&instance.name),
            message: format!("Stopping container {}", instance.name),
            grace: grace::container_grace(of, container, None, override_seconds),
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
