//! Faults of a private containerd: it is killed, paused, restarted, or loses all that a reboot removes.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::task;
use quintlet_localnode::{Containerd, Error};
use tokio::time::Instant;

/// Interval of checks for a change of a process.
const STEP: Duration = Duration::from_millis(1);

/// Limit of a change of a process. Only a process in an uninterruptible wait takes longer, and it does not
/// answer either.
const LIMIT: Duration = Duration::from_secs(2);

/// Faults of a private containerd.
#[allow(async_fn_in_trait, reason = "tests call the methods on one type")]
pub trait Faults {
    /// Stops containerd and starts it again. Pods continue to run.
    ///
    /// # Errors
    /// Containerd does not answer in time.
    async fn restart(&mut self) -> Result<(), Error>;

    /// Kills containerd. Pods continue to run. [`Containerd::launch`] starts it.
    async fn kill9(&mut self);

    /// Removes everything that a reboot of the machine removes: containerd, its shims, all pods, mounts,
    /// interfaces, cgroups, and its state directory. Images, records and assigned addresses stay on disk.
    /// [`Containerd::launch`] is the next boot.
    async fn power_off(&mut self);

    /// Pauses the process with SIGSTOP: the kernel accepts connections, and nothing is answered. Returns when
    /// all its threads have stopped, since the signal stops a thread on another core a moment later.
    async fn pause(&self);

    /// Continues a paused process.
    fn resume(&self);
}

impl Faults for Containerd {
    async fn restart(&mut self) -> Result<(), Error> {
        self.end_process().await;
        self.launch().await
    }

    async fn kill9(&mut self) {
        signal(self, Signal::SIGKILL);
        wait_threads(self, &['Z', 'X']).await;
    }

    async fn power_off(&mut self) {
        let traces = self.traces();
        task::blocking(move || traces.remove_volatile()).await;
        wait_threads(self, &['Z', 'X']).await;
    }

    async fn pause(&self) {
        signal(self, Signal::SIGSTOP);
        wait_threads(self, &['T', 'Z', 'X']).await;
    }

    fn resume(&self) {
        signal(self, Signal::SIGCONT);
    }
}

fn signal(containerd: &Containerd, signal: Signal) {
    if let Some(pid) = containerd.pid() {
        // The process may have exited.
        let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
    }
}

/// Waits until all threads of the process are in one of these states of proc(5), or gone.
async fn wait_threads(containerd: &Containerd, states: &[char]) {
    let Some(pid) = containerd.pid() else { return };
    let deadline = Instant::now() + LIMIT;
    while !all_threads_are(pid, states) && Instant::now() < deadline {
        tokio::time::sleep(STEP).await;
    }
}

fn all_threads_are(pid: u32, states: &[char]) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads
        .filter_map(Result::ok)
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok())
        // The state follows the name, which is in parentheses and may contain any character.
        .all(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(states)))
}
