//! systemd-logind: signals of shutdowns, and inhibitors that delay them.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use quintlet_kit::task::blocking;
use zbus::Connection;

/// Name of the drop-in file; the same as that of the kubelet, so that there is one.
const DROP_IN: &str = "99-kubelet.conf";
const SIGHUP: i32 = 1;

/// logind cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// A call over the system bus failed.
    #[error("failed to {what}")]
    Call {
        /// Purpose of the call.
        what: &'static str,
        /// Error of the bus or of logind.
        source: zbus::Error,
    },
    /// The configuration of logind cannot be written.
    #[error("failed to write {}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// logind kept a shorter delay than the configured one.
    #[error("logind delays a shutdown by {now:?} at most, requested {requested:?}")]
    TooShort {
        /// Delay that the shutdown of pods needs.
        requested: Duration,
        /// Delay that logind grants.
        now: Duration,
    },
}

/// Connects to logind.
#[async_trait]
pub trait Login: Send + Sync {
    /// Connects to the system bus and to logind.
    async fn connect(&self) -> Result<Box<dyn Session>, LoginError>;
}

/// A connection to logind.
#[async_trait]
pub trait Session: Send + Sync {
    /// Returns the longest delay of a shutdown (`InhibitDelayMaxSec`).
    async fn max_delay(&self) -> Result<Duration, LoginError>;

    /// Configures a longer delay and reloads logind.
    async fn raise_max_delay(&self, delay: Duration) -> Result<(), LoginError>;

    /// Delays shutdowns until the returned file is closed.
    async fn inhibit(&self) -> Result<OwnedFd, LoginError>;

    /// Returns whether a shutdown is in progress.
    async fn is_preparing(&self) -> Result<bool, LoginError>;

    /// Waits until a shutdown starts (`true`) or is cancelled (`false`). Returns `None` if the connection
    /// breaks. Cancel safe.
    async fn prepare_for_shutdown(&mut self) -> Option<bool>;
}

#[zbus::proxy(
    interface = "org.freedesktop.login1.Manager",
    default_service = "org.freedesktop.login1",
    default_path = "/org/freedesktop/login1"
)]
trait LoginManager {
    fn inhibit(&self, what: &str, who: &str, why: &str, mode: &str) -> zbus::Result<zbus::OwnedFd>;

    #[zbus(property(emits_changed_signal = "false"), name = "InhibitDelayMaxUSec")]
    fn inhibit_delay_max_usec(&self) -> zbus::Result<u64>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn preparing_for_shutdown(&self) -> zbus::Result<bool>;

    #[zbus(signal)]
    fn prepare_for_shutdown(&self, start: bool);
}

#[zbus::proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1"
)]
trait SystemdManager {
    fn kill_unit(&self, name: &str, whom: &str, signal: i32) -> zbus::Result<()>;
}

/// logind on the system bus.
#[derive(Debug, Clone)]
pub struct SystemBus {
    /// Address of the bus; `None` for the default.
    pub address: Option<String>,
    /// Directory of drop-in files of logind.
    pub drop_ins: PathBuf,
}

struct BusSession {
    connection: Connection,
    manager: LoginManagerProxy<'static>,
    signals: PrepareForShutdownStream,
    drop_ins: PathBuf,
}

fn call(what: &'static str) -> impl FnOnce(zbus::Error) -> LoginError {
    move |source| LoginError::Call { what, source }
}

#[async_trait]
impl Login for SystemBus {
    async fn connect(&self) -> Result<Box<dyn Session>, LoginError> {
        let builder = match &self.address {
            Some(address) => zbus::connection::Builder::address(address.as_str()),
            None => zbus::connection::Builder::system(),
        };
        let connection = builder.build().await.map_err(call("connect to the system bus"))?;
        let manager = LoginManagerProxy::new(&connection).await.map_err(call("connect to logind"))?;
        // Subscribed before the inhibitor is taken, so that no shutdown is missed.
        let signals = manager.receive_prepare_for_shutdown().await.map_err(call("watch for shutdowns"))?;
        Ok(Box::new(BusSession { connection, manager, signals, drop_ins: self.drop_ins.clone() }))
    }
}

#[async_trait]
impl Session for BusSession {
    async fn max_delay(&self) -> Result<Duration, LoginError> {
        let usec = self.manager.inhibit_delay_max_usec().await.map_err(call("read InhibitDelayMaxUSec"))?;
        Ok(Duration::from_micros(usec))
    }

    async fn raise_max_delay(&self, delay: Duration) -> Result<(), LoginError> {
        let path = self.drop_ins.join(DROP_IN);
        let text = format!(
            "# Written by pod-sync for shutdownGracePeriod\n\n[Login]\nInhibitDelayMaxSec={}\n",
            delay.as_secs()
        );
        let (dir, file) = (self.drop_ins.clone(), path.clone());
        let write = move || {
            std::fs::create_dir_all(dir)?;
            quintlet_kit::atomic_file::write_durable(&file, text.as_bytes(), 0o644)
        };
        blocking(write).await.map_err(|source| LoginError::Write { path, source })?;
        let systemd = SystemdManagerProxy::new(&self.connection).await.map_err(call("connect to systemd"))?;
        systemd.kill_unit("systemd-logind.service", "all", SIGHUP).await.map_err(call("reload logind"))
    }

    async fn inhibit(&self) -> Result<OwnedFd, LoginError> {
        let why = "Pods are given time to terminate";
        let lock = self.manager.inhibit("shutdown", "quintlet", why, "delay").await;
        Ok(lock.map_err(call("take a delay inhibitor"))?.into())
    }

    async fn is_preparing(&self) -> Result<bool, LoginError> {
        self.manager.preparing_for_shutdown().await.map_err(call("read PreparingForShutdown"))
    }

    async fn prepare_for_shutdown(&mut self) -> Option<bool> {
        loop {
            let signal = self.signals.next().await?;
            match signal.args() {
                Ok(args) => return Some(args.start),
                Err(error) => tracing::warn!(%error, "signal PrepareForShutdown is invalid, ignoring"),
            }
        }
    }
}
