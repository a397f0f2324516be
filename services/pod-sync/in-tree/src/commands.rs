//! mount(8) and the tools of file systems.

use std::ffi::OsString;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Error;

/// Largest part of a command's output that an error has, in bytes.
const MOST_OUTPUT: usize = 4096;

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

/// Runs commands. Tests implement it with their own results.
#[async_trait]
pub trait Commands: Send + Sync {
    /// Runs a command until it ends, or kills it after `limit`.
    ///
    /// # Errors
    /// The command cannot be started.
    async fn run(
        &self,
        program: &'static str,
        arguments: &[OsString],
        limit: Option<Duration>,
    ) -> io::Result<Ended>;
}

/// The commands of the system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemCommands;

#[async_trait]
impl Commands for SystemCommands {
    async fn run(
        &self,
        program: &'static str,
        arguments: &[OsString],
        limit: Option<Duration>,
    ) -> io::Result<Ended> {
        let mut command = tokio::process::Command::new(program);
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(limit.is_some());
        let output = match limit {
            None => command.output().await?,
            Some(limit) => match tokio::time::timeout(limit, command.output()).await {
                Ok(output) => output?,
                Err(_) => return Ok(Ended { code: None, output: String::new() }),
            },
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
    limit: Option<Duration>,
) -> Result<Ended, Error> {
    commands.run(program, arguments, limit).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NoCommand(program),
        _ => Error::Command { command: program.to_owned(), cause: error.to_string(), output: String::new() },
    })
}

/// Mounts with mount(8).
///
/// # Errors
/// The command is not installed, or fails. The text is that of the kubelet.
pub(crate) async fn mount(commands: &dyn Commands, arguments: Vec<OsString>) -> Result<(), Error> {
    let ended = run(commands, "mount", &arguments, None).await?;
    if ended.code == Some(0) {
        return Ok(());
    }
    let words: Vec<_> = arguments.iter().map(|word| word.to_string_lossy()).collect();
    Err(Error::Mount { cause: ended.cause(), arguments: words.join(" "), output: ended.output })
}
