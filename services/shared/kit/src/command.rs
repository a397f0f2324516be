//! Runs short commands of the system from blocking code, each within a time limit.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tokio::time::Instant;

/// Interval between checks whether a command has ended.
const POLL: Duration = Duration::from_millis(2);
/// Longest output that is kept of each stream. The rest is read and dropped, so that no command waits for its
/// reader.
const MAX_OUTPUT: usize = 64 << 10;
/// Bytes that are read at once.
const BLOCK: usize = 16 << 10;

/// Runs commands one at a time. A command that the kernel does not end, because it hangs in a system call,
/// prevents later ones: each of them would most likely hang, too.
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
        let mut output = Pipe::new(child.stdout.take())?;
        let mut errors = Pipe::new(child.stderr.take())?;
        let status = loop {
            let ended = child.try_wait()?;
            // What the command wrote last is read after its end.
            output.read()?;
            errors.read()?;
            if let Some(status) = ended {
                break status;
            }
            if began.elapsed() >= limit {
                child.kill()?;
                *hung = Some(child);
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the command did not end in time"));
            }
            std::thread::sleep(POLL);
        };
        Ok(Ended { status, output: output.text(), errors: errors.text() })
    }
}

/// The output of a command, which is read while it runs. A process that the command left behind may keep the
/// pipe open, so the end of the output is not waited for.
struct Pipe<S> {
    stream: Option<S>,
    bytes: Vec<u8>,
}

impl<S: Read + AsFd> Pipe<S> {
    fn new(stream: Option<S>) -> io::Result<Self> {
        if let Some(stream) = &stream {
            fcntl_setfl(stream, fcntl_getfl(stream)? | OFlags::NONBLOCK)?;
        }
        Ok(Self { stream, bytes: Vec::new() })
    }

    /// Reads what the pipe holds, a few blocks at most.
    fn read(&mut self) -> io::Result<()> {
        let mut block = [0; BLOCK];
        // A pipe holds 64 KiB. A command that writes faster than this is read again in the next pass.
        for _ in 0..(MAX_OUTPUT / BLOCK).saturating_mul(2) {
            let Some(stream) = &mut self.stream else { break };
            match stream.read(&mut block) {
                Ok(0) => self.stream = None,
                Ok(length) => {
                    let kept = length.min(MAX_OUTPUT.saturating_sub(self.bytes.len()));
                    self.bytes.extend_from_slice(block.get(..kept).unwrap_or_default());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn text(self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
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
    fn a_command_that_writes_more_than_a_pipe_holds_ends_and_its_output_is_cut() {
        let commands = Commands::new();
        let script =
            "head -c 1000000 /dev/zero | tr '\\0' o; head -c 1000000 /dev/zero | tr '\\0' e >&2; exit 3";
        let ended = commands.run(shell(script), Duration::from_secs(60)).unwrap();
        assert_eq!(ended.status.code(), Some(3));
        assert_eq!((ended.output, ended.errors), ("o".repeat(MAX_OUTPUT), "e".repeat(MAX_OUTPUT)));
    }

    #[test]
    fn a_process_that_a_command_leaves_behind_is_not_waited_for() {
        let commands = Commands::new();
        // The process ends by itself when its pipe is closed.
        let ended = commands.run(shell("yes >&2 & echo out"), Duration::from_secs(60)).unwrap();
        assert_eq!(ended.success().unwrap(), "out\n");
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
