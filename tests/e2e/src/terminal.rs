//! Runs a program in a terminal with simulated input.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::until;
use crate::wait::LONG;

/// A terminal with a program. Dropping it kills the program.
#[derive(Debug)]
pub struct Terminal {
    child: tokio::process::Child,
    name: PathBuf,
    keys: File,
    screen: Arc<Mutex<String>>,
    reading: JoinHandle<()>,
}

impl Terminal {
    /// Starts a program in a terminal with this number of rows and columns.
    ///
    /// # Panics
    /// There is no terminal, or the program does not start.
    #[must_use]
    pub fn open(program: &Command, rows: u16, columns: u16) -> Self {
        let size = nix::pty::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = nix::pty::openpty(Some(&size), None).expect("the system has terminals");
        let name = nix::unistd::ttyname(&pty.slave).expect("a terminal has a name");
        let copy = |fd: &OwnedFd| fd.try_clone().expect("descriptors can be copied");
        let end = || Stdio::from(copy(&pty.slave));
        // Only processes with this controlling terminal are notified of a new size.
        let mut command = tokio::process::Command::new("setsid");
        command.arg("--ctty").arg("--wait").arg(program.get_program()).args(program.get_args());
        for (variable, value) in program.get_envs() {
            match value {
                Some(value) => command.env(variable, value),
                None => command.env_remove(variable),
            };
        }
        command.stdin(end()).stdout(end()).stderr(end()).kill_on_drop(true);
        let child = command.spawn().unwrap_or_else(|e| panic!("{program:?}: {e}"));
        drop(command);
        drop(pty.slave);
        let keys = File::from(copy(&pty.master));
        let screen = Arc::new(Mutex::new(String::new()));
        let seen = screen.clone();
        let reading = std::thread::spawn(move || {
            let mut master = File::from(pty.master);
            let mut block = [0; 4096];
            // Reading a terminal whose other end is closed is an error instead of an end.
            while let Ok(n @ 1..) = master.read(&mut block) {
                seen.lock().push_str(&String::from_utf8_lossy(&block[..n]));
            }
        });
        Self { child, name, keys, screen, reading }
    }

    /// Sends keys.
    ///
    /// # Panics
    /// The terminal is closed.
    pub fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal is there");
    }

    /// Returns all output so far.
    #[must_use]
    pub fn screen(&self) -> String {
        self.screen.lock().clone()
    }

    /// Waits until a text is shown.
    ///
    /// # Panics
    /// The wait exceeds [`LONG`].
    pub async fn shows(&self, what: &str) {
        until(&format!("{what:?} on the terminal"), LONG, async || {
            let seen = self.screen();
            if seen.contains(what) { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// Sends keys repeatedly until a text is shown.
    ///
    /// # Panics
    /// The wait exceeds [`LONG`].
    pub async fn types_until(&mut self, keys: &str, what: &str) {
        until(&format!("{what:?} on the terminal"), LONG, async || {
            self.types(keys);
            tokio::time::sleep(Duration::from_millis(100)).await;
            let seen = self.screen();
            if seen.contains(what) { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// Changes the size of the terminal.
    ///
    /// # Panics
    /// The change fails.
    pub fn resize(&self, rows: u16, columns: u16) {
        let [rows, columns] = [rows, columns].map(|n| n.to_string());
        let mut stty = Command::new("stty");
        stty.arg("-F").arg(&self.name).args(["rows", &rows, "cols", &columns]);
        assert!(stty.status().expect("stty is there").success(), "no new size");
    }

    /// Waits until the program exits. Returns its exit code; `None` after a signal.
    ///
    /// # Panics
    /// The wait exceeds [`LONG`].
    pub async fn ends(mut self) -> Option<i32> {
        let status = tokio::time::timeout(LONG, self.child.wait()).await;
        let status = status.unwrap_or_else(|_| panic!("it does not end: {}", self.screen()));
        drop(self.keys);
        self.reading.join().expect("the reader does not panic");
        status.expect("the program can be waited for").code()
    }
}
