//! Reports processes that the kernel killed because the node, and not only a container, had no memory left
//! (`pkg/kubelet/oom`).
//!
//! [`watch`] follows `/dev/kmsg`. The position is kept in a file: a restarted process reports the kills that
//! happened meanwhile, and none twice.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use quintlet_kit::atomic_file;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::net::unix::pipe::Receiver;

/// Reason of the event.
pub const SYSTEM_OOM: &str = "SystemOOM";
/// Largest record of the kernel (`CONSOLE_EXT_LOG_MAX`).
const MAX_RECORD: usize = 8192;

/// A process that the kernel killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// Name of the command (`comm`).
    pub process: String,
    /// Process ID on the host.
    pub pid: u32,
}

impl fmt::Display for Victim {
    /// Formats the kubelet's text of the event.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "System OOM encountered, victim process: {}, pid: {}", self.process, self.pid)
    }
}

/// Recognizes kills in the lines of the kernel's log (cAdvisor's `oomparser`).
#[derive(Debug, Default)]
struct Kills {
    /// Between the first and the last line about a kill.
    in_progress: bool,
}

impl Kills {
    /// Takes the next line. Returns the victim of a kill that was not caused by the limit of a cgroup.
    fn line(&mut self, line: &str) -> Option<Victim> {
        if line.contains("invoked oom-killer:") {
            self.in_progress = true;
            return None;
        }
        if !self.in_progress {
            return None;
        }
        let is_limit = line.starts_with("oom-kill:constraint=CONSTRAINT_MEMCG")
            || line.starts_with("Memory cgroup out of memory")
            || line.starts_with("Task in /") && line.contains(" killed as a result of limit of /");
        let (_, victim) = match line.split_once("Killed process ") {
            _ if is_limit => {
                self.in_progress = false;
                return None;
            }
            None => return None,
            Some(parts) => parts,
        };
        self.in_progress = false;
        let (pid, rest) = victim.split_once(" (")?;
        let (process, _) = rest.rsplit_once(')')?;
        Some(Victim { process: process.to_owned(), pid: pid.parse().ok()? })
    }
}

/// A record of `/dev/kmsg`: `priority,sequence,time,flags;message`.
#[derive(Debug, PartialEq, Eq)]
struct Record<'a> {
    sequence: u64,
    message: &'a str,
}

impl<'a> Record<'a> {
    /// Returns a record of the kernel itself. Processes can write records, too, but not with the kernel's
    /// facility.
    fn parse(text: &'a str) -> Option<Self> {
        let (prefix, message) = text.split_once(';')?;
        let mut fields = prefix.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let sequence = fields.next()?.parse().ok()?;
        let message = message.lines().next().unwrap_or_default();
        (priority < 8).then_some(Self { sequence, message })
    }
}

/// The last record that was read, in a file that is valid for one boot.
#[derive(Debug)]
struct Position {
    file: PathBuf,
    boot_id: String,
    /// Kills up to this record were reported. `None`: all that happened before the first start.
    reported: Option<u64>,
}

impl Position {
    // Blocks: the run directory is on a tmpfs.
    fn load(file: PathBuf, boot_id: String) -> Self {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let reported = text.split_once(' ').filter(|(boot, _)| *boot == boot_id);
        let reported = reported.and_then(|(_, sequence)| sequence.trim().parse().ok());
        Self { file, boot_id, reported }
    }

    // Blocks: the run directory is on a tmpfs.
    fn store(&mut self, sequence: u64) {
        self.reported = Some(sequence);
        let text = format!("{} {sequence}\n", self.boot_id);
        if let Err(error) = atomic_file::write(&self.file, text.as_bytes(), 0o600) {
            tracing::info!(file = %self.file.display(), %error, "failed to store the position in the kernel's log");
        }
    }
}

/// Calls `report` for each process that the kernel kills because the node has no memory left. `log` is
/// `/dev/kmsg`, and `position` the file for the position. If the log cannot be read, that is logged once and
/// set in the gauge `quintlet_kernel_log_unreadable`. Cancellation drops no kill: it is reported by the next
/// process.
pub async fn watch(log: &Path, position: PathBuf, boot_id: String, report: impl Fn(&Victim)) {
    let unreadable = quintlet_telemetry::metrics::gauge(
        "quintlet_kernel_log_unreadable",
        "Whether kills by the kernel cannot be reported, since its log cannot be read (1 or 0)",
    );
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // Blocks: the log is a device of the kernel.
    let opened = rustix::fs::open(log, flags, Mode::empty()).map_err(io::Error::from);
    unreadable.set(i64::from(opened.is_err()));
    let followed = match opened {
        Ok(log) => follow(log, Position::load(position, boot_id), report).await,
        Err(error) => Err(error),
    };
    if let Err(error) = followed {
        unreadable.set(1);
        tracing::warn!(log = %log.display(), %error, "failed to read the kernel's log, kills by the kernel are not reported");
    }
}

/// Follows the log until its end, which `/dev/kmsg` does not have.
async fn follow(log: OwnedFd, position: Position, report: impl Fn(&Victim)) -> io::Result<()> {
    let mut log_of_kills = LogOfKills { kills: Kills::default(), last: 0, position };
    let mut buffer = vec![0; MAX_RECORD];
    loop {
        match rustix::io::read(&log, &mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => log_of_kills.take(buffer.get(..read).unwrap_or_default(), &report),
            Err(Errno::AGAIN) => break,
            // Records were overwritten before they were read. The next read returns the oldest that is left.
            Err(Errno::PIPE | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    log_of_kills.caught_up();
    // A record is read like the content of a pipe.
    let log = Receiver::from_file_unchecked(File::from(log))?;
    loop {
        match log.try_read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => log_of_kills.take(buffer.get(..read).unwrap_or_default(), &report),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => log.readable().await?,
                ErrorKind::BrokenPipe | ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
    }
}

/// The kills in the log, up to a position.
struct LogOfKills {
    kills: Kills,
    /// The last record that was read.
    last: u64,
    position: Position,
}

impl LogOfKills {
    fn take(&mut self, bytes: &[u8], report: impl Fn(&Victim)) {
        let text = String::from_utf8_lossy(bytes);
        let Some(record) = Record::parse(&text) else { return };
        self.last = record.sequence;
        let Some(victim) = self.kills.line(record.message) else { return };
        if self.position.reported.is_some_and(|reported| record.sequence > reported) {
            report(&victim);
            self.position.store(record.sequence);
        }
    }

    /// Records that all that happened before the first start was read.
    fn caught_up(&mut self) {
        if self.position.reported.is_none() {
            self.position.store(self.last);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Mutex;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use tokio::time::timeout;

    use super::*;

    const SYSTEM: [&str; 4] = [
        "stress invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=0",
        "Mem-Info:",
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/kubepods/x,task=stress,pid=4242,uid=0",
        "Out of memory: Killed process 4242 (stress) total-vm:1048576kB, anon-rss:900000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1800kB oom_score_adj:1000",
    ];

    const CONTAINER: [&str; 4] = [
        "dd invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=999",
        "Memory cgroup stats for /kubepods/burstable/pod1:",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0,oom_memcg=/kubepods/burstable/pod1,task_memcg=/kubepods/burstable/pod1/c,task=dd,pid=17,uid=0",
        "Memory cgroup out of memory: Killed process 17 (dd) total-vm:70000kB, anon-rss:65536kB, file-rss:4kB, shmem-rss:0kB, UID:0 pgtables:176kB oom_score_adj:999",
    ];

    fn victims<'a>(lines: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let mut kills = Kills::default();
        lines.into_iter().filter_map(|line| kills.line(line)).map(|victim| victim.to_string()).collect()
    }

    #[test]
    fn a_kill_for_the_whole_node_is_reported_and_one_for_a_limit_is_not() {
        let text = "System OOM encountered, victim process: stress, pid: 4242";
        assert_eq!(victims(SYSTEM), [text]);
        assert_eq!(victims(CONTAINER), [""; 0]);
        assert_eq!(victims(CONTAINER.into_iter().chain(SYSTEM)), [text]);
        let legacy = [
            "java invoked oom-killer: gfp_mask=0xd0, order=0, oom_score_adj=0",
            "Task in /docker/1 killed as a result of limit of /docker/1",
            "Killed process 19667 (evilprogram) total-vm:1460016kB, anon-rss:1414008kB, file-rss:4kB",
        ];
        assert_eq!(victims(legacy), [""; 0]);
        assert_eq!(victims([legacy[0], legacy[2]]).len(), 1);
    }

    #[test]
    fn lines_outside_of_a_kill_and_strange_names_are_understood() {
        assert_eq!(victims([SYSTEM[3]]), [""; 0], "no kill has begun");
        let name = "Out of memory: Killed process 7 (a) b (c) total-vm:1kB";
        assert_eq!(victims([SYSTEM[0], name]), ["System OOM encountered, victim process: a) b (c, pid: 7"]);
        for broken in [
            "Killed process x (a)",
            "Killed process 99999999999 (a)",
            "Killed process 7 a",
            "Killed process ",
        ] {
            assert_eq!(victims([SYSTEM[0], broken]), [""; 0], "{broken}");
        }
    }

    #[test]
    fn only_records_of_the_kernel_count() {
        let record = Record::parse("6,339,5140900,-;message; of it\n SUBSYSTEM=acpi\n");
        assert_eq!(record, Some(Record { sequence: 339, message: "message; of it" }));
        assert_eq!(Record::parse("12,340,5140900,-;written by a process"), None);
        for broken in ["", "6", "6,x,1,-;m", "x,1,1,-;m", "6;m"] {
            assert_eq!(Record::parse(broken), None, "{broken}");
        }
    }

    /// Follows a log with these records, and returns the reports until nothing more comes.
    async fn reports(file: &Path, boot_id: &str, records: &[(u64, &str)]) -> Vec<u32> {
        // Keeps records apart, as the kernel's log does.
        let pair = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        );
        let (log, writer) = pair.unwrap();
        for (sequence, message) in records {
            rustix::io::write(&writer, format!("4,{sequence},1,-;{message}\n").as_bytes()).unwrap();
        }
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (position, pids) = (Position::load(file.to_owned(), boot_id.to_owned()), Arc::clone(&seen));
        let following = follow(log, position, move |victim| pids.lock().push(victim.pid));
        let ended = timeout(Duration::from_millis(300), following).await;
        assert!(ended.is_err(), "{ended:?}");
        drop(writer);
        seen.lock().clone()
    }

    fn kill(sequence: u64) -> Vec<(u64, &'static str)> {
        (sequence..).zip(SYSTEM).collect()
    }

    #[tokio::test]
    async fn a_kill_is_reported_once_also_by_a_restarted_process() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kernel-log");
        let mut log = kill(10);
        assert_eq!(reports(&file, "boot-1", &log).await, [0; 0], "it happened before the first start");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "boot-1 13\n");
        log.extend(kill(20));
        assert_eq!(reports(&file, "boot-1", &log).await, [4242], "it happened while no process was running");
        assert_eq!(reports(&file, "boot-1", &log).await, [0; 0], "reported already");
        assert_eq!(reports(&file, "boot-2", &kill(1)).await, [0; 0], "the position is that of another boot");
        assert_eq!(reports(&file, "boot-2", &kill(30)).await, [4242]);
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_read_ends_the_watch() {
        let dir = tempfile::tempdir().unwrap();
        let (log, file) = (dir.path().join("none"), dir.path().join("kernel-log"));
        watch(&log, file, "b".to_owned(), |_| panic!("nothing happened")).await;
        let metrics = quintlet_telemetry::metrics::text();
        assert!(metrics.contains("quintlet_kernel_log_unreadable 1"), "{metrics}");
    }
}
