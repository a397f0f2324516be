//! Describes the actions of a sync.

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;

use super::StartBackoffs;
use crate::actions::PodActions;
use crate::sandbox::{SandboxChange, SandboxDecision};

/// Returns one line per action, or one line that says that there is none.
#[must_use]
pub fn explain(
    pod: &Pod,
    actions: &PodActions,
    sandbox: &SandboxDecision,
    start_backoffs: &StartBackoffs,
) -> Vec<String> {
    let spec = pod::spec(pod);
    let mut lines = Vec::new();
    if actions.kill_pod && !actions.create_sandbox {
        lines.push("stop the pod: no container will run again".to_owned());
    }
    if actions.create_sandbox {
        let why = match sandbox {
            SandboxDecision::Keep { .. } => "",
            SandboxDecision::Create { why, .. } => match why {
                SandboxChange::None => "none exists",
                SandboxChange::SeveralReady => "more than one is ready",
                SandboxChange::NotReady => "the newest is not ready",
                SandboxChange::NetworkMode => "the network mode of the newest differs from the spec",
                SandboxChange::NoAddress => "the newest has no address",
            },
        };
        lines.push(format!("create sandbox, attempt {}: {why}", actions.attempt));
    }
    lines.extend(actions.containers_to_kill.iter().map(|k| format!("kill {}: {}", k.name, k.message)));
    for (what, updates) in [("memory", &actions.resize.memory), ("cpu", &actions.resize.cpu)] {
        lines.extend(updates.iter().map(|u| format!("resize {}: {what}", u.name)));
    }
    if actions.resize.pod {
        lines.push("resize the pod's cgroup".to_owned());
    }
    lines.extend(actions.reset.iter().map(|r| {
        format!(
            "{} {} ({}) to restart all containers",
            if r.kill { "kill and remove" } else { "remove" },
            r.name,
            r.id
        )
    }));
    let start = |kind: &str, name: &str| match start_backoffs.get(name) {
        Some(h) => format!("start {kind}{name} at +{:.1}s", h.remaining.as_secs_f64()),
        None => format!("start {kind}{name}"),
    };
    let ephemeral: Vec<_> = spec.ephemeral_containers.iter().flatten().map(|c| &c.name).collect();
    let name = |list: &[&String], i: usize| list.get(i).map_or_else(String::new, |n| (*n).clone());
    let inits: Vec<_> = pod::init_containers(pod).iter().map(|c| &c.name).collect();
    let regular: Vec<_> = spec.containers.iter().map(|c| &c.name).collect();
    lines.extend(
        actions.ephemeral_containers_to_start.iter().map(|i| start("ephemeral ", &name(&ephemeral, *i))),
    );
    lines.extend(actions.init_containers_to_start.iter().map(|i| start("init ", &name(&inits, *i))));
    lines.extend(actions.containers_to_start.iter().map(|i| start("", &name(&regular, *i))));
    if lines.is_empty() {
        lines.push("no change needed".to_owned());
    }
    lines
}
