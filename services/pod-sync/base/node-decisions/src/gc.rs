//! Selects dead containers and sandboxes for removal (`pkg/kubelet/kuberuntime: containerGC`).

use std::time::Duration;

use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::runtime::{Container, ContainerState, PodRuntime, SandboxState};

/// Instances that are kept of each container: the current one and the previous one, for status and logs.
const KEPT_INSTANCES: usize = 2;

/// Limits of the dead containers that a pod keeps (`pkg/kubelet/container: GCPolicy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GcPolicy {
    /// Dead instances to keep of each container; below 0: all. `None`: two instances, dead or running.
    pub per_container: Option<i32>,
    /// Dead containers younger than this are kept.
    pub min_age: Duration,
}

/// Selection of the dead instances of a pod that garbage collection keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodDisposition {
    /// The pod runs or has completed, and its newest instances are kept.
    Kept,
    /// The pod was evicted or is no longer desired: all its dead containers are removed.
    Removed,
}

/// Returns the containers to remove, oldest first; `now` is wall time. Running containers are never removed.
/// Of a kept pod the newest instance of each container stays, since without it the container would look as if
/// it had never run.
#[must_use]
pub fn dead_containers(
    runtime: &PodRuntime,
    fate: PodDisposition,
    limits: GcPolicy,
    now: jiff::Timestamp,
) -> Vec<ContainerId> {
    let mut names: Vec<&str> = runtime.containers.iter().map(|c| c.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let is_dead = |c: &&Container| c.state != ContainerState::Running;
    let dead_instances = |name| -> Vec<&Container> {
        let all = runtime.instances(name);
        match (fate, limits.per_container) {
            (PodDisposition::Removed, _) => all.filter(is_dead).collect(),
            (PodDisposition::Kept, None) => all.skip(KEPT_INSTANCES).filter(is_dead).collect(),
            (PodDisposition::Kept, Some(kept)) => {
                let kept = usize::try_from(kept).map_or(usize::MAX, |kept| kept.max(1));
                all.filter(is_dead).skip(kept).collect()
            }
        }
    };
    let min_age = i128::try_from(limits.min_age.as_nanos()).unwrap_or(i128::MAX);
    let born = i64::try_from(now.as_nanosecond().saturating_sub(min_age));
    let is_old =
        |c: &Container| fate == PodDisposition::Removed || born.is_ok_and(|born| c.created_unix_ns <= born);
    let mut dead: Vec<_> = names.into_iter().flat_map(dead_instances).filter(|c| is_old(c)).collect();
    dead.sort_by_key(|c| c.created_unix_ns);
    dead.into_iter().map(|c| c.id.clone()).collect()
}

/// Returns the sandboxes to remove: not ready, without containers once `removed` are gone, and not the newest
/// of a kept pod.
#[must_use]
pub fn dead_sandboxes(runtime: &PodRuntime, removed: &[ContainerId], fate: PodDisposition) -> Vec<SandboxId> {
    let kept = match fate {
        PodDisposition::Kept => 1,
        PodDisposition::Removed => 0,
    };
    runtime
        .sandboxes
        .iter()
        .skip(kept)
        .filter(|s| s.state == SandboxState::NotReady)
        .filter(|s| !runtime.containers.iter().any(|c| c.sandbox_id == s.id && !removed.contains(&c.id)))
        .map(|s| s.id.clone())
        .collect()
}

/// Returns the UID in the name of a pod's log directory, `<namespace>_<name>_<uid>`.
#[must_use]
pub fn log_dir_uid(name: &str) -> Option<&str> {
    let (rest, uid) = name.rsplit_once('_')?;
    (rest.contains('_') && !uid.is_empty()).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::RuntimeBuilder;

    fn names(runtime: &PodRuntime, fate: PodDisposition) -> Vec<String> {
        let name = |id: &ContainerId| {
            let c = runtime.containers.iter().find(|c| c.id == *id).unwrap();
            format!("{}-{}", c.name, c.attempt)
        };
        dead_containers(runtime, fate, GcPolicy::default(), now(0)).iter().map(name).collect()
    }

    // Wall time, in seconds after the builder's containers were created.
    fn now(seconds: i64) -> jiff::Timestamp {
        let at = RuntimeBuilder::ready().running("c").build().containers[0].created_unix_ns;
        jiff::Timestamp::from_nanosecond(at.into()).unwrap() + jiff::SignedDuration::from_secs(3600 + seconds)
    }

    #[test]
    fn the_configured_number_of_dead_instances_and_recent_ones_are_kept() {
        let crashed = RuntimeBuilder::ready().exited("c", 1).exited("c", 1).exited("c", 1);
        let (down, up) = (crashed.clone().build(), crashed.running("c").build());
        let count = |runtime: &PodRuntime, per_container, min_age| {
            let limits = GcPolicy { per_container, min_age: Duration::from_secs(min_age) };
            dead_containers(runtime, PodDisposition::Kept, limits, now(0)).len()
        };
        for (per_container, of_down, of_up) in [
            (None, 1, 2),
            (Some(-1), 0, 0),
            (Some(0), 2, 2),
            (Some(1), 2, 2),
            (Some(2), 1, 1),
            (Some(9), 0, 0),
        ] {
            assert_eq!(count(&down, per_container, 0), of_down, "down, {per_container:?}");
            assert_eq!(count(&up, per_container, 0), of_up, "up, {per_container:?}");
        }
        assert_eq!(count(&down, Some(1), 86_400), 0, "too young");
        let limits = GcPolicy { min_age: Duration::MAX, ..GcPolicy::default() };
        assert_eq!(
            dead_containers(&down, PodDisposition::Removed, limits, now(0)).len(),
            3,
            "a pod that goes has no young ones"
        );
    }

    #[test]
    fn the_newest_two_instances_are_kept_and_no_running_one_is_removed() {
        let crashed = || RuntimeBuilder::ready().exited("c", 1).exited("c", 1).exited("c", 1);
        for (what, runtime, stays, goes) in [
            ("nothing", RuntimeBuilder::none(), vec![], vec![]),
            ("running", RuntimeBuilder::ready().running("c"), vec![], vec![]),
            ("one death", RuntimeBuilder::ready().exited("c", 1).running("c"), vec![], vec!["c-0"]),
            ("crashing", crashed(), vec!["c-0"], vec!["c-0", "c-1", "c-2"]),
            ("running again", crashed().running("c"), vec!["c-0", "c-1"], vec!["c-0", "c-1", "c-2"]),
            (
                "by name",
                RuntimeBuilder::ready().exited("a", 0).exited("b", 0).exited("b", 0).exited("b", 0),
                vec!["b-0"],
                vec!["a-0", "b-0", "b-1", "b-2"],
            ),
        ] {
            let runtime = runtime.build();
            assert_eq!(names(&runtime, PodDisposition::Kept), stays, "{what}");
            assert_eq!(names(&runtime, PodDisposition::Removed), goes, "{what}");
        }
    }

    #[test]
    fn an_empty_sandbox_is_removed_if_there_is_a_newer_one() {
        let old = RuntimeBuilder::none().sandbox(SandboxState::NotReady).exited("c", 1);
        let both = old.sandbox(SandboxState::Ready).running("c").build();
        let count = |r: &PodRuntime, removed: &[ContainerId], fate| dead_sandboxes(r, removed, fate).len();
        assert_eq!(count(&both, &[], PodDisposition::Kept), 0, "its container is still there");
        let dead: Vec<_> = both
            .containers
            .iter()
            .filter(|c| c.state == ContainerState::Exited)
            .map(|c| c.id.clone())
            .collect();
        assert_eq!(count(&both, &dead, PodDisposition::Kept), 1);
        assert_eq!(count(&both, &dead, PodDisposition::Removed), 1, "one that is ready is not dead");
        let last = RuntimeBuilder::none().sandbox(SandboxState::NotReady).build();
        assert_eq!(
            (count(&last, &[], PodDisposition::Kept), count(&last, &[], PodDisposition::Removed)),
            (0, 1)
        );
    }

    #[test]
    fn a_log_directory_name_contains_the_pods_uid() {
        for (name, want) in [
            ("default_web_u-1", Some("u-1")),
            ("ns_a_b_u", Some("u")),
            ("web_u", None),
            ("web", None),
            ("a_b_", None),
        ] {
            assert_eq!(log_dir_uid(name), want, "{name}");
        }
    }
}
