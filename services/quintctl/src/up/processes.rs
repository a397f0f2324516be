//! Records the supervisor's processes on disk, so that the next supervisor can terminate the services of a
//! killed one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_agents::{AgentProcess, ProcessTable};
use serde::{Deserialize, Serialize};

use super::error::UpError;

/// Interval of checks of a process that was sent a signal.
const CHECK_PERIOD: Duration = Duration::from_millis(20);

/// Number of checks between SIGTERM and SIGKILL: 3 s.
const CHECKS: usize = 150;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: u32,
    /// Start time in clock ticks since boot, which distinguishes the process from a later one with the same
    /// ID.
    started: u64,
}

/// The running services and the lock on the directory.
#[derive(Debug)]
pub(super) struct Processes {
    file: PathBuf,
    running: BTreeMap<String, Process>,
    _lock: Flock<std::fs::File>,
}

impl Processes {
    /// Locks a directory and terminates the services that an earlier supervisor left running. Returns their
    /// names too.
    ///
    /// # Errors
    /// Another supervisor holds the lock, or the directory cannot be written.
    pub(super) async fn take_over(dir: &Path) -> Result<(Self, Vec<String>), UpError> {
        let io = |source| UpError::Directory { path: dir.to_path_buf(), source };
        std::fs::create_dir_all(dir).map_err(io)?;
        let path = dir.join("up.lock");
        let lock = std::fs::File::create(&path).map_err(io)?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|_| {
            let holder = ProcessTable::default().lock_holder(&path);
            let process = holder.unwrap_or(AgentProcess { pid: None, command: String::new() });
            UpError::AlreadyRunning { dir: dir.to_path_buf(), process }
        })?;
        let file = dir.join("up.json");
        let left: BTreeMap<String, Process> = std::fs::read(&file)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        let alive: Vec<(String, Process)> = left.into_iter().filter(|(_, p)| p.is_alive()).collect();
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            for (_, process) in alive.iter().filter(|(_, p)| p.is_alive()) {
                let _ = kill(Pid::from_raw(process.pid.cast_signed()), signal);
                let _ = kill(Pid::from_raw(process.pid.cast_signed()), Signal::SIGCONT);
            }
            for _ in 0..CHECKS {
                if !alive.iter().any(|(_, p)| p.is_alive()) {
                    break;
                }
                tokio::time::sleep(CHECK_PERIOD).await;
            }
        }
        let names = alive.into_iter().map(|(name, _)| name).collect();
        Ok((Self { file, running: BTreeMap::new(), _lock: lock }, names))
    }

    /// Records that a service runs as `pid`, or that it has exited.
    pub(super) fn set(&mut self, name: &str, pid: Option<u32>) {
        match pid.and_then(Process::of) {
            Some(process) => self.running.insert(name.to_owned(), process),
            None => self.running.remove(name),
        };
        if self.running.is_empty() {
            let _ = std::fs::remove_file(&self.file);
        } else if let Ok(bytes) = serde_json::to_vec(&self.running) {
            // Without the file, the next supervisor does not find the services of a killed one. They keep
            // running.
            let _ = quintlet_kit::atomic_file::write(&self.file, &bytes, 0o600);
        }
    }
}

impl Process {
    fn of(pid: u32) -> Option<Self> {
        let (started, _) = stat(pid)?;
        Some(Self { pid, started })
    }

    fn is_alive(&self) -> bool {
        stat(self.pid).is_some_and(|(started, state)| started == self.started && state != "Z")
    }
}

/// Returns the start time and the state of a process (proc_pid_stat(5)).
fn stat(pid: u32) -> Option<(u64, String)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The fields after the name in parentheses: the state is the first, the start time the twentieth.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_whitespace();
    let state = fields.next()?.to_owned();
    Some((fields.nth(18)?.parse().ok()?, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_processes_of_a_killed_supervisor_are_terminated() {
        let dir = tempfile::tempdir().unwrap();
        let mut left = tokio::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut other = tokio::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (mut first, _) = Processes::take_over(dir.path()).await.unwrap();
        first.set("pleg-service", left.id());
        let own = Some(std::process::id());
        let second = Processes::take_over(dir.path()).await;
        assert!(
            matches!(&second, Err(UpError::AlreadyRunning { process, .. }) if process.pid == own),
            "{second:?}"
        );
        // The same id, but of a process that started at another time.
        let reused = Process { pid: other.id().unwrap(), started: 1 };
        first.running.insert("reused".to_owned(), reused);
        first.set("gone", None);
        drop(first);
        let (_second, ended) = Processes::take_over(dir.path()).await.unwrap();
        assert_eq!(ended, ["pleg-service"]);
        assert!(!left.wait().await.unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        other.kill().await.unwrap();
    }
}
