//! Which containers may start now, and how long the others wait.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::EventType;
use pod_sync_decisions::actions::PodActions;
use pod_sync_decisions::backoff::{self, BackoffDecision, BackoffDelays, CrashLoopBackoffs};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::waiting::{StartBackoff, StartBackoffs, StartFailure};
use quintlet_model::ids::ContainerId;
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};

use super::start::{FailedInstance, FailedStart};
use super::{ERROR_WAIT, Pass, Worker, jitter};

/// How long an error is reported before the back-off replaces it. In a kubelet, the next relist causes the next sync.
const ERROR_SHOWN: Duration = Duration::from_secs(1);

/// The time (CLOCK_BOOTTIME) before which a failed start is not retried.
#[derive(Debug, Clone, Copy)]
pub(super) struct StartHold {
    // If the start left an exited container, which the crash-loop back-off then delays.
    if_ended: Duration,
    until: Duration,
}

/// The list of the pod spec that a container is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContainerKind {
    Init,
    Regular,
    Ephemeral,
}

impl ContainerKind {
    pub(super) fn field_path(self, name: &str) -> String {
        match self {
            Self::Init => format!("spec.initContainers{{{name}}}"),
            Self::Regular => format!("spec.containers{{{name}}}"),
            Self::Ephemeral => format!("spec.ephemeralContainers{{{name}}}"),
        }
    }

    /// Returns the containers of this kind. `ephemeral` are the pod's ephemeral containers.
    fn containers<'a>(self, pod: &'a Pod, ephemeral: &'a [Container]) -> &'a [Container] {
        match self {
            Self::Init => pods::init_containers(pod),
            Self::Regular => &pods::spec(pod).containers,
            Self::Ephemeral => ephemeral,
        }
    }

    /// Returns whether the containers after this one must wait for it: it is an init container and no sidecar.
    pub(super) fn blocks_the_next(self, container: &Container) -> bool {
        self == Self::Init && !pods::is_sidecar(container)
    }

    /// Returns the label of metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Init => pod_sync_metrics::INIT,
            Self::Regular => pod_sync_metrics::REGULAR,
            Self::Ephemeral => pod_sync_metrics::EPHEMERAL,
        }
    }
}

impl Worker {
    // Decides which starts may happen now, and the waiting reasons of the others.
    pub(super) fn due(&mut self, pass: &Pass, actions: &PodActions) -> DueStarts {
        let boot = self.ctx.clock.boot();
        let wall = self.ctx.clock.wall();
        let mut due = DueStarts {
            waiting: self.record.waiting.clone(),
            crash_loop: self.record.crash_loop.clone(),
            ..DueStarts::default()
        };
        let ephemeral = ephemeral_containers(&pass.pod);
        for (kind, indexes) in [
            (ContainerKind::Ephemeral, &actions.ephemeral_containers_to_start),
            (ContainerKind::Init, &actions.init_containers_to_start),
            (ContainerKind::Regular, &actions.containers_to_start),
        ] {
            for &index in indexes {
                let Some(container) = kind.containers(&pass.pod, &ephemeral).get(index) else { continue };
                let hold = self.remaining_hold(pass, &container.name, boot);
                if !hold.is_zero() {
                    due.retry_after(hold);
                } else {
                    match self.decide(pass, container, &mut due.crash_loop, boot, wall) {
                        BackoffDecision::Start => {
                            due.starts_mut(kind).push(index);
                            continue;
                        }
                        BackoffDecision::BackOff { until, delay } => {
                            let backoff = StartBackoff { remaining: until.saturating_sub(boot), delay };
                            self.report_backoff(pass, kind, container, &backoff, &mut due.waiting);
                            due.start_backoffs.insert(container.name.clone(), backoff);
                        }
                    }
                }
                if kind.blocks_the_next(container) {
                    break;
                }
            }
        }
        due
    }

    // Sets the waiting reason of a container in back-off. A new reason is an event.
    fn report_backoff(
        &self,
        pass: &Pass,
        kind: ContainerKind,
        container: &Container,
        backoff: &StartBackoff,
        waiting: &mut BTreeMap<String, WaitingReason>,
    ) {
        let has_exited = backoff::last_exit(&pass.runtime, &container.name).is_some();
        let pull = self.pull_backoff(&pass.pod, container, self.ctx.clock.boot());
        let before = waiting.get(&container.name);
        let event = |kind_of_event, reason: &str, text: &str| {
            let path = kind.field_path(&container.name);
            self.ctx.reporting.events.pod(&pass.pod, kind_of_event, reason, text, &path);
        };
        let reason = if has_exited && pull.is_none() {
            let message = backoff::crash_loop_message(backoff.delay, &container.name, &self.pod_ref);
            if before.is_none_or(|w| w.reason != "CrashLoopBackOff" || w.message != message) {
                let text = format!(
                    "Back-off restarting failed container {} in pod {}",
                    container.name, self.pod_ref
                );
                event(EventType::Warning, "BackOff", &text);
            }
            StartFailure::CrashLoopBackOff.with_message(message)
        } else {
            let spec_image =
                pull.map_or_else(|| container.image.clone().unwrap_or_default(), |(image, _)| image);
            let image = crate::image::with_tag(&spec_image).unwrap_or_default();
            let reason = StartFailure::ImagePullBackOff.with_message(self.record.pulls.message(&image));
            if before != Some(&reason) {
                event(EventType::Normal, "BackOff", &format!("Back-off pulling image {spec_image:?}"));
                event(EventType::Warning, "Failed", "Error: ImagePullBackOff");
            }
            reason
        };
        waiting.insert(container.name.clone(), reason);
    }

    // Returns the time until a failed start may be retried.
    pub(super) fn remaining_hold(&self, pass: &Pass, container: &str, boot: Duration) -> Duration {
        let newest = pass.runtime.newest(container);
        let ended = newest.is_some_and(|c| c.state == ContainerState::Exited);
        self.retries.containers.get(container).map_or(Duration::ZERO, |held| {
            if ended { held.if_ended } else { held.until }.saturating_sub(boot)
        })
    }

    fn decide(
        &self,
        pass: &Pass,
        container: &Container,
        crash_loop: &mut CrashLoopBackoffs,
        boot: Duration,
        wall: jiff::Timestamp,
    ) -> BackoffDecision {
        if let Some(exited) = backoff::last_exit(&pass.runtime, &container.name) {
            let key = backoff::crash_loop_key(&self.pod_ref, container);
            let ago = crash_loop.finished_ago(&key, exited, wall, boot);
            let turn = crash_loop.decide(&key, ago, boot);
            // A restart that another process began, or whose call had an unknown outcome, is repeated at once.
            if turn != BackoffDecision::Start && !crash_loop.is_restarting(&key, &exited.id) {
                return turn;
            }
        }
        self.pull_backoff(&pass.pod, container, boot).map_or(BackoffDecision::Start, |(_, turn)| turn)
    }

    // Returns the image with the longest pull back-off, among those of the container and of its image volumes.
    pub(super) fn pull_backoff(
        &self,
        pod: &Pod,
        container: &Container,
        boot: Duration,
    ) -> Option<(String, BackoffDecision)> {
        // Only a container that waits for a failed pull has a pull back-off.
        let pulling = self
            .record
            .waiting
            .get(&container.name)
            .is_some_and(|w| StartFailure::parse(&w.reason).is_some_and(is_of_pull));
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

    /// Records that an instance of a container was started, and that its postStart hook has ended.
    pub(super) fn record_start(&mut self, container: &Container, id: &ContainerId) {
        let (key, name) = (backoff::crash_loop_key(&self.pod_ref, container), &container.name);
        self.record.update(|record| {
            record.crash_loop.end_restart(&key);
            record.waiting.remove(name);
            record.refused_starts.remove(name);
            record.starting.remove(name);
            record.post_starts.remove(id.as_str());
        });
    }

    /// Records why a container was not started.
    pub(super) fn record_failed_start(&mut self, container: &Container, failed: FailedStart) {
        let FailedStart { reason, instance, pulls } = failed;
        if let Some(held) = hold_after(&reason.reason, self.ctx.clock.boot()) {
            self.retries.containers.insert(container.name.clone(), held);
        }
        let (key, name) = (backoff::crash_loop_key(&self.pod_ref, container), &container.name);
        self.record.update(|record| {
            record.crash_loop.end_restart(&key);
            match instance {
                FailedInstance::None => {}
                FailedInstance::Refused(id) => {
                    record.starting.remove(name);
                    record.post_starts.remove(id.as_str());
                    record.refused_starts.insert(name.clone(), id.to_string());
                }
                FailedInstance::HookFailed(id) => {
                    record.post_starts.remove(id.as_str());
                }
            }
            if let Some(pulls) = pulls {
                record.pulls = pulls;
            }
            record.waiting.insert(name.clone(), reason);
        });
    }
}

/// Returns how long a failed start keeps its reason; none if the reason is a back-off.
fn hold_after(reason: &str, boot: Duration) -> Option<StartHold> {
    let (if_ended, until) = match StartFailure::parse(reason) {
        Some(StartFailure::CrashLoopBackOff | StartFailure::ImagePullBackOff) => return None,
        Some(failure) if is_of_pull(failure) => (ERROR_SHOWN, ERROR_SHOWN),
        // There is a container. Its exit wakes the worker and counts for the crash-loop back-off.
        Some(StartFailure::RunContainerError | StartFailure::PostStartHookError) => {
            (ERROR_SHOWN, jitter(ERROR_WAIT))
        }
        Some(_) | None => {
            let wait = jitter(ERROR_WAIT);
            (wait, wait)
        }
    };
    Some(StartHold { if_ended: boot.saturating_add(if_ended), until: boot.saturating_add(until) })
}

pub(super) fn ephemeral_containers(pod: &Pod) -> Vec<Container> {
    let list = pods::spec(pod).ephemeral_containers.iter().flatten();
    list.map(pod_sync_cri_config::container::container_of_ephemeral).collect()
}

/// Whether a failure is one of an image pull.
fn is_of_pull(failure: StartFailure) -> bool {
    matches!(
        failure,
        StartFailure::ImagePullBackOff
            | StartFailure::ErrImagePull
            | StartFailure::RegistryUnavailable
            | StartFailure::SignatureValidationFailed
    )
}

/// The starts that may happen now, and the waits of the others.
#[derive(Debug, Default)]
pub(super) struct DueStarts {
    pub(super) ephemeral: Vec<usize>,
    pub(super) init: Vec<usize>,
    pub(super) regular: Vec<usize>,
    pub(super) start_backoffs: StartBackoffs,
    // Time until the next retry of a failed start.
    pub(super) retry: Option<Duration>,
    pub(super) waiting: BTreeMap<String, WaitingReason>,
    // The crash-loop back-offs, with the exits of the containers to start.
    pub(super) crash_loop: CrashLoopBackoffs,
}

impl DueStarts {
    fn starts_mut(&mut self, kind: ContainerKind) -> &mut Vec<usize> {
        match kind {
            ContainerKind::Ephemeral => &mut self.ephemeral,
            ContainerKind::Init => &mut self.init,
            ContainerKind::Regular => &mut self.regular,
        }
    }

    pub(super) fn has_starts(&self) -> bool {
        !self.init.is_empty() || !self.regular.is_empty() || !self.ephemeral.is_empty()
    }

    /// Returns the containers to start, in order. `ephemeral` are the pod's ephemeral containers.
    pub(super) fn in_order<'a>(
        &self,
        pod: &'a Pod,
        ephemeral: &'a [Container],
    ) -> Vec<(ContainerKind, &'a Container)> {
        let lists = [
            (ContainerKind::Ephemeral, &self.ephemeral),
            (ContainerKind::Init, &self.init),
            (ContainerKind::Regular, &self.regular),
        ];
        let of =
            |kind: ContainerKind, index: &usize| Some((kind, kind.containers(pod, ephemeral).get(*index)?));
        lists.iter().flat_map(|(kind, indexes)| indexes.iter().filter_map(|index| of(*kind, index))).collect()
    }

    /// Demands another pass after `wait` at the latest.
    pub(super) fn retry_after(&mut self, wait: Duration) {
        self.retry = Some(self.retry.map_or(wait, |retry| retry.min(wait)));
    }

    pub(super) fn is_idle(&self, actions: &PodActions, runtime: &PodRuntime) -> bool {
        let stops = actions.kill_pod && !runtime.is_quiet();
        !stops
            && !actions.create_sandbox
            && !self.has_starts()
            && actions.containers_to_kill.is_empty()
            && actions.reset.is_empty()
            && actions.resize.is_empty()
    }
}

/// Returns the name of a pod for messages.
pub(super) fn described(pod: &Pod) -> String {
    pods::pod_ref(pod).map(|r| r.to_string()).unwrap_or_default()
}
