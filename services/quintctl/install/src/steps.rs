//! The steps of an installation: each can be shown, done and undone.
//!
//! A step may be cut at any point, so that its undo also works on a step that was not done or half done.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_kit::atomic_file;
use quintlet_kit::clock::Clock;
use serde::{Deserialize, Serialize};

use crate::error::InstallError;
use crate::files::{failed, gone};
use crate::machine::{Machine, reason};
use crate::places::is_own_file;
use crate::swap::{self, ServiceSwap};

/// Interval of health checks after the start.
const HEALTH_PERIOD: Duration = Duration::from_millis(500);

/// Mode of unit files.
const UNIT_MODE: u32 = 0o644;

/// A step of an installation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "step")]
pub(crate) enum InstallStep {
    /// Stops a unit that runs. The undo starts it.
    Stop { unit: String },
    /// Creates a directory that is missing. The undo removes it if it is empty.
    Directory { path: PathBuf },
    /// Writes a file of a unit that does not exist, and reloads systemd. The undo removes the file.
    Unit { path: PathBuf, content: String },
    /// Enables a unit that is disabled. The undo disables it.
    Enable { unit: String },
    /// Starts a unit. The undo stops it.
    Start { unit: String },
    /// Waits until all services are healthy.
    Healthy { run_dir: PathBuf, seconds: u64 },
    /// Copies a new binary beside the one in use. The undo removes the copy.
    Binary { source: PathBuf, dir: PathBuf },
    /// Makes a service run the new binary. The undo makes it run the old one.
    Swap(ServiceSwap),
    /// Gives the new binary the name of the old one, which is kept under another name. The undo takes the
    /// name back.
    Promote { dir: PathBuf, links: Vec<String> },
}

impl InstallStep {
    /// Returns the step as a command to the reader.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Stop { unit } => format!("stop {unit}"),
            Self::Directory { path } => format!("create {}", path.display()),
            Self::Unit { path, .. } => format!("write {} and reload systemd", path.display()),
            Self::Enable { unit } => format!("enable {unit}"),
            Self::Start { unit } => format!("start {unit}"),
            Self::Healthy { seconds, .. } => {
                format!("wait until all services are healthy, {seconds} s at most")
            }
            Self::Binary { source, dir } => {
                format!("copy {} to {}", source.display(), dir.join(swap::NEXT).display())
            }
            Self::Swap(swap) => swap.text(swap::NEXT),
            Self::Promote { dir, .. } => format!(
                "rename {} to {}, and keep the old binary as {}",
                dir.join(swap::NEXT).display(),
                swap::BINARY,
                swap::PREVIOUS
            ),
        }
    }

    /// Returns the undo as a command to the reader.
    pub(crate) fn undo_text(&self) -> String {
        match self {
            Self::Stop { unit } => format!("start {unit}"),
            Self::Directory { path } => format!("remove {} if it is empty", path.display()),
            Self::Unit { path, .. } => format!("remove {} and reload systemd", path.display()),
            Self::Enable { unit } => format!("disable {unit}"),
            Self::Start { unit } => format!("stop {unit}"),
            Self::Healthy { .. } => "nothing".to_owned(),
            Self::Binary { dir, .. } => format!("remove {}", dir.join(swap::NEXT).display()),
            Self::Swap(swap) => swap.text(swap::BINARY),
            Self::Promote { dir, .. } => {
                format!("rename {} to {}", dir.join(swap::PREVIOUS).display(), swap::BINARY)
            }
        }
    }

    /// Returns whether the undo changes anything.
    pub(crate) fn has_undo(&self) -> bool {
        !matches!(self, Self::Healthy { .. })
    }

    /// Returns the content of the file that the step writes.
    pub(crate) fn content(&self) -> Option<&str> {
        match self {
            Self::Unit { content, .. } => Some(content),
            Self::Stop { .. }
            | Self::Directory { .. }
            | Self::Enable { .. }
            | Self::Start { .. }
            | Self::Healthy { .. }
            | Self::Binary { .. }
            | Self::Swap(_)
            | Self::Promote { .. } => None,
        }
    }

    /// Does the step.
    pub(crate) fn apply(&self, machine: &Machine) -> Result<(), InstallError> {
        match self {
            Self::Stop { unit } => machine.systemctl(&["stop", unit]).map(drop),
            Self::Directory { path } => {
                std::fs::create_dir(machine.path(path)).map_err(|source| failed("create", path, source))
            }
            Self::Unit { path, content } => {
                let written = atomic_file::write_durable(&machine.path(path), content.as_bytes(), UNIT_MODE);
                written.map_err(|source| failed("write", path, source))?;
                reload(machine)
            }
            Self::Enable { unit } => machine.systemctl(&["enable", unit]).map(drop),
            Self::Start { unit } => machine.systemctl(&["start", unit]).map(drop),
            Self::Healthy { run_dir, seconds } => wait_until_healthy(machine, run_dir, *seconds),
            Self::Binary { source, dir } => swap::copy(machine, source, dir),
            Self::Swap(swap) => swap.run(machine, swap::NEXT),
            Self::Promote { dir, links } => swap::promote(machine, dir, links),
        }
    }

    /// Undoes the step. Returns a directory that is kept since it is not empty.
    pub(crate) fn undo(&self, machine: &Machine) -> Result<Option<PathBuf>, InstallError> {
        match self {
            Self::Stop { unit } => machine.systemctl(&["start", unit]).map(|_| None),
            Self::Directory { path } => match std::fs::remove_dir(machine.path(path)) {
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(Some(path.clone())),
                done => gone(done).map(|()| None).map_err(|source| failed("remove", path, source)),
            },
            // A journal that was changed by hand must not remove other files.
            Self::Unit { path, .. } if !is_own_file(path) => {
                Err(failed("remove", path, io::ErrorKind::PermissionDenied.into()))
            }
            Self::Unit { path, .. } => {
                let removed = gone(std::fs::remove_file(machine.path(path)));
                removed.map_err(|source| failed("remove", path, source))?;
                reload(machine).map(|()| None)
            }
            Self::Enable { unit } => machine.systemctl(&["disable", unit]).map(|_| None),
            Self::Start { unit } => machine.systemctl(&["stop", unit]).map(|_| None),
            Self::Healthy { .. } => Ok(None),
            Self::Binary { dir, .. } => swap::remove_copy(machine, dir).map(|()| None),
            Self::Swap(swap) => swap.run(machine, swap::BINARY).map(|()| None),
            Self::Promote { dir, .. } => swap::demote(machine, dir).map(|()| None),
        }
    }
}

fn reload(machine: &Machine) -> Result<(), InstallError> {
    machine.systemctl(&["daemon-reload"]).map(drop)
}

/// Asks `quintctl health` until it succeeds.
fn wait_until_healthy(machine: &Machine, run_dir: &Path, seconds: u64) -> Result<(), InstallError> {
    let run_dir = run_dir.display().to_string();
    let clock = Clock::system();
    let begin = clock.boot();
    loop {
        let output = machine.program("quintctl", &["--run-dir", &run_dir, "health"], &BTreeMap::new())?;
        if output.status.success() {
            return Ok(());
        }
        if clock.boot().saturating_sub(begin) >= Duration::from_secs(seconds) {
            return Err(InstallError::Unhealthy { seconds, reason: reason(&output) });
        }
        std::thread::sleep(HEALTH_PERIOD);
    }
}
