//! Flame graphs and counts of system calls of the services, by perf, inferno and strace.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_e2e::Node;
use quintlet_e2e::bins::SERVICES;
use tokio::process::{Child, Command};

use quintlet_e2e::cost::pid;

/// Samples per second and thread. It is no divisor of the services' intervals.
const FREQUENCY: &str = "497";
/// Bytes of the stack that perf copies with each sample: release builds have no frame pointers.
const CALL_GRAPH: &str = "dwarf,16384";

/// System calls whose number depends on how threads are scheduled: they wait, wake, or belong to threads and
/// their memory.
const OF_SCHEDULING: [&str; 18] = [
    "clock_nanosleep",
    "clone3",
    "epoll_pwait",
    "epoll_wait",
    "exit",
    "futex",
    "madvise",
    "mmap",
    "mprotect",
    "munmap",
    "prctl",
    "restart_syscall",
    "rseq",
    "rt_sigprocmask",
    "sched_getaffinity",
    "sched_yield",
    "set_robust_list",
    "sigaltstack",
];

/// Attaches profilers to the running services.
pub(crate) struct Profiler {
    dir: PathBuf,
    pids: Vec<(&'static str, i32)>,
}

impl Profiler {
    pub(crate) fn new(dir: &Path, node: &Node) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let pids = SERVICES.into_iter().map(|s| Ok((s, pid(node, s)?))).collect::<anyhow::Result<_>>()?;
        Ok(Self { dir: dir.to_owned(), pids })
    }

    /// Samples stacks during `work`. Writes `SERVICE-PHASE.svg` and `SERVICE-PHASE.folded`.
    pub(crate) async fn sample(&self, phase: &str, work: impl AsyncFnOnce()) -> anyhow::Result<()> {
        let data = self.dir.join("perf.data");
        let pids: Vec<String> = self.pids.iter().map(|(_, pid)| pid.to_string()).collect();
        let perf = Command::new("perf")
            .args([
                "record",
                "--quiet",
                "--freq",
                FREQUENCY,
                "--call-graph",
                CALL_GRAPH,
                "--pid",
                &pids.join(","),
            ])
            .arg("--output")
            .arg(&data)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("failed to start perf: install linux-perf")?;
        work().await;
        interrupt(perf).await?;
        for (service, pid) in &self.pids {
            self.draw(&data, phase, service, *pid).await?;
        }
        std::fs::remove_file(&data)?;
        Ok(())
    }

    async fn draw(&self, data: &Path, phase: &str, service: &str, pid: i32) -> anyhow::Result<()> {
        let stacks = self.dir.join(format!("{service}-{phase}.stacks"));
        let folded = self.dir.join(format!("{service}-{phase}.folded"));
        let graph = self.dir.join(format!("{service}-{phase}.svg"));
        let pid = pid.to_string();
        let data = data.to_string_lossy();
        write_to(&stacks, "perf", &["script", "--no-inline", "--pid", &pid, "--input", &data]).await?;
        write_to(&folded, "inferno-collapse-perf", &[&stacks.to_string_lossy()]).await?;
        std::fs::remove_file(&stacks)?;
        if std::fs::metadata(&folded)?.len() == 0 {
            // The service did not run while it was sampled, and inferno refuses to draw nothing.
            return Ok(());
        }
        let title = format!("{service}, {phase}");
        write_to(&graph, "inferno-flamegraph", &["--title", &title, &folded.to_string_lossy()]).await
    }

    /// Counts system calls during `work`, which is slower for it. Writes `SERVICE-PHASE.syscalls`.
    pub(crate) async fn count_syscalls(&self, phase: &str, work: impl AsyncFnOnce()) -> anyhow::Result<()> {
        let mut tracers = Vec::new();
        for (service, pid) in &self.pids {
            let strace = Command::new("strace")
                .args(["-c", "-f", "-p", &pid.to_string(), "-o"])
                .arg(self.syscalls_file(service, phase))
                .stdin(Stdio::null())
                .stderr(Stdio::null())
                .kill_on_drop(true)
                .spawn()
                .context("failed to start strace: install strace")?;
            tracers.push(strace);
        }
        work().await;
        for strace in tracers {
            interrupt(strace).await?;
        }
        Ok(())
    }

    fn syscalls_file(&self, service: &str, phase: &str) -> PathBuf {
        self.dir.join(format!("{service}-{phase}.syscalls"))
    }

    /// Returns the counted system calls of each service, without [`OF_SCHEDULING`].
    pub(crate) fn counted(&self, phase: &str) -> anyhow::Result<Vec<(&'static str, u64)>> {
        let calls = |service| -> anyhow::Result<u64> {
            let table = std::fs::read_to_string(self.syscalls_file(service, phase))?;
            Ok(calls(&table).filter(|(name, _)| !OF_SCHEDULING.contains(name)).map(|(_, calls)| calls).sum())
        };
        self.pids.iter().map(|(service, _)| Ok((*service, calls(*service)?))).collect()
    }
}

/// Returns names and counts in a table of `strace -c`. Its columns are: % time, seconds, usecs/call, calls,
/// errors (if any), name.
fn calls(table: &str) -> impl Iterator<Item = (&str, u64)> {
    table.lines().filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let name = columns.last().filter(|name| **name != "total")?;
        Some((*name, columns.get(3)?.parse().ok()?))
    })
}

/// Runs a command with its output in a file.
async fn write_to(file: &Path, command: &str, args: &[&str]) -> anyhow::Result<()> {
    let status = Command::new(command).args(args).stdout(File::create(file)?).stderr(Stdio::null()).status();
    let status = status.await.with_context(|| format!("failed to start {command}"))?;
    ensure!(status.success(), "{command} {args:?} ended with {status}");
    Ok(())
}

/// Interrupts a profiler, which then writes its result, and waits for its end.
async fn interrupt(mut profiler: Child) -> anyhow::Result<()> {
    let pid = profiler.id().context("the profiler ended early")?;
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGINT)?;
    // Both end by the signal that they were sent, after they have written.
    let _interrupted = profiler.wait().await?;
    Ok(())
}
