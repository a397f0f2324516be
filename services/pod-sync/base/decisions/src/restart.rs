//! Decides whether an exited container is restarted (`pkg/kubelet/container: ShouldContainerBeRestarted`).

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, Pod};
use quintlet_model::pod;
use quintlet_model::runtime::{ContainerState, PodRuntime};

/// Reason of the states that a restart of all containers leaves.
pub(crate) const RESTARTING_ALL: &str = "RestartingAllContainers";
/// Rule action that restarts the container.
const RESTART: &str = "Restart";
/// Rule action that restarts all containers of the pod in place.
const RESTART_ALL: &str = "RestartAllContainers";

/// Action of a restart rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleAction {
    /// Restart this container.
    Restart,
    /// Restart every container of the pod in the same sandbox.
    RestartAll,
}

/// Returns the action of the first rule that matches `exit_code`. Rules apply only with a container-level
/// restart policy.
#[must_use]
pub(crate) fn matching_rule(container: &Container, exit_code: i32) -> Option<RuleAction> {
    container.restart_policy.as_ref()?;
    container.restart_policy_rules.iter().flatten().find_map(|rule| {
        let codes = rule.exit_codes.as_ref()?;
        let listed = codes.values.iter().flatten().any(|v| *v == exit_code);
        let hit = match codes.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            _ => false,
        };
        match rule.action.as_str() {
            RESTART if hit => Some(RuleAction::Restart),
            RESTART_ALL if hit => Some(RuleAction::RestartAll),
            _ => None,
        }
    })
}

/// Returns the restart policy of a container: its own, else the pod's.
#[must_use]
pub(crate) fn effective_policy<'a>(container: &'a Container, pod: &'a Pod) -> &'a str {
    container.restart_policy.as_deref().unwrap_or_else(|| pod::restart_policy(pod))
}

/// Returns whether a container that exited with `exit_code` is restarted.
#[must_use]
pub(crate) fn container_should_restart(container: &Container, pod: &Pod, exit_code: i32) -> bool {
    if matching_rule(container, exit_code).is_some() {
        return true;
    }
    match effective_policy(container, pod) {
        "Never" => false,
        "OnFailure" => exit_code != 0,
        _ => true,
    }
}

/// Returns the exit code that decides whether an init container has failed
/// (`pkg/kubelet/kuberuntime: isInitContainerFailed`). A container that was OOMKilled has failed even if its
/// process exits with 0, so its code is that of SIGKILL then. A kubelet takes 0 for the restart and the
/// phase, and leaves such a pod Pending for ever.
#[must_use]
pub(crate) fn init_exit_code(exit_code: i32, reason: &str) -> i32 {
    if exit_code == 0 && reason == "OOMKilled" { 137 } else { exit_code }
}

/// Returns whether an init container with this terminated state has completed.
#[must_use]
pub(crate) fn init_has_completed(ended: &ContainerStateTerminated) -> bool {
    init_exit_code(ended.exit_code, ended.reason.as_deref().unwrap_or_default()) == 0
}

/// Returns whether a container is to be started in the next sync, according to its newest instance.
#[must_use]
pub(crate) fn should_container_be_restarted(container: &Container, pod: &Pod, runtime: &PodRuntime) -> bool {
    if pod.metadata.deletion_timestamp.is_some() {
        return false;
    }
    match runtime.newest(&container.name) {
        None => true,
        Some(newest) => match newest.state {
            ContainerState::Running => false,
            ContainerState::Unknown | ContainerState::Created => true,
            ContainerState::Exited => container_should_restart(container, pod, newest.exit_code),
        },
    }
}

/// Returns whether a running container is started again after a kill. Rules do not apply, since it has not
/// exited.
#[must_use]
pub(crate) fn restarts_after_kill(container: &Container, pod: &Pod) -> bool {
    effective_policy(container, pod) != "Never"
}

/// Returns whether any container may ever be started again. Only then does a pod get a new cgroup.
#[must_use]
pub(crate) fn pod_is_restartable(pod: &Pod) -> bool {
    pod::restart_policy(pod) != "Never"
        || pod::spec(pod).containers.iter().chain(pod::init_containers(pod)).any(|c| {
            c.restart_policy.as_deref().is_some_and(|p| p != "Never")
                || (c.restart_policy.is_some()
                    && c.restart_policy_rules
                        .iter()
                        .flatten()
                        .any(|r| r.action == RESTART || r.action == RESTART_ALL))
        })
}

/// Returns whether a container of the pod has a rule that restarts all containers.
#[must_use]
pub fn has_restart_all_rule(pod: &Pod) -> bool {
    pod::spec(pod).containers.iter().chain(pod::init_containers(pod)).any(|c| {
        c.restart_policy.is_some() && c.restart_policy_rules.iter().flatten().any(|r| r.action == RESTART_ALL)
    })
}

/// Returns whether the newest instance of `container` exited with a code for which a rule restarts all
/// containers.
#[must_use]
pub(crate) fn is_restart_all_source(container: &Container, runtime: &PodRuntime) -> bool {
    runtime.newest(&container.name).is_some_and(|c| {
        c.state == ContainerState::Exited
            && matching_rule(container, c.exit_code) == Some(RuleAction::RestartAll)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::{RuntimeBuilder, pod_json};
    use serde_json::{Value, json};

    fn container(own: Option<&str>, rules: Value) -> Container {
        let mut c = json!({"name": "c", "image": "i"});
        if let Some(own) = own {
            c["restartPolicy"] = json!(own);
        }
        if !rules.is_null() {
            c["restartPolicyRules"] = rules;
        }
        serde_json::from_value(c).unwrap()
    }

    fn pod(policy: &str) -> Pod {
        pod_json(json!({"restartPolicy": policy, "containers": [{"name": "c", "image": "i"}]}))
    }

    fn rule(action: &str, operator: &str, values: &[i32]) -> Value {
        json!({"action": action, "exitCodes": {"operator": operator, "values": values}})
    }

    #[test]
    fn the_pods_policy_applies_to_containers_without_one() {
        for (policy, code, want) in [
            ("Always", 0, true),
            ("Always", 1, true),
            ("OnFailure", 0, false),
            ("OnFailure", 1, true),
            ("Never", 0, false),
            ("Never", 1, false),
            ("Sometimes", 0, true),
        ] {
            assert_eq!(
                container_should_restart(&container(None, Value::Null), &pod(policy), code),
                want,
                "{policy} {code}"
            );
        }
    }

    #[test]
    fn the_containers_own_policy_wins_over_the_pods() {
        for (own, code, want) in
            [("Always", 0, true), ("OnFailure", 0, false), ("OnFailure", 2, true), ("Never", 2, false)]
        {
            for policy in ["Always", "OnFailure", "Never"] {
                let c = container(Some(own), Value::Null);
                assert_eq!(
                    container_should_restart(&c, &pod(policy), code),
                    want,
                    "{own} in {policy}, {code}"
                );
            }
        }
    }

    #[test]
    fn the_first_matching_rule_applies_and_an_unmatched_code_uses_the_containers_policy() {
        let rules = json!([rule("Restart", "In", &[42]), rule("RestartAllContainers", "NotIn", &[0, 1, 42])]);
        let c = container(Some("Never"), rules);
        assert_eq!(matching_rule(&c, 42), Some(RuleAction::Restart));
        assert_eq!(matching_rule(&c, 7), Some(RuleAction::RestartAll));
        assert_eq!(matching_rule(&c, 1), None);
        assert!(container_should_restart(&c, &pod("Never"), 42));
        assert!(container_should_restart(&c, &pod("Never"), 7));
        assert!(!container_should_restart(&c, &pod("Always"), 1));
    }

    #[test]
    fn rules_without_an_own_policy_are_ignored() {
        let c = container(None, json!([rule("Restart", "In", &[42])]));
        assert_eq!(matching_rule(&c, 42), None);
        assert!(!container_should_restart(&c, &pod("Never"), 42));
    }

    #[test]
    fn a_container_is_started_by_its_newest_instance() {
        let p = pod("OnFailure");
        let c = container(None, Value::Null);
        let with = |f: fn(RuntimeBuilder) -> RuntimeBuilder| f(RuntimeBuilder::ready()).build();
        for (name, runtime, want) in [
            ("never started", with(|r| r), true),
            ("running", with(|r| r.running("c")), false),
            ("created", with(|r| r.created("c")), true),
            ("unknown", with(|r| r.unknown("c")), true),
            ("exited 0", with(|r| r.exited("c", 0)), false),
            ("exited 1", with(|r| r.exited("c", 1)), true),
            ("failed, then succeeded", with(|r| r.exited("c", 1).exited("c", 0)), false),
        ] {
            assert_eq!(should_container_be_restarted(&c, &p, &runtime), want, "{name}");
        }
        let mut deleted = pod("Always");
        deleted.metadata.deletion_timestamp = Some(quintlet_testkit::pods::time(0));
        assert!(!should_container_be_restarted(&c, &deleted, &with(|r| r)));
    }

    #[test]
    fn a_pod_with_policy_never_is_restartable_only_by_a_container_policy() {
        assert!(pod_is_restartable(&pod("Always")));
        assert!(!pod_is_restartable(&pod("Never")));
        let p = pod_json(json!({"restartPolicy": "Never", "containers": [
            {"name": "c", "image": "i", "restartPolicy": "Never", "restartPolicyRules": [rule("Restart", "In", &[1])]}]}));
        assert!(pod_is_restartable(&p));
        let p = pod_json(json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}],
            "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always"}]}));
        assert!(pod_is_restartable(&p));
    }
}
