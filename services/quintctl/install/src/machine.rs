//! The machine: its files below a root, systemd and the programs of Quintlet.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use quintlet_agents::ProcessTable;

use crate::error::InstallError;

/// The machine that Quintlet is installed on.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Directory that all paths of the machine are below.
    pub root: PathBuf,
    /// The program `systemctl`.
    pub systemctl: PathBuf,
    /// Directory of the programs of Quintlet, without [`Self::root`].
    pub bin_dir: PathBuf,
    /// Whether this process may change the machine.
    pub is_root: bool,
    /// Default of a node's name.
    pub host_name: String,
    /// File name of the journal.
    pub journal_name: &'static str,
}

/// File names of the journals of an installation and of an upgrade.
pub(crate) const INSTALL_JOURNAL: &str = "install.json";
pub(crate) const UPGRADE_JOURNAL: &str = "upgrade.json";

impl Machine {
    /// Returns this machine. The programs are in `bin_dir`, or beside this program.
    ///
    /// # Errors
    /// The path of this program cannot be read.
    pub fn this(bin_dir: Option<&Path>) -> Result<Self, InstallError> {
        let own = || {
            let path = PathBuf::from("/proc/self/exe");
            let own = std::env::current_exe().map_err(|source| InstallError::File {
                action: "read",
                path,
                source,
            })?;
            Ok(own.parent().unwrap_or(Path::new("/")).to_owned())
        };
        let bin_dir = match bin_dir {
            Some(dir) => std::path::absolute(dir).map_err(|source| InstallError::File {
                action: "find",
                path: dir.to_owned(),
                source,
            })?,
            None => own()?,
        };
        Ok(Self {
            root: PathBuf::from("/"),
            systemctl: PathBuf::from("systemctl"),
            bin_dir,
            is_root: nix::unistd::geteuid().is_root(),
            host_name: quintlet_kit::args::host_name(),
            journal_name: INSTALL_JOURNAL,
        })
    }

    /// Returns the file that a path of the machine names.
    pub(crate) fn path(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the path of the journal, without the root.
    pub(crate) fn journal(&self) -> PathBuf {
        Path::new("/var/lib/quintlet").join(self.journal_name)
    }

    /// Returns the processes of the machine.
    pub(crate) fn processes(&self) -> ProcessTable {
        ProcessTable::at(&self.path(Path::new("/proc")))
    }

    /// Runs systemctl and returns its output.
    pub(crate) fn systemctl(&self, arguments: &[&str]) -> Result<String, InstallError> {
        output(Command::new(&self.systemctl).args(arguments), &format!("systemctl {}", arguments.join(" ")))
    }

    /// Runs a program of Quintlet in an environment that has only `variables` and a PATH.
    pub(crate) fn program(
        &self,
        name: &str,
        arguments: &[impl AsRef<OsStr>],
        variables: &BTreeMap<String, String>,
    ) -> Result<Output, InstallError> {
        let path = self.path(&self.bin_dir.join(name));
        let path_variable = std::env::var_os("PATH").unwrap_or_default();
        let mut command = Command::new(&path);
        command.args(arguments).env_clear().env("PATH", path_variable).envs(variables);
        command.output().map_err(|error| InstallError::Command {
            command: path.display().to_string(),
            reason: error.to_string(),
        })
    }
}

fn output(command: &mut Command, line: &str) -> Result<String, InstallError> {
    let failed = |reason: String| InstallError::Command { command: line.to_owned(), reason };
    let output = command.output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(failed(reason(&output)))
}

/// Returns the last line of a failed program, or its exit status.
pub(crate) fn reason(output: &Output) -> String {
    let texts = [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let last = texts.iter().find_map(|text| text.lines().map(str::trim).rfind(|line| !line.is_empty()));
    last.map_or_else(|| output.status.to_string(), str::to_owned)
}
