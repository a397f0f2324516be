//! Sources of desired pods: a manifest directory, a URL, the API server.
//!
//! Each source is a task ([`file::run`], [`http::run`], [`api`]) that sends all of its pods as a [`Snapshot`] over one channel of
//! [`SOURCE_QUEUE`] entries. A source that waits for room is only late: its next snapshot holds everything. Nothing is compared here;
//! the sync loop of pod-sync merges the snapshots
//! ([`pod_sync_decisions::merge`]). [`decode`] reads manifests, [`validate`] refuses those that a kubelet refuses.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod api;
pub mod decode;
pub mod file;
pub mod http;
pub mod lenient;
pub mod objects;
pub mod validate;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use lenient::Undecodable;
use tokio::sync::mpsc;

/// The three sources (pkg/kubelet/types/pod_update.go).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceKind {
    /// Manifest directory or file.
    File,
    /// Manifest URL.
    Http,
    /// API server.
    Api,
}

impl SourceKind {
    /// Value of the annotation `kubernetes.io/config.source`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Http => "http",
            Self::Api => "api",
        }
    }
}

/// Something about a source or one of its manifests that a person should mend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// File or URL.
    pub origin: String,
    /// Path of the field to blame, empty where none is.
    pub field: String,
    /// What is wrong.
    pub message: String,
}

/// Everything a source has at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Pods, decoded, defaulted and valid.
    pub pods: Vec<Arc<Pod>>,
    /// ConfigMaps among the manifests (standalone use).
    pub config_maps: Vec<ConfigMap>,
    /// Secrets among the manifests (standalone use).
    pub secrets: Vec<Secret>,
    /// What could not be used.
    pub problems: Vec<Problem>,
    /// Pods of the API server that became undecodable since the last snapshot.
    pub undecodable: Vec<Undecodable>,
}

/// What a source has to say.
#[derive(Debug, Clone)]
pub enum Update {
    /// Its whole world. The source counts as seen, and what is not in it is gone.
    Snapshot(Snapshot),
    /// Only what is wrong with it now; nothing if it was mended. Its pods stay as they are.
    Problems(Vec<Problem>),
}

/// An update and whose it is.
pub type SourceUpdate = (SourceKind, Update);

/// Snapshots in flight. A source that waits here is only late: the next snapshot holds everything.
pub const SOURCE_QUEUE: usize = 4;

/// Sending half of the sources' queue.
pub type SourceSender = mpsc::Sender<SourceUpdate>;

/// Largest manifest file or body, bytes (pkg/kubelet/config/common.go). Reaching it is an error.
pub const MAX_MANIFEST: usize = 10 << 20;
