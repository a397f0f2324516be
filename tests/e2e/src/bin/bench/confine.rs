//! Confines processes to a processor each, like a node of one core whose control plane is elsewhere.

use std::path::PathBuf;

use anyhow::Context as _;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Processor of agents and runtimes.
const NODE_CPU: usize = 0;
/// Processor of this process, which has the API server and its clients.
const CONTROL_PLANE_CPU: usize = 1;

/// Confines these processes to one processor, and this process to another. Their children inherit it.
pub(crate) fn confine(pids: &[i32]) -> anyhow::Result<()> {
    // The second time for threads that one of a process started before its turn.
    for _ in 0..2 {
        for pid in pids {
            set(*pid, &[NODE_CPU])?;
        }
        set(std::process::id().cast_signed(), &[CONTROL_PLANE_CPU])?;
    }
    Ok(())
}

/// Lets the same processes use both processors again.
pub(crate) fn release(pids: &[i32]) -> anyhow::Result<()> {
    for pid in pids.iter().copied().chain([std::process::id().cast_signed()]) {
        set(pid, &[NODE_CPU, CONTROL_PLANE_CPU])?;
    }
    Ok(())
}

fn set(pid: i32, cpus: &[usize]) -> anyhow::Result<()> {
    let mut mask = CpuSet::new();
    for cpu in cpus {
        mask.set(*cpu)?;
    }
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    for task in std::fs::read_dir(&tasks).with_context(|| tasks.display().to_string())? {
        let id = task?.file_name().to_string_lossy().parse()?;
        match sched_setaffinity(Pid::from_raw(id), &mask) {
            // The thread has ended meanwhile.
            Ok(()) | Err(nix::Error::ESRCH) => {}
            Err(error) => return Err(error).context("the affinity of a thread"),
        }
    }
    Ok(())
}
