//! The steps of an installation, from the facts of the survey. Does no I/O.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::args::InstallArgs;
use crate::beside;
use crate::facts::{KUBELET_UNIT, MachineFacts};
use crate::machine::Machine;
use crate::places::{BESIDE_NAME, BESIDE_RUN_DIR, BESIDE_UNIT, DROP_IN};
use crate::steps::InstallStep;

/// Directory of the sockets in the place of a kubelet.
const RUN_DIR: &str = "/run/quintlet";

/// Settings of a unit that runs all services. The values are those of the unit in the package
/// quintlet-kubelet.
const SERVICE: &str = "\
# The supervisor stops the services in their order. Pods keep running: their processes are not in this cgroup.
KillMode=mixed
TimeoutStopSec=60s
Delegate=yes
OOMScoreAdjust=-999
LimitNOFILE=1000000
LimitCORE=0
# Users of containers must be able to enter directories of volumes and logs.
UMask=0022
";

/// The steps of an installation, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InstallPlan {
    pub(crate) steps: Vec<InstallStep>,
}

impl InstallPlan {
    /// Returns a title and the numbered steps, and with `whole` the content of their files.
    pub(crate) fn text(&self, title: &str, whole: bool) -> String {
        let mut text = format!("{title}:\n");
        for (number, step) in (1..).zip(&self.steps) {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{number:3}. {}", step.text());
            let _ = writeln!(text, "     undo: {}", step.undo_text());
            if whole && let Some(content) = step.content() {
                text.extend(
                    content.lines().map(|line| format!("     | {line}").trim_end().to_owned() + "\n"),
                );
            }
        }
        text
    }

    /// Returns the steps that undo `begun`, numbered in the order in which they are undone.
    pub(crate) fn undo_text(begun: &[InstallStep], is_dry: bool) -> String {
        let mut text =
            String::from(if is_dry { "Steps that would be undone:\n" } else { "Steps to undo:\n" });
        let undone = begun.iter().rev().filter(|step| step.has_undo());
        for (number, step) in (1..).zip(undone) {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{number:3}. {}", step.undo_text());
        }
        text
    }
}

/// Returns the steps that make kubelet.service run Quintlet.
pub(crate) fn replace(args: &InstallArgs, machine: &Machine, facts: &MachineFacts) -> InstallPlan {
    let unit = || KUBELET_UNIT.to_owned();
    let run_dir = facts.node.as_ref().map_or_else(|_| PathBuf::from(RUN_DIR), |node| node.run_dir.clone());
    let mut steps = Vec::new();
    if facts.unit.is_active {
        steps.push(InstallStep::Stop { unit: unit() });
    }
    steps.extend(directories(facts));
    steps.push(InstallStep::Unit { path: DROP_IN.into(), content: drop_in(machine, facts) });
    if !facts.unit.is_enabled {
        steps.push(InstallStep::Enable { unit: unit() });
    }
    steps.push(InstallStep::Start { unit: unit() });
    steps.push(InstallStep::Healthy { run_dir, seconds: args.timeout });
    InstallPlan { steps }
}

/// Returns the steps that install a node beside the kubelet.
pub(crate) fn beside(args: &InstallArgs, machine: &Machine, facts: &MachineFacts) -> InstallPlan {
    let unit = || BESIDE_NAME.to_owned();
    let mut steps: Vec<InstallStep> = directories(facts).collect();
    steps.push(InstallStep::Unit { path: BESIDE_UNIT.into(), content: beside_unit(args, machine) });
    steps.push(InstallStep::Enable { unit: unit() });
    steps.push(InstallStep::Start { unit: unit() });
    steps.push(InstallStep::Healthy { run_dir: BESIDE_RUN_DIR.into(), seconds: args.timeout });
    InstallPlan { steps }
}

fn directories(facts: &MachineFacts) -> impl Iterator<Item = InstallStep> {
    facts.missing_directories.iter().map(|path| InstallStep::Directory { path: path.clone() })
}

fn drop_in(machine: &Machine, facts: &MachineFacts) -> String {
    let program = machine.bin_dir.join("quintlet");
    let arguments = facts.unit.command.raw_arguments();
    format!(
        "# Written by quintctl install --replace-kubelet, and removed by quintctl uninstall.\n\
         [Unit]\n\
         Description=Quintlet in the place of the kubelet\n\
         # Both would supervise the same services.\n\
         Conflicts=quintlet.target quintlet-cri-proxy.service quintlet-pleg-service.service quintlet-probe-service.service\n\
         Conflicts=quintlet-status-reporter.service quintlet-node-api.service quintlet-pod-sync.service\n\
         \n\
         [Service]\n\
         Type=simple\n\
         WatchdogSec=0\n\
         ExecStart=\n\
         ExecStart=@{} kubelet {arguments}\n\
         Restart=always\n\
         RestartSec=10\n\
         {SERVICE}",
        program.display()
    )
}

fn beside_unit(args: &InstallArgs, machine: &Machine) -> String {
    let program = machine.bin_dir.join("quintlet");
    let arguments = beside::arguments(args, machine);
    let words: Vec<String> = arguments.iter().map(|word| unit_word(word)).collect();
    format!(
        "# Written by quintctl install --beside, and removed by quintctl uninstall.\n\
         [Unit]\n\
         Description=Quintlet beside a kubelet\n\
         After=network-online.target containerd.service crio.service\n\
         Wants=network-online.target\n\
         StartLimitIntervalSec=0\n\
         \n\
         [Service]\n\
         ExecStart=@{} kubelet \\\n    {}\n\
         Restart=always\n\
         RestartSec=10\n\
         {SERVICE}\n\
         [Install]\n\
         WantedBy=multi-user.target\n",
        program.display(),
        words.join(" \\\n    ")
    )
}

/// Returns a word as a unit has it.
fn unit_word(word: &str) -> String {
    let escaped = word.replace('\\', "\\\\").replace('%', "%%").replace('$', "$$").replace('"', "\\\"");
    if escaped.contains(char::is_whitespace) { format!("\"{escaped}\"") } else { escaped }
}
