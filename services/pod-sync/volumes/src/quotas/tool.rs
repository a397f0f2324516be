//! Runs `xfs_quota` and `lsattr`, as the kubelet does: both work for ext4, too (`pkg/volume/util/fsquota/common`).

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::time::Instant;

use super::{Mount, QuotaTool, QuotaUsage};

/// Longest run of a command.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks whether a command has ended.
const POLL: Duration = Duration::from_millis(2);
/// Longest output that is read.
const MAX_OUTPUT: u64 = 64 << 10;
const XFS_QUOTA: [&str; 3] = ["/sbin/xfs_quota", "/usr/sbin/xfs_quota", "/bin/xfs_quota"];
const LSATTR: &str = "/usr/bin/lsattr";

/// The tools of this machine.
#[derive(Debug)]
pub(super) struct Tools {
    xfs_quota: Option<PathBuf>,
    /// A command that was killed and has not ended. While there is one, no other is run.
    hung: Mutex<Option<Child>>,
}

impl Tools {
    pub(super) fn find() -> Self {
        let there = XFS_QUOTA.into_iter().map(PathBuf::from).find(|path| path.is_file());
        Self { xfs_quota: there, hung: Mutex::new(None) }
    }

    /// Runs a subcommand on one mount only: another one may hang.
    fn quota(&self, mount: &Mount, subcommand: &str) -> io::Result<String> {
        let program = self.xfs_quota.as_ref().ok_or_else(|| io::Error::other("there is no xfs_quota"))?;
        let table = memfd_create("mounts", MemfdFlags::CLOEXEC)?;
        let mut table = std::fs::File::from(table);
        table.write_all(format!("{}\n", mount.line).as_bytes())?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), table.as_raw_fd());
        let mut command = Command::new(program);
        // Projects are given by ID, so the files with names need not be read.
        command.args(["-t", &path, "-P", "/dev/null", "-D", "/dev/null", "-x", "-f"]).arg(&mount.path);
        command.args(["-c", subcommand]);
        self.run(command)
    }

    /// Returns the output of a command that succeeds within the time limit.
    fn run(&self, mut command: Command) -> io::Result<String> {
        let mut hung = self.hung.lock();
        if let Some(child) = &mut *hung {
            if child.try_wait()?.is_none() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "an earlier command has not ended"));
            }
            *hung = None;
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let began = Instant::now();
        // The output is shorter than what a pipe holds, so it is read after the end.
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if began.elapsed() >= TIMEOUT {
                child.kill()?;
                *hung = Some(child);
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the command did not end in time"));
            }
            std::thread::sleep(POLL);
        };
        let mut output = String::new();
        if let Some(stdout) = child.stdout.take() {
            stdout.take(MAX_OUTPUT).read_to_string(&mut output)?;
        }
        if status.success() {
            Ok(output)
        } else {
            Err(io::Error::other(format!("the command failed: {status}")))
        }
    }
}

impl QuotaTool for Tools {
    fn has_accounting(&self, mount: &Mount) -> io::Result<bool> {
        Ok(self.quota(mount, "state -p")?.contains("Accounting: ON"))
    }

    fn project_of(&self, dir: &Path) -> io::Result<u32> {
        let mut command = Command::new(LSATTR);
        command.arg("-pd").arg(dir);
        let output = self.run(command)?;
        parse_project(&output).ok_or_else(|| io::Error::other(format!("unexpected output {output:?}")))
    }

    fn set_project(&self, mount: &Mount, dir: &Path, id: u32) -> io::Result<()> {
        self.quota(mount, &format!("project -s -p {} {id}", dir.display())).map(drop)
    }

    fn usage(&self, mount: &Mount, id: u32) -> io::Result<QuotaUsage> {
        let number = |unit: &str| {
            let output = self.quota(mount, &format!("quota -p -N -n -v {unit} {id}"))?;
            parse_number(&output).ok_or_else(|| io::Error::other(format!("unexpected output {output:?}")))
        };
        let (kibibytes, inodes) = (number("-b")?, number("-i")?);
        Ok(QuotaUsage { bytes: kibibytes.saturating_mul(1024), inodes })
    }
}

/// Parses `    0 -------------e----P-- /dir`.
fn parse_project(output: &str) -> Option<u32> {
    output.split_whitespace().next()?.parse().ok()
}

/// Parses the second word, `/dev/vdb 102400 0 0 00 [--------] /pods`. A long name of a device has a line of its own. xfs prints nothing for
/// a project without files.
fn parse_number(output: &str) -> Option<u64> {
    let mut words = output.split_whitespace();
    if words.next().is_none() { Some(0) } else { words.next()?.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_the_tools_is_parsed() {
        for (output, want) in [
            ("1048577 --------------e----P-- /pods/v\n", Some(1_048_577)),
            ("    0 --------------e------- /pods/v\n", Some(0)),
            ("", None),
            ("lsattr: Operation not supported\n", None),
        ] {
            assert_eq!(parse_project(output), want, "{output}");
        }
        for (output, want) in [
            ("/dev/vdb            102400          0          0     00 [--------] /pods\n", Some(102_400)),
            (
                "/dev/mapper/a-long-name-of-a-volume\n                         7          0          0 /pods\n",
                Some(7),
            ),
            ("", Some(0)),
            ("/dev/vdb\n", None),
            ("/dev/vdb x 0 0\n", None),
        ] {
            assert_eq!(parse_number(output), want, "{output}");
        }
    }

    #[test]
    fn a_command_ends_in_time_and_one_that_hangs_holds_up_no_other_for_long() {
        let tools = Tools { xfs_quota: None, hung: Mutex::new(None) };
        let shell = |script: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            command
        };
        assert_eq!(tools.run(shell("echo out; echo err >&2")).unwrap(), "out\n");
        assert!(tools.run(shell("exit 3")).unwrap_err().to_string().contains("exit status: 3"));
        let began = Instant::now();
        let error = tools.run(shell("exec sleep 60")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < TIMEOUT * 2);
        // Waits until the kernel has ended the killed one.
        let next = (0..500).find_map(|_| {
            std::thread::sleep(POLL);
            tools.run(shell("echo again")).ok()
        });
        assert_eq!(next.as_deref(), Some("again\n"));
        let mount = Mount { path: "/".into(), fs_type: "xfs".into(), line: String::new() };
        assert!(tools.has_accounting(&mount).is_err(), "without the tool nothing is known");
    }
}
