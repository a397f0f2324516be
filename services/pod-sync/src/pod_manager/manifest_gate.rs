//! Holds back the API server's pods until the manifests were read, so that static pods are admitted first.

use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

use super::PodManager;
use pod_sync_sources::{SourceEvent, SourceKind};

/// Longest time that the API server's pods wait for the manifests: the directory may hang.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Holds the newest snapshot of the API server until the manifests were read.
#[derive(Debug)]
pub(super) enum ManifestGate {
    /// The manifests were not read yet. The gate opens at `until` at the latest.
    Closed { until: Instant, api: Option<SourceEvent> },
    /// The manifests were read, the time limit has passed, or there is no source of manifests.
    Open,
}

impl ManifestGate {
    pub(super) fn of(sources: &[SourceKind]) -> Self {
        if sources.contains(&SourceKind::File) {
            Self::Closed { until: deadline_after(Instant::now(), MAX_WAIT), api: None }
        } else {
            Self::Open
        }
    }

    /// Completes at the time limit; never while the gate is open.
    pub(super) fn expired(&self) -> impl Future<Output = ()> + use<> {
        let until = match self {
            Self::Closed { until, .. } => Some(*until),
            Self::Open => None,
        };
        async move {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Keeps an update of the API server while the gate is closed. Returns any other update.
    fn hold(&mut self, source: SourceKind, update: SourceEvent) -> Option<SourceEvent> {
        match self {
            Self::Closed { api, .. } if source == SourceKind::Api => {
                // Each snapshot is complete, so the newest replaces an older one.
                *api = Some(update);
                None
            }
            Self::Closed { .. } | Self::Open => Some(update),
        }
    }

    /// Opens the gate. Returns the API server's newest snapshot, if one was kept.
    fn open(&mut self) -> Option<SourceEvent> {
        match std::mem::replace(self, Self::Open) {
            Self::Closed { api, .. } => api,
            Self::Open => None,
        }
    }
}

impl PodManager {
    pub(super) fn receive(&mut self, source: SourceKind, update: SourceEvent) {
        let Some(update) = self.manifests.hold(source, update) else { return };
        self.update(source, update);
        if source == SourceKind::File {
            self.manifests_read();
        }
    }

    pub(super) fn manifests_read(&mut self) {
        if let Some(update) = self.manifests.open() {
            self.update(SourceKind::Api, update);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_sync_sources::ManifestProblem;

    // NextWork apart by the number of their problems.
    fn update(problems: usize) -> SourceEvent {
        let problem = ManifestProblem { origin: String::new(), field: String::new(), message: String::new() };
        SourceEvent::Problems(vec![problem; problems])
    }

    fn number(update: Option<SourceEvent>) -> Option<usize> {
        update.map(|update| match update {
            SourceEvent::Problems(problems) => problems.len(),
            SourceEvent::Snapshot(_) => 0,
        })
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_api_snapshot_waits_for_manifests_and_for_no_other_source() {
        let mut manifests = ManifestGate::of(&[SourceKind::Api, SourceKind::File]);
        assert_eq!(number(manifests.hold(SourceKind::Api, update(1))), None);
        assert_eq!(number(manifests.hold(SourceKind::Http, update(2))), Some(2));
        assert_eq!(number(manifests.hold(SourceKind::Api, update(3))), None);
        assert_eq!(number(manifests.hold(SourceKind::File, update(4))), Some(4));
        assert_eq!(number(manifests.open()), Some(3));
        assert_eq!(number(manifests.hold(SourceKind::Api, update(5))), Some(5), "an open gate keeps nothing");
        assert_eq!(number(manifests.open()), None);

        let mut without = ManifestGate::of(&[SourceKind::Api]);
        assert_eq!(number(without.hold(SourceKind::Api, update(1))), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_manifests_has_a_deadline() {
        let began = Instant::now();
        ManifestGate::of(&[SourceKind::File]).expired().await;
        assert_eq!(began.elapsed(), MAX_WAIT);
    }
}
