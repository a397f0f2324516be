//! Checks of a sync before its actions, and when a static pod starts (`pkg/kubelet: SyncPod`,
//! `allowPodStart`).

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use quintlet_model::runtime::{ContainerState, PodRuntime};

use super::conditions;
use super::restart::pod_is_restartable;

/// Continuation of a sync after its status was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncGate {
    /// The phase is terminal: the pod is terminated.
    Terminal,
    /// The runtime's network is not ready and the pod needs it.
    NetworkNotReady,
    /// Compute and execute the actions.
    Proceed,
}

/// Decides whether a sync continues after its status was computed. A pod of the host's network does not wait
/// for the network of pods.
#[must_use]
pub fn gate(pod: &Pod, status: &PodStatus, network_ready: bool) -> SyncGate {
    if pod::is_terminal_phase(status.phase.as_deref()) {
        SyncGate::Terminal
    } else if !network_ready && !pod::host_network(pod) {
        SyncGate::NetworkNotReady
    } else {
        SyncGate::Proceed
    }
}

/// Operations on a pod's cgroup before any container starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CgroupPlan {
    /// Containers run outside the cgroup: kill the pod first.
    pub kill_first: bool,
    /// Create the cgroup.
    pub ensure: bool,
}

/// Plans the cgroup. An existing cgroup is not updated here.
#[must_use]
pub fn cgroup_plan(pod: &Pod, exists: bool, runtime: &PodRuntime) -> CgroupPlan {
    if exists {
        return CgroupPlan::default();
    }
    let kill_first = runtime.containers.iter().any(|c| c.state == ContainerState::Running);
    // A pod that has run and is not restarted needs no new cgroup.
    CgroupPlan { kill_first, ensure: !kill_first || pod_is_restartable(pod) }
}

/// Returns whether the status says that all containers restart: [`super::actions::ActionInput::restart_all`].
#[must_use]
pub fn restarts_all(status: &PodStatus) -> bool {
    status
        .conditions
        .iter()
        .flatten()
        .any(|c| c.type_ == conditions::ALL_CONTAINERS_RESTARTING && c.status == "True")
}

/// A pod that waits until its full name is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FullNameWaiter {
    /// The pod that waits.
    pub uid: PodUid,
    /// Whether the pod has a worker and is not terminating.
    pub live: bool,
}

/// Returns whether a static pod may start: no other pod with its full name is started, and it is the first
/// live one in the queue (`pkg/kubelet: allowStaticPodStart`).
#[must_use]
pub fn static_pod_may_start(uid: &PodUid, started: Option<&PodUid>, line: &[FullNameWaiter]) -> bool {
    match started {
        Some(other) => other == uid,
        None => line.iter().find(|w| w.live).is_none_or(|first| &first.uid == uid),
    }
}

/// Returns restart count and attempt of the next instance of a container. Without a runtime record they are
/// derived from the log files in its log directory, `<n>.log` and rotated ones.
#[must_use]
pub fn next_attempt<'a>(
    runtime: &PodRuntime,
    name: &str,
    log_files: impl IntoIterator<Item = &'a str>,
) -> u32 {
    // Two records may disagree if an annotation was lost. An attempt is never reused.
    let recorded = runtime.instances(name).map(|c| c.restart_count().max(c.attempt)).max();
    if let Some(count) = recorded {
        return count.saturating_add(1);
    }
    log_files.into_iter().filter_map(log_number).max().map_or(0, |n| n.saturating_add(1))
}

fn log_number(file: &str) -> Option<u32> {
    let (number, rest) = file.split_once('.')?;
    let ours = rest == "log" || rest.starts_with("log.");
    let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    number.parse().ok().filter(|_| ours && digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::{RuntimeBuilder, pod_json, status_json};
    use serde_json::json;

    fn pod(policy: &str) -> Pod {
        pod_json(json!({"restartPolicy": policy, "containers": [{"name": "c", "image": "i"}]}))
    }

    #[test]
    fn a_sync_ends_at_a_terminal_phase_and_waits_for_the_network() {
        let host = pod_json(json!({"hostNetwork": true, "containers": []}));
        for (name, p, phase, network, want) in [
            ("failed", pod("Always"), "Failed", true, SyncGate::Terminal),
            ("succeeded without network", pod("Always"), "Succeeded", false, SyncGate::Terminal),
            ("no network", pod("Always"), "Running", false, SyncGate::NetworkNotReady),
            ("no network needed", host, "Running", false, SyncGate::Proceed),
            ("all well", pod("Always"), "Pending", true, SyncGate::Proceed),
        ] {
            assert_eq!(gate(&p, &status_json(json!({"phase": phase})), network), want, "{name}");
        }
    }

    #[test]
    fn a_missing_cgroup_is_created_unless_the_pod_has_terminated() {
        let runs = || RuntimeBuilder::ready().running("c").build();
        let none = || RuntimeBuilder::none().build();
        let plan = |kill_first, ensure| CgroupPlan { kill_first, ensure };
        for (name, policy, exists, runtime, want) in [
            ("there", "Always", true, runs(), plan(false, false)),
            ("new pod", "Never", false, none(), plan(false, true)),
            ("runs without one", "Always", false, runs(), plan(true, true)),
            ("runs without one and never again", "Never", false, runs(), plan(true, false)),
        ] {
            assert_eq!(cgroup_plan(&pod(policy), exists, &runtime), want, "{name}");
        }
    }

    #[test]
    fn one_static_pod_per_name_starts_and_the_longest_waiting_one_is_next() {
        let uid = |u: &str| PodUid::parse(u).unwrap();
        let line = |l: &[(&str, bool)]| {
            l.iter().map(|(u, live)| FullNameWaiter { uid: uid(u), live: *live }).collect::<Vec<_>>()
        };
        for (name, started, waiting, want) in [
            ("nobody waits", None, vec![], true),
            ("first", None, vec![("b", true), ("c", true)], true),
            ("second", None, vec![("a", true), ("b", true)], false),
            ("those before are over", None, vec![("a", false), ("b", true)], true),
            ("another runs", Some("a"), vec![("b", true)], false),
            ("it runs itself", Some("b"), vec![("a", true)], true),
        ] {
            let started = started.map(uid);
            assert_eq!(static_pod_may_start(&uid("b"), started.as_ref(), &line(&waiting)), want, "{name}");
        }
    }

    #[test]
    fn an_attempt_is_never_used_twice() {
        let none = RuntimeBuilder::none().build();
        for (name, runtime, logs, want) in [
            ("first", none.clone(), vec![], 0),
            ("after two", RuntimeBuilder::ready().exited("c", 1).running("c").build(), vec!["7.log"], 2),
            (
                "annotation lost",
                RuntimeBuilder::ready().exited("c", 1).exited("c", 1).edit(|c| c.annotations.clear()).build(),
                vec![],
                2,
            ),
            ("logs only", none.clone(), vec!["0.log", "3.log", "x.log", "12.txt", ".log", "+9.log"], 4),
            ("rotated logs", none, vec!["5.log.20260101-000000.gz", "6.logs"], 6),
        ] {
            assert_eq!(next_attempt(&runtime, "c", logs), want, "{name}");
        }
    }
}
