//! systemd's logind, which tells of a shutdown and lets it be delayed.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use zbus::Connection;

/// Where the kubelet writes it too, so that it is there once whoever runs the node.
const DROP_IN: &str = "99-kubelet.conf";
const SIGHUP: i32 = 1;

/// logind cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// A call failed.
    #[error("{what}")]
    Call {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: zbus::Error,
    },
    /// The configuration of logind cannot be written.
    #[error("{path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It does not wait as long as pods may take.
    #[error("logind waits {now:?} at most, wanted {wanted:?}")]
    TooShort {
        /// What is asked for.
        wanted: Duration,
        /// What it has, though it was told.
        now: Duration,
    },
}

/// Connects to logind.
#[async_trait]
pub trait Login: Send + Sync {
    /// A connection.
    ///
    /// # Errors
    /// There is no logind.
    async fn connect(&self) -> Result<Box<dyn Session>, LoginError>;
}

/// A connection to logind.
#[async_trait]
pub trait Session: Send + Sync {
    /// How long it lets a shutdown be delayed (`InhibitDelayMaxSec`).
    ///
    /// # Errors
    /// It does not answer.
    async fn max_delay(&self) -> Result<Duration, LoginError>;

    /// Configures it for a longer delay and tells it to read that.
    ///
    /// # Errors
    /// The file cannot be written, or it cannot be told.
    async fn raise_max_delay(&self, delay: Duration) -> Result<(), LoginError>;

    /// Delays shutdowns until the file is closed.
    ///
    /// # Errors
    /// It refuses.
    async fn inhibit(&self) -> Result<OwnedFd, LoginError>;

    /// Whether a shutdown has started already.
    ///
    /// # Errors
    /// It does not answer.
    async fn is_preparing(&self) -> Result<bool, LoginError>;

    /// Waits until a shutdown starts (true) or is called off; none when the connection broke. Nothing is lost by dropping it.
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

/// The real one, on the system bus.
#[derive(Debug, Clone)]
pub struct SystemBus {
    /// Address of the bus; none for the usual one.
    pub address: Option<String>,
    /// Directory of logind's additional configuration.
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
        let connection = builder.build().await.map_err(call("connecting to the system bus"))?;
        let manager = LoginManagerProxy::new(&connection).await.map_err(call("logind"))?;
        // Before the inhibitor: a shutdown that waits for it has been heard of.
        let signals = manager.receive_prepare_for_shutdown().await.map_err(call("watching for shutdowns"))?;
        Ok(Box::new(BusSession { connection, manager, signals, drop_ins: self.drop_ins.clone() }))
    }
}

#[async_trait]
impl Session for BusSession {
    async fn max_delay(&self) -> Result<Duration, LoginError> {
        let usec =
            self.manager.inhibit_delay_max_usec().await.map_err(call("reading InhibitDelayMaxUSec"))?;
        Ok(Duration::from_micros(usec))
    }

    async fn raise_max_delay(&self, delay: Duration) -> Result<(), LoginError> {
        let path = self.drop_ins.join(DROP_IN);
        let text = format!(
            "# Written by pod-sync for shutdownGracePeriod\n\n[Login]\nInhibitDelayMaxSec={}\n",
            delay.as_secs()
        );
        std::fs::create_dir_all(&self.drop_ins)
            .and_then(|()| quintlet_kit::atomic_file::write_durable(&path, text.as_bytes(), 0o644))
            .map_err(|source| LoginError::Write { path, source })?;
        let systemd = SystemdManagerProxy::new(&self.connection).await.map_err(call("systemd"))?;
        systemd
            .kill_unit("systemd-logind.service", "all", SIGHUP)
            .await
            .map_err(call("telling logind to reload"))
    }

    async fn inhibit(&self) -> Result<OwnedFd, LoginError> {
        let why = "Pods are given time to end";
        let lock = self.manager.inhibit("shutdown", "quintlet", why, "delay").await;
        Ok(lock.map_err(call("taking a delay inhibitor"))?.into())
    }

    async fn is_preparing(&self) -> Result<bool, LoginError> {
        self.manager.preparing_for_shutdown().await.map_err(call("reading PreparingForShutdown"))
    }

    async fn prepare_for_shutdown(&mut self) -> Option<bool> {
        loop {
            let signal = self.signals.next().await?;
            match signal.args() {
                Ok(args) => return Some(args.start),
                Err(error) => tracing::warn!(%error, "PrepareForShutdown cannot be read"),
            }
        }
    }
}
