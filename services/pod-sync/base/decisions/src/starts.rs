//! Decides which of the containers to start may start now, and how long the others wait.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use quintlet_model::ids::PodRef;
use quintlet_model::pod as pods;
use quintlet_model::runtime::{ContainerState, PodRuntime};

use crate::actions::PodActions;
use crate::backoff::{self, BackoffDecision, BackoffDelays, CrashLoopBackoffs, ImagePullBackoffs};
use crate::container_status::WaitingReason;
use crate::waiting::{StartBackoff, StartBackoffs, StartFailure};

/// How long an error is reported before the back-off replaces it. In a kubelet, the next relist causes the
/// next sync.
const ERROR_SHOWN: Duration = Duration::from_secs(1);

/// The list of the pod spec that a container is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// `spec.initContainers`, sidecars included.
    Init,
    /// `spec.containers`.
    Regular,
    /// `spec.ephemeralContainers`, which `kubectl debug` adds.
    Ephemeral,
}

impl ContainerKind {
    /// Returns the field path of events about a container of this kind.
    #[must_use]
    pub fn field_path(self, name: &str) -> String {
        match self {
            Self::Init => format!("spec.initContainers{{{name}}}"),
            Self::Regular => format!("spec.containers{{{name}}}"),
            Self::Ephemeral => format!("spec.ephemeralContainers{{{name}}}"),
        }
    }

    /// Returns whether the containers after this one must wait for it: it is an init container and no
    /// sidecar.
    #[must_use]
    pub fn blocks_the_next(self, container: &Container) -> bool {
        self == Self::Init && !pods::is_sidecar(container)
    }

    /// Returns the containers of this kind. `ephemeral` are the pod's ephemeral containers.
    fn containers<'a>(self, pod: &'a Pod, ephemeral: &'a [Container]) -> &'a [Container] {
        match self {
            Self::Init => pods::init_containers(pod),
            Self::Regular => &pods::spec(pod).containers,
            Self::Ephemeral => ephemeral,
        }
    }
}

/// The time (CLOCK_BOOTTIME) before which a failed start is not retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartHold {
    // If the start left an exited container, which the crash-loop back-off then delays.
    if_ended: Duration,
    until: Duration,
}

impl StartHold {
    /// Returns how long a start that failed at `boot` keeps its reason; none if the reason is a back-off.
    /// `error_wait` is the time until the retry of most failures.
    #[must_use]
    pub fn after(reason: &str, boot: Duration, error_wait: Duration) -> Option<Self> {
        let (if_ended, until) = match StartFailure::parse(reason) {
            Some(StartFailure::CrashLoopBackOff | StartFailure::ImagePullBackOff) => return None,
            Some(failure) if is_pull_failure(failure) => (ERROR_SHOWN, ERROR_SHOWN),
            // There is a container. Its exit wakes the worker and counts for the crash-loop back-off.
            Some(StartFailure::RunContainerError | StartFailure::PostStartHookError) => {
                (ERROR_SHOWN, error_wait)
            }
            Some(_) | None => (error_wait, error_wait),
        };
        Some(Self { if_ended: boot.saturating_add(if_ended), until: boot.saturating_add(until) })
    }

    fn remaining(self, runtime: &PodRuntime, container: &str, boot: Duration) -> Duration {
        let has_ended = runtime.newest(container).is_some_and(|c| c.state == ContainerState::Exited);
        let end = if has_ended { self.if_ended } else { self.until };
        end.saturating_sub(boot)
    }
}

/// Whether a failure is one of an image pull.
fn is_pull_failure(failure: StartFailure) -> bool {
    matches!(
        failure,
        StartFailure::ImagePullBackOff
            | StartFailure::ErrImagePull
            | StartFailure::RegistryUnavailable
            | StartFailure::SignatureValidationFailed
    )
}

/// The input of [`due_starts`].
#[derive(Debug, Clone, Copy)]
pub struct StartInput<'a> {
    /// The pod, with its allocated resources in the spec.
    pub pod: &'a Pod,
    /// Name, namespace and UID, for records and events.
    pub pod_ref: &'a PodRef,
    /// The pod's ephemeral containers, as containers.
    pub ephemeral: &'a [Container],
    /// The actions of this sync.
    pub actions: &'a PodActions,
    /// State from the newest inspection.
    pub runtime: &'a PodRuntime,
    /// Recorded waiting reasons, by container name.
    pub waiting: &'a BTreeMap<String, WaitingReason>,
    /// Back-offs after exits, by container.
    pub crash_loop: &'a CrashLoopBackoffs,
    /// Back-offs after failed pulls, by image.
    pub pulls: &'a ImagePullBackoffs,
    /// Holds of failed starts, by container name.
    pub holds: &'a BTreeMap<String, StartHold>,
    /// Returns the name under which the pulls of an image are recorded; none for an invalid name.
    pub image_key: fn(&str) -> Option<String>,
    /// Wall-clock time, which the status shows.
    pub wall: jiff::Timestamp,
    /// CLOCK_BOOTTIME.
    pub boot: Duration,
}

/// A back-off that an event is due for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewBackoff {
    /// A container starts again after an exit (reason CrashLoopBackOff).
    CrashLoop {
        /// The list that the container is in.
        kind: ContainerKind,
        /// Name in the spec.
        container: String,
    },
    /// An image is pulled again after a failure (reason ImagePullBackOff).
    ImagePull {
        /// The list that the container is in.
        kind: ContainerKind,
        /// Name in the spec.
        container: String,
        /// The image in the spec.
        image: String,
    },
}

/// The starts that may happen now, and the waits of the others.
#[derive(Debug, Default)]
pub struct DueStarts {
    ephemeral: Vec<usize>,
    init: Vec<usize>,
    regular: Vec<usize>,
    /// Delayed starts.
    pub start_backoffs: StartBackoffs,
    /// Time until the next retry of a failed start.
    pub retry: Option<Duration>,
    /// Waiting reasons, by container name.
    pub waiting: BTreeMap<String, WaitingReason>,
    /// The crash-loop back-offs, with the exits of the containers to start.
    pub crash_loop: CrashLoopBackoffs,
    /// Back-offs that have no event yet.
    pub new_backoffs: Vec<NewBackoff>,
}

impl DueStarts {
    fn starts_mut(&mut self, kind: ContainerKind) -> &mut Vec<usize> {
        match kind {
            ContainerKind::Ephemeral => &mut self.ephemeral,
            ContainerKind::Init => &mut self.init,
            ContainerKind::Regular => &mut self.regular,
        }
    }

    /// Leaves the due starts in `actions`, and removes those that wait.
    pub fn limit(&mut self, actions: &mut PodActions) {
        actions.ephemeral_containers_to_start = std::mem::take(&mut self.ephemeral);
        actions.init_containers_to_start = std::mem::take(&mut self.init);
        actions.containers_to_start = std::mem::take(&mut self.regular);
    }

    /// Demands another pass after `wait` at the latest.
    pub fn retry_after(&mut self, wait: Duration) {
        self.retry = Some(self.retry.map_or(wait, |retry| retry.min(wait)));
    }

    /// Returns the time until the first start that a back-off or a hold delays.
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        self.start_backoffs.values().map(|backoff| backoff.remaining).chain(self.retry).min()
    }
}

/// Decides which starts may happen now, and the waiting reasons of the others.
#[must_use]
pub fn due_starts(input: &StartInput<'_>) -> DueStarts {
    let mut due = DueStarts {
        waiting: input.waiting.clone(),
        crash_loop: input.crash_loop.clone(),
        ..DueStarts::default()
    };
    for (kind, indexes) in [
        (ContainerKind::Ephemeral, &input.actions.ephemeral_containers_to_start),
        (ContainerKind::Init, &input.actions.init_containers_to_start),
        (ContainerKind::Regular, &input.actions.containers_to_start),
    ] {
        for &index in indexes {
            let Some(container) = kind.containers(input.pod, input.ephemeral).get(index) else { continue };
            let hold = input.holds.get(&container.name);
            let hold = hold
                .map_or(Duration::ZERO, |hold| hold.remaining(input.runtime, &container.name, input.boot));
            if hold.is_zero() {
                match decide(input, container, &mut due.crash_loop) {
                    BackoffDecision::Start => {
                        due.starts_mut(kind).push(index);
                        continue;
                    }
                    BackoffDecision::BackOff { until, delay } => {
                        let backoff = StartBackoff { remaining: until.saturating_sub(input.boot), delay };
                        wait(input, kind, container, backoff, &mut due);
                    }
                }
            } else {
                due.retry_after(hold);
            }
            if kind.blocks_the_next(container) {
                break;
            }
        }
    }
    due
}

fn decide(
    input: &StartInput<'_>,
    container: &Container,
    crash_loop: &mut CrashLoopBackoffs,
) -> BackoffDecision {
    if let Some(exited) = backoff::last_exit(input.runtime, &container.name) {
        let key = backoff::crash_loop_key(input.pod_ref, container);
        let ago = crash_loop.finished_ago(&key, exited, input.wall, input.boot);
        let decision = crash_loop.decide(&key, ago, input.boot);
        // A restart that another process began, or whose call had an unknown outcome, is repeated at once.
        if decision != BackoffDecision::Start && !crash_loop.is_restarting(&key, &exited.id) {
            return decision;
        }
    }
    pull_backoff(input, container).map_or(BackoffDecision::Start, |(_, decision)| decision)
}

/// Sets the waiting reason of a container in back-off. A new reason is an event.
fn wait(
    input: &StartInput<'_>,
    kind: ContainerKind,
    container: &Container,
    backoff: StartBackoff,
    due: &mut DueStarts,
) {
    let name = &container.name;
    let has_exited = backoff::last_exit(input.runtime, name).is_some();
    let pull = pull_backoff(input, container);
    let before = due.waiting.get(name);
    let reason = if has_exited && pull.is_none() {
        let message = backoff::crash_loop_message(backoff.delay, name, input.pod_ref);
        let reason = StartFailure::CrashLoopBackOff.with_message(message);
        if before != Some(&reason) {
            due.new_backoffs.push(NewBackoff::CrashLoop { kind, container: name.clone() });
        }
        reason
    } else {
        let image = pull.map_or_else(|| container.image.clone().unwrap_or_default(), |(image, _)| image);
        let key = (input.image_key)(&image).unwrap_or_default();
        let reason = StartFailure::ImagePullBackOff.with_message(input.pulls.message(&key));
        if before != Some(&reason) {
            due.new_backoffs.push(NewBackoff::ImagePull { kind, container: name.clone(), image });
        }
        reason
    };
    due.waiting.insert(name.clone(), reason);
    due.start_backoffs.insert(name.clone(), backoff);
}

/// Returns the image with the longest pull back-off, among those of the container and of its image volumes.
fn pull_backoff(input: &StartInput<'_>, container: &Container) -> Option<(String, BackoffDecision)> {
    // Only a container that waits for a failed pull has a pull back-off.
    let reason = input.waiting.get(&container.name)?;
    StartFailure::parse(&reason.reason).filter(|failure| is_pull_failure(*failure))?;
    let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|m| m.name == name);
    let volumes = pods::spec(input.pod).volumes.iter().flatten().filter(|v| mounted(&v.name));
    let volumes = volumes.filter_map(|v| v.image.as_ref()?.reference.clone());
    let held = container.image.iter().cloned().chain(volumes).filter_map(|image| {
        let key = (input.image_key)(&image)?;
        match input.pulls.decide(&key, input.boot, BackoffDelays::default()) {
            BackoffDecision::Start => None,
            later @ BackoffDecision::BackOff { until, .. } => Some((until, image, later)),
        }
    });
    held.max_by_key(|(until, _, _)| *until).map(|(_, image, decision)| (image, decision))
}

impl PodActions {
    /// Returns whether a container is to start.
    #[must_use]
    pub fn has_starts(&self) -> bool {
        !self.init_containers_to_start.is_empty()
            || !self.containers_to_start.is_empty()
            || !self.ephemeral_containers_to_start.is_empty()
    }

    /// Returns the containers to start, in order. `ephemeral` are the pod's ephemeral containers.
    #[must_use]
    pub fn starts_in_order<'a>(
        &self,
        pod: &'a Pod,
        ephemeral: &'a [Container],
    ) -> Vec<(ContainerKind, &'a Container)> {
        let lists = [
            (ContainerKind::Ephemeral, &self.ephemeral_containers_to_start),
            (ContainerKind::Init, &self.init_containers_to_start),
            (ContainerKind::Regular, &self.containers_to_start),
        ];
        let start =
            |kind: ContainerKind, index: &usize| Some((kind, kind.containers(pod, ephemeral).get(*index)?));
        let starts = lists.iter().map(|(kind, indexes)| indexes.iter().filter_map(|i| start(*kind, i)));
        starts.flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use quintlet_model::ids::PodUid;
    use quintlet_testkit::pods::{RuntimeBuilder, at};
    use serde_json::json;

    use super::*;

    const NOW: Duration = Duration::from_secs(1000);
    const ERROR_WAIT: Duration = Duration::from_secs(12);

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_failed_start_is_held_by_its_reason_and_less_once_its_container_has_ended() {
        let cases = [
            (StartFailure::CrashLoopBackOff, None),
            (StartFailure::ImagePullBackOff, None),
            (StartFailure::ErrImagePull, Some((s(1), s(1)))),
            (StartFailure::RegistryUnavailable, Some((s(1), s(1)))),
            (StartFailure::RunContainerError, Some((s(1), ERROR_WAIT))),
            (StartFailure::PostStartHookError, Some((s(1), ERROR_WAIT))),
            (StartFailure::CreateContainerError, Some((ERROR_WAIT, ERROR_WAIT))),
            (StartFailure::ErrImageNeverPull, Some((ERROR_WAIT, ERROR_WAIT))),
        ];
        let ended = RuntimeBuilder::ready().exited("a", 1).build();
        let running = RuntimeBuilder::ready().running("a").build();
        for (failure, want) in cases {
            let hold = StartHold::after(failure.as_str(), NOW, ERROR_WAIT);
            let got = hold.map(|h| (h.remaining(&ended, "a", NOW), h.remaining(&running, "a", NOW)));
            assert_eq!(got, want, "{failure:?}");
            assert!(hold.is_none_or(|h| h.remaining(&running, "a", NOW + ERROR_WAIT).is_zero()));
        }
    }

    struct Case {
        waiting: BTreeMap<String, WaitingReason>,
        crash_loop: CrashLoopBackoffs,
        pulls: ImagePullBackoffs,
        holds: BTreeMap<String, StartHold>,
        runtime: PodRuntime,
        actions: PodActions,
    }

    impl Default for Case {
        fn default() -> Self {
            Self {
                waiting: BTreeMap::new(),
                crash_loop: CrashLoopBackoffs::default(),
                pulls: ImagePullBackoffs::default(),
                holds: BTreeMap::new(),
                runtime: RuntimeBuilder::ready().build(),
                actions: PodActions { containers_to_start: vec![0, 1], ..PodActions::default() },
            }
        }
    }

    fn pod() -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
            "initContainers": [
                {"name": "side", "restartPolicy": "Always"},
                {"name": "first"},
                {"name": "last"},
            ],
            "containers": [
                {"name": "a", "image": "one", "volumeMounts": [{"name": "v", "mountPath": "/v"}]},
                {"name": "b", "image": "two"},
            ],
            "volumes": [{"name": "v", "image": {"reference": "volume"}}],
        }}))
        .unwrap()
    }

    fn pod_ref() -> PodRef {
        PodRef { uid: PodUid::parse("u").unwrap(), namespace: "ns".into(), name: "p".into() }
    }

    fn due(case: &Case) -> DueStarts {
        due_starts(&StartInput {
            pod: &pod(),
            pod_ref: &pod_ref(),
            ephemeral: &[],
            actions: &case.actions,
            runtime: &case.runtime,
            waiting: &case.waiting,
            crash_loop: &case.crash_loop,
            pulls: &case.pulls,
            holds: &case.holds,
            image_key: |image| Some(format!("{image}:latest")),
            wall: at(1_000_000),
            boot: NOW,
        })
    }

    #[test]
    fn a_container_without_a_wait_starts_and_a_held_one_is_retried_later() {
        let hold = StartHold::after("CreateContainerError", NOW, s(5)).unwrap();
        let first = Case { holds: [("a".to_owned(), hold)].into(), ..Case::default() };
        let got = due(&first);
        assert_eq!((got.regular, got.retry), (vec![1], Some(s(5))));
        assert!(got.start_backoffs.is_empty() && got.waiting.is_empty());
    }

    #[test]
    fn an_init_container_that_waits_delays_those_after_it_and_a_sidecar_does_not() {
        let hold = StartHold::after("CreateContainerError", NOW, s(5)).unwrap();
        for (held, starts) in
            [("side", vec![1, 2]), ("first", vec![0]), ("last", vec![0, 1]), ("none", vec![0, 1, 2])]
        {
            let actions = PodActions { init_containers_to_start: vec![0, 1, 2], ..PodActions::default() };
            let case = Case { holds: [(held.to_owned(), hold)].into(), actions, ..Case::default() };
            assert_eq!(due(&case).init, starts, "{held}");
        }
    }

    #[test]
    fn a_crash_loop_delays_a_restart_has_one_event_and_is_over_for_a_restart_in_progress() {
        let runtime = RuntimeBuilder::ready().exited("a", 1).build();
        let exited = backoff::last_exit(&runtime, "a").unwrap().id.clone();
        let spec = pod();
        let key = backoff::crash_loop_key(&pod_ref(), &pods::spec(&spec).containers[0]);
        let mut crash_loop = CrashLoopBackoffs::default();
        let delays = BackoffDelays::default();
        crash_loop.begin_restart(&key, &exited, Duration::ZERO, NOW, delays);
        let mut case = Case { crash_loop, runtime, ..Case::default() };
        assert_eq!(due(&case).regular, [0, 1], "its restart is in progress");

        case.crash_loop.end_restart(&key);
        let got = due(&case);
        assert_eq!(got.regular, [1]);
        assert_eq!(got.start_backoffs["a"].delay, s(10));
        assert_eq!(got.waiting["a"].reason, "CrashLoopBackOff");
        let event = NewBackoff::CrashLoop { kind: ContainerKind::Regular, container: "a".to_owned() };
        assert_eq!(got.new_backoffs, [event]);
        assert_ne!(got.crash_loop, case.crash_loop, "the exit is converted to CLOCK_BOOTTIME once");

        case.waiting = got.waiting;
        assert_eq!(due(&case).new_backoffs, []);
    }

    #[test]
    fn the_longest_pull_back_off_of_image_and_volumes_delays_a_container_that_waits_for_a_pull() {
        let mut pulls = ImagePullBackoffs::default();
        let delays = BackoffDelays::default();
        pulls.record_failure("one:latest", NOW - s(5), delays, "ErrImagePull", "no");
        pulls.record_failure("volume:latest", NOW, delays, "ErrImagePull", "denied");
        let failed = |reason: StartFailure| [("a".to_owned(), reason.with_message("no".to_owned()))].into();
        let mut case = Case { pulls, waiting: failed(StartFailure::CreateContainerError), ..Case::default() };
        assert_eq!(due(&case).regular, [0, 1], "it waits for something else");

        case.waiting = failed(StartFailure::ErrImagePull);
        let got = due(&case);
        assert_eq!((got.regular.as_slice(), got.next()), ([1].as_slice(), Some(s(10))));
        assert_eq!(got.waiting["a"].reason, "ImagePullBackOff");
        let image = "volume".to_owned();
        let kind = ContainerKind::Regular;
        assert_eq!(got.new_backoffs, [NewBackoff::ImagePull { kind, container: "a".to_owned(), image }]);
    }

    #[test]
    fn starts_are_in_order_and_only_the_due_ones_are_left() {
        let mut actions = PodActions {
            init_containers_to_start: vec![1],
            containers_to_start: vec![0, 1],
            ..PodActions::default()
        };
        let spec = pod();
        let names = |actions: &PodActions| -> Vec<String> {
            actions.starts_in_order(&spec, &[]).iter().map(|(_, c)| c.name.clone()).collect()
        };
        assert_eq!(names(&actions), ["first", "a", "b"]);
        let mut due = DueStarts { regular: vec![1], ..DueStarts::default() };
        due.limit(&mut actions);
        assert_eq!(names(&actions), ["b"]);
        assert!(actions.has_starts());
        DueStarts::default().limit(&mut actions);
        assert!(!actions.has_starts());
    }
}
