//! systemd's manager of units on a private bus.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zbus::{Connection, OwnedObjectPath, OwnedVariant};

use crate::bus;
use crate::wait::until;

/// Time limit for the start of a bus. It only bounds a failure.
const START_LIMIT: Duration = Duration::from_secs(60);
const PATH: &str = "/org/freedesktop/systemd1";
const INTERFACE: &str = "org.freedesktop.systemd1.Manager";

#[derive(Debug, Default)]
struct State {
    calls: Vec<String>,
    /// Units whose jobs fail.
    failing: BTreeSet<String>,
    /// Units that are unknown.
    refused: BTreeSet<String>,
    version: String,
}

struct Manager(Arc<Mutex<State>>);

impl Manager {
    // The signal precedes the reply, which a client has to cope with.
    async fn job(
        &self,
        connection: &Connection,
        action: &str,
        unit: &str,
        mode: &str,
    ) -> zbus::fdo::Result<OwnedObjectPath> {
        let (id, result) = {
            let mut state = self.0.lock();
            if state.refused.contains(unit) {
                return Err(zbus::fdo::Error::Failed(format!("Unit {unit} not loaded.")));
            }
            state.calls.push(format!("{action} {unit} {mode}"));
            let id = u32::try_from(state.calls.len()).unwrap_or(u32::MAX);
            (id, if state.failing.contains(unit) { "failed" } else { "done" })
        };
        let path = |id: u32| {
            let path = OwnedObjectPath::try_from(format!("/org/freedesktop/systemd1/job/{id}"));
            path.map_err(|e| zbus::fdo::Error::Failed(e.to_string()))
        };
        let everyone = None::<zbus::names::BusName<'_>>;
        // The end of another job comes first.
        for (id, unit) in [(id.saturating_add(1000), "other.slice"), (id, unit)] {
            let body = (id, path(id)?, unit, result);
            connection.emit_signal(everyone.clone(), PATH, INTERFACE, "JobRemoved", &body).await?;
        }
        path(id)
    }
}

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl Manager {
    #[zbus(property)]
    fn version(&self) -> String {
        self.0.lock().version.clone()
    }

    fn subscribe(&self) {}

    async fn start_unit(
        &self,
        #[zbus(connection)] connection: &Connection,
        name: &str,
        mode: &str,
    ) -> zbus::fdo::Result<OwnedObjectPath> {
        self.job(connection, "start", name, mode).await
    }

    async fn stop_unit(
        &self,
        #[zbus(connection)] connection: &Connection,
        name: &str,
        mode: &str,
    ) -> zbus::fdo::Result<OwnedObjectPath> {
        self.job(connection, "stop", name, mode).await
    }

    fn set_unit_properties(&self, name: &str, runtime: bool, properties: Vec<(String, OwnedVariant)>) {
        let values = properties.iter().map(|(property, value)| {
            let number = u64::try_from(value).map(|v| v.to_string());
            let bytes = || value.try_clone().ok().and_then(|v| Vec::<u8>::try_from(v).ok());
            let value = number.unwrap_or_else(|_| bytes().map_or("?".to_owned(), |b| format!("{b:?}")));
            format!("{property}={value}")
        });
        let scope = if runtime { "runtime" } else { "persistent" };
        let values = values.collect::<Vec<_>>().join(" ");
        self.0.lock().calls.push(format!("set {name} {scope} {values}"));
    }
}

/// The bus with its systemd.
#[derive(Debug)]
pub struct FakeSystemd {
    dir: PathBuf,
    state: Arc<Mutex<State>>,
    daemon: Child,
    _connection: Connection,
}

impl FakeSystemd {
    /// Starts a bus in this directory.
    ///
    /// # Panics
    /// dbus-daemon is missing or does not start.
    pub async fn start(dir: &Path) -> Self {
        let state = Arc::new(Mutex::new(State { version: "257".to_owned(), ..State::default() }));
        let daemon = bus::spawn(dir);
        let connection = until("a bus", START_LIMIT, async || {
            let builder = zbus::connection::Builder::address(bus::address(dir).as_str())
                .serve_at(PATH, Manager(Arc::clone(&state)))
                .name("org.freedesktop.systemd1");
            builder.build().await.map_err(|e| e.to_string())
        })
        .await;
        Self { dir: dir.to_owned(), state, daemon, _connection: connection }
    }

    /// Address of the bus.
    #[must_use]
    pub fn address(&self) -> String {
        bus::address(&self.dir)
    }

    /// Returns the calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.state.lock().calls.clone()
    }

    /// Lets every job of a unit fail.
    pub fn fail_jobs_of(&self, unit: &str) {
        self.state.lock().failing.insert(unit.to_owned());
    }

    /// Sets the version of systemd.
    pub fn set_version(&self, version: &str) {
        version.clone_into(&mut self.state.lock().version);
    }

    /// Refuses calls for a unit as unknown.
    pub fn refuse(&self, unit: &str) {
        self.state.lock().refused.insert(unit.to_owned());
    }
}

impl Drop for FakeSystemd {
    fn drop(&mut self) {
        // It may have ended by itself, with the test.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
