//! A pass over a pod that is to run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::EventType;
use quintlet_kit::failpoint;
use quintlet_model::ids::SandboxId;
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};

use pod_sync_decisions::actions::{ActionInput, PodActions, compute_pod_actions};
use pod_sync_decisions::backoff::{self, BackoffDecision, BackoffDelays};
use pod_sync_decisions::conditions::{self, READY_TO_START};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::resize::plan::ResizeActions;
use pod_sync_decisions::sandbox::sandbox_decision;
use pod_sync_decisions::status;
use pod_sync_decisions::sync::{self as decide_sync, SyncGate};
use pod_sync_decisions::unsupported;
use pod_sync_decisions::waiting::{self, StartBackoff, StartBackoffs, StartFailure};
use pod_sync_decisions::worker::Input;
use tracing::{Instrument as _, Span};

use super::{ERROR_WAIT, Halt, Next, Pass, Step, Worker, jitter};
use crate::context::Desired;
use crate::mirror::{MirrorContext, MirrorReconciler};

/// For how long an error is shown before the back-off takes its place: the kubelet's next sync comes with its next relist.
const ERROR_SHOWN: Duration = Duration::from_secs(1);

/// How long a start that failed is left alone (boottime).
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    // Where a container ended by it: from then on the crash-loop back-off has it.
    if_ended: Duration,
    until: Duration,
}

/// Which list of the spec a container stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Init,
    Regular,
    Ephemeral,
}

impl Kind {
    pub(super) fn field_path(self, name: &str) -> String {
        match self {
            Self::Init => format!("spec.initContainers{{{name}}}"),
            Self::Regular => format!("spec.containers{{{name}}}"),
            Self::Ephemeral => format!("spec.ephemeralContainers{{{name}}}"),
        }
    }

    /// What metrics call it.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Init => pod_sync_metrics::INIT,
            Self::Regular => pod_sync_metrics::REGULAR,
            Self::Ephemeral => pod_sync_metrics::EPHEMERAL,
        }
    }
}

impl Worker {
    pub(super) async fn sync(&mut self, desired: &Desired) -> Result<Next, Halt> {
        let mut pass = self.look(false).await?;
        if !self.record.starting.is_empty() && self.forget_cut_starts(&pass).await? {
            return Ok(Next::Again);
        }
        if self.is_past_deadline(&pass) {
            self.ctx.reporting.events.pod(
                &pass.pod,
                EventType::Normal,
                status::DEADLINE_EXCEEDED,
                status::DEADLINE_MESSAGE,
                "",
            );
        }
        self.report(pass.status.clone(), false);
        self.set_targets(&pass, false);
        let network = self.ctx.runtime.state.borrow().network_not_ready.clone();
        let gate = decide_sync::gate(&pass.pod, &pass.status, network.is_none());
        if gate == SyncGate::Terminal {
            return Ok(Next::Advance);
        }
        let restart_all = decide_sync::restarts_all(&pass.status);
        failpoint::work!("actions decided");
        let mut actions = compute_pod_actions(&ActionInput {
            pod: &pass.pod,
            runtime: &pass.runtime,
            probes: &pass.probes,
            actuated: self.ctx.checkpoints.allocations.actuated(&self.pod_ref.uid).as_ref(),
            restart_all,
        });
        let sandbox = sandbox_decision(&pass.pod, &pass.runtime);
        let mut due = self.due(&pass, &actions);
        let held = self.resize_hold.saturating_sub(self.ctx.clock.boot());
        if !held.is_zero() && !actions.resize.is_empty() {
            // It was refused a moment ago.
            actions.resize = ResizeActions::default();
            due.retry = Some(due.retry.map_or(held, |r| r.min(held)));
        }
        if self.record.waiting != due.waiting {
            self.record.waiting.clone_from(&due.waiting);
            pass.status = self.make_status(&pass.runtime, &pass.probes, false);
            self.report(pass.status.clone(), false);
        }
        self.decided(waiting::explain(&pass.pod, &actions, &sandbox, &due.start_backoffs), &pass.runtime);
        self.keep_mirror(desired);
        // What runs no more has nothing to be stopped.
        self.record.stops.retain(|id, _| {
            pass.runtime.containers.iter().any(|c| c.id.as_str() == id && c.state == ContainerState::Running)
        });
        if !self.record.post_starts.is_empty() && self.finish_post_starts(&pass).await? {
            self.acted();
            return Ok(Next::Again);
        }
        if self.leave_lost_cgroup(&pass).await? {
            return Ok(Next::Again);
        }
        if due.is_idle(&actions, &pass.runtime) {
            return self.rest(&pass, &due).await;
        }
        let hold = self.hold_all.saturating_sub(self.ctx.clock.boot());
        if !hold.is_zero() && actions.containers_to_kill.is_empty() {
            self.keep_waiting();
            return Ok(Next::Idle(Some(hold)));
        }
        // Its cgroup driver and what its handlers can do are in every sandbox.
        if actions.create_sandbox && self.ctx.runtime.state.borrow().name.is_empty() {
            self.wait_for(&waiting::Waiting::Runtime { error: None }, None);
            return Err(Halt::Interrupted("the runtime's status has not been read".to_owned()));
        }
        // A pod that already has its network does not need another one (ARCHITECTURE.md, invariant 10).
        if gate == SyncGate::NetworkNotReady && actions.create_sandbox {
            let message = network.unwrap_or_default();
            let text = format!("network is not ready: {message}");
            self.ctx.reporting.events.pod(&pass.pod, EventType::Warning, "NetworkNotReady", &text, "");
            return Err(Halt::NetworkNotReady(message));
        }
        // What it is about to do may hang.
        if let Some(wait) =
            waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, self.ctx.clock.wall())
        {
            self.meanwhile(wait.what);
        }
        // Boxed: most passes do nothing, and a worker must not carry room for the rest.
        self.begin_operation("sync");
        let span = match &self.operation {
            Some(operation) => tracing::info_span!(parent: operation, "act", pod.uid = %self.pod_ref.uid),
            None => Span::none(),
        };
        let acted = Box::pin(self.act(&pass, &actions, &due)).instrument(span).await;
        self.acted();
        if let Err(Halt::Failed { after, .. }) = &acted {
            // What failed rings the bell too; it must not be tried again for that.
            let wait = after.unwrap_or_else(|| jitter(ERROR_WAIT));
            self.hold_all = self.ctx.clock.boot().saturating_add(wait);
            return acted.map(|()| Next::Again).map_err(|halt| halt.after(wait));
        }
        acted?;
        Ok(Next::Again)
    }

    fn is_past_deadline(&self, pass: &Pass) -> bool {
        let old = self.record.status.as_deref();
        old.is_some_and(|old| status::past_active_deadline(&pass.pod, old, self.unstepped()))
            && old.is_some_and(|old| old.reason.as_deref() != Some(status::DEADLINE_EXCEEDED))
    }

    // Nothing to do: until when?
    async fn rest(&mut self, pass: &Pass, due: &Due) -> Result<Next, Halt> {
        let now = self.ctx.clock.wall();
        if let Some(wait) = waiting::from_status(&pass.pod, &pass.status, &due.start_backoffs, now) {
            self.wait_shown(&wait);
        }
        self.refresh_volumes(pass).await;
        self.collect_dead().await?;
        let boot = self.ctx.clock.boot();
        self.record.crash_loop.remove_expired(boot);
        self.record.pulls.remove_expired(boot, BackoffDelays::default());
        let held = due.start_backoffs.values().map(|h| h.remaining).min();
        let deadline = status::until_active_deadline(&pass.pod, &pass.status, self.unstepped());
        Ok(Next::Idle([held, due.retry, deadline].into_iter().flatten().min()))
    }

    // Which of the starts may happen now, and what the others wait with.
    fn due(&mut self, pass: &Pass, actions: &PodActions) -> Due {
        let boot = self.ctx.clock.boot();
        let wall = self.ctx.clock.wall();
        let mut due = Due { waiting: self.record.waiting.clone(), ..Due::default() };
        let ephemeral = ephemeral_containers(&pass.pod);
        let inits = pods::init_containers(&pass.pod);
        let regular = &pods::spec(&pass.pod).containers;
        for (kind, list, indexes) in [
            (Kind::Ephemeral, ephemeral.as_slice(), &actions.ephemeral_containers_to_start),
            (Kind::Init, inits, &actions.init_containers_to_start),
            (Kind::Regular, regular.as_slice(), &actions.containers_to_start),
        ] {
            for &index in indexes {
                let Some(container) = list.get(index) else { continue };
                let held = self.held(pass, &container.name, boot);
                if !held.is_zero() {
                    due.retry = Some(due.retry.map_or(held, |r| r.min(held)));
                    if kind == Kind::Init && !pods::is_sidecar(container) {
                        break;
                    }
                    continue;
                }
                match self.decide(pass, container, boot, wall) {
                    BackoffDecision::Start => match kind {
                        Kind::Ephemeral => due.ephemeral.push(index),
                        Kind::Init => due.init.push(index),
                        Kind::Regular => due.regular.push(index),
                    },
                    BackoffDecision::BackOff { until, delay } => {
                        due.start_backoffs.insert(
                            container.name.clone(),
                            StartBackoff { remaining: until.saturating_sub(boot), delay },
                        );
                        let crash = backoff::last_exit(&pass.runtime, &container.name).is_some();
                        let pull = self.held_by_pull(&pass.pod, container, boot);
                        let own = container.image.clone().unwrap_or_default();
                        if crash && pull.is_none() {
                            let message = backoff::crash_loop_message(delay, &container.name, &self.pod_ref);
                            let entered = due
                                .waiting
                                .get(&container.name)
                                .is_none_or(|w| w.reason != "CrashLoopBackOff" || w.message != message);
                            if entered {
                                let text = format!(
                                    "Back-off restarting failed container {} in pod {}",
                                    container.name, self.pod_ref
                                );
                                self.ctx.reporting.events.pod(
                                    &pass.pod,
                                    EventType::Warning,
                                    "BackOff",
                                    &text,
                                    &kind.field_path(&container.name),
                                );
                            }
                            let reason = StartFailure::CrashLoopBackOff.with_message(message);
                            due.waiting.insert(container.name.clone(), reason);
                        } else {
                            let spec_image = pull.map_or(own, |(image, _)| image);
                            let image = crate::image::with_tag(&spec_image).unwrap_or_default();
                            let reason = StartFailure::ImagePullBackOff
                                .with_message(self.record.pulls.message(&image));
                            if due.waiting.get(&container.name) != Some(&reason) {
                                let path = kind.field_path(&container.name);
                                let text = format!("Back-off pulling image {spec_image:?}");
                                self.ctx.reporting.events.pod(
                                    &pass.pod,
                                    EventType::Normal,
                                    "BackOff",
                                    &text,
                                    &path,
                                );
                                let text = "Error: ImagePullBackOff";
                                self.ctx.reporting.events.pod(
                                    &pass.pod,
                                    EventType::Warning,
                                    "Failed",
                                    text,
                                    &path,
                                );
                            }
                            due.waiting.insert(container.name.clone(), reason);
                        }
                        // A plain init container that waits holds up all after it.
                        if kind == Kind::Init && !pods::is_sidecar(container) {
                            break;
                        }
                    }
                }
            }
        }
        due
    }

    // For how much longer a start that failed is left alone.
    fn held(&self, pass: &Pass, container: &str, boot: Duration) -> Duration {
        let newest = pass.runtime.newest(container);
        let ended = newest.is_some_and(|c| c.state == ContainerState::Exited);
        self.start_backoffs.get(container).map_or(Duration::ZERO, |held| {
            if ended { held.if_ended } else { held.until }.saturating_sub(boot)
        })
    }

    fn decide(
        &mut self,
        pass: &Pass,
        container: &Container,
        boot: Duration,
        wall: jiff::Timestamp,
    ) -> BackoffDecision {
        if let Some(exited) = backoff::last_exit(&pass.runtime, &container.name) {
            let key = backoff::crash_loop_key(&self.pod_ref, container);
            let ago = self.record.crash_loop.finished_ago(&key, exited, wall, boot);
            let turn = self.record.crash_loop.decide(&key, ago, boot);
            if turn != BackoffDecision::Start {
                return turn;
            }
        }
        self.held_by_pull(&pass.pod, container, boot).map_or(BackoffDecision::Start, |(_, turn)| turn)
    }

    // The image, of the container's own and its image volumes', whose back-off holds it up for longest.
    fn held_by_pull(
        &self,
        pod: &Pod,
        container: &Container,
        boot: Duration,
    ) -> Option<(String, BackoffDecision)> {
        // An image that is there needs no pull; only after a failed one is there an entry at all.
        let pulling = self
            .record
            .waiting
            .get(&container.name)
            .is_some_and(|w| StartFailure::parse(&w.reason).is_some_and(of_a_pull));
        if !pulling {
            return None;
        }
        let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|m| m.name == name);
        let volumes = pods::spec(pod).volumes.iter().flatten().filter(|v| mounted(&v.name));
        let volumes = volumes.filter_map(|v| v.image.as_ref()?.reference.clone());
        let held = container.image.iter().cloned().chain(volumes).filter_map(|image| {
            let tagged = crate::image::with_tag(&image).ok()?;
            match self.record.pulls.decide(&tagged, boot, BackoffDelays::default()) {
                BackoffDecision::Start => None,
                later @ BackoffDecision::BackOff { until, .. } => Some((until, image, later)),
            }
        });
        held.max_by_key(|(until, _, _)| *until).map(|(_, image, turn)| (image, turn))
    }

    async fn act(&mut self, pass: &Pass, actions: &PodActions, due: &Due) -> Result<(), Halt> {
        let (pod, runtime) = (&pass.pod, &pass.runtime);
        if actions.kill_pod {
            if actions.create_sandbox && actions.sandbox_id.is_some() {
                self.ctx.reporting.events.pod(
                    pod,
                    EventType::Normal,
                    "SandboxChanged",
                    "Pod sandbox changed, it will be killed and re-created.",
                    "",
                );
            }
            if !runtime.is_quiet() {
                self.kill_pod(runtime, None).await?;
            }
            if !actions.create_sandbox {
                return Ok(());
            }
        } else {
            for kill in &actions.containers_to_kill {
                self.kill_one(pod, runtime, &kill.id, &kill.message, Some(kill.reason), None).await?;
            }
            for reset in &actions.reset {
                if reset.kill {
                    self.kill_one(pod, runtime, &reset.id, "killing", None, Some(0)).await?;
                }
                self.ctx
                    .runtime
                    .calls
                    .remove_container(&reset.id)
                    .await
                    .map_err(|e| Halt::of(&e, Step::RemoveContainer))?;
            }
            if !actions.reset.is_empty() {
                return Ok(());
            }
        }
        // The group grows before anything starts in it with more.
        if let Some(sandbox) = actions.sandbox_id.as_ref().filter(|_| !actions.resize.is_empty()) {
            self.resize(pass, &actions.resize, sandbox).await?;
        }
        for id in &actions.prune {
            self.remove_container(pod, runtime, id, actions.create_sandbox).await?;
        }
        let starts = actions.create_sandbox
            || !due.init.is_empty()
            || !due.regular.is_empty()
            || !due.ephemeral.is_empty();
        if !starts {
            return Ok(());
        }
        // A pod whose sandboxes do not last never comes to rest.
        if actions.create_sandbox {
            let collected = self.collect_dead().await;
            self.unless_cut(collected)?;
        }
        self.refuse_claims(pod)?;
        if actions.create_sandbox {
            for text in unsupported::not_enforced(pod) {
                self.ctx.reporting.events.pod(pod, EventType::Warning, unsupported::NOT_ENFORCED, &text, "");
            }
        }
        self.prepare(pass).await?;
        self.resolve(pod).await?;
        if actions.create_sandbox && !pods::is_static(pod) {
            // Nothing was begun: whichever comes, the next line looks.
            tokio::select! {
                () = self.ctx.control.static_pod_gate.opened() => {}
                () = self.cancel.cancelled() => {}
            }
        }
        self.enter_runtime()?;
        let config = self.sandbox_config(pod, actions.attempt, actions.create_sandbox)?;
        let (sandbox, ips) = if actions.create_sandbox {
            self.meanwhile(waiting::Waiting::SandboxCreating { attempt: actions.attempt });
            let created = self.create_sandbox(pod, config.clone()).await?;
            self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
            created
        } else {
            let id = actions.sandbox_id.clone().ok_or_else(|| {
                let message = "no sandbox to start containers in".to_owned();
                Halt::failed(waiting::Waiting::SandboxFailing { message: message.clone() }, message)
            })?;
            (id, runtime.ips().to_vec())
        };
        self.start_all(pass, due, &sandbox, &config, &ips).await
    }

    // Until the pod is deleted: what is looked at again costs one event a minute.
    fn refuse_claims(&self, pod: &Pod) -> Result<(), Halt> {
        const AGAIN: Duration = Duration::from_secs(60);
        let Some(message) = unsupported::unprepared_claims(pod) else { return Ok(()) };
        self.ctx.reporting.events.pod(pod, EventType::Warning, unsupported::CLAIMS_FAILED, &message, "");
        let waiting = waiting::Waiting::SandboxFailing { message: message.clone() };
        Err(Halt::failed(waiting, message).after(jitter(AGAIN)))
    }

    async fn start_all(
        &mut self,
        pass: &Pass,
        due: &Due,
        sandbox: &SandboxId,
        config: &k8s_cri::v1::PodSandboxConfig,
        ips: &[std::net::IpAddr],
    ) -> Result<(), Halt> {
        let pod = &pass.pod;
        let ephemeral = ephemeral_containers(pod);
        let pick = |list: &[Container], indexes: &[usize]| -> Vec<Container> {
            indexes.iter().filter_map(|i| list.get(*i).cloned()).collect()
        };
        let mut plan: Vec<(Kind, Container)> = Vec::new();
        plan.extend(pick(&ephemeral, &due.ephemeral).into_iter().map(|c| (Kind::Ephemeral, c)));
        plan.extend(pick(pods::init_containers(pod), &due.init).into_iter().map(|c| (Kind::Init, c)));
        plan.extend(pick(&pods::spec(pod).containers, &due.regular).into_iter().map(|c| (Kind::Regular, c)));
        let containers: Vec<&Container> = plan.iter().map(|(_, c)| c).collect();
        self.ensure_image_volumes(pod, &containers, config).await?;
        for (kind, container) in plan {
            // What is to end is not started any more.
            if self.is_ending() {
                return Ok(());
            }
            self.ctx.reporting.metrics.container_starting(kind.label());
            match self.start_container(pass, kind, &container, sandbox, config, ips).await {
                Ok(()) => {
                    self.record.waiting.remove(&container.name);
                }
                Err(super::start::NotStarted::Waits(reason)) => {
                    self.ctx.reporting.metrics.container_start_failed(kind.label(), &reason.reason);
                    self.note_waiting(&container.name, reason);
                    if kind == Kind::Init && !pods::is_sidecar(&container) {
                        break;
                    }
                }
                Err(super::start::NotStarted::Ends) => return Ok(()),
                Err(super::start::NotStarted::Halt(halt)) => return Err(halt),
            }
            self.save();
        }
        Ok(())
    }

    pub(super) fn note_waiting(&mut self, container: &str, reason: WaitingReason) {
        if let Some(held) = held_from(&reason.reason, self.ctx.clock.boot()) {
            self.start_backoffs.insert(container.to_owned(), held);
        }
        self.record.waiting.insert(container.to_owned(), reason);
    }

    /// Tells of the sandbox before something that may take minutes. Where nothing does, the next pass tells of all.
    pub(super) fn sandbox_is_ready(&mut self) {
        let Some(mut status) = self.record.status.as_deref().cloned() else { return };
        if conditions::set_true(&mut status, READY_TO_START, self.ctx.clock.wall()) {
            self.report(status, false);
        }
    }

    // Its end was asked for while this pass goes on.
    pub(super) fn is_ending(&self) -> bool {
        self.ctx.control.pod_workers.read(|w| w.is_termination_requested(&self.pod_ref.uid))
    }

    // From here on the pass goes to its end, whatever comes.
    fn enter_runtime(&self) -> Result<(), Halt> {
        self.ctx.control.pod_workers.step(Input::RuntimeReached(self.pod_ref.uid.clone()));
        if self.cancel.is_cancelled() { Err(Halt::Cancelled) } else { Ok(()) }
    }

    fn keep_mirror(&mut self, desired: &Desired) {
        if !self.ctx.node.has_api || !pods::is_static(&self.pod) {
            return;
        }
        match &self.mirror {
            Some(keeper) => keeper.set(&self.pod, desired.mirror.as_ref()),
            None => {
                let (ctx, pod) = (MirrorContext::from(&*self.ctx), Arc::clone(&self.pod));
                self.mirror = Some(MirrorReconciler::start(ctx, pod, desired.mirror.clone()));
            }
        }
    }
}

/// For how long a failed start keeps its reason before anything else is made of it; none for those that are back-offs.
fn held_from(reason: &str, boot: Duration) -> Option<Held> {
    let (if_ended, until) = match StartFailure::parse(reason) {
        Some(StartFailure::CrashLoopBackOff | StartFailure::ImagePullBackOff) => return None,
        Some(failure) if of_a_pull(failure) => (ERROR_SHOWN, ERROR_SHOWN),
        // A container was made; its end wakes the kubelet, and is an exit like any other.
        Some(StartFailure::RunContainerError | StartFailure::PostStartHookError) => {
            (ERROR_SHOWN, jitter(ERROR_WAIT))
        }
        Some(_) | None => {
            let wait = jitter(ERROR_WAIT);
            (wait, wait)
        }
    };
    Some(Held { if_ended: boot.saturating_add(if_ended), until: boot.saturating_add(until) })
}

fn ephemeral_containers(pod: &Pod) -> Vec<Container> {
    let list = pods::spec(pod).ephemeral_containers.iter().flatten();
    list.map(pod_sync_cri_config::container::container_of_ephemeral).collect()
}

/// The image was asked for and did not come.
fn of_a_pull(failure: StartFailure) -> bool {
    matches!(
        failure,
        StartFailure::ImagePullBackOff
            | StartFailure::ErrImagePull
            | StartFailure::RegistryUnavailable
            | StartFailure::SignatureValidationFailed
    )
}

/// Starts that may happen now, and those that are held back.
#[derive(Debug, Default)]
pub(super) struct Due {
    ephemeral: Vec<usize>,
    init: Vec<usize>,
    regular: Vec<usize>,
    start_backoffs: StartBackoffs,
    // Until the next try of a start that failed.
    retry: Option<Duration>,
    waiting: BTreeMap<String, WaitingReason>,
}

impl Due {
    fn is_idle(&self, actions: &PodActions, runtime: &PodRuntime) -> bool {
        let stops = actions.kill_pod && !runtime.is_quiet();
        !stops
            && !actions.create_sandbox
            && self.init.is_empty()
            && self.regular.is_empty()
            && self.ephemeral.is_empty()
            && actions.containers_to_kill.is_empty()
            && actions.reset.is_empty()
            && actions.resize.is_empty()
    }
}

/// A pod and its names, for messages.
pub(super) fn described(pod: &Pod) -> String {
    pods::pod_ref(pod).map(|r| r.to_string()).unwrap_or_default()
}
