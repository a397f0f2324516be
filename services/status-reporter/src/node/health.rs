//! Whether the other services serve, asked from here.

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

/// Pause between two questions.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// How long an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// A service to watch.
#[derive(Debug, Clone)]
pub struct Watched {
    /// Its name in messages.
    pub name: &'static str,
    /// Its socket.
    pub socket: PathBuf,
    /// How long it may be down before the node is not ready.
    pub limit: Duration,
}

struct Seen {
    watched: Watched,
    /// CLOCK_BOOTTIME of the last good answer; at first that of the start.
    last_good: Duration,
}

/// What is known of the others. Clones share it.
#[derive(Clone)]
pub struct HealthBoard {
    seen: Arc<Mutex<Vec<Seen>>>,
    clock: Clock,
}

impl HealthBoard {
    /// Starts one task per service; they end with `stop`.
    #[must_use]
    pub fn start(watched: Vec<Watched>, clock: Clock, stop: &CancellationToken) -> Self {
        let now = clock.boot();
        let seen = watched.into_iter().map(|watched| Seen { watched, last_good: now }).collect();
        let board = Self { seen: Arc::new(Mutex::new(seen)), clock };
        let count = board.seen.lock().len();
        for at in 0..count {
            let (board, stop) = (board.clone(), stop.clone());
            quintlet_kit::task::spawn("peer-health", async move {
                // A question cut short is of no use any more.
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
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// The services as seen now.
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
