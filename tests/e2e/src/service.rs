//! A supervised process in its own process group.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Delay of a restart, as in `quintctl up`.
const RESTART: Duration = Duration::from_millis(200);

/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(10);

/// The process to start.
#[derive(Debug, Clone)]
pub struct ServiceCommand {
    /// Name of the binary, which logs are named by.
    pub name: &'static str,
    /// Path of the executable.
    pub binary: PathBuf,
    /// Arguments after the name.
    pub args: Vec<OsString>,
    /// Additional environment variables.
    pub env: Vec<(&'static str, OsString)>,
    /// File for its output.
    pub log: PathBuf,
    /// User and group; `None`: those of this process.
    pub uid: Option<u32>,
    /// Boot of the machine; `None`: that of this process.
    pub boot: Option<Boot>,
}

/// A simulated boot of the machine.
#[derive(Debug, Clone)]
pub struct Boot {
    /// File with the boot ID.
    pub id: PathBuf,
    /// Time of the boot, in seconds of the machine's CLOCK_BOOTTIME.
    pub began: u64,
}

/// Runs in its own mount and time namespaces. They hide only the boot ID: mounts below shared mounts
/// propagate both ways.
const OF_ANOTHER_BOOT: &str =
    r#"mount --make-private /proc && mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;

/// State of the process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Process {
    /// `None` between an exit and the next start.
    pub pid: Option<i32>,
    /// Number of starts so far.
    pub starts: u32,
}

/// A process that is restarted whenever it exits.
#[derive(Debug)]
pub struct Service {
    /// The process that each restart starts.
    pub plan: ServiceCommand,
    process: watch::Receiver<Process>,
    once: CancellationToken,
    supervisor: JoinHandle<()>,
}

impl Service {
    /// Starts the process, and restarts it whenever it exits.
    #[must_use]
    pub fn start(plan: ServiceCommand) -> Self {
        let (tx, process) = watch::channel(Process::default());
        let once = CancellationToken::new();
        let supervisor = quintlet_kit::task::spawn("supervise", supervise(plan.clone(), tx, once.clone()));
        Self { plan, process, once, supervisor }
    }

    /// Returns the state of the process.
    #[must_use]
    pub fn process(&self) -> Process {
        *self.process.borrow()
    }

    /// Sends a signal. Has no effect between an exit and the next start.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = self.process().pid {
            // It may have exited just now.
            let _gone = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Stops it for good with this signal. Returns false if it did not exit within `limit` and was killed.
    pub async fn end(&mut self, signal: Signal, limit: Duration) -> bool {
        self.once.cancel();
        self.signal(signal);
        self.signal(Signal::SIGCONT);
        let obeyed = tokio::time::timeout(limit, &mut self.supervisor).await.is_ok();
        if !obeyed {
            self.signal(Signal::SIGKILL);
            // The process is gone after SIGKILL. A supervisor that panicked has killed it when it was
            // dropped.
            let _ended = tokio::time::timeout(GRACE, &mut self.supervisor).await;
        }
        obeyed
    }

    /// Stops it with SIGTERM.
    pub async fn terminate(&mut self) -> bool {
        self.end(Signal::SIGTERM, GRACE).await
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.supervisor.abort();
        self.signal(Signal::SIGKILL);
    }
}

async fn supervise(plan: ServiceCommand, process: watch::Sender<Process>, once: CancellationToken) {
    while !once.is_cancelled() {
        let mut child = spawn(&plan);
        process.send_modify(|p| {
            p.pid = child.id().map(u32::cast_signed);
            p.starts += 1;
        });
        // The exit status is in its log.
        let _status = child.wait().await;
        process.send_modify(|p| p.pid = None);
        // Either arm may be dropped: both only wait.
        tokio::select! {
            () = tokio::time::sleep(RESTART) => {}
            () = once.cancelled() => {}
        }
    }
}

fn spawn(plan: &ServiceCommand) -> Child {
    let log = OpenOptions::new().create(true).append(true).open(&plan.log).expect("the log can be written");
    let mut command = match &plan.boot {
        None => Command::new(&plan.binary),
        Some(boot) => {
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "unchanged", "--time", "--boottime"]);
            command.arg(format!("-{}", boot.began)).args(["sh", "-c", OF_ANOTHER_BOOT]);
            command.arg(&boot.id).arg(&plan.binary);
            command
        }
    };
    if let Some(uid) = plan.uid {
        command.uid(uid).gid(uid);
    }
    command
        .args(&plan.args)
        .envs(plan.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a descriptor can be copied"))
        .stderr(log)
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|e| panic!("{} does not start: {e}", plan.binary.display()))
}
