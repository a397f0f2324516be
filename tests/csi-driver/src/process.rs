//! Starts the driver from a test.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// A running driver. Dropping it kills the process; its sockets stay, as after a crash.
#[derive(Debug)]
pub struct DriverProcess {
    child: Child,
    state: PathBuf,
}

impl DriverProcess {
    /// Starts the binary for a root directory, with its state in `state`.
    ///
    /// # Errors
    /// Fails if the process cannot be started.
    pub fn start(binary: &Path, root: &Path, state: &Path, more: &[&str]) -> io::Result<Self> {
        std::fs::create_dir_all(state)?;
        let mut command = Command::new(binary);
        command.arg("--root").arg(root).arg("--state").arg(state).args(more);
        Ok(Self { child: command.spawn()?, state: state.to_owned() })
    }

    /// Returns the state directory.
    #[must_use]
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Returns the process ID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Kills the process and waits for its end.
    pub fn kill(&mut self) {
        // Killing a process that has exited fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for DriverProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
