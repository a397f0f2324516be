//! Computes grace periods and the order in which containers stop (`pkg/kubelet/kuberuntime: killContainer`).

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use quintlet_kit::clock;
use quintlet_model::ids::ContainerId;
use quintlet_model::runtime::{Container as RuntimeContainer, ContainerState, PodRuntime};
use quintlet_model::{labels, pod};

use super::actions::KillReason;

/// Least timeout of StopContainer, in seconds (`pkg/kubelet/kuberuntime: minimumGracePeriodInSeconds`).
pub const MINIMUM_STOP_SECONDS: i64 = 2;

/// Largest timeout of StopContainer, in seconds: 30 years, as [`clock::FAR`].
///
/// containerd and CRI-O convert the timeout to 64-bit nanoseconds. A larger one overflows to a negative
/// timeout, which kills the container at once.
pub const MAXIMUM_STOP_SECONDS: i64 = 30 * 365 * 24 * 3600;

/// Least time to wait for a pod that the node terminates.
const KILL_WAIT: Duration = Duration::from_secs(10);

/// Grace period of a terminating pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EffectiveGrace {
    /// Seconds, at least 1.
    pub seconds: i64,
    /// Whether the period differs from an earlier one: stops in progress must be issued again.
    pub shortened: bool,
}

/// Returns the grace period of a terminating pod (`pkg/kubelet: calculateEffectiveGracePeriod`). `stored` is
/// the current one; 0 means none.
#[must_use]
pub fn effective_grace(stored: i64, pod: PodGrace, override_seconds: Option<i64>) -> EffectiveGrace {
    // The kubelet treats a requested 0 as "not set", so that a later override lengthens the grace period
    // again. Here the shortest one counts.
    let stored_seconds = (stored != 0).then_some(stored);
    let least = [stored_seconds, pod.deletion, override_seconds].into_iter().flatten().min();
    let seconds = least.or(pod.termination).unwrap_or(0).max(1);
    EffectiveGrace { seconds, shortened: stored != 0 && stored != seconds }
}

/// The grace periods of a pod, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PodGrace {
    /// `metadata.deletionGracePeriodSeconds`.
    pub deletion: Option<i64>,
    /// `spec.terminationGracePeriodSeconds`.
    pub termination: Option<i64>,
}

impl PodGrace {
    /// Reads the grace periods of an object.
    #[must_use]
    pub fn of_pod(pod: &Pod) -> Self {
        Self {
            deletion: pod.metadata.deletion_grace_period_seconds,
            termination: pod::spec(pod).termination_grace_period_seconds,
        }
    }

    /// Reads the grace periods from a container's annotations, for a pod whose object is lost.
    #[must_use]
    pub fn of_record(container: &RuntimeContainer) -> Self {
        let number = |key: &str| container.annotations.get(key).and_then(|v| v.parse().ok());
        Self {
            deletion: number(labels::POD_DELETION_GRACE),
            termination: number(labels::POD_TERMINATION_GRACE),
        }
    }
}

/// Returns the seconds that a container has to stop, including its preStop hook. An override replaces all
/// other values.
#[must_use]
pub fn container_grace(
    grace: PodGrace,
    container: Option<&Container>,
    reason: Option<KillReason>,
    override_seconds: Option<i64>,
) -> i64 {
    if let Some(seconds) = override_seconds.or(grace.deletion) {
        return seconds;
    }
    let Some(termination) = grace.termination else { return MINIMUM_STOP_SECONDS };
    let probe = match reason {
        Some(KillReason::LivenessProbe) => container.and_then(|c| c.liveness_probe.as_ref()),
        Some(KillReason::StartupProbe) => container.and_then(|c| c.startup_probe.as_ref()),
        Some(KillReason::UnknownState | KillReason::DefinitionChanged | KillReason::Resize) | None => None,
    };
    probe.and_then(|p| p.termination_grace_period_seconds).unwrap_or(termination)
}

/// Returns the rest of `seconds` after a preStop hook or a wait took `spent`, in whole seconds.
#[must_use]
pub fn remaining_after(seconds: i64, spent: Duration) -> i64 {
    seconds.saturating_sub(i64::try_from(spent.as_secs()).unwrap_or(i64::MAX))
}

/// Returns the timeout for StopContainer, between [`MINIMUM_STOP_SECONDS`] and [`MAXIMUM_STOP_SECONDS`]
/// seconds.
#[must_use]
pub fn stop_timeout(seconds: i64) -> i64 {
    seconds.clamp(MINIMUM_STOP_SECONDS, MAXIMUM_STOP_SECONDS)
}

/// Returns the seconds from `now` to `deadline` (both CLOCK_BOOTTIME), for a stop that is issued again.
/// Rounded up, so that repeating a stop never shortens the grace period.
#[must_use]
pub fn remaining_until(deadline: Duration, now: Duration) -> i64 {
    let left = deadline.saturating_sub(now);
    let whole = left.as_secs().saturating_add(u64::from(left.subsec_nanos() > 0));
    i64::try_from(whole).unwrap_or(i64::MAX)
}

/// Returns how long to wait for a pod that the node terminates: one and a half times its grace period, 10 s
/// at least (`pkg/kubelet: killPodNow`).
#[must_use]
pub fn kill_timeout(grace: Option<i64>) -> Duration {
    let grace = clock::seconds(grace.unwrap_or(0));
    grace.saturating_add(grace.checked_div(2).unwrap_or_default()).max(KILL_WAIT)
}

/// A container to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerStop {
    /// The instance to stop.
    pub id: ContainerId,
    /// Name in the spec.
    pub name: String,
    /// The failed probe for which the container stops, if it does.
    pub reason: Option<KillReason>,
    /// Containers of the plan that must stop first. The wait begins after the container's own preStop hook,
    /// counts towards its grace period, and ends with it.
    pub after: Vec<String>,
}

/// Returns all running containers of a pod with the order in which they stop: sidecars after the regular
/// containers, in reverse order of the spec. Containers without `after` may stop at the same time.
#[must_use]
pub fn termination_plan(pod: Option<&Pod>, runtime: &PodRuntime) -> Vec<ContainerStop> {
    let running: Vec<&RuntimeContainer> =
        runtime.containers.iter().filter(|c| c.state == ContainerState::Running).collect();
    let names: BTreeSet<&str> = running.iter().map(|c| c.name.as_str()).collect();
    let runs = |name: &str| names.contains(name);
    let regular: Vec<&str> =
        pod.map(|p| pod::spec(p).containers.iter().map(|c| c.name.as_str()).collect()).unwrap_or_default();
    let sidecars: Vec<&str> = pod
        .map(|p| {
            pod::init_containers(p).iter().filter(|c| pod::is_sidecar(c)).map(|c| c.name.as_str()).collect()
        })
        .unwrap_or_default();
    let mut plan: Vec<ContainerStop> = running
        .iter()
        .map(|c| {
            let after = match sidecars.iter().position(|s| *s == c.name) {
                None => Vec::new(),
                Some(place) => regular
                    .iter()
                    // A sidecar that does not run is skipped: the next later one that runs is waited for.
                    .chain(sidecars.iter().skip(place.saturating_add(1)).find(|s| runs(s)))
                    .filter(|n| runs(n))
                    .map(|n| (*n).to_owned())
                    .collect(),
            };
            ContainerStop { id: c.id.clone(), name: c.name.clone(), reason: None, after }
        })
        .collect();
    let rank = |name: &str| {
        sidecars.iter().position(|s| *s == name).map_or(0, |place| sidecars.len().saturating_sub(place))
    };
    plan.sort_by_key(|s| rank(&s.name));
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::{RuntimeBuilder, pod_json};
    use serde_json::json;

    #[test]
    fn the_effective_grace_only_shrinks() {
        for (name, stored, deletion, override_seconds, spec, seconds, shortened) in [
            ("spec", 0, None, None, Some(30), 30, false),
            ("nothing at all", 0, None, None, None, 1, false),
            ("spec of zero", 0, None, None, Some(0), 1, false),
            ("deletion", 0, Some(10), None, Some(30), 10, false),
            ("deletion longer than the spec", 0, Some(60), None, Some(30), 60, false),
            ("override", 0, None, Some(5), Some(30), 5, false),
            ("the smaller of both", 0, Some(10), Some(5), Some(30), 5, false),
            ("the smaller of both, other way", 0, Some(5), Some(10), Some(30), 5, false),
            ("unchanged", 10, Some(10), None, Some(30), 10, false),
            ("shortened by a second deletion", 30, Some(5), None, Some(30), 5, true),
            ("not lengthened", 5, Some(30), Some(60), Some(30), 5, false),
            ("killed at once", 30, Some(0), None, Some(30), 1, true),
            ("killed at once, whatever the override", 1, Some(0), Some(5), Some(30), 1, false),
        ] {
            let mut p = pod_json(json!({"containers": [], "terminationGracePeriodSeconds": spec}));
            p.metadata.deletion_grace_period_seconds = deletion;
            let got = effective_grace(stored, PodGrace::of_pod(&p), override_seconds);
            assert_eq!(got, EffectiveGrace { seconds, shortened }, "{name}");
        }
    }

    #[test]
    fn a_kill_gets_the_grace_of_its_cause() {
        let c: Container = serde_json::from_value(json!({"name": "c",
            "livenessProbe": {"terminationGracePeriodSeconds": 7}, "startupProbe": {}}))
        .unwrap();
        let grace = |deletion, termination| PodGrace { deletion, termination };
        for (name, g, reason, override_seconds, want) in [
            ("nothing known", grace(None, None), None, None, 2),
            ("spec", grace(None, Some(30)), None, None, 30),
            ("deletion", grace(Some(4), Some(30)), None, None, 4),
            ("liveness", grace(None, Some(30)), Some(KillReason::LivenessProbe), None, 7),
            (
                "liveness, longer than the pod's",
                grace(None, Some(5)),
                Some(KillReason::LivenessProbe),
                None,
                7,
            ),
            ("startup without its own", grace(None, Some(30)), Some(KillReason::StartupProbe), None, 30),
            ("liveness of a deleted pod", grace(Some(4), Some(30)), Some(KillReason::LivenessProbe), None, 4),
            ("liveness without a spec value", grace(None, None), Some(KillReason::LivenessProbe), None, 2),
            ("definition changed", grace(None, Some(30)), Some(KillReason::DefinitionChanged), None, 30),
            ("override", grace(Some(4), Some(30)), Some(KillReason::LivenessProbe), Some(0), 0),
        ] {
            assert_eq!(container_grace(g, Some(&c), reason, override_seconds), want, "{name}");
        }
        assert_eq!(container_grace(grace(None, Some(9)), None, Some(KillReason::LivenessProbe), None), 9);
    }

    #[test]
    fn time_spent_is_taken_off_and_a_stop_gets_two_seconds_at_least() {
        assert_eq!(remaining_after(10, Duration::from_millis(2999)), 8);
        assert_eq!(stop_timeout(remaining_after(10, Duration::from_secs(60))), 2);
        assert_eq!(stop_timeout(30), 30);
        assert_eq!(remaining_until(Duration::from_secs(10), Duration::from_millis(7500)), 3);
        assert_eq!(remaining_until(Duration::from_secs(10), Duration::from_secs(11)), 0);
    }

    #[test]
    fn a_grace_of_any_length_is_waited_for_without_an_overflow() {
        for (grace, want) in [
            (None, 10),
            (Some(i64::MIN), 10),
            (Some(0), 10),
            (Some(6), 10),
            (Some(7), 10),
            (Some(8), 12),
            (Some(30), 45),
            (Some(i64::MAX), MAXIMUM_STOP_SECONDS.unsigned_abs() / 2 * 3),
        ] {
            let got = kill_timeout(grace);
            assert_eq!(got.as_secs(), want, "{grace:?}");
        }
        assert_eq!(clock::FAR.as_secs(), MAXIMUM_STOP_SECONDS.unsigned_abs());
        for (seconds, want) in [(i64::MIN, 2), (-1, 2), (30, 30), (i64::MAX, MAXIMUM_STOP_SECONDS)] {
            assert_eq!(stop_timeout(seconds), want);
        }
        assert_eq!(remaining_after(i64::MIN, Duration::MAX), i64::MIN);
        assert_eq!(remaining_until(Duration::MAX, Duration::ZERO), i64::MAX);
    }

    #[test]
    fn the_grace_period_of_an_orphaned_pod_is_read_from_its_containers() {
        let runtime = RuntimeBuilder::ready()
            .running("c")
            .edit(|c| {
                c.annotations.insert(labels::POD_TERMINATION_GRACE.to_owned(), "12".to_owned());
                c.annotations.insert(labels::POD_DELETION_GRACE.to_owned(), "x".to_owned());
            })
            .build();
        let got = PodGrace::of_record(&runtime.containers[0]);
        assert_eq!(got, PodGrace { deletion: None, termination: Some(12) });
    }

    #[test]
    fn sidecars_stop_after_the_regular_containers_in_reverse_order() {
        let sidecar = |n: &str| json!({"name": n, "image": "i", "restartPolicy": "Always"});
        let p = pod_json(json!({
            "initContainers": [sidecar("s0"), sidecar("s1"), sidecar("s2")],
            "containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}],
            "ephemeralContainers": [{"name": "e", "image": "i"}],
        }));
        let plan = |r: RuntimeBuilder, p: Option<&Pod>| {
            termination_plan(p, &r.build()).into_iter().map(|s| (s.name, s.after)).collect::<Vec<_>>()
        };
        let all = || {
            ["s0", "s1", "s2", "a", "b", "e"]
                .into_iter()
                .fold(RuntimeBuilder::ready(), RuntimeBuilder::running)
        };
        let got = plan(all(), Some(&p));
        let find = |n: &str| got.iter().find(|(name, _)| name == n).unwrap().1.clone();
        assert_eq!(find("a"), Vec::<String>::new());
        assert_eq!(find("e"), Vec::<String>::new());
        assert_eq!(find("s2"), ["a", "b"]);
        assert_eq!(find("s1"), ["a", "b", "s2"]);
        assert_eq!(find("s0"), ["a", "b", "s1"]);
        let order: Vec<_> = got[3..].iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(order, ["s2", "s1", "s0"]);
        let got = plan(
            RuntimeBuilder::ready().running("s0").exited("s1", 0).running("s2").exited("a", 0),
            Some(&p),
        );
        assert_eq!(got, [("s2".to_owned(), vec![]), ("s0".to_owned(), vec!["s2".to_owned()])]);
        let got = plan(all(), None);
        assert!(got.iter().all(|(_, after)| after.is_empty()));
    }
}
