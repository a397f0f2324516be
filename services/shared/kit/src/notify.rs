//! Notifications to systemd (sd_notify(3)): readiness, stopping, and watchdog pings that depend on what the
//! service does.
//!
//! A service whose socket does not answer, or whose main loop is reported as not serving, sends no ping.
//! systemd then restarts the process. Without systemd, no checks are made and no notifications are sent.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::clock::Clock;
use crate::server::HealthHandle;
use crate::socket::channel;
use crate::timers;

/// Checks per watchdog period. A check that takes its whole time limit leaves time for another one.
const CHECKS_PER_PERIOD: u32 = 3;

/// Time limit of a check if systemd does not expect pings.
const CHECK_LIMIT_WITHOUT_WATCHDOG: Duration = Duration::from_secs(1);

/// Time between checks until the service is ready.
const READINESS_INTERVAL: Duration = Duration::from_millis(50);

/// Interval between two checks of a heartbeat.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The time at which a loop last made progress, by CLOCK_BOOTTIME. Clones share it.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    last: Arc<AtomicU64>,
    clock: Clock,
}

impl Heartbeat {
    /// Returns the heartbeat of a loop that starts now.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let heartbeat = Self { last: Arc::default(), clock };
        heartbeat.beat();
        heartbeat
    }

    /// Records that the loop makes progress.
    pub fn beat(&self) {
        let now = u64::try_from(self.clock.boot().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    /// Returns the time since the last progress.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.clock.boot().saturating_sub(Duration::from_millis(self.last.load(Ordering::Relaxed)))
    }

    /// Reports the loop as `name` to health until `stop` is cancelled: SERVING while the heartbeat is at most
    /// `limit` old.
    pub async fn watch(
        self,
        name: &'static str,
        limit: Duration,
        health: HealthHandle,
        stop: CancellationToken,
    ) {
        self.watch_every(CHECK_INTERVAL, name, limit, health, stop).await;
    }

    async fn watch_every(
        self,
        every: Duration,
        name: &'static str,
        limit: Duration,
        health: HealthHandle,
        stop: CancellationToken,
    ) {
        loop {
            let age = self.age();
            if age > limit {
                tracing::error!(name, ?age, ?limit, "loop makes no progress");
                health.set_not_serving(name).await;
            } else {
                health.set_serving(name).await;
            }
            // Dropping either arm only ends a wait.
            tokio::select! {
                () = stop.cancelled() => return,
                () = timers::pause(every) => {}
            }
        }
    }
}

/// The reason why a service is not alive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stalled {
    /// The socket does not answer.
    #[error("{} does not answer: {reason}", socket.display())]
    Silent {
        /// The service's own socket.
        socket: PathBuf,
        /// Error of the health check.
        reason: String,
    },
    /// The socket answers, but its health reports that the loop is stuck.
    #[error("{name} is reported as not serving")]
    Loop {
        /// Name of the loop in health.
        name: &'static str,
    },
}

/// The conditions under which a service is alive.
///
/// The health of the service as a whole does not matter: a restart of the service does not bring back an
/// unreachable runtime or API server.
#[derive(Debug, Clone)]
pub struct Liveness {
    sockets: Vec<PathBuf>,
    loop_name: Option<&'static str>,
    is_loop_optional: bool,
}

impl Liveness {
    /// Requires that the service's own sockets answer a health check.
    #[must_use]
    pub fn of(sockets: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { sockets: sockets.into_iter().collect(), loop_name: None, is_loop_optional: false }
    }

    /// Adds the requirement that the health of the first socket reports `name` as SERVING.
    #[must_use]
    pub fn and_loop(mut self, name: &'static str) -> Self {
        self.loop_name = Some(name);
        self
    }

    /// Requires a loop as [`Self::and_loop`] does, for a service that may run without it. Its health then
    /// does not have the name.
    #[must_use]
    pub fn and_loop_if_any(self, name: &'static str) -> Self {
        Self { is_loop_optional: true, ..self.and_loop(name) }
    }

    /// Checks all conditions once, on new connections, within `limit` for each socket.
    ///
    /// # Errors
    /// Returns the first condition that does not hold.
    pub async fn check(&self, limit: Duration) -> Result<(), Stalled> {
        for (index, socket) in self.sockets.iter().enumerate() {
            let name = self.loop_name.filter(|_| index == 0);
            let silent = |reason: String| Stalled::Silent { socket: socket.clone(), reason };
            let mut client = HealthClient::new(channel(socket.clone()));
            let request = HealthCheckRequest { service: name.unwrap_or_default().to_owned() };
            let answer = tokio::time::timeout(limit, client.check(request)).await;
            match (name, answer) {
                (_, Err(_)) => return Err(silent(format!("no answer within {limit:?}"))),
                (Some(name), Ok(Ok(reply))) if reply.get_ref().status() != ServingStatus::Serving => {
                    return Err(Stalled::Loop { name });
                }
                (_, Ok(Ok(_))) => {}
                (Some(_), Ok(Err(status))) if self.is_loop_optional && status.code() == Code::NotFound => {}
                (_, Ok(Err(status))) => return Err(silent(status.message().to_owned())),
            }
        }
        Ok(())
    }
}

/// Reports readiness once `liveness` holds, then pings the watchdog while it holds, and reports the stop.
/// Returns at once if systemd did not start the process with `Type=notify`.
pub async fn run(liveness: Liveness, stop: CancellationToken) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let period = sd_notify::watchdog_enabled().filter(|period| !period.is_zero());
    let every = period
        .and_then(|period| period.checked_div(CHECKS_PER_PERIOD))
        .unwrap_or(CHECK_LIMIT_WITHOUT_WATCHDOG);
    let check = || liveness.check(every);
    drive(check, period.map(|_| every), send, stop).await;
}

fn send(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "failed to notify systemd");
    }
}

/// Runs the loop of [`run`] with the given check and sender. `every` is the interval between pings; without
/// it, none are sent.
async fn drive<C>(
    check: impl Fn() -> C,
    every: Option<Duration>,
    send: impl Fn(NotifyState<'_>),
    stop: CancellationToken,
) where
    C: Future<Output = Result<(), Stalled>>,
{
    let ping = async {
        // A service that is still starting is not stalled.
        while check().await.is_err() {
            tokio::time::sleep(READINESS_INTERVAL).await;
        }
        send(NotifyState::Ready);
        let Some(every) = every else { return std::future::pending().await };
        loop {
            match check().await {
                Ok(()) => send(NotifyState::Watchdog),
                Err(error) => tracing::error!(%error, "service is stalled, watchdog not pinged"),
            }
            tokio::time::sleep(every).await;
        }
    };
    // A dropped check needs no repetition, since the service ends.
    tokio::select! {
        () = ping => {}
        () = stop.cancelled() => {}
    }
    send(NotifyState::Stopping);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use parking_lot::Mutex;

    use super::*;
    use crate::server::Server;
    use crate::socket::{PeerPolicy, bind_unix};

    const LIMIT: Duration = Duration::from_millis(200);

    fn stalled() -> Stalled {
        Stalled::Loop { name: "loop" }
    }

    struct Driven {
        alive: Arc<AtomicBool>,
        sent: Arc<Mutex<Vec<String>>>,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    /// A loop of the service that is `alive` or not, checked every 10 s.
    fn driven(alive: bool) -> Driven {
        let alive = Arc::new(AtomicBool::new(alive));
        let sent = Arc::new(Mutex::new(Vec::new()));
        let stop = CancellationToken::new();
        let task = crate::task::spawn("driven", {
            let alive = Arc::clone(&alive);
            let sent = Arc::clone(&sent);
            let stop = stop.clone();
            async move {
                let check = || {
                    let alive = alive.load(Ordering::Relaxed);
                    async move { if alive { Ok(()) } else { Err(stalled()) } }
                };
                let send = |state: NotifyState<'_>| sent.lock().push(state.to_string());
                drive(check, Some(Duration::from_secs(10)), send, stop).await;
            }
        });
        Driven { alive, sent, stop, task }
    }

    #[tokio::test(start_paused = true)]
    async fn pings_stop_while_the_service_is_stalled_and_continue_after() {
        let service = driven(true);
        let pings = || service.sent.lock().iter().filter(|s| *s == "WATCHDOG=1").count();
        tokio::time::sleep(Duration::from_secs(35)).await;
        assert_eq!(pings(), 4, "at 0, 10, 20 and 30 s");
        service.alive.store(false, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(pings(), 4, "a stalled service was reported as alive");
        service.alive.store(true, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(pings(), 5);
        service.stop.cancel();
        service.task.await.unwrap();
        let sent = service.sent.lock();
        assert_eq!(sent.first().map(String::as_str), Some("READY=1"));
        assert_eq!(sent.last().map(String::as_str), Some("STOPPING=1"));
        assert_eq!(sent.iter().filter(|s| *s == "READY=1").count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_does_not_respond_yet_is_neither_ready_nor_pinged() {
        let service = driven(false);
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(*service.sent.lock(), [""; 0]);
        service.alive.store(true, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*service.sent.lock(), ["READY=1", "WATCHDOG=1"]);
    }

    #[tokio::test]
    async fn a_socket_that_does_not_accept_is_silent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let missing = Liveness::of([path.clone()]).check(LIMIT).await;
        assert!(matches!(missing, Err(Stalled::Silent { .. })), "{missing:?}");
        // It listens, as a process that hangs or is stopped does.
        let _listener = bind_unix(&path, 0o600).unwrap();
        let hung = Liveness::of([path]).check(LIMIT).await;
        assert!(matches!(hung, Err(Stalled::Silent { .. })), "{hung:?}");
    }

    #[tokio::test]
    async fn a_stalled_loop_stops_the_watchdog_pings_until_it_resumes() {
        let limit = Duration::from_secs(300);
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s.sock");
        let stop = CancellationToken::new();
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1000));
        let server = Server::new("test");
        let health = server.health();
        let listener = bind_unix(&socket, 0o600).unwrap();
        let serving = crate::task::spawn("server", server.serve(listener, PeerPolicy::Any, stop.clone()));
        let heartbeat = Heartbeat::new(clock.clone());
        health.set_serving("loop").await;
        let watch =
            heartbeat.clone().watch_every(Duration::from_millis(10), "loop", limit, health, stop.clone());
        let watching = crate::task::spawn("watch", watch);
        let liveness = Liveness::of([socket]).and_loop("loop");
        // What systemd is sent depends on this check alone.
        let check = || liveness.check(Duration::from_secs(10));

        clock.advance(limit);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(check().await, Ok(()), "the loop has its whole limit");
        let becomes = async |want: Result<(), Stalled>| {
            let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
            while check().await != want {
                assert!(tokio::time::Instant::now() < deadline, "it does not become {want:?}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        clock.advance(Duration::from_secs(1));
        becomes(Err(stalled())).await;
        heartbeat.beat();
        becomes(Ok(())).await;
        stop.cancel();
        watching.await.unwrap();
        serving.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn not_serving_counts_only_for_the_loop_that_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let stop = CancellationToken::new();
        let server = Server::new("test");
        let health = server.health();
        health.set_not_serving("").await;
        health.set_serving("loop").await;
        let listener = bind_unix(&path, 0o600).unwrap();
        let task = crate::task::spawn("server", server.serve(listener, PeerPolicy::Any, stop.clone()));
        let alive = Liveness::of([path]);
        let limit = Duration::from_secs(10);
        assert_eq!(alive.check(limit).await, Ok(()), "a peer that is away does not come back by a restart");
        let other = alive.clone().and_loop("other").check(limit).await;
        assert!(matches!(other, Err(Stalled::Silent { .. })), "{other:?}");
        assert_eq!(alive.clone().and_loop_if_any("other").check(limit).await, Ok(()));
        let alive = alive.and_loop_if_any("loop");
        assert_eq!(alive.check(limit).await, Ok(()));
        health.set_not_serving("loop").await;
        assert_eq!(alive.check(limit).await, Err(stalled()));
        stop.cancel();
        task.await.unwrap().unwrap();
    }
}
