//! Holds back the API server's pods until the manifests were read, so that static pods are admitted first.

use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

use pod_sync_layout::SourceKind;
use pod_sync_sources::SourceEvent;

/// Longest time that the API server's pods wait for the manifests: the directory may hang.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Holds the updates of the API server until the manifests were read.
#[derive(Debug)]
pub(super) enum ManifestGate {
    /// The manifests were not read yet. The gate opens at `until` at the latest.
    Closed { until: Instant, api: Vec<SourceEvent> },
    /// The manifests were read, the time limit has passed, or there is no source of manifests.
    Open,
}

impl ManifestGate {
    pub(super) fn of(sources: &[SourceKind]) -> Self {
        if sources.contains(&SourceKind::File) {
            Self::Closed { until: deadline_after(Instant::now(), MAX_WAIT), api: Vec::new() }
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
    pub(super) fn hold(&mut self, source: SourceKind, update: SourceEvent) -> Option<SourceEvent> {
        match self {
            Self::Closed { api, .. } if source == SourceKind::Api => {
                // A snapshot is complete, so it replaces what came before.
                if matches!(update, SourceEvent::Snapshot(_)) {
                    api.clear();
                }
                api.push(update);
                None
            }
            Self::Closed { .. } | Self::Open => Some(update),
        }
    }

    /// Opens the gate. Returns the updates of the API server that were kept, in their order.
    pub(super) fn open(&mut self) -> Vec<SourceEvent> {
        match std::mem::replace(self, Self::Open) {
            Self::Closed { api, .. } => api,
            Self::Open => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use pod_sync_sources::Snapshot;
    use quintlet_model::ids::PodUid;

    use super::*;

    fn snapshot(uids: &[&str]) -> SourceEvent {
        let pods = uids.iter().map(|uid| pod(uid)).collect();
        SourceEvent::Snapshot(Snapshot { pods, ..Snapshot::default() })
    }

    fn pod(uid: &str) -> Arc<Pod> {
        let metadata = ObjectMeta { uid: Some(uid.to_owned()), ..ObjectMeta::default() };
        Arc::new(Pod { metadata, ..Pod::default() })
    }

    fn uids(updates: impl IntoIterator<Item = SourceEvent>) -> Vec<String> {
        let uid = |pod: Arc<Pod>| pod.metadata.uid.clone().unwrap();
        let description = |update| match update {
            SourceEvent::Snapshot(s) => s.pods.into_iter().map(uid).collect::<Vec<_>>().join("+"),
            SourceEvent::Changed(pod) => uid(pod),
            SourceEvent::Removed(uid) => format!("-{uid}"),
            SourceEvent::Offline(pods) => format!("offline {}", pods.len()),
            SourceEvent::Problems(_) => "problems".to_owned(),
        };
        updates.into_iter().map(description).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn updates_of_the_api_server_wait_for_manifests_and_for_no_other_source() {
        let mut manifests = ManifestGate::of(&[SourceKind::Api, SourceKind::File]);
        let mut hold = |source, update| uids(manifests.hold(source, update));
        assert_eq!(hold(SourceKind::Api, snapshot(&["old"])), [""; 0]);
        assert_eq!(hold(SourceKind::Http, snapshot(&["http"])), ["http"]);
        assert_eq!(hold(SourceKind::Api, snapshot(&["a", "b"])), [""; 0]);
        assert_eq!(hold(SourceKind::Api, SourceEvent::Changed(pod("c"))), [""; 0]);
        let removed = SourceEvent::Removed(PodUid::parse("a").unwrap());
        assert_eq!(hold(SourceKind::Api, removed), [""; 0]);
        assert_eq!(hold(SourceKind::File, snapshot(&["file"])), ["file"]);
        assert_eq!(uids(manifests.open()), ["a+b", "c", "-a"]);
        assert_eq!(
            uids(manifests.hold(SourceKind::Api, snapshot(&["d"]))),
            ["d"],
            "an open gate keeps nothing"
        );
        assert_eq!(uids(manifests.open()), [""; 0]);

        let mut without = ManifestGate::of(&[SourceKind::Api]);
        assert_eq!(uids(without.hold(SourceKind::Api, snapshot(&["a"]))), ["a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_manifests_has_a_deadline() {
        let began = Instant::now();
        ManifestGate::of(&[SourceKind::File]).expired().await;
        assert_eq!(began.elapsed(), MAX_WAIT);
    }
}
