//! The files and restarts of an upgrade.
//!
//! Each program in the directory is a link to one binary. During an upgrade there are two binaries, and the
//! link of a service names the one that the service runs, so that a service that exits in between starts
//! again with the same one.

use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::clock::Clock;
use serde::{Deserialize, Serialize};

use crate::error::InstallError;
use crate::files::{failed, gone};
use crate::machine::Machine;

/// The binary that all links name.
pub(crate) const BINARY: &str = "quintlet";
/// The new binary, until all services run it.
pub(crate) const NEXT: &str = "quintlet-next";
/// The binary before the last upgrade.
pub(crate) const PREVIOUS: &str = "quintlet-previous";

/// File that becomes a link or a binary by a rename.
const TEMPORARY: &str = ".quintlet-upgrade";

const MODE: u32 = 0o755;

/// Longest time between the signal to a process and its successor. A service completes its calls first, 5 s
/// at most.
const RESTART_SECONDS: u64 = 30;
const CHECK_PERIOD: Duration = Duration::from_millis(50);

/// How a process of a service is restarted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ServiceRestart {
    /// systemd restarts the unit.
    Unit(String),
    /// The process that listens on the socket gets SIGTERM, and its supervisor starts another one:
    /// `quintctl up` or `kubelet`.
    Process(PathBuf),
}

/// The change of the binary of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceSwap {
    pub(crate) service: String,
    /// Directory of the programs.
    pub(crate) dir: PathBuf,
    /// The processes: one, or one per instance of probe-service.
    pub(crate) restarts: Vec<ServiceRestart>,
}

impl ServiceSwap {
    /// Returns the change to a binary as a command to the reader.
    pub(crate) fn text(&self, binary: &str) -> String {
        let restarts: Vec<String> = self.restarts.iter().map(ServiceRestart::text).collect();
        format!("link {} to {binary} and {}", self.dir.join(&self.service).display(), restarts.join(", "))
    }

    /// Links the program to a binary and restarts its processes.
    pub(crate) fn run(&self, machine: &Machine, binary: &str) -> Result<(), InstallError> {
        link(machine, &self.dir, &self.service, binary)?;
        self.restarts.iter().try_for_each(|restart| restart.run(machine, &self.service))
    }
}

impl ServiceRestart {
    fn text(&self) -> String {
        match self {
            Self::Unit(unit) => format!("restart {unit}"),
            Self::Process(socket) => format!("end the process that serves {}", socket.display()),
        }
    }

    fn run(&self, machine: &Machine, service: &str) -> Result<(), InstallError> {
        match self {
            Self::Unit(unit) => machine.systemctl(&["restart", unit]).map(drop),
            Self::Process(socket) => replace_process(&machine.path(socket), service),
        }
    }
}

/// Ends the process that listens on a socket, and waits for the next one. A process that exits again and
/// again, as after the start of a broken binary, may be in the pause of its supervisor: then only the next
/// one is waited for.
fn replace_process(socket: &Path, service: &str) -> Result<(), InstallError> {
    let old = quintlet_agents::socket_owner(socket);
    if let Some(pid) = old {
        // The process may have exited by itself.
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM);
    }
    let clock = Clock::system();
    let began = clock.boot();
    while quintlet_agents::socket_owner(socket).is_none_or(|pid| Some(pid) == old) {
        if clock.boot().saturating_sub(began) >= Duration::from_secs(RESTART_SECONDS) {
            return Err(InstallError::NotRestarted { service: service.to_owned(), seconds: RESTART_SECONDS });
        }
        std::thread::sleep(CHECK_PERIOD);
    }
    Ok(())
}

/// Copies the new binary into the directory of the programs.
pub(crate) fn copy(machine: &Machine, source: &Path, dir: &Path) -> Result<(), InstallError> {
    let temporary = machine.path(&dir.join(TEMPORARY));
    let path = dir.join(NEXT);
    let copied = std::fs::copy(machine.path(source), &temporary)
        .and_then(|_| std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(MODE)))
        .and_then(|()| std::fs::File::open(&temporary)?.sync_all())
        .and_then(|()| std::fs::rename(&temporary, machine.path(&path)));
    copied.map_err(|source| failed("write", &path, source))
}

/// Removes the copy that [`copy`] made.
pub(crate) fn remove_copy(machine: &Machine, dir: &Path) -> Result<(), InstallError> {
    for name in [TEMPORARY, NEXT] {
        let path = dir.join(name);
        gone(std::fs::remove_file(machine.path(&path))).map_err(|source| failed("remove", &path, source))?;
    }
    Ok(())
}

/// Gives the new binary the name of the old one. At each moment, all names that a link has exist.
pub(crate) fn promote(machine: &Machine, dir: &Path, links: &[String]) -> Result<(), InstallError> {
    rename_copy(machine, dir, BINARY, PREVIOUS)?;
    rename_copy(machine, dir, NEXT, BINARY)?;
    links.iter().try_for_each(|name| link(machine, dir, name, BINARY))?;
    remove_copy(machine, dir)
}

/// Gives the old binary its name back, if it has lost it.
pub(crate) fn demote(machine: &Machine, dir: &Path) -> Result<(), InstallError> {
    let file = |name: &str| {
        let metadata = std::fs::metadata(machine.path(&dir.join(name))).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    // Before the new binary has the name, `PREVIOUS` may be that of an earlier upgrade.
    let is_promoted = file(NEXT).is_none_or(|next| file(BINARY) == Some(next));
    if is_promoted && file(PREVIOUS).is_some() {
        rename_copy(machine, dir, PREVIOUS, BINARY)?;
    }
    Ok(())
}

/// Gives a binary a second name, in the place of another file.
fn rename_copy(machine: &Machine, dir: &Path, present: &str, name: &str) -> Result<(), InstallError> {
    let temporary = machine.path(&dir.join(TEMPORARY));
    let path = dir.join(name);
    let renamed = gone(std::fs::remove_file(&temporary))
        .and_then(|()| std::fs::hard_link(machine.path(&dir.join(present)), &temporary))
        .and_then(|()| std::fs::rename(&temporary, machine.path(&path)));
    renamed.map_err(|source| failed("write", &path, source))
}

/// Makes a program a link to a binary in its directory.
fn link(machine: &Machine, dir: &Path, program: &str, binary: &str) -> Result<(), InstallError> {
    let temporary = machine.path(&dir.join(TEMPORARY));
    let path = dir.join(program);
    let linked: io::Result<()> = gone(std::fs::remove_file(&temporary))
        .and_then(|()| symlink(binary, &temporary))
        .and_then(|()| std::fs::rename(&temporary, machine.path(&path)));
    linked.map_err(|source| failed("link", &path, source))
}
