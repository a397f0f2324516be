//! Programs that follow the log of a container.

use std::process::Stdio;
use std::time::Duration;

use quintlet_kit::task;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::Command;

use crate::LONG;

/// The first line of a container's log. The container prints the others once its follower has this one: a
/// later follower gets only the newest file of a log that is rotated, as with the kubelet.
pub const BEGIN: &str = "begin\n";

/// A program that has received [`BEGIN`].
#[derive(Debug)]
pub struct Follower {
    rest: tokio::task::JoinHandle<String>,
}

impl Follower {
    /// Starts `command`, and waits until it prints [`BEGIN`].
    ///
    /// # Panics
    /// It cannot be started, or its output begins with something else.
    pub async fn start(mut command: Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the follower starts");
        let mut out = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        let mut begin = String::new();
        let read = tokio::time::timeout(LONG, out.read_line(&mut begin)).await.expect("nothing is followed");
        read.expect("the output is text");
        assert_eq!(begin, BEGIN);
        let rest = task::spawn("follower", async move {
            let mut all = String::new();
            out.read_to_string(&mut all).await.expect("the output is text");
            let status = child.wait().await.expect("the follower is a child");
            assert!(status.success(), "the follower ended with {status}");
            all
        });
        Self { rest }
    }

    /// Returns what the program prints after [`BEGIN`], once it has ended.
    ///
    /// # Panics
    /// It does not end within `limit`, or fails.
    pub async fn rest(self, limit: Duration) -> String {
        tokio::time::timeout(limit, self.rest).await.expect("the follower does not end").expect("see above")
    }
}
