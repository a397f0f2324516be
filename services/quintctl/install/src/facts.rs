//! Surveys the machine. Only reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use quintlet_agents::{AgentProcess, KubeletProcess};
use serde::Deserialize;

use crate::args::InstallArgs;
use crate::beside;
use crate::error::InstallError;
use crate::listeners::{Listener, listeners};
use crate::machine::{Machine, reason};
use crate::places::{BESIDE_DIRECTORIES, BESIDE_UNIT, DROP_IN};
use crate::unit_file::UnitCommand;

/// The unit of the kubelet.
pub(crate) const KUBELET_UNIT: &str = "kubelet.service";

/// The programs that a node needs, beside each other.
const PROGRAMS: [&str; 8] = [
    "quintlet",
    "quintctl",
    "cri-proxy",
    "pleg-service",
    "probe-service",
    "status-reporter",
    "node-api",
    "pod-sync",
];

/// The conditions of each installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BasicFacts {
    pub(crate) is_root: bool,
    pub(crate) has_systemd: bool,
    pub(crate) missing_programs: Vec<PathBuf>,
    /// The journal of an installation, if there is one.
    pub(crate) journal: Option<PathBuf>,
}

/// The unit of the kubelet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KubeletUnit {
    /// `LoadState`: loaded, not-found, masked, …
    pub(crate) load_state: String,
    /// Whether systemd runs the unit, or restarts it again and again.
    pub(crate) is_active: bool,
    pub(crate) is_enabled: bool,
    pub(crate) main_pid: Option<u32>,
    /// The drop-ins, in systemd's order.
    pub(crate) drop_ins: Vec<PathBuf>,
    pub(crate) command: UnitCommand,
    /// Whether the program is the binary of Quintlet.
    pub(crate) runs_quintlet: bool,
}

/// The settings that `kubelet --check` prints.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeSettings {
    pub(crate) root_dir: PathBuf,
    pub(crate) node_name: String,
    pub(crate) run_dir: PathBuf,
    pub(crate) runtime_endpoint: String,
    pub(crate) cgroup_driver: Option<String>,
    pub(crate) runtime_cgroup_driver: Option<String>,
    pub(crate) runtime_error: Option<String>,
    pub(crate) ports: BTreeMap<String, u16>,
}

/// The reasons why a command line or its files are not usable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CheckFailure {
    pub(crate) code: u8,
    pub(crate) lines: Vec<String>,
}

/// A running kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KubeletFacts {
    pub(crate) process: AgentProcess,
    /// Whether its root directory is that of the node to install.
    pub(crate) uses_root: bool,
    /// The settings of the kubelet, for a node beside it; else defaults.
    pub(crate) settings: Result<NodeSettings, CheckFailure>,
}

/// The machine, and the node that is to be installed on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MachineFacts {
    pub(crate) unit: KubeletUnit,
    /// Units of Quintlet that run.
    pub(crate) active_units: Vec<String>,
    pub(crate) kubelets: Vec<KubeletFacts>,
    /// The Quintlet that uses the root directory.
    pub(crate) quintlet: Option<AgentProcess>,
    pub(crate) listeners: Vec<Listener>,
    pub(crate) node: Result<NodeSettings, CheckFailure>,
    /// Files that the installation would write and that exist.
    pub(crate) existing: Vec<PathBuf>,
    /// Directories that the installation needs and that do not exist.
    pub(crate) missing_directories: Vec<PathBuf>,
}

/// Returns what can be known without systemd and without root.
pub(crate) fn basic(machine: &Machine) -> BasicFacts {
    let programs = PROGRAMS.iter().map(|name| machine.bin_dir.join(name));
    let journal = machine.journal();
    BasicFacts {
        is_root: machine.is_root,
        has_systemd: machine.path(Path::new("/run/systemd/system")).is_dir(),
        missing_programs: programs.filter(|path| !machine.path(path).is_file()).collect(),
        journal: Some(journal).filter(|path| machine.path(path).exists()),
    }
}

/// Surveys the machine for an installation in the place of the kubelet.
pub(crate) fn replace(machine: &Machine) -> Result<MachineFacts, InstallError> {
    let unit = kubelet_unit(machine)?;
    let node = check(machine, &unit.command.arguments(), &unit.command.environment)?;
    let drop_in = PathBuf::from(DROP_IN);
    let directory = drop_in.parent().unwrap_or(Path::new("/")).to_owned();
    survey(machine, unit, node, &drop_in, &[directory], false)
}

/// Surveys the machine for an installation beside a kubelet.
pub(crate) fn beside_kubelet(args: &InstallArgs, machine: &Machine) -> Result<MachineFacts, InstallError> {
    let unit = kubelet_unit(machine)?;
    let node = check(machine, &beside::arguments(args, machine), &BTreeMap::new())?;
    let directories = BESIDE_DIRECTORIES.map(PathBuf::from);
    survey(machine, unit, node, Path::new(BESIDE_UNIT), &directories, true)
}

fn survey(
    machine: &Machine,
    unit: KubeletUnit,
    node: Result<NodeSettings, CheckFailure>,
    file: &Path,
    directories: &[PathBuf],
    with_settings: bool,
) -> Result<MachineFacts, InstallError> {
    let root_dir = node.as_ref().map(|node| machine.path(&node.root_dir)).ok();
    let processes = machine.processes();
    let mut kubelets = Vec::new();
    for kubelet in processes.kubelets() {
        kubelets.push(kubelet_facts(machine, &kubelet, root_dir.as_deref(), with_settings)?);
    }
    let active =
        machine.systemctl(&["list-units", "--state=active", "--plain", "--no-legend", "quintlet*"])?;
    let names = active.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned);
    let is_missing = |path: &&PathBuf| !machine.path(path).exists();
    Ok(MachineFacts {
        unit,
        active_units: names.collect(),
        kubelets,
        quintlet: root_dir.and_then(|dir| processes.quintlet_of(&dir)),
        listeners: listeners(&machine.path(Path::new("/proc"))),
        node,
        existing: Some(file.to_owned()).filter(|path| machine.path(path).exists()).into_iter().collect(),
        missing_directories: directories.iter().filter(is_missing).cloned().collect(),
    })
}

fn kubelet_facts(
    machine: &Machine,
    kubelet: &KubeletProcess,
    root_dir: Option<&Path>,
    with_settings: bool,
) -> Result<KubeletFacts, InstallError> {
    let settings = match with_settings {
        true => check(machine, &kubelet.arguments, &BTreeMap::new())?,
        false => Ok(NodeSettings::default()),
    };
    Ok(KubeletFacts {
        process: kubelet.process.clone(),
        uses_root: root_dir.is_some_and(|dir| kubelet.uses(dir)),
        settings,
    })
}

/// Reads the unit of the kubelet and its files.
fn kubelet_unit(machine: &Machine) -> Result<KubeletUnit, InstallError> {
    let names = "--property=LoadState,ActiveState,UnitFileState,MainPID,FragmentPath,DropInPaths";
    let shown = machine.systemctl(&["show", KUBELET_UNIT, names])?;
    let values: BTreeMap<&str, &str> = shown.lines().filter_map(|line| line.split_once('=')).collect();
    let value = |name: &str| values.get(name).copied().unwrap_or_default();
    let drop_ins: Vec<PathBuf> = value("DropInPaths").split_whitespace().map(PathBuf::from).collect();
    let files = Some(PathBuf::from(value("FragmentPath"))).filter(|path| path.is_absolute());
    let mut texts = Vec::new();
    for path in files.iter().chain(&drop_ins) {
        let text = std::fs::read_to_string(machine.path(path));
        texts.push(text.map_err(|source| InstallError::File {
            action: "read",
            path: path.clone(),
            source,
        })?);
    }
    let mut command = UnitCommand::parse(texts.iter().map(String::as_str));
    for path in command.environment_files.clone() {
        // systemd starts the unit without a file that may be missing, and the check names the file that
        // kubeadm writes.
        if let Ok(text) = std::fs::read_to_string(machine.path(&path)) {
            command.add_file(&text);
        }
    }
    let program = command.program().map(|program| machine.path(&program));
    let resolved = program.and_then(|program| std::fs::canonicalize(program).ok());
    Ok(KubeletUnit {
        load_state: value("LoadState").to_owned(),
        is_active: ["active", "activating", "reloading"].contains(&value("ActiveState")),
        is_enabled: value("UnitFileState") != "disabled",
        main_pid: value("MainPID").parse().ok().filter(|pid| *pid != 0),
        drop_ins,
        command,
        runs_quintlet: resolved.is_some_and(|path| path.file_name().is_some_and(|name| name == "quintlet")),
    })
}

/// Checks a command line of a kubelet with Quintlet's `kubelet`.
fn check(
    machine: &Machine,
    arguments: &[String],
    variables: &BTreeMap<String, String>,
) -> Result<Result<NodeSettings, CheckFailure>, InstallError> {
    let words: Vec<&str> =
        ["kubelet", "--check"].into_iter().chain(arguments.iter().map(String::as_str)).collect();
    let output = machine.program("quintlet", &words, variables)?;
    let failed = |lines: Vec<String>| {
        let code = output.status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        Ok(Err(CheckFailure { code, lines }))
    };
    if output.status.success() {
        return match serde_json::from_slice(&output.stdout) {
            Ok(settings) => Ok(Ok(settings)),
            Err(error) => {
                failed(vec![format!("the settings that kubelet --check prints are not valid: {error}")])
            }
        };
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let lines = errors.lines().map(|line| line.strip_prefix("kubelet: ").unwrap_or(line).trim());
    let lines: Vec<String> = lines.filter(|line| !line.is_empty()).map(str::to_owned).collect();
    failed(if lines.is_empty() { vec![reason(&output)] } else { lines })
}
