//! The session of an exec or attach: connects the streams of a container to those of this process until the
//! container's side ends.
//!
//! A thread reads standard input, a task sends it, and another task sends the size of the terminal. They end
//! with this process.

use std::io::{IsTerminal as _, Read as _};
use std::process::ExitCode;
use std::time::Duration;

use quintlet_kit::task;
use quintlet_spdy::{Connection, Stream, Writer};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use super::terminal::{self, RawTerminal};
use crate::error::{EXIT_FAILURE, Error};

/// Buffer size of a read from standard input, in bytes.
const BLOCK: usize = 32 << 10;
/// Longest wait for the remaining output after the status was received.
const DRAIN: Duration = Duration::from_secs(2);

/// The streams of the session besides standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) stdin: bool,
    pub(super) tty: bool,
}

impl Wanted {
    /// Checks that standard input is a terminal if it is connected to a terminal of the container.
    pub(super) fn check(self) -> Result<(), Error> {
        if self.tty && self.stdin && !std::io::stdin().is_terminal() {
            return Err(Error::NoStdinTerminal);
        }
        Ok(())
    }
}

/// Runs the session at `url` and returns the exit code of the container's process.
///
/// # Errors
/// The connection closed before the process exited, or the runtime reported an error.
pub(super) async fn run(url: &str, wanted: Wanted) -> Result<ExitCode, Error> {
    let failed = |e| Error::Streaming(quintctl_text::clean(&quintlet_kit::error_chain(&e)));
    let connection = Connection::open(url, &["v4.channel.k8s.io"]).await.map_err(failed)?;
    let closed = || Error::Streaming("the runtime closed the connection".to_owned());
    let open = async |kind: &str| connection.stream(&[("streamType", kind)]).await.ok_or_else(closed);
    // The server expects exactly these streams, in this order.
    let mut error = open("error").await?;
    let stdin = if wanted.stdin { Some(open("stdin").await?) } else { None };
    let stdout = open("stdout").await?;
    let stderr = if wanted.tty { None } else { Some(open("stderr").await?) };
    let resize = if wanted.tty { Some(open("resize").await?) } else { None };
    let _raw = if wanted.tty && wanted.stdin { Some(RawTerminal::enter()?) } else { None };
    if let Some(resize) = resize {
        task::spawn("terminal size", send_sizes(resize.writer));
    }
    if let Some(stdin) = stdin {
        task::spawn("stdin", read_stdin(stdin.writer));
    }
    let out = async {
        tokio::join!(copy(stdout, std::io::stdout()), async {
            if let Some(stderr) = stderr {
                copy(stderr, std::io::stderr()).await;
            }
        });
    };
    let status = async {
        let mut text = Vec::new();
        while let Some(block) = error.blocks.recv().await {
            text.extend(block);
        }
        text
    };
    tokio::pin!(out);
    tokio::pin!(status);
    // Output and status have separate streams, and either may end last. A process that was left behind may
    // keep the output open, so that the wait for it after the status is limited.
    let text = tokio::select! {
        text = &mut status => {
            let _ = tokio::time::timeout(DRAIN, &mut out).await;
            text
        }
        () = &mut out => status.await,
    };
    exit_code(&text)
}

/// Converts the text of the error stream to the exit code
/// (`k8s.io/client-go/tools/remotecommand: errorDecoderV4`).
fn exit_code(text: &[u8]) -> Result<ExitCode, Error> {
    if text.is_empty() {
        return Err(Error::Streaming("the connection closed before the process exited".to_owned()));
    }
    let Ok(status) = serde_json::from_slice::<Value>(text) else {
        return Err(Error::Streaming(quintctl_text::clean(&String::from_utf8_lossy(text))));
    };
    if status.get("status").and_then(Value::as_str) == Some("Success") {
        return Ok(ExitCode::SUCCESS);
    }
    let code = status
        .pointer("/details/causes")
        .and_then(Value::as_array)
        .and_then(|causes| {
            causes.iter().find(|c| c.get("reason").and_then(Value::as_str) == Some("ExitCode"))
        })
        .and_then(|cause| cause.get("message")?.as_str()?.parse::<i64>().ok());
    match code {
        Some(code) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(EXIT_FAILURE))),
        None => {
            let message = status.get("message").and_then(Value::as_str).unwrap_or("failed");
            Err(Error::Streaming(quintctl_text::clean(message)))
        }
    }
}

async fn copy(mut stream: Stream, mut output: impl std::io::Write) {
    // Each block is flushed, since a terminal shows output as it arrives. A closed output ends the copy, not
    // the container's process.
    while let Some(block) = stream.blocks.recv().await {
        if output.write_all(&block).and_then(|()| output.flush()).is_err() {
            return;
        }
    }
}

async fn read_stdin(writer: Writer) {
    // A plain thread: the tokio runtime waits at its end for blocking reads of its own, and this read may
    // never return.
    let (blocks, mut block) = quintlet_kit::queue::channel::<Vec<u8>>("blocks", 1);
    std::thread::spawn(move || {
        let mut buffer = vec![0; BLOCK];
        while let Ok(n @ 1..) = std::io::stdin().lock().read(&mut buffer) {
            if blocks.blocking_send(buffer[..n].to_vec()).is_err() {
                return;
            }
        }
    });
    while let Some(block) = block.recv().await {
        if !writer.send(&block).await {
            return;
        }
    }
    writer.end().await;
}

async fn send_sizes(writer: Writer) {
    let Ok(mut changed) = signal(SignalKind::window_change()) else { return };
    loop {
        if let Some(size) = terminal::size()
            && !writer.send(size.as_bytes()).await
        {
            return;
        }
        if changed.recv().await.is_none() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_that_of_the_process() {
        let code = |text: &str| exit_code(text.as_bytes()).map(|c| format!("{c:?}"));
        let exit_code = |n: u8| format!("{:?}", ExitCode::from(n));
        assert_eq!(code(r#"{"metadata":{},"status":"Success"}"#).unwrap(), exit_code(0));
        let failed = r#"{"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"42"}]}}"#;
        assert_eq!(code(failed).unwrap(), exit_code(42));
        for (text, want) in [
            (r#"{"status":"Failure","message":"no such file"}"#, "no such file"),
            ("plain text of an old server", "plain text of an old server"),
            ("", "the connection closed before the process exited"),
        ] {
            assert_eq!(code(text).unwrap_err().to_string(), want);
        }
    }
}
