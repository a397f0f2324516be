//! Decides whether all containers of a pod restart in place (the rule action `RestartAllContainers`).

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use quintlet_model::pod;
use quintlet_model::runtime::PodRuntime;

use super::conditions::ALL_CONTAINERS_RESTARTING;
use super::container_status::STATUS_UNKNOWN;
use super::restart::{
    RESTARTING_ALL, RuleAction, has_restart_all_rule, is_restart_all_source, matching_rule,
};

/// Returns whether a restart of all containers is requested: by a current exit, by one in `old`, or by a
/// restart that is still in progress.
#[must_use]
pub(crate) fn restart_all_triggered(pod: &Pod, runtime: &PodRuntime, old: &PodStatus) -> bool {
    if !has_restart_all_rule(pod) {
        return false;
    }
    let already =
        old.conditions.iter().flatten().any(|c| c.type_ == ALL_CONTAINERS_RESTARTING && c.status == "True");
    if already {
        return true;
    }
    let statuses =
        || old.container_statuses.iter().flatten().chain(old.init_container_statuses.iter().flatten());
    pod::spec(pod).containers.iter().chain(pod::init_containers(pod)).any(|c| {
        is_restart_all_source(c, runtime)
            || statuses().filter(|s| s.name == c.name).any(|s| {
                s.state.as_ref().and_then(|s| s.terminated.as_ref()).is_some_and(|t| {
                    // A state that was not observed is not an exit.
                    t.reason.as_deref() != Some(RESTARTING_ALL)
                        && t.reason.as_deref() != Some(STATUS_UNKNOWN)
                        && matching_rule(c, t.exit_code) == Some(RuleAction::RestartAll)
                })
            })
    })
}
