//! mount(8) and the tools of file systems.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use rustix::process::{Pid, Signal};
use tokio_util::sync::CancellationToken;

use crate::error::Error;

/// Largest part of a command's output that an error has, in bytes.
const MOST_OUTPUT: usize = 8192;

/// A command that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The exit code; `None` if a signal ended the command.
    pub code: Option<i32>,
    /// The beginning of stdout and stderr.
    pub output: String,
}

impl Ended {
    /// Returns the cause of a failure as Go prints it.
    #[must_use]
    pub fn cause(&self) -> String {
        self.code.map_or_else(|| "signal: killed".to_owned(), |code| format!("exit status {code}"))
    }
}

/// When a command that has not ended is killed, with its process group.
#[derive(Debug, Clone, Copy)]
pub enum Until<'a> {
    /// After this time. The result does not wait for a process that the kernel does not end.
    Limit(Duration),
    /// When the token is cancelled. The result waits for the end of the command, so that it has no effect
    /// later.
    Cancelled(&'a CancellationToken),
}

/// Runs commands. Tests implement it with their own results.
#[async_trait]
pub trait Commands: Send + Sync {
    /// Runs a command until it ends, or is killed.
    ///
    /// # Errors
    /// The command cannot be started.
    async fn run(&self, program: &'static str, arguments: &[OsString], until: Until<'_>)
    -> io::Result<Ended>;
}

/// The commands of the system.
#[derive(Debug, Clone, Default)]
pub struct SystemCommands {
    /// Directory that is searched before `PATH`.
    pub first: Option<PathBuf>,
}

#[async_trait]
impl Commands for SystemCommands {
    async fn run(
        &self,
        program: &'static str,
        arguments: &[OsString],
        until: Until<'_>,
    ) -> io::Result<Ended> {
        let (first, arguments) = (self.first.clone(), arguments.to_vec());
        // A mount in progress outlives the process. The next process finds it in the mount table.
        let kill_on_drop = matches!(until, Until::Limit(_));
        // The start of a program reads it from the disk.
        let spawn = move || {
            let found = first.map(|first| first.join(program)).filter(|path| path.exists());
            let program = found.unwrap_or_else(|| PathBuf::from(program));
            let mut command = tokio::process::Command::new(program);
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.process_group(0).kill_on_drop(kill_on_drop).spawn()
        };
        let child = blocking(spawn).await?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        // The child is not reaped before `output` ends, so that the number is that of its group until then.
        let kill = || {
            if let Some(group) = group {
                let _ended_meanwhile = rustix::process::kill_process_group(group, Signal::KILL);
            }
        };
        let mut output = std::pin::pin!(child.wait_with_output());
        let output = match until {
            Until::Limit(limit) => match tokio::time::timeout(limit, &mut output).await {
                Ok(output) => output?,
                Err(_) => {
                    kill();
                    return Ok(Ended { code: None, output: String::new() });
                }
            },
            Until::Cancelled(cancel) => {
                // The output is polled again below.
                let ended = tokio::select! {
                    output = &mut output => Some(output),
                    () = cancel.cancelled() => None,
                };
                match ended {
                    Some(output) => output?,
                    None => {
                        kill();
                        output.await?
                    }
                }
            }
        };
        let mut bytes = [output.stdout, output.stderr].concat();
        bytes.truncate(MOST_OUTPUT);
        Ok(Ended { code: output.status.code(), output: String::from_utf8_lossy(&bytes).into_owned() })
    }
}

/// Runs a command, and names it if it is not installed.
///
/// # Errors
/// The command cannot be started.
pub(crate) async fn run(
    commands: &dyn Commands,
    program: &'static str,
    arguments: &[OsString],
    until: Until<'_>,
) -> Result<Ended, Error> {
    failpoint::reached!(File, Before, "volume command run");
    let ended = commands.run(program, arguments, until).await;
    failpoint::reached!(File, After, "volume command run");
    ended.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NoCommand(program),
        _ => Error::Command { command: program.to_owned(), cause: error.to_string(), output: String::new() },
    })
}

/// Mounts with mount(8).
///
/// # Errors
/// The command is not installed, or fails. The text is that of the kubelet.
pub(crate) async fn mount(
    commands: &dyn Commands,
    arguments: Vec<OsString>,
    until: Until<'_>,
) -> Result<(), Error> {
    let ended = run(commands, "mount", &arguments, until).await?;
    if ended.code == Some(0) {
        return Ok(());
    }
    let words: Vec<_> = arguments.iter().map(|word| word.to_string_lossy()).collect();
    Err(Error::Mount { cause: ended.cause(), arguments: words.join(" "), output: ended.output })
}
