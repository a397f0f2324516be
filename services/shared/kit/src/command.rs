//! Runs short commands of the system from blocking code, each within a time limit.

use std::io::{self, Read as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Interval between checks whether a command has ended.
const POLL: Duration = Duration::from_millis(2);
/// Longest output that is read of each stream. A pipe holds as much, so a command whose output is shorter never waits for its reader.
const MAX_OUTPUT: u64 = 64 << 10;

/// Runs commands one at a time. A command that the kernel does not end, because it hangs in a system call, prevents later ones: each
/// of them would most likely hang, too.
#[derive(Debug, Default)]
pub struct Commands {
    /// A command that was killed and has not ended.
    hung: Mutex<Option<Child>>,
}

/// A command that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code, or the signal that ended it.
    pub status: ExitStatus,
    /// Output, at most 64 KiB. Bytes that are no UTF-8 are replaced.
    pub output: String,
    /// Error output, at most 64 KiB.
    pub errors: String,
}

impl Ended {
    /// Returns the output of a command that succeeded.
    ///
    /// # Errors
    /// The command failed. The text has its error output.
    pub fn success(self) -> io::Result<String> {
        if self.status.success() {
            return Ok(self.output);
        }
        let errors = self.errors.trim();
        let separator = if errors.is_empty() { "" } else { ": " };
        Err(io::Error::other(format!("the command failed: {}{separator}{errors}", self.status)))
    }
}

impl Commands {
    /// Creates a runner without a hanging command.
    #[must_use]
    pub const fn new() -> Self {
        Self { hung: Mutex::new(None) }
    }

    /// Runs a command, and kills it after `limit`. Blocks for as long.
    ///
    /// # Errors
    /// The command cannot be started, or does not end in time; or an earlier one was killed and has not ended
    /// ([`io::ErrorKind::TimedOut`]).
    pub fn run(&self, mut command: Command, limit: Duration) -> io::Result<Ended> {
        let mut hung = self.hung.lock();
        if let Some(child) = &mut *hung {
            if child.try_wait()?.is_none() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "an earlier command has not ended"));
            }
            *hung = None;
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if began.elapsed() >= limit {
                child.kill()?;
                *hung = Some(child);
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the command did not end in time"));
            }
            std::thread::sleep(POLL);
        };
        let output = text(child.stdout.take())?;
        let errors = text(child.stderr.take())?;
        Ok(Ended { status, output, errors })
    }
}

fn text(stream: Option<impl io::Read>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(MAX_OUTPUT).read_to_end(&mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_command_has_its_output_or_its_error_output() {
        let commands = Commands::new();
        let run = |script| commands.run(shell(script), Duration::from_secs(60)).unwrap();
        assert_eq!(run("echo out; echo err >&2").success().unwrap(), "out\n");
        let failed = |script| run(script).success().unwrap_err().to_string();
        assert_eq!(failed("echo out; echo err >&2; exit 3"), "the command failed: exit status: 3: err");
        assert_eq!(failed("exit 3"), "the command failed: exit status: 3");
        assert!(commands.run(Command::new("/absent"), Duration::from_secs(60)).is_err());
    }

    #[test]
    fn a_command_that_hangs_is_killed_and_the_next_one_runs_after_its_end() {
        let commands = Commands::new();
        let error = commands.run(shell("exec sleep 600"), Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // Waits until the kernel has ended the killed one.
        let next = (0..5000).find_map(|_| {
            std::thread::sleep(POLL);
            commands.run(shell("echo again"), Duration::from_secs(60)).ok()
        });
        assert_eq!(next.unwrap().success().unwrap(), "again\n");
    }
}
