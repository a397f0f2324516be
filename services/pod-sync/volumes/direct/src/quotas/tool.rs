//! Runs `xfs_quota` and `lsattr`, as the kubelet does: both work for ext4, too
//! (`pkg/volume/util/fsquota/common`).

use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use quintlet_kit::command::Commands;
use rustix::fs::{MemfdFlags, memfd_create};

use super::interface::{Mount, QuotaTool, QuotaUsage};

/// Longest run of a command.
const LIMIT: Duration = Duration::from_secs(5);
const XFS_QUOTA: [&str; 3] = ["/sbin/xfs_quota", "/usr/sbin/xfs_quota", "/bin/xfs_quota"];
const LSATTR: &str = "/usr/bin/lsattr";

/// The tools of this machine.
#[derive(Debug)]
pub(super) struct Tools {
    xfs_quota: Option<PathBuf>,
    commands: Commands,
}

impl Tools {
    pub(super) fn find() -> Self {
        let there = XFS_QUOTA.into_iter().map(PathBuf::from).find(|path| path.is_file());
        Self { xfs_quota: there, commands: Commands::new() }
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
    fn run(&self, command: Command) -> io::Result<String> {
        self.commands.run(command, LIMIT)?.success()
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

/// Parses the second word, `/dev/vdb 102400 0 0 00 [--------] /pods`. A long name of a device has a line of
/// its own. xfs prints nothing for a project without files.
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
    fn without_xfs_quota_nothing_is_known() {
        let tools = Tools { xfs_quota: None, commands: Commands::new() };
        let mount = Mount { path: "/".into(), fs_type: "xfs".into(), line: String::new() };
        assert!(tools.has_accounting(&mount).is_err());
    }
}
