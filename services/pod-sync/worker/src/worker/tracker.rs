//! Follows one pod: observes the runtime, computes the status, records it, and publishes it.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_claims::Claims;
use pod_sync_clients::EventType;
use pod_sync_decisions::active::PodStart;
use pod_sync_decisions::conditions::{self, READY, READY_TO_START};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::device_status::add_device_health;
use pod_sync_decisions::probes::{ProbeResults, record_starts};
use pod_sync_decisions::resize::message::resize_message;
use pod_sync_decisions::resize::plan;
use pod_sync_decisions::status::{self, NodeFacts};
use pod_sync_decisions::volume_health::add_volume_health;
use pod_sync_decisions::waiting::Waiting;
use pod_sync_devices::Devices;
use pod_sync_layout::RuntimeState;
use pod_sync_records::{PodRecord, Termination};
use pod_sync_volume_manager::VolumeTasks;
use quintlet_kit::clock::Clock;
use quintlet_kit::failpoint;
use quintlet_model::ids::PodRef;
use quintlet_model::probe::{ProbeResult, ProbeType};
use quintlet_model::runtime::{PodRuntime, SharedPodRuntime};
use quintlet_model::{labels, pod as pods};
use tokio::sync::watch;

use super::halt::Halt;
use super::observe::{NotObserved, Observer};
use super::pass::{Findings, Pass, changed_memories};
use super::probes::PodProbes;
use super::record::RecordFile;
use super::report::{Reporter, StatusReport};
use super::view::{Shown, ViewPublisher};
use crate::context::{Checkpoints, Desired, NodeConfig, Reporting, WorkerContext};

/// The state of one pod: the desired pod, its record, and the parts that observe and report it.
pub(super) struct Tracker {
    clock: Clock,
    node: Arc<NodeConfig>,
    reporting: Arc<Reporting>,
    checkpoints: Arc<Checkpoints>,
    runtime: watch::Receiver<RuntimeState>,
    // `None` if statuses do not have the health of devices.
    devices: Option<(Devices, Claims)>,
    // `None` if statuses do not have the health of volumes.
    volumes: Option<VolumeTasks>,
    pub(super) pod_ref: PodRef,
    pub(super) desired: watch::Receiver<Desired>,
    /// The desired pod of the current or last pass.
    pub(super) pod: Arc<Pod>,
    pub(super) record: RecordFile,
    pub(super) observer: Observer,
    pub(super) probes: PodProbes,
    pub(super) reporter: Reporter,
    pub(super) view: ViewPublisher,
    // Message on the device plugin for which the pod waits.
    plugin_wait: Option<String>,
    // An earlier process reported a status of the pod.
    was_reported: bool,
    // Probe results of the mirror pod's status were handed to probe-service.
    is_mirror_seeded: bool,
}

impl Tracker {
    /// Follows a pod from its record on.
    pub(super) fn new(
        ctx: &WorkerContext,
        pod_ref: PodRef,
        desired: watch::Receiver<Desired>,
        record: PodRecord,
    ) -> Self {
        let clock = &ctx.clock;
        let (node, reporting) = (&ctx.node, &ctx.reporting);
        let age = clock.boot().saturating_sub(record.accepted);
        let accepted = clock.wall().checked_sub(age).unwrap_or_else(|_| clock.wall());
        let observer =
            Observer::new(clock.clone(), Arc::clone(node), Arc::clone(&ctx.runtime.pleg), pod_ref.clone());
        let probes = PodProbes::new(
            Arc::clone(&ctx.probes),
            Arc::clone(&ctx.probe_rates),
            Arc::clone(node),
            Arc::clone(reporting),
            pod_ref.uid.clone(),
        );
        let reporter = Reporter::new(clock.clone(), Arc::clone(node), Arc::clone(reporting), pod_ref.clone());
        let pod = Arc::clone(&desired.borrow().pod);
        let was_reported = record.status.is_some() && !record.unreported;
        Self {
            record: RecordFile::new(Arc::clone(&ctx.checkpoints), pod_ref.clone(), record),
            observer,
            probes,
            reporter,
            view: ViewPublisher::new(clock.clone(), Arc::clone(reporting), pod_ref.clone(), accepted),
            clock: clock.clone(),
            node: Arc::clone(node),
            reporting: Arc::clone(reporting),
            checkpoints: Arc::clone(&ctx.checkpoints),
            runtime: ctx.runtime.state.clone(),
            devices: ctx
                .node
                .settings
                .device_health
                .then(|| (ctx.environment.devices.clone(), ctx.environment.claims.clone())),
            volumes: ctx.node.settings.volume_health.then(|| ctx.environment.volume_tasks.clone()),
            pod_ref,
            desired,
            pod,
            plugin_wait: None,
            was_reported,
            is_mirror_seeded: false,
        }
    }

    /// Returns the mirror of a static pod that another agent reported: this one, and an earlier process, have
    /// reported no status of it.
    fn adopted_mirror(&self) -> Option<Arc<Pod>> {
        if self.was_reported || self.reporter.has_reported() || !pods::is_static(&self.pod) {
            return None;
        }
        let mirror = self.desired.borrow().mirror.clone()?;
        let hash = pods::annotation(&self.pod, labels::CONFIG_HASH);
        let is_of_pod = pods::annotation(&mirror, labels::CONFIG_MIRROR) == hash && hash.is_some();
        (is_of_pod && mirror.metadata.deletion_timestamp.is_none()).then_some(mirror)
    }

    /// Returns a copy: with one read guard held, a second one would block behind a pod manager that waits to
    /// write.
    pub(super) fn desired(&self) -> Desired {
        self.desired.borrow().clone()
    }

    /// Returns `namespace/name`, for log lines.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.pod_ref.namespace, self.pod_ref.name)
    }

    /// Returns the phase of the worker.
    pub(super) fn phase(&self) -> &'static str {
        match &self.record.termination {
            None => "sync",
            Some(t) if t.finished => "finished",
            Some(t) if t.stopped => "terminated",
            Some(_) => "terminating",
        }
    }

    /// Returns whether the traced operation has ended: the pod is Ready or has terminated.
    pub(super) fn is_settled(&self) -> bool {
        let ready =
            |s: &PodStatus| s.conditions.iter().flatten().any(|c| c.type_ == READY && c.status == "True");
        match &self.record.termination {
            None => self.record.status.as_deref().is_some_and(ready),
            Some(t) => t.finished,
        }
    }

    /// Returns the runtime state of the pod, never older than the last action.
    pub(super) async fn observe(&mut self) -> Result<SharedPodRuntime, Halt> {
        match self.observer.observe().await {
            Ok(runtime) => Ok(runtime),
            Err(NotObserved::Restarted) => Err(Halt::Interrupted("pleg-service was restarted".to_owned())),
            Err(NotObserved::Unavailable(why)) => {
                self.view.wait_for(Waiting::Service { name: "pleg-service" }, None);
                Err(Halt::Interrupted(format!("runtime state cannot be read: {why}")))
            }
            Err(NotObserved::Runtime(why)) => {
                let message = format!("error determining status: {why}");
                self.reporting.events.pod(&self.pod, EventType::Warning, "FailedSync", &message, "");
                Err(Halt::failed(Waiting::Runtime { error: Some(why) }, message))
            }
        }
    }

    /// Begins a pass: observes the runtime and computes the status.
    pub(super) async fn look(&mut self, is_terminal: bool) -> Result<Pass, Halt> {
        let runtime = self.observe().await?;
        let status = self.record.status.as_deref();
        let named = !self.runtime.borrow().name.is_empty() || status.and_then(status::runtime_name).is_some();
        if !named && !runtime.containers.is_empty() {
            return Err(Halt::Interrupted(
                "the runtime's name, a part of container ids, is not known yet".to_owned(),
            ));
        }
        let mirror = self.adopted_mirror();
        if mirror.is_some() && !std::mem::replace(&mut self.is_mirror_seeded, true) {
            self.probes.seed_again();
        }
        let shown = mirror.as_deref().unwrap_or(&self.pod).status.as_ref();
        let status = status.filter(|_| mirror.is_none());
        let known = if failpoint::planted!("ready before its own probe") { shown } else { status.or(shown) };
        self.probes.seed(&self.pod, known, &runtime);
        Ok(self.pass(runtime, is_terminal))
    }

    /// Computes the status from a runtime state and the newest probe results.
    fn pass(&self, runtime: SharedPodRuntime, is_terminal: bool) -> Pass {
        let (wall, boot) = (self.clock.wall(), self.clock.boot());
        let mut container_starts = self.record.container_starts.clone();
        record_starts(&mut container_starts, &runtime.containers, wall, boot);
        let memory = self.probes.memory();
        let mut probes = ProbeResults::default();
        for ((_, probe), memory) in &memory {
            probes.add(*probe, memory);
        }
        if failpoint::planted!("ready without a prober") && !self.probes.has_targets() {
            for container in &runtime.containers {
                probes.set(ProbeType::Readiness, container.id.clone(), ProbeResult::Success);
            }
        }
        let memories = memory.into_iter().map(|((container, probe), memory)| (container, probe, memory));
        let memories = changed_memories(&self.record.probes, memories.collect());
        if self.record.termination.is_none() {
            self.note_resize(&runtime);
        }
        let known = self.record.status.as_deref().or(self.pod.status.as_ref());
        let active = match known.and_then(|s| s.start_time.as_ref()) {
            Some(start) => Some(PodStart::at(start.0, self.record.active, wall, boot)),
            None => self.record.active,
        };
        let status = self.status_of(&runtime, &probes, active, &self.record.waiting, is_terminal);
        let findings = Findings { container_starts, probes: memories, active };
        Pass { pod: Arc::clone(&self.pod), runtime, probes, findings, status }
    }

    /// Records whether a resize is in progress, before the status is computed.
    fn note_resize(&self, runtime: &PodRuntime) {
        let (allocations, uid) = (&self.checkpoints.allocations, &self.pod_ref.uid);
        let actuated = allocations.actuated(uid);
        let generation = self.pod.metadata.generation;
        if plan::in_progress(&self.pod, runtime, actuated.as_ref()) {
            allocations.conditions(uid, |c| c.keep_in_progress(generation, self.clock.wall()));
        } else if let Some(over) = allocations.complete(uid, &self.pod) {
            let message = resize_message("completed", &self.pod, over.observed_generation, "");
            self.reporting.events.pod(&self.pod, EventType::Normal, "ResizeCompleted", &message, "");
        }
    }

    fn status_of(
        &self,
        runtime: &PodRuntime,
        probes: &ProbeResults,
        active: Option<PodStart>,
        waiting: &BTreeMap<String, WaitingReason>,
        is_terminal: bool,
    ) -> PodStatus {
        let handler = runtime.sandboxes.first().map(|s| s.runtime_handler.as_str()).unwrap_or_default();
        let mut status = status::generate(&status::StatusInput {
            pod: &self.pod,
            old: self.record.status.as_deref(),
            runtime,
            probes,
            waiting,
            termination_messages: self.observer.termination_messages(),
            resize: &self.checkpoints.allocations.condition_list(&self.pod_ref.uid),
            actuated: self.checkpoints.allocations.actuated(&self.pod_ref.uid).as_ref(),
            node: &self.node_facts(handler),
            is_terminal,
            now: self.clock.wall(),
            unstepped: self.steady_now(active),
        });
        if let Some(message) = self.plugin_wait.as_deref().filter(|_| self.record.termination.is_none()) {
            conditions::explain_missing_sandbox(&mut status, message);
        }
        if let Some((devices, claims)) = &self.devices {
            let devices = devices.health(&self.pod_ref.uid);
            let claims = claims.pod_health(&self.pod_ref.uid, &self.pod);
            add_device_health(&mut status, self.record.status.as_deref(), &devices, &claims);
        }
        if let Some(volumes) = &self.volumes {
            let old = self.record.status.as_deref().or(self.pod.status.as_ref());
            add_volume_health(&mut status, old, &volumes.health(&self.pod_ref.uid), self.clock.wall());
        }
        match self.adopted_mirror().as_deref().and_then(|mirror| mirror.status.as_ref()) {
            Some(shown) => status::with_times_of(status, shown),
            None => status,
        }
    }

    /// Returns the facts of the node that a pod status shows.
    fn node_facts(&self, handler: &str) -> NodeFacts {
        let runtime = self.runtime.borrow();
        let runtime_name = match runtime.name.as_str() {
            // Before the first answer of the runtime, the scheme of the recorded container ids is used.
            "" => self.record.status.as_deref().and_then(status::runtime_name).unwrap_or_default(),
            name => name.to_owned(),
        };
        NodeFacts {
            runtime_name,
            host_ips: self.node.settings.node_ips.get(),
            recursive_read_only: runtime.handlers.get(handler).is_some_and(|h| h.recursive_read_only_mounts),
            stop_signals: self.node.settings.stop_signals,
        }
    }

    /// Returns the wall time without the steps of the clock since the pod started.
    pub(super) fn steady_now(&self, active: Option<PodStart>) -> jiff::Timestamp {
        active.map_or_else(|| self.clock.wall(), |active| active.now(self.clock.boot()))
    }

    /// Computes the status of a pass again, with other waiting reasons of containers, and reports it. They
    /// are recorded with it, together with the changes of `change`.
    pub(super) fn report_waiting(
        &mut self,
        pass: &mut Pass,
        waiting: &BTreeMap<String, WaitingReason>,
        change: impl FnOnce(&mut PodRecord),
    ) {
        pass.status = self.status_of(&pass.runtime, &pass.probes, pass.findings.active, waiting, false);
        self.report(pass.status.clone(), false, |record| {
            record.waiting.clone_from(waiting);
            change(record);
        });
    }

    /// Hands a new status to status-reporter, after it was recorded together with the changes of `change`.
    pub(super) fn report(&mut self, status: PodStatus, finished: bool, change: impl FnOnce(&mut PodRecord)) {
        let (pod, mirror) = (Arc::clone(&self.pod), self.desired.borrow().mirror.clone());
        self.reporter.report(&mut self.record, StatusReport { pod, mirror, status, finished }, change);
    }

    /// Reports the status of a pass that acts on a pod that is to run. Distributes its probes.
    pub(super) fn report_running(&mut self, pass: &Pass, change: impl FnOnce(&mut PodRecord)) {
        let old = self.record.status.as_deref();
        let is_over =
            |old| status::past_active_deadline(&pass.pod, old, self.steady_now(pass.findings.active));
        let is_shown = |old: &PodStatus| old.reason.as_deref() == Some(status::DEADLINE_EXCEEDED);
        if old.is_some_and(|old| is_over(old) && !is_shown(old)) {
            let (reason, message) = (status::DEADLINE_EXCEEDED, status::DEADLINE_MESSAGE);
            self.reporting.events.pod(&pass.pod, EventType::Normal, reason, message, "");
        }
        self.report(pass.status.clone(), false, |record| {
            pass.findings.record(record);
            change(record);
        });
        self.probes.set_targets(pass, false);
    }

    /// Reports the status of a terminating pod, together with a change of its recorded termination. If the
    /// node killed the pod, phase, reason and message say so, whatever the exit codes of its containers are.
    pub(super) fn report_terminating(&mut self, pass: &Pass, change: impl FnOnce(&mut Termination)) {
        let killed_as = self.record.termination.as_ref().and_then(|t| t.killed_as.as_ref());
        let status = match killed_as {
            Some(why) => status::with_kill_override(&pass.pod, pass.status.clone(), why, self.clock.wall()),
            None => pass.status.clone(),
        };
        self.report(status, false, |record| {
            pass.findings.record(record);
            if let Some(termination) = record.termination.as_mut() {
                change(termination);
            }
        });
    }

    /// Reports PodReadyToStartContainers before an image pull, which may take minutes.
    pub(super) fn report_sandbox_ready(&mut self) {
        let Some(mut status) = self.record.status.as_deref().cloned() else { return };
        if conditions::set_true(&mut status, READY_TO_START, self.clock.wall()) {
            self.report(status, false, |_| {});
        }
    }

    /// Reports the wait for a device plugin in PodReadyToStartContainers. Later statuses have the message,
    /// too, until the wait ends with `None`.
    pub(super) fn report_plugin_wait(&mut self, message: Option<String>) {
        if self.plugin_wait == message {
            return;
        }
        self.plugin_wait = message;
        let Some(message) = self.plugin_wait.as_deref() else { return };
        let Some(mut status) = self.record.status.as_deref().cloned() else { return };
        if conditions::explain_missing_sandbox(&mut status, message) {
            self.report(status, false, |_| {});
        }
    }

    /// Reports the health of volumes that cannot be mounted, while the pod waits for them.
    pub(super) fn report_volume_health(&mut self) {
        let (Some(volumes), Some(old)) = (&self.volumes, self.record.status.as_deref()) else { return };
        let mut status = old.clone();
        add_volume_health(&mut status, Some(old), &volumes.health(&self.pod_ref.uid), self.clock.wall());
        if status.volume_health != old.volume_health {
            self.report(status, false, |_| {});
        }
    }

    /// Reports and publishes what has changed in the middle of a step.
    pub(super) async fn report_progress(&mut self) {
        let Some(runtime) = self.observer.newest() else { return };
        self.observer.take_over(&runtime).await;
        let pass = self.pass(runtime, false);
        self.report_terminating(&pass, |_| {});
        self.probes.set_targets(&pass, self.record.termination.is_some());
        let shown = self.shown();
        self.view.publish_progress(shown);
    }

    /// Publishes the view of the pod.
    pub(super) fn show(&mut self, is_between_passes: bool) {
        let shown = self.shown();
        self.view.publish(shown, is_between_passes);
    }

    fn shown(&self) -> Shown {
        Shown {
            desired: self.desired(),
            pod: Arc::clone(&self.pod),
            status: self.record.status.clone(),
            worker: self.phase(),
        }
    }

    /// Adds to the view what is wrong with a pod that has nothing to do: the answer of an API server that
    /// declines its status, unless the wait of a finished pod has it, and the probes that do not run.
    pub(super) fn explain_errors(&mut self) {
        let is_finished = self.record.termination.as_ref().is_some_and(|t| t.finished);
        if !is_finished && let Some(answer) = self.reporter.declined() {
            self.view.add_error(format!("failed to write the status: {answer}"));
        }
        for error in self.probes.errors() {
            self.view.add_error(error);
        }
    }
}
