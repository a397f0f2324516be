//! One supervised process in a process group of its own.

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

/// Before a process that ended is started again, as `quintctl up` has it.
const RESTART: Duration = Duration::from_millis(200);

/// Between SIGTERM and SIGKILL at the end.
const GRACE: Duration = Duration::from_secs(10);

/// What is started.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Name of the service.
    pub name: &'static str,
    /// Its binary.
    pub binary: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// What its environment has beside that of this process.
    pub env: Vec<(&'static str, OsString)>,
    /// Where its output goes.
    pub log: PathBuf,
    /// As which user and group; as this process when there is none.
    pub uid: Option<u32>,
    /// Of which boot of the machine; of that of this process when there is none.
    pub boot: Option<Boot>,
}

/// Another boot of the machine, for those who are of it.
#[derive(Debug, Clone)]
pub struct Boot {
    /// A file that has its id.
    pub id: PathBuf,
    /// When it began, seconds of the machine's own CLOCK_BOOTTIME.
    pub began: u64,
}

/// Run in namespaces of its own for mounts and time. Nothing but the boot id is hidden by it: what is mounted below shared mounts is
/// seen within and without.
const OF_ANOTHER_BOOT: &str =
    r#"mount --make-private /proc && mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;

/// The process as it is now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Process {
    /// None between an end and the next start.
    pub pid: Option<i32>,
    /// Starts so far.
    pub starts: u32,
}

/// A service that is started again whenever it ends, until told otherwise.
#[derive(Debug)]
pub struct Service {
    /// What it runs.
    pub plan: Plan,
    process: watch::Receiver<Process>,
    once: CancellationToken,
    supervisor: JoinHandle<()>,
}

impl Service {
    /// Starts it.
    #[must_use]
    pub fn start(plan: Plan) -> Self {
        let (tx, process) = watch::channel(Process::default());
        let once = CancellationToken::new();
        let supervisor = quintlet_kit::task::spawn("supervise", supervise(plan.clone(), tx, once.clone()));
        Self { plan, process, once, supervisor }
    }

    /// The process now.
    #[must_use]
    pub fn process(&self) -> Process {
        *self.process.borrow()
    }

    /// Sends a signal; nothing happens between an end and the next start.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = self.process().pid {
            // It may have ended by itself just now.
            let _gone = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Ends it for good with a signal it is to obey. Returns whether it did within `limit`; else it was killed.
    pub async fn end(&mut self, signal: Signal, limit: Duration) -> bool {
        self.once.cancel();
        self.signal(signal);
        self.signal(Signal::SIGCONT);
        let obeyed = tokio::time::timeout(limit, &mut self.supervisor).await.is_ok();
        if !obeyed {
            self.signal(Signal::SIGKILL);
            // The process is gone after SIGKILL; a task that panicked has dropped, thus killed it.
            let _ended = tokio::time::timeout(GRACE, &mut self.supervisor).await;
        }
        obeyed
    }

    /// Ends it with SIGTERM.
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

async fn supervise(plan: Plan, process: watch::Sender<Process>, once: CancellationToken) {
    while !once.is_cancelled() {
        let mut child = spawn(&plan);
        process.send_modify(|p| {
            p.pid = child.id().map(u32::cast_signed);
            p.starts += 1;
        });
        // How it ended is in its log; here it only matters that it did.
        let _status = child.wait().await;
        process.send_modify(|p| p.pid = None);
        // Either arm may be dropped: both only wait.
        tokio::select! {
            () = tokio::time::sleep(RESTART) => {}
            () = once.cancelled() => {}
        }
    }
}

fn spawn(plan: &Plan) -> Child {
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
