//! Sources of desired pods: a manifest directory, a URL, the API server.
//!
//! Each source is a task ([`file::run`], [`http::run`], [`api`]) that sends all of its pods as a [`Snapshot`]
//! over one channel of [`SOURCE_QUEUE`] entries. The API server's sends single pods after its first snapshot,
//! so that a change costs the same whatever the number of pods. A source that waits for the channel is only
//! late. The pod manager of pod-sync merges the updates ([`pod_sync_decisions::merge`]). [`decode`] parses
//! manifests, [`validate`] rejects those that a kubelet rejects. [`cluster`] reads the objects that pods
//! refer to.
//!
//! A static pod has the UID that a kubelet computes ([`kubelet_uid`]). One that runs keeps its UID:
//! [`adoption`] has the conditions, [`static_uids`] the file of UIDs.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod adoption;
pub mod api;
pub mod cluster;
pub mod decode;
pub mod defaults;
pub mod file;
pub mod http;
#[cfg(test)]
mod installers;
mod known;
pub mod kubelet_uid;
mod lenient;
pub mod objects;
mod origin;
mod proxy;
pub mod static_uids;
pub mod validate;
mod zero;

pub use lenient::Undecodable;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use pod_sync_layout::{ManifestProblem, SourceKind};
use quintlet_model::ids::PodUid;
use tokio::sync::mpsc;

/// All pods of a source at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Valid pods with defaults.
    pub pods: Vec<Arc<Pod>>,
    /// Other pods, which are as they were sent last.
    pub unchanged: Vec<PodUid>,
    /// ConfigMaps among the manifests, for use without an API server.
    pub config_maps: Vec<ConfigMap>,
    /// Secrets among the manifests, for use without an API server.
    pub secrets: Vec<Secret>,
    /// Errors in manifests.
    pub problems: Vec<ManifestProblem>,
    /// Faults in manifests that a kubelet ignores. They are shown with the errors.
    pub warnings: Vec<ManifestProblem>,
    /// Pods of the API server that became undecodable since the last snapshot.
    pub undecodable: Vec<Undecodable>,
}

impl Snapshot {
    /// Returns the errors and warnings that the user sees.
    #[must_use]
    pub fn reported(&self) -> Vec<ManifestProblem> {
        self.problems.iter().chain(&self.warnings).cloned().collect()
    }
}

/// An update of a source.
#[derive(Debug, Clone)]
pub enum SourceEvent {
    /// All pods. The source is ready, and pods that the snapshot does not name are removed.
    Snapshot(Snapshot),
    /// A pod was added or changed. The other pods are as before.
    Changed(Arc<Pod>),
    /// The pod with this UID is gone. The other pods are as before.
    Removed(PodUid),
    /// Pods that the API server had when it answered last, and which run until it answers. The source is not
    /// ready.
    Offline(Vec<Arc<Pod>>),
    /// The current errors of the source; empty if they are fixed. Its pods stay.
    Problems(Vec<ManifestProblem>),
}

impl SourceEvent {
    fn problems(&self) -> Vec<ManifestProblem> {
        match self {
            Self::Snapshot(snapshot) => snapshot.reported(),
            Self::Problems(problems) => problems.clone(),
            Self::Changed(_) | Self::Removed(_) | Self::Offline(_) => Vec::new(),
        }
    }
}

/// An update, with the source that it comes from.
pub type SourceMessage = (SourceKind, SourceEvent);

/// Updates in flight. A source that waits is only late.
pub const SOURCE_QUEUE: usize = 4;

/// The end of the queue of updates that sources hold.
pub type SourceSender = mpsc::Sender<SourceMessage>;

/// Size limit of a manifest file or body, in bytes (`pkg/kubelet/config: maxConfigLength`).
pub const MAX_MANIFEST: usize = 10 << 20;
