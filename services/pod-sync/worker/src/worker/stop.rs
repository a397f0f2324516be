//! Stops containers and pods, and reports what changes meanwhile
//! (`pkg/kubelet/kuberuntime: killContainer, killPodWithSyncResult`).

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::actions::{KillReason, PodActions};
use pod_sync_decisions::grace::{self, PodGrace};
use quintlet_model::ids::ContainerId;
use quintlet_model::runtime::PodRuntime;
use tokio::sync::{Notify, watch};

use super::container_stop::{ContainerStop, RunningHooks, find, stop_observed};
use super::halt::{Halt, RuntimeCall};
use super::pass::Pass;
use super::tracker::Tracker;
use crate::context::StopContext;

/// Time from a change during a stop to its report. A pod whose containers all stop quickly has one status.
const SETTLE: Duration = Duration::from_millis(500);

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

/// The stops of one pod.
pub(super) struct Stops<'a> {
    pub(super) ctx: StopContext,
    pub(super) tracker: &'a mut Tracker,
    /// Wakes the worker.
    pub(super) wakeup: &'a Arc<Notify>,
}

impl Stops<'_> {
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
        let (stopping, uid) = (self.ctx.clone(), self.tracker.pod_ref.uid.clone());
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
        self.tracker.observer.acted();
        stopped
    }

    /// Stops all containers in order, then all sandboxes. Every stop is tried; the first error is returned.
    pub(super) async fn kill_pod(
        &mut self,
        runtime: &PodRuntime,
        override_seconds: Option<i64>,
    ) -> Result<(), Halt> {
        self.kill_planned(
            runtime,
            override_seconds,
            grace::termination_plan(Some(&self.tracker.pod), runtime),
        )
        .await
    }

    async fn kill_planned(
        &mut self,
        runtime: &PodRuntime,
        override_seconds: Option<i64>,
        plan: Vec<grace::ContainerStop>,
    ) -> Result<(), Halt> {
        let pod = Arc::clone(&self.tracker.pod);
        let begun = self.stops_begin(plan.iter().map(|stop| &stop.id));
        let (stopping, ended) = (self.ctx.clone(), watch::Sender::default());
        let seen = ended.subscribe();
        let stops = stop_observed(&stopping, Some(&pod), runtime, &plan, override_seconds, &begun, &seen);
        let result = self.observing(&ended, Progress::Reported, stops).await;
        self.tracker.observer.acted();
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

    /// Waits for `stops` of containers. Meanwhile, reports what changes, as a pass does: a container that has
    /// ended is not ready, and a failed readiness probe counts. kubelet 1.36 reports nothing of the runtime
    /// until all containers have stopped (`pkg/kubelet: SyncTerminatingPod`).
    async fn observing<T>(
        &mut self,
        ended: &watch::Sender<HashSet<ContainerId>>,
        progress: Progress,
        stops: impl Future<Output = T>,
    ) -> T {
        let wakeup = Arc::clone(self.wakeup);
        let mut is_woken = false;
        let reports = async {
            loop {
                wakeup.notified().await;
                is_woken = true;
                if let Some(exited) = self.tracker.observer.newest_exited() {
                    ended.send_if_modified(|known| {
                        let is_new = *known != exited;
                        *known = exited;
                        is_new
                    });
                }
                if progress == Progress::Reported {
                    tokio::time::sleep(SETTLE).await;
                    self.tracker.report_progress().await;
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

    /// Records the start of these stops. Returns the start times of stops that are already in progress, by
    /// container ID.
    fn stops_begin<'a>(
        &mut self,
        ids: impl IntoIterator<Item = &'a ContainerId>,
    ) -> BTreeMap<String, Duration> {
        let now = self.ctx.clock.boot();
        self.tracker.record.update(|record| {
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

    /// Stops the pod for a new sandbox, or because nothing of it is to run.
    pub(super) async fn kill_sandbox(&mut self, pass: &Pass, actions: &PodActions) -> Result<(), Halt> {
        if actions.create_sandbox && actions.sandbox_id.is_some() {
            self.ctx.reporting.events.pod(
                &pass.pod,
                EventType::Normal,
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
                "",
            );
        }
        if pass.runtime.is_quiet() {
            return Ok(());
        }
        let mut plan = grace::termination_plan(Some(&self.tracker.pod), &pass.runtime);
        for stop in &mut plan {
            let failed = actions.failed_probes.iter().find(|(id, _)| *id == stop.id);
            stop.reason = failed.map(|(_, reason)| *reason);
        }
        self.kill_planned(&pass.runtime, None, plan).await
    }

    /// Stops containers, and removes those that a restart of all containers resets.
    pub(super) async fn stop_containers(&mut self, pass: &Pass, actions: &PodActions) -> Result<(), Halt> {
        let (pod, runtime) = (&pass.pod, &pass.runtime);
        for kill in &actions.containers_to_kill {
            self.kill_one(pod, runtime, &kill.id, &kill.message, Some(kill.reason), None).await?;
        }
        for reset in &actions.reset {
            if reset.kill {
                self.kill_one(pod, runtime, &reset.id, "killing", None, Some(0)).await?;
            }
            let removed = self.ctx.runtime.calls.remove_container(&reset.id).await;
            removed.map_err(|e| Halt::of(&e, RuntimeCall::RemoveContainer))?;
        }
        Ok(())
    }
}
