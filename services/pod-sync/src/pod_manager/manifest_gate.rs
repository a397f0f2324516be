//! Holds back the API server's pods until the manifests were read, so that static pods are admitted first.

use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

use super::PodManager;
use pod_sync_sources::{SourceEvent, SourceKind};

/// Longest time that the API server's pods wait for the manifests: the directory may hang.
const READ: Duration = Duration::from_secs(2);

/// Whether the manifests were read.
#[derive(Debug)]
pub(super) enum ManifestGate {
    /// Not yet. Keeps the newest snapshot of the API server, at most until the deadline.
    Awaited { until: Instant, api: Option<SourceEvent> },
    /// They were read, the deadline passed, or there is no such source.
    Read,
}

impl ManifestGate {
    pub(super) fn of(sources: &[SourceKind]) -> Self {
        if sources.contains(&SourceKind::File) {
            Self::Awaited { until: deadline_after(Instant::now(), READ), api: None }
        } else {
            Self::Read
        }
    }

    /// Completes at the deadline; never when the manifests were read.
    pub(super) fn due(&self) -> impl Future<Output = ()> + use<> {
        let until = match self {
            Self::Awaited { until, .. } => Some(*until),
            Self::Read => None,
        };
        async move {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Keeps a snapshot of the API server while manifests are awaited; returns any update to handle now.
    fn hold(&mut self, source: SourceKind, update: SourceEvent) -> Option<SourceEvent> {
        match self {
            Self::Awaited { api, .. } if source == SourceKind::Api => {
                // Each snapshot is complete, so the newest replaces an older one.
                *api = Some(update);
                None
            }
            Self::Awaited { .. } | Self::Read => Some(update),
        }
    }

    /// Opens the gate. Returns the API server's newest snapshot, if one was kept.
    fn read(&mut self) -> Option<SourceEvent> {
        match std::mem::replace(self, Self::Read) {
            Self::Awaited { api, .. } => api,
            Self::Read => None,
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
        if let Some(update) = self.manifests.read() {
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
        assert_eq!(number(manifests.read()), Some(3));
        assert_eq!(number(manifests.hold(SourceKind::Api, update(5))), Some(5), "an open gate keeps nothing");
        assert_eq!(number(manifests.read()), None);

        let mut without = ManifestGate::of(&[SourceKind::Api]);
        assert_eq!(number(without.hold(SourceKind::Api, update(1))), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_manifests_has_a_deadline() {
        let began = Instant::now();
        ManifestGate::of(&[SourceKind::File]).due().await;
        assert_eq!(began.elapsed(), READ);
    }
}
