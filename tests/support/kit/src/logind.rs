//! A private bus with a fake logind.

use std::io::{PipeReader, pipe};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use zbus::Connection;

use crate::bus;
use crate::wait::until;

/// Limit of the start of a bus. It bounds failures only.
const UP: Duration = Duration::from_secs(60);
const PATH: &str = "/org/freedesktop/login1";
const INTERFACE: &str = "org.freedesktop.login1.Manager";

#[derive(Debug)]
struct State {
    delay: Mutex<Duration>,
    // An inhibitor exists until the other end is closed.
    inhibitors: Mutex<Vec<PipeReader>>,
    preparing: Mutex<bool>,
    drop_ins: PathBuf,
}

struct Manager(Arc<State>);

#[zbus::interface(name = "org.freedesktop.login1.Manager")]
impl Manager {
    fn inhibit(&self, what: &str, _who: &str, _why: &str, mode: &str) -> zbus::fdo::Result<zbus::OwnedFd> {
        if (what, mode) != ("shutdown", "delay") {
            return Err(zbus::fdo::Error::InvalidArgs(format!("{what} {mode}")));
        }
        if *self.0.preparing.lock() {
            return Err(zbus::fdo::Error::Failed("the operation is already running".to_owned()));
        }
        let (reader, writer) = pipe().map_err(|e| zbus::fdo::Error::Failed(e.to_string()))?;
        self.0.inhibitors.lock().push(reader);
        Ok(OwnedFd::from(writer).into())
    }

    #[zbus(property, name = "InhibitDelayMaxUSec")]
    fn inhibit_delay_max_usec(&self) -> u64 {
        u64::try_from(self.0.delay.lock().as_micros()).unwrap_or(u64::MAX)
    }

    #[zbus(property)]
    fn preparing_for_shutdown(&self) -> bool {
        *self.0.preparing.lock()
    }
}

struct Systemd(Arc<State>);

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl Systemd {
    // Simulates that logind reads its configuration.
    fn kill_unit(&self, name: &str, _whom: &str, signal: i32) {
        if (name, signal) != ("systemd-logind.service", 1) {
            return;
        }
        let files = std::fs::read_dir(&self.0.drop_ins).into_iter().flatten().flatten();
        let texts = files.filter_map(|f| std::fs::read_to_string(f.path()).ok());
        for text in texts {
            let mut seconds =
                text.lines().filter_map(|l| l.strip_prefix("InhibitDelayMaxSec=")?.parse().ok());
            if let Some(seconds) = seconds.next_back() {
                *self.0.delay.lock() = Duration::from_secs(seconds);
            }
        }
    }
}

/// A bus with a fake logind.
pub struct FakeLogind {
    dir: PathBuf,
    state: Arc<State>,
    daemon: Child,
    connection: Connection,
}

impl std::fmt::Debug for FakeLogind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeLogind").field("state", &self.state).finish_non_exhaustive()
    }
}

impl FakeLogind {
    /// Starts a bus in this directory. Shutdowns are delayed by at most `delay`, until a file in `drop_ins`
    /// changes it.
    ///
    /// # Panics
    /// Panics if there is no dbus-daemon or it does not start.
    pub async fn start(dir: &Path, drop_ins: &Path, delay: Duration) -> Self {
        std::fs::create_dir_all(dir).expect("a directory can be made");
        let state = State {
            delay: Mutex::new(delay),
            inhibitors: Mutex::default(),
            preparing: Mutex::default(),
            drop_ins: drop_ins.to_owned(),
        };
        let state = Arc::new(state);
        let (daemon, connection) = start_bus(dir, &state).await;
        Self { dir: dir.to_owned(), state, daemon, connection }
    }

    /// Returns the address of the bus.
    #[must_use]
    pub fn address(&self) -> String {
        bus::address(&self.dir)
    }

    /// Returns the number of inhibitors that were ever taken.
    #[must_use]
    pub fn inhibitors_taken(&self) -> usize {
        self.state.inhibitors.lock().len()
    }

    /// Returns whether an inhibitor delays the shutdown.
    #[must_use]
    pub fn is_inhibited(&self) -> bool {
        self.state.inhibitors.lock().iter().any(|reader| {
            let mut look = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
            // No data is written: the only event is the end of the last writer.
            poll(&mut look, PollTimeout::ZERO).is_ok_and(|events| events == 0)
        })
    }

    /// Announces the begin or the cancellation of a shutdown.
    ///
    /// # Panics
    /// Panics if the bus has stopped.
    pub async fn prepare_for_shutdown(&self, start: bool) {
        *self.state.preparing.lock() = start;
        let nobody = None::<zbus::names::BusName<'_>>;
        let sent =
            self.connection.emit_signal(nobody, PATH, INTERFACE, "PrepareForShutdown", &(start,)).await;
        sent.expect("the bus takes a signal");
    }

    /// Stops the bus and starts another one in its place.
    pub async fn restart(&mut self) {
        self.stop();
        (self.daemon, self.connection) = start_bus(&self.dir, &self.state).await;
    }

    fn stop(&mut self) {
        // The process may have exited with the test.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Drop for FakeLogind {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn start_bus(dir: &Path, state: &Arc<State>) -> (Child, Connection) {
    let daemon = bus::spawn(dir);
    let connection = until("a bus", UP, async || {
        let builder = zbus::connection::Builder::address(bus::address(dir).as_str())
            .serve_at(PATH, Manager(Arc::clone(state)))
            .serve_at("/org/freedesktop/systemd1", Systemd(Arc::clone(state)))
            .name("org.freedesktop.systemd1")
            .name("org.freedesktop.login1");
        builder.build().await.map_err(|e| e.to_string())
    })
    .await;
    (daemon, connection)
}
