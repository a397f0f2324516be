//! Health of the other services.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::socket;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::setters::Peer;

/// Interval between health checks.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// Limit of a health check.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// A service to check.
#[derive(Debug, Clone)]
pub struct Watched {
    /// Name for the message of the condition.
    pub name: &'static str,
    /// The socket with the service's health.
    pub socket: PathBuf,
    /// Time without health after which the node is not ready.
    pub limit: Duration,
}

struct Seen {
    watched: Watched,
    /// CLOCK_BOOTTIME of the last successful check, or of the start.
    last_good: Duration,
}

/// Results of the health checks. Clones share them.
#[derive(Clone)]
pub struct HealthBoard {
    seen: Arc<Mutex<Vec<Seen>>>,
    clock: Clock,
}

impl HealthBoard {
    /// Spawns one task per service, until `stop`.
    #[must_use]
    pub fn start(watched: Vec<Watched>, clock: Clock, stop: &CancellationToken) -> Self {
        let now = clock.boot();
        let seen = watched.into_iter().map(|watched| Seen { watched, last_good: now }).collect();
        let board = Self { seen: Arc::new(Mutex::new(seen)), clock };
        let count = board.seen.lock().len();
        for at in 0..count {
            let (board, stop) = (board.clone(), stop.clone());
            quintlet_kit::task::spawn("peer-health", async move {
                // A dropped check loses nothing.
                tokio::select! {
                    () = board.ask_forever(at) => {}
                    () = stop.cancelled() => {}
                }
            });
        }
        board
    }

    async fn ask_forever(&self, at: usize) {
        let Some(path) = self.seen.lock().get(at).map(|s| s.watched.socket.clone()) else { return };
        let mut client = HealthClient::new(socket::channel(path));
        loop {
            let question = client.check(HealthCheckRequest { service: String::new() });
            let answer = tokio::time::timeout(ANSWER_WITHIN, question).await;
            let serving =
                matches!(answer, Ok(Ok(reply)) if reply.get_ref().status() == ServingStatus::Serving);
            if serving && let Some(seen) = self.seen.lock().get_mut(at) {
                seen.last_good = self.clock.boot();
            }
            quintlet_kit::timers::pause(ASK_EVERY).await;
        }
    }

    /// Returns the current health of all services.
    #[must_use]
    pub fn peers(&self) -> Vec<Peer> {
        let now = self.clock.boot();
        let fresh = ASK_EVERY.saturating_add(ANSWER_WITHIN);
        let peer = |seen: &Seen| {
            let silent = now.saturating_sub(seen.last_good);
            Peer {
                name: seen.watched.name,
                down_for: (silent > fresh).then_some(silent),
                limit: seen.watched.limit,
            }
        };
        self.seen.lock().iter().map(peer).collect()
    }
}
