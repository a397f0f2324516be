//! Moves processes between cgroups (`kubeletCgroups`, `systemCgroups`).

use std::fs;
use std::path::Path;

use super::files::{make_v1, make_v2, put};
use super::{CgroupError, Cgroups, Layout, io_error, names};

/// Rounds of moves: a process that is moved may have forked before.
const ROUNDS: u32 = 10;

impl Cgroups {
    /// Moves a process into the cgroup `name`, a path from the root of the hierarchies. The cgroup is created
    /// if it is missing.
    ///
    /// # Errors
    /// A cgroup cannot be created, or the process cannot be moved.
    pub fn move_process(&self, name: &str, pid: u32) -> Result<(), CgroupError> {
        let group = names::path(names::CgroupDriver::Cgroupfs, &names::below_root(name, &[]));
        let join = |mount: &Path| {
            let file = mount.join(&group).join("cgroup.procs");
            put(&file, &pid.to_string()).map_err(io_error("cannot write", &file))
        };
        match &self.layout {
            Layout::V1(controllers) => {
                for (name, mount) in controllers {
                    // On a hybrid system the v2 hierarchy has no controllers.
                    if name != "unified" {
                        make_v1(mount, &group, name.contains("cpuset"))?;
                        join(mount)?;
                    }
                }
                Ok(())
            }
            Layout::V2(root) => {
                make_v2(root, &group)?;
                join(root)
            }
        }
    }

    /// Moves the processes in the root cgroup into the cgroup `name`, except process 1 and kernel threads
    /// (`pkg/kubelet/cm: ensureSystemCgroups`).
    ///
    /// # Errors
    /// The processes cannot be listed, or a process that still exists cannot be moved.
    pub fn move_root_processes(
        &self,
        name: &str,
        is_kernel: impl Fn(u32) -> bool,
    ) -> Result<(), CgroupError> {
        let mut moved = Ok(());
        for _ in 0..ROUNDS {
            let pids = self.root_processes()?;
            let pids: Vec<u32> = pids.into_iter().filter(|pid| *pid > 1 && !is_kernel(*pid)).collect();
            if pids.is_empty() {
                return Ok(());
            }
            moved = pids.into_iter().try_for_each(|pid| self.move_process(name, pid));
        }
        moved
    }

    fn root_processes(&self) -> Result<Vec<u32>, CgroupError> {
        let root = match &self.layout {
            Layout::V1(controllers) => controllers.get("devices").or_else(|| controllers.get("memory")),
            Layout::V2(root) => Some(root),
        };
        let Some(file) = root.map(|root| root.join("cgroup.procs")) else { return Ok(Vec::new()) };
        let text = fs::read_to_string(&file).map_err(io_error("cannot read", &file))?;
        Ok(text.lines().filter_map(|line| line.trim().parse().ok()).collect())
    }
}

/// Returns whether a process is a kernel thread: it has no executable.
#[must_use]
pub fn is_kernel_thread(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}
