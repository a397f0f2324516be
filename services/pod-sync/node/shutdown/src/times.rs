//! Start and end of the last shutdown, kept in the kubelet's file for the metrics after the next boot.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use pod_sync_metrics::PodMetrics;
use quintlet_kit::task::blocking;

const FILE: &str = "graceful_node_shutdown_state";

/// Longest wait for the file. The shutdown does not wait for a disk that does not answer.
const WRITE: Duration = Duration::from_secs(1);

/// Go's zero time.
const ZERO: &str = "0001-01-01T00:00:00Z";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct State {
    start_time: Timestamp,
    end_time: Timestamp,
}

/// The times of the last shutdown, on disk and in the metrics.
pub(super) struct Times {
    path: PathBuf,
    metrics: PodMetrics,
    start: Option<Timestamp>,
    // Held during a write, so that one which takes long does not end after a newer one.
    writing: Arc<Mutex<()>>,
}

fn zero() -> Timestamp {
    ZERO.parse().unwrap_or(Timestamp::UNIX_EPOCH)
}

impl Times {
    /// Reads the file of an earlier process.
    pub(super) fn load(root: &Path, metrics: PodMetrics) -> Self {
        let path = root.join(FILE);
        let read = std::fs::read(&path).ok().and_then(|text| {
            serde_json::from_slice::<State>(&text)
                .inspect_err(|error| {
                    tracing::warn!(path = %path.display(), %error, "times of the last shutdown are unusable");
                })
                .ok()
        });
        let mut times = Self { path, metrics, start: None, writing: Arc::default() };
        if let Some(state) = read {
            times.start = Some(state.start_time).filter(|t| *t > Timestamp::UNIX_EPOCH);
            times.show(Some(state.end_time).filter(|t| *t > Timestamp::UNIX_EPOCH));
        }
        times
    }

    /// Records the start of a shutdown.
    pub(super) async fn begin(&mut self, now: Timestamp) {
        self.start = Some(now);
        self.keep(None).await;
    }

    /// Records that all pods have terminated.
    pub(super) async fn end(&self, now: Timestamp) {
        self.keep(Some(now)).await;
    }

    fn show(&self, end: Option<Timestamp>) {
        let seconds = |t: Option<Timestamp>| t.map_or(0.0, |t| t.as_duration().as_secs_f64().floor());
        self.metrics.shutdown_start.set(seconds(self.start));
        self.metrics.shutdown_end.set(seconds(end));
    }

    async fn keep(&self, end: Option<Timestamp>) {
        self.show(end);
        let state = State { start_time: self.start.unwrap_or_else(zero), end_time: end.unwrap_or_else(zero) };
        let bytes = serde_json::to_vec(&state).unwrap_or_default();
        let (path, writing) = (self.path.clone(), Arc::clone(&self.writing));
        // Synced, since the machine is about to go down.
        let write = blocking(move || {
            let _turn = writing.lock();
            quintlet_kit::atomic_file::write_durable(&path, &bytes, 0o600)
        });
        let error = match tokio::time::timeout(WRITE, write).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the disk does not answer".to_owned(),
        };
        tracing::warn!(error, file = %self.path.display(), "failed to write the time of the shutdown");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_times_of_a_shutdown_survive_a_restart() {
        let root = tempfile::tempdir().unwrap();
        let metrics = PodMetrics::default();
        let shown = || (metrics.shutdown_start.get(), metrics.shutdown_end.get());
        let at = |seconds: i64| Timestamp::new(seconds, 5_000_000).unwrap();
        let mut times = Times::load(root.path(), metrics.clone());
        times.begin(at(1000)).await;
        assert_eq!(shown(), (1000.0, 0.0));
        let text = std::fs::read_to_string(root.path().join(FILE)).unwrap();
        assert_eq!(text, format!("{{\"startTime\":\"1970-01-01T00:16:40.005Z\",\"endTime\":\"{ZERO}\"}}"));
        times.end(at(1030)).await;
        metrics.shutdown_start.set(0.0);
        metrics.shutdown_end.set(0.0);
        let times = Times::load(root.path(), metrics.clone());
        assert_eq!(shown(), (1000.0, 1030.0));
        drop(times);
        std::fs::write(root.path().join(FILE), "{").unwrap();
        metrics.shutdown_start.set(7.0);
        let _torn = Times::load(root.path(), metrics.clone());
        assert_eq!(shown(), (7.0, 1030.0), "an unreadable file changes no metric");
    }
}
