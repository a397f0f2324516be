//! A supervised service: a child process in its own process group, which is restarted when it exits.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::task::TaskGroup;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::plan::ServiceCommand;
use super::processes::Processes;
use super::restarts::Restarts;

/// Time between SIGTERM and SIGKILL, which exceeds the services' own grace period.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// The desired state of a service. It only moves to later variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    /// Run, and restart after an exit.
    Run,
    /// Terminate all pods, then exit: SIGUSR1, which only pod-sync handles.
    Drain,
    /// Exit: SIGTERM, then SIGKILL after [`STOP_GRACE`].
    Stop,
    /// Exit now: SIGKILL.
    Kill,
}

/// The actual state of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServiceState {
    /// The service has not been started.
    New,
    /// `starts` counts from 1.
    Running { pid: u32, starts: u32, since: Instant },
    /// The process exited and is restarted after the delay. `exit` describes the exit for the user.
    Waiting { exit: String, delay: Duration },
    /// The process exited after an order and is not restarted.
    Ended,
}

/// The binary of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServiceBinary {
    pub(super) path: PathBuf,
    /// The name that it is run by, which selects the program of a binary of all programs.
    pub(super) name: OsString,
}

impl ServiceBinary {
    /// Returns the file of a service in the directory of programs, or `all`, the binary of all programs, if
    /// the service has none there.
    pub(super) fn find(service: &'static str, dir: &Path, all: Option<&Path>) -> Option<Self> {
        let path = dir.join(service);
        if path.is_file() {
            return Some(Self { name: path.clone().into(), path });
        }
        all.map(|all| Self { path: all.to_owned(), name: service.into() })
    }
}

/// Handle of one supervised service.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) name: &'static str,
    order: watch::Sender<Order>,
    state: watch::Receiver<ServiceState>,
}

impl Service {
    /// Spawns the supervision of a service on `tasks`.
    pub(super) fn start(
        plan: ServiceCommand,
        binary: ServiceBinary,
        log_dir: &Path,
        paths: &Paths,
        processes: Arc<Mutex<Processes>>,
        tasks: &TaskGroup,
    ) -> Self {
        let (order, orders) = watch::channel(Order::Run);
        let (states, state) = watch::channel(ServiceState::New);
        let name = plan.name;
        let log = quintctl_service_logs::path(log_dir, name);
        let exit_note = paths.exit(name);
        let supervised = Supervised { binary, plan, log, exit_note, processes, orders, states };
        tasks.spawn("supervise", supervised.run());
        Self { name, order, state }
    }

    /// Raises the order. A weaker order than the current one has no effect.
    pub(super) fn order(&self, order: Order) {
        self.order.send_if_modified(|current| {
            let raise = order > *current;
            *current = order.max(*current);
            raise
        });
    }

    pub(super) fn state(&self) -> watch::Receiver<ServiceState> {
        self.state.clone()
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(*self.state.borrow(), ServiceState::Running { .. })
    }

    /// Waits for [`ServiceState::Ended`].
    pub(super) async fn ended(&self) {
        // An error means that the supervising task has ended, which kills the process.
        let _ = self.state.clone().wait_for(|s| *s == ServiceState::Ended).await;
    }
}

struct Supervised {
    binary: ServiceBinary,
    plan: ServiceCommand,
    log: PathBuf,
    exit_note: PathBuf,
    processes: Arc<Mutex<Processes>>,
    orders: watch::Receiver<Order>,
    states: watch::Sender<ServiceState>,
}

impl Supervised {
    async fn run(mut self) {
        let mut restarts = Restarts::default();
        let mut starts = 0;
        while *self.orders.borrow() == Order::Run {
            let began = Instant::now();
            let exit = match self.spawn() {
                Ok(mut child) => {
                    starts += 1;
                    let pid = child.id().unwrap_or_default();
                    self.remember(Some(pid));
                    self.states.send_replace(ServiceState::Running { pid, starts, since: began });
                    let exit = self.attend(&mut child).await;
                    self.remember(None);
                    exit
                }
                Err(e) => format!("failed to start {}: {e}", self.binary.path.display()),
            };
            if *self.orders.borrow() > Order::Run {
                break;
            }
            let now = Instant::now();
            let delay = restarts.after_exit(now, now.duration_since(began));
            self.states.send_replace(ServiceState::Waiting { exit, delay });
            // Both arms only wait; dropping them loses nothing.
            tokio::select! {
                () = sleep_until(now + delay) => {}
                _ = self.orders.wait_for(|o| *o > Order::Run) => {}
            }
        }
        self.states.send_replace(ServiceState::Ended);
    }

    /// Signals the orders to the process until it exits. Returns the description of the exit.
    async fn attend(&mut self, child: &mut Child) -> String {
        let mut kill_at: Option<Instant> = None;
        loop {
            // Child::wait and watch::changed lose nothing when dropped.
            tokio::select! {
                ended = child.wait() => return self.note(ended),
                changed = self.orders.changed() => {
                    // The handle was dropped without an order: the supervisor has ended.
                    let order = if changed.is_err() { Order::Kill } else { *self.orders.borrow_and_update() };
                    match order {
                        Order::Run => {}
                        Order::Drain => send(child, Signal::SIGUSR1),
                        Order::Stop => {
                            send(child, Signal::SIGTERM);
                            // A process stopped by SIGSTOP handles SIGTERM only after SIGCONT.
                            send(child, Signal::SIGCONT);
                            kill_at = Some(Instant::now() + STOP_GRACE);
                        }
                        Order::Kill => kill_at = Some(Instant::now()),
                    }
                }
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                    send(child, Signal::SIGKILL);
                    let ended = child.wait().await;
                    return self.note(ended);
                }
            }
        }
    }

    /// Writes the exit note for the next process of the service, and returns the description of the exit. The
    /// note has the format of SERVICE_RESULT and EXIT_STATUS of systemd.exec(5), since under systemd a unit
    /// writes the note.
    fn note(&self, ended: std::io::Result<ExitStatus>) -> String {
        let status = match ended {
            Ok(status) => status,
            Err(e) => return e.to_string(),
        };
        let written = self.exit_note.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| {
            quintlet_kit::atomic_file::write(&self.exit_note, exit_note(status).as_bytes(), 0o600)
        });
        if let Err(error) = written {
            tracing::warn!(path = %self.exit_note.display(), %error, "write of exit note failed");
        }
        exit_text(status)
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let log = quintctl_service_logs::open(&self.log)?;
        let ServiceBinary { path, name } = &self.binary;
        let mut command = match &self.plan.user {
            // quintctl run-as changes the user and executes the service in the same process.
            Some(user) => {
                let mut command = Command::new("/proc/self/exe");
                command.arg0("quintctl").args(user.line(name, path.as_os_str()));
                command
            }
            None => {
                let mut command = Command::new(path);
                command.arg0(name);
                command
            }
        };
        command
            .args(&self.plan.args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C in the terminal must reach only the supervisor, which stops the services in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
    }

    fn remember(&self, pid: Option<u32>) {
        if let Ok(mut processes) = self.processes.lock() {
            processes.set(self.plan.name, pid);
        }
    }
}

fn send(child: &Child, signal: Signal) {
    if let Some(pid) = child.id() {
        let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
    }
}

fn exit_note(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    let signal = status.signal().and_then(|signal| Signal::try_from(signal).ok());
    match (status.code(), signal) {
        (Some(code), _) => format!("exit-code {code}\n"),
        (None, Some(signal)) => format!("signal {}\n", signal.as_str().trim_start_matches("SIG")),
        (None, None) => "unknown\n".to_owned(),
    }
}

fn exit_text(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => signal.to_string(),
            Err(_) => format!("signal {signal}"),
        },
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn an_exit_note_has_the_values_of_systemd() {
        for (raw, want) in [
            (70 << 8, "exit-code 70\n"),
            (0, "exit-code 0\n"),
            (6 | 0x80, "signal ABRT\n"),
            (9, "signal KILL\n"),
            (11, "signal SEGV\n"),
            (64, "unknown\n"),
        ] {
            assert_eq!(exit_note(ExitStatus::from_raw(raw)), want);
        }
    }
}
