//! The published state of one pod.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use pod_sync_decisions::waiting::WaitingFor;
use pod_sync_layout::SourceKind;
use quintlet_model::ids::PodRef;
use quintlet_model::runtime::Cursor;
use quintlet_model::text;

/// The reason for which a pod waits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Waiting {
    /// Reason, one of a fixed list.
    pub reason: String,
    /// Details of the reason, for `quintctl explain`.
    pub message: String,
    /// Container, empty if the whole pod waits.
    pub container: String,
    /// Start of the wait, nanoseconds since 1970.
    pub since_unix_ns: i64,
    /// End of the wait, nanoseconds since 1970; 0 if unknown.
    pub until_unix_ns: i64,
}

impl Waiting {
    /// Returns the published form. A wait without a start began `now`.
    #[must_use]
    pub fn of(wait: &WaitingFor, now: jiff::Timestamp) -> Self {
        Self {
            reason: wait.what.reason().to_owned(),
            message: text::shortened(wait.what.message(), text::MESSAGE),
            container: wait.what.container().unwrap_or_default().to_owned(),
            since_unix_ns: unix_ns(wait.since.unwrap_or(now)),
            until_unix_ns: wait.until.map_or(0, unix_ns),
        }
    }
}

/// Nanoseconds since 1970.
#[must_use]
pub fn unix_ns(t: jiff::Timestamp) -> i64 {
    i64::try_from(t.as_nanosecond()).unwrap_or(i64::MAX)
}

/// Decision of the last pass of the worker, and the runtime state that it used.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// Description of the decision.
    pub lines: Vec<String>,
    /// Time, nanoseconds since 1970.
    pub at_unix_ns: i64,
    /// Position of the runtime state.
    pub saw: Cursor,
    /// Age of the runtime state, milliseconds.
    pub age_ms: f64,
    /// Errors of the last pass.
    pub errors: Vec<String>,
    /// Trace of the last pass that acted.
    pub trace_id: String,
}

/// The published state of one pod.
#[derive(Debug, Clone)]
pub struct PodView {
    /// Namespace, name and UID.
    pub pod_ref: PodRef,
    /// The source that desires the pod.
    pub source: SourceKind,
    /// The pod with its allocated resources.
    pub pod: Arc<Pod>,
    /// The newest status; none if it is the status in `pod`.
    pub status: Option<Arc<PodStatus>>,
    /// Deletion timestamp that the source gave.
    pub deletion: Option<Time>,
    /// Phase of the worker: sync, terminating, terminated, finished; empty before it has one.
    pub worker: &'static str,
    /// The source no longer has the pod.
    pub is_removed: bool,
    /// The reason for which the pod waits.
    pub waiting: Option<Waiting>,
    /// Last decision.
    pub decision: Arc<Decision>,
    /// Wall time the pod was accepted, nanoseconds since 1970.
    pub created_unix_ns: i64,
    /// resourceVersion of the status that was last written to the API server; empty where none was.
    pub resource_version: String,
    /// UID of the API server's copy of a static pod; empty where there is none.
    pub mirror_uid: String,
    /// Version of the change, set by [`crate::PodViews::publish`].
    pub version: u64,
}

impl PodView {
    /// Returns the newest status, empty if there is none.
    #[must_use]
    pub fn status(&self) -> PodStatus {
        self.status.as_deref().or(self.pod.status.as_ref()).cloned().unwrap_or_default()
    }

    /// Returns the pod with its newest status and deletion timestamp.
    #[must_use]
    pub fn object(&self) -> Pod {
        let mut pod = (*self.pod).clone();
        if let Some(status) = &self.status {
            pod.status = Some((**status).clone());
        }
        pod.metadata.deletion_timestamp.clone_from(&self.deletion);
        pod
    }

    /// Returns of the pod what statistics need: the names, the UID, `hostNetwork` and the newest status. The
    /// rest, which may have 1.5 MiB, is not copied.
    #[must_use]
    pub fn object_for_statistics(&self) -> Pod {
        let ObjectMeta { name, namespace, uid, .. } = &self.pod.metadata;
        let metadata = ObjectMeta {
            name: name.clone(),
            namespace: namespace.clone(),
            uid: uid.clone(),
            ..ObjectMeta::default()
        };
        let host_network = self.pod.spec.as_ref().and_then(|spec| spec.host_network);
        let spec = PodSpec { host_network, ..PodSpec::default() };
        Pod { metadata, spec: Some(spec), status: Some(self.status()) }
    }
}
