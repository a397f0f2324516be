//! Surveys the running services and both binaries. Only reads.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use quintlet_kit::args::paths::{CriSocket, Paths, socket_names};
use quintlet_kit::command::Commands;

use crate::journal::Journal;
use crate::machine::{Machine, reason};
use crate::swap::{BINARY, ServiceRestart};

/// Programs that are links to the binary. `node-api` and `kubelet` need not exist.
const PROGRAMS: [&str; 8] = [
    "cri-proxy",
    "pleg-service",
    "probe-service",
    "status-reporter",
    "node-api",
    "pod-sync",
    "quintctl",
    "kubelet",
];

/// Time limit of a binary that prints its version.
const VERSION_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of two binaries that are compared at once.
const BLOCK: usize = 64 << 10;

/// A service that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunningService {
    pub(crate) name: &'static str,
    /// How its processes are restarted, or why that is unknown.
    pub(crate) restarts: Result<Vec<ServiceRestart>, String>,
}

/// The services and both binaries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UpgradeFacts {
    /// The journal of an upgrade that was interrupted.
    pub(crate) journal: Option<PathBuf>,
    /// Version of the installed binary, or why it cannot be read.
    pub(crate) old_version: Result<String, String>,
    /// Version of the new binary, or why it cannot be used.
    pub(crate) new_version: Result<String, String>,
    /// Whether both binaries have the same content.
    pub(crate) is_same: bool,
    /// The result of the health check, if a service is not healthy.
    pub(crate) unhealthy: Option<String>,
    /// The services, each before its callers.
    pub(crate) services: Vec<RunningService>,
    /// Programs that are links to the installed binary.
    pub(crate) links: Vec<String>,
    /// Programs of services that run and are no such links.
    pub(crate) no_links: Vec<String>,
}

/// Surveys the services whose sockets are below `run_dir`.
pub(crate) fn survey(binary: &Path, run_dir: &Path, machine: &Machine) -> UpgradeFacts {
    let installed = machine.bin_dir.join(BINARY);
    let services = services(run_dir, machine);
    let is_link = |name: &str| {
        let target = std::fs::read_link(machine.path(&machine.bin_dir.join(name)));
        target.is_ok_and(|target| target == Path::new(BINARY) || target == installed)
    };
    let links: Vec<String> =
        PROGRAMS.iter().filter(|name| is_link(name)).map(|name| (*name).to_owned()).collect();
    let no_links =
        services.iter().map(|service| service.name.to_owned()).filter(|name| !links.contains(name)).collect();
    let run_dir = run_dir.display().to_string();
    let unhealthy = match machine.program("quintctl", &["--run-dir", &run_dir, "health"], &BTreeMap::new()) {
        Ok(output) => (!output.status.success()).then(|| reason(&output)),
        Err(error) => Some(error.to_string()),
    };
    UpgradeFacts {
        // A damaged journal is one of an upgrade, too.
        journal: (!matches!(Journal::read(machine), Ok(None))).then(|| machine.journal()),
        old_version: version(&machine.path(&installed)),
        new_version: version(&machine.path(binary)),
        // A file that cannot be read has no version, which is refused by name.
        is_same: have_same_content(&machine.path(binary), &machine.path(&installed)).unwrap_or(false),
        unhealthy,
        services,
        links,
        no_links,
    }
}

/// Compares two files block by block: a binary with symbols has hundreds of megabytes.
fn have_same_content(one: &Path, other: &Path) -> io::Result<bool> {
    let (mut one, mut other) = (File::open(one)?, File::open(other)?);
    let (first, second) = (one.metadata()?, other.metadata()?);
    if (first.dev(), first.ino()) == (second.dev(), second.ino()) {
        return Ok(true);
    }
    if first.len() != second.len() {
        return Ok(false);
    }
    let mut blocks = [vec![0; BLOCK], vec![0; BLOCK]];
    let [left, right] = &mut blocks;
    let mut rest = first.len();
    while rest > 0 {
        let length = usize::try_from(rest).unwrap_or(BLOCK).min(BLOCK);
        let (left, right) = (left.split_at_mut(length).0, right.split_at_mut(length).0);
        one.read_exact(left)?;
        other.read_exact(right)?;
        if left != right {
            return Ok(false);
        }
        rest = rest.saturating_sub(u64::try_from(length).unwrap_or(rest));
    }
    Ok(true)
}

/// Returns the version of a binary of all services.
fn version(binary: &Path) -> Result<String, String> {
    let failed =
        |why: String| format!("{} is not a binary of Quintlet for this machine: {why}", binary.display());
    let mut command = Command::new(binary);
    command.arg0("quintctl").arg("--version");
    let ended = Commands::new().run(command, VERSION_LIMIT).map_err(|error| failed(error.to_string()))?;
    if !ended.status.success() {
        let last = ended.errors.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned);
        return Err(failed(last.unwrap_or_else(|| ended.status.to_string())));
    }
    let version = ended
        .output
        .trim()
        .strip_prefix("quintctl ")
        .ok_or_else(|| failed("it has no version".to_owned()))?;
    Ok(version.lines().next().unwrap_or_default().to_owned())
}

fn services(run_dir: &Path, machine: &Machine) -> Vec<RunningService> {
    let paths = Paths::new(run_dir);
    let probes = socket_names(&machine.path(&paths.probe_dir()));
    let probes = probes.iter().map(|instance| paths.probe(instance)).collect();
    let all = [
        ("cri-proxy", vec![paths.cri(CriSocket::Read)]),
        ("pleg-service", vec![paths.pleg()]),
        ("probe-service", probes),
        ("status-reporter", vec![paths.status()]),
        ("pod-sync", vec![paths.podsync()]),
        ("node-api", vec![paths.node_api()]),
    ];
    let service = |(name, sockets): (&'static str, Vec<PathBuf>)| {
        // The node API is optional, and an instance of probe-service that was removed may leave its socket.
        let is_optional = name == "node-api" || sockets.len() > 1;
        let owned = sockets.into_iter().map(|socket| {
            let owner = quintlet_agents::socket_owner(&machine.path(&socket));
            (socket, owner)
        });
        let owned: Vec<_> = owned.filter(|(_, owner)| !is_optional || owner.is_some()).collect();
        if is_optional && owned.is_empty() {
            return None;
        }
        let restarts = owned.into_iter().map(|(socket, owner)| restart(machine, socket, owner));
        let restarts: Result<Vec<_>, _> = restarts.collect();
        let restarts = restarts.and_then(|restarts| match restarts.is_empty() {
            true => Err("no process serves its socket".to_owned()),
            false => Ok(restarts),
        });
        Some(RunningService { name, restarts })
    };
    all.into_iter().filter_map(service).collect()
}

/// Checks that a process runs a program of the directory of programs: the upgrade would not change another
/// one.
fn check_program(machine: &Machine, pid: u32, process: &Path) -> Result<(), String> {
    let program = std::fs::read_link(process.join("exe"))
        .map_err(|error| format!("the program of pid {pid} cannot be read: {error}"))?;
    // The kernel shows the path without links.
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let installed = real(&machine.path(&machine.bin_dir.join(BINARY)));
    let root = real(&machine.root);
    let dirs = [installed.parent(), Some(real(&machine.path(&machine.bin_dir)).as_path())]
        .map(|dir| dir.and_then(|dir| dir.strip_prefix(&root).ok()).map(|dir| Path::new("/").join(dir)));
    let dir = program.parent().unwrap_or(Path::new("/"));
    if dirs.iter().flatten().any(|known| known == dir) {
        return Ok(());
    }
    Err(format!(
        "pid {pid} runs {}, which is not in {}: use the quintctl of that directory, or --bin-dir {}",
        program.display(),
        machine.bin_dir.display(),
        dir.display()
    ))
}

/// Returns how the process that serves a socket is restarted.
fn restart(machine: &Machine, socket: PathBuf, owner: Option<u32>) -> Result<ServiceRestart, String> {
    let pid = owner.ok_or_else(|| format!("no process of this machine serves {}", socket.display()))?;
    let process = machine.path(Path::new("/proc")).join(pid.to_string());
    check_program(machine, pid, &process)?;
    let text = |name: &str| std::fs::read_to_string(process.join(name)).unwrap_or_default();
    let cgroup = text("cgroup");
    let unit = cgroup
        .lines()
        .filter_map(|line| line.rsplit('/').next())
        .find(|name| name.starts_with("quintlet-") && name.ends_with(".service"));
    if let Some(unit) = unit.filter(|unit| *unit != crate::places::BESIDE_NAME) {
        return Ok(ServiceRestart::Unit(unit.to_owned()));
    }
    let parent =
        text("status").lines().find_map(|line| line.strip_prefix("PPid:").map(|pid| pid.trim().to_owned()));
    let line = parent.and_then(|parent| {
        let line = std::fs::read(machine.path(Path::new("/proc")).join(parent).join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).into_owned())
    });
    let line = line.unwrap_or_default();
    let mut words = line.split('\0');
    let program = words.next().and_then(|path| Path::new(path).file_name()).and_then(std::ffi::OsStr::to_str);
    let is_supervised = match program {
        Some("kubelet") => true,
        Some("quintctl") => words.any(|word| word == "up"),
        Some(_) | None => false,
    };
    if is_supervised {
        return Ok(ServiceRestart::Process(socket));
    }
    Err(format!(
        "pid {pid} runs neither in a unit of Quintlet nor under quintctl up: restart it as it was started, for example by a new image"
    ))
}
