//! Which containers may start now, and how long the others wait.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::EventType;
use pod_sync_decisions::actions::PodActions;
use pod_sync_decisions::backoff::{self, BackoffDecision, BackoffDelays};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::waiting::{StartBackoff, StartBackoffs, StartFailure};
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};

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
        let mut due = DueStarts { waiting: self.record.waiting.clone(), ..DueStarts::default() };
        let ephemeral = ephemeral_containers(&pass.pod);
        let inits = pods::init_containers(&pass.pod);
        let regular = &pods::spec(&pass.pod).containers;
        for (kind, list, indexes) in [
            (ContainerKind::Ephemeral, ephemeral.as_slice(), &actions.ephemeral_containers_to_start),
            (ContainerKind::Init, inits, &actions.init_containers_to_start),
            (ContainerKind::Regular, regular.as_slice(), &actions.containers_to_start),
        ] {
            for &index in indexes {
                let Some(container) = list.get(index) else { continue };
                let held = self.remaining_hold(pass, &container.name, boot);
                if !held.is_zero() {
                    due.retry = Some(due.retry.map_or(held, |r| r.min(held)));
                    if kind == ContainerKind::Init && !pods::is_sidecar(container) {
                        break;
                    }
                    continue;
                }
                match self.decide(pass, container, boot, wall) {
                    BackoffDecision::Start => match kind {
                        ContainerKind::Ephemeral => due.ephemeral.push(index),
                        ContainerKind::Init => due.init.push(index),
                        ContainerKind::Regular => due.regular.push(index),
                    },
                    BackoffDecision::BackOff { until, delay } => {
                        due.start_backoffs.insert(
                            container.name.clone(),
                            StartBackoff { remaining: until.saturating_sub(boot), delay },
                        );
                        let crash = backoff::last_exit(&pass.runtime, &container.name).is_some();
                        let pull = self.pull_backoff(&pass.pod, container, boot);
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
                        // An init container blocks those after it, unless it is a sidecar.
                        if kind == ContainerKind::Init && !pods::is_sidecar(container) {
                            break;
                        }
                    }
                }
            }
        }
        due
    }

    // Returns the time until a failed start may be retried.
    pub(super) fn remaining_hold(&self, pass: &Pass, container: &str, boot: Duration) -> Duration {
        let newest = pass.runtime.newest(container);
        let ended = newest.is_some_and(|c| c.state == ContainerState::Exited);
        self.retries.containers.get(container).map_or(Duration::ZERO, |held| {
            if ended { held.if_ended } else { held.until }.saturating_sub(boot)
        })
    }

    pub(super) fn decide(
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

    pub(super) fn record_failed_start(&mut self, container: &str, reason: WaitingReason) {
        if let Some(held) = hold_after(&reason.reason, self.ctx.clock.boot()) {
            self.retries.containers.insert(container.to_owned(), held);
        }
        self.record.waiting.insert(container.to_owned(), reason);
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
}

impl DueStarts {
    pub(super) fn is_idle(&self, actions: &PodActions, runtime: &PodRuntime) -> bool {
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

/// Returns the name of a pod for messages.
pub(super) fn described(pod: &Pod) -> String {
    pods::pod_ref(pod).map(|r| r.to_string()).unwrap_or_default()
}
