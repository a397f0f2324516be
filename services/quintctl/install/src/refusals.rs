//! Decides whether an installation would break something. Does no I/O.

use crate::facts::{BasicFacts, CheckFailure, KUBELET_UNIT, MachineFacts, NodeSettings};
use crate::places::DROP_IN;
use crate::refusal::Refusal;

/// Exit codes: a file or an option has to be changed, something is missing or in use, another reason.
const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
const FAILURE: u8 = 1;

fn refusal(code: u8, text: impl Into<String>) -> Refusal {
    Refusal { text: text.into(), code }
}

/// Returns the reasons that do not depend on the node.
pub(crate) fn before_survey(facts: &BasicFacts) -> Vec<Refusal> {
    let mut refusals = before_removal(facts);
    if let Some(journal) = &facts.journal {
        let text = format!(
            "quintctl install has run here ({} exists): run quintctl uninstall first",
            journal.display()
        );
        refusals.push(refusal(FAILURE, text));
    }
    for path in &facts.missing_programs {
        let text =
            format!("{} does not exist: install the package quintlet, or set --bin-dir", path.display());
        refusals.push(refusal(UNAVAILABLE, text));
    }
    refusals
}

/// Returns the reasons not to undo an installation.
pub(crate) fn before_removal(facts: &BasicFacts) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    if !facts.is_root {
        refusals.push(refusal(FAILURE, "only root can install and uninstall: run it with sudo"));
    }
    if !facts.has_systemd {
        let text = "systemd does not run on this machine: run quintctl up, or kubelet of Quintlet, under its own supervisor";
        refusals.push(refusal(FAILURE, text));
    }
    refusals
}

/// Returns the reasons not to take the place of the kubelet.
pub(crate) fn replace(facts: &MachineFacts) -> Vec<Refusal> {
    let unit = &facts.unit;
    match unit.load_state.as_str() {
        "loaded" => {}
        "masked" => {
            let text =
                format!("{KUBELET_UNIT} is masked: run systemctl unmask kubelet, or use quintlet.target");
            return vec![refusal(FAILURE, text)];
        }
        _ => {
            let text = format!(
                "there is no {KUBELET_UNIT} whose place Quintlet could take: without a kubelet, install the package \
                 quintlet-kubelet, or use quintlet.target"
            );
            return vec![refusal(UNAVAILABLE, text)];
        }
    }
    if unit.runs_quintlet {
        return vec![refusal(FAILURE, format!("{KUBELET_UNIT} runs Quintlet already"))];
    }
    let mut refusals = later_drop_ins(facts);
    refusals.extend(files_in_the_way(facts));
    let own = |pid: Option<u32>| pid.is_some() && pid == unit.main_pid;
    let others = facts.kubelets.iter().filter(|kubelet| kubelet.uses_root && !own(kubelet.process.pid));
    refusals.extend(others.map(|kubelet| {
        let text = format!(
            "a kubelet that is not {KUBELET_UNIT} uses the same root directory, {}: stop it",
            kubelet.process
        );
        refusal(UNAVAILABLE, text)
    }));
    refusals.extend(running_quintlets(facts));
    match &facts.node {
        Err(failure) => refusals.extend(unusable(failure)),
        Ok(node) => {
            refusals.extend(runtime(node));
            refusals.extend(ports(
                facts,
                node,
                own,
                "change it in the configuration of the kubelet, or stop the process",
            ));
        }
    }
    refusals
}

/// Returns the reasons not to install a node beside the kubelet.
pub(crate) fn beside(facts: &MachineFacts) -> Vec<Refusal> {
    let mut refusals = files_in_the_way(facts);
    refusals.extend(running_quintlets(facts));
    let node = match &facts.node {
        Ok(node) => node,
        Err(failure) => {
            refusals.extend(unusable(failure));
            return refusals;
        }
    };
    refusals.extend(runtime(node));
    refusals.extend(ports(facts, node, |_| false, "choose another one with --port or --healthz-port"));
    for kubelet in &facts.kubelets {
        let process = &kubelet.process;
        if kubelet.uses_root {
            let text = format!("{} is the root directory of a kubelet, {process}", node.root_dir.display());
            refusals.push(refusal(UNAVAILABLE, text));
        }
        match &kubelet.settings {
            Err(failure) => {
                let why = failure.lines.first().map_or("", String::as_str);
                let text =
                    format!("the runtime and the node name of the kubelet, {process}, are unknown: {why}");
                refusals.push(refusal(failure.code, text));
            }
            Ok(other) => {
                if other.runtime_endpoint == node.runtime_endpoint {
                    let text = format!(
                        "the kubelet, {process}, uses the runtime {}, too, and stops pods in it that are not its own: give \
                         --runtime-endpoint of another one",
                        node.runtime_endpoint
                    );
                    refusals.push(refusal(USAGE, text));
                }
                if other.node_name.eq_ignore_ascii_case(&node.node_name) {
                    let text = format!(
                        "the kubelet, {process}, has the node name {}, too: give another --node-name",
                        node.node_name
                    );
                    refusals.push(refusal(USAGE, text));
                }
            }
        }
    }
    refusals
}

/// Returns the drop-ins that would replace the command line of Quintlet: systemd reads them in the order of
/// their file names.
fn later_drop_ins(facts: &MachineFacts) -> Vec<Refusal> {
    let name = |path: &std::path::Path| path.file_name().map(std::ffi::OsStr::to_owned);
    let own = name(std::path::Path::new(DROP_IN));
    let later = facts.unit.drop_ins.iter().filter(|path| name(path) > own);
    let text = |path: &std::path::PathBuf| {
        format!("{} would precede the drop-in of Quintlet: give it a name before {}", path.display(), DROP_IN)
    };
    later.map(|path| refusal(USAGE, text(path))).collect()
}

fn files_in_the_way(facts: &MachineFacts) -> Vec<Refusal> {
    let text = |path: &std::path::PathBuf| {
        format!("{} exists and would be overwritten: remove it, or rename it", path.display())
    };
    facts.existing.iter().map(|path| refusal(USAGE, text(path))).collect()
}

fn running_quintlets(facts: &MachineFacts) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    if let Some(process) = &facts.quintlet {
        let text = format!("another Quintlet uses the same root directory, {process}: stop it");
        refusals.push(refusal(UNAVAILABLE, text));
    }
    if !facts.active_units.is_empty() {
        let names = facts.active_units.join(" ");
        let text = format!("Quintlet runs already, as {names}: run systemctl disable --now {names}");
        refusals.push(refusal(UNAVAILABLE, text));
    }
    refusals
}

fn unusable(failure: &CheckFailure) -> Vec<Refusal> {
    failure.lines.iter().map(|line| refusal(failure.code, line)).collect()
}

fn runtime(node: &NodeSettings) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    if let Some(error) = &node.runtime_error {
        let text = format!("the runtime at {} does not answer: {error}: start it", node.runtime_endpoint);
        refusals.push(refusal(UNAVAILABLE, text));
    }
    if let (Some(configured), Some(reported)) = (&node.cgroup_driver, &node.runtime_cgroup_driver)
        && configured != reported
    {
        let text = format!(
            "cgroupDriver is {configured}, and the runtime at {} uses {reported}: change the field, or the runtime",
            node.runtime_endpoint
        );
        refusals.push(refusal(USAGE, text));
    }
    refusals
}

fn ports(
    facts: &MachineFacts,
    node: &NodeSettings,
    is_own: impl Fn(Option<u32>) -> bool,
    remedy: &str,
) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for (field, port) in &node.ports {
        let other = facts.listeners.iter().find(|found| found.port == *port && !is_own(found.pid));
        if let Some(other) = other {
            let owner = match other.pid {
                Some(pid) => format!("pid {pid} ({})", other.command),
                None => "another process".to_owned(),
            };
            let text = format!("port {port} ({field}) is in use by {owner}: {remedy}");
            refusals.push(refusal(UNAVAILABLE, text));
        }
    }
    refusals
}

#[cfg(test)]
mod tests;
