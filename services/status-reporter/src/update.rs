//! Status updates of pod-sync, and their acks.

use std::sync::Arc;

use quintlet_model::ids::PodUid;
use quintlet_model::pod_status::shorten::Part;
use quintlet_proto::common::v1::Trace;
use serde_json::Value;

/// Order of the updates of one pod: first the epoch of pod-sync, then the version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Epoch of pod-sync.
    pub epoch: u64,
    /// Version of the status in this epoch.
    pub version: u64,
}

/// A status update of a pod.
#[derive(Debug, Clone)]
pub struct Update {
    /// UID of the pod in pod-sync.
    pub uid: PodUid,
    /// UID of the object in the API server, or empty.
    pub api_uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Position of the update in the sequence of its pod.
    pub stamp: Stamp,
    /// Status that pod-sync last read from the API server.
    pub base: Arc<Value>,
    /// `resourceVersion` of the object of the base, or 0.
    pub base_version: u64,
    /// The whole status that the object should have.
    pub desired: Value,
    /// Whether containers may still run.
    pub could_run: bool,
    /// Whether nothing of the pod is left on the node.
    pub finished: bool,
    /// Whether the pod has a deletion timestamp.
    pub deleting: bool,
    /// Whether the object is a mirror pod.
    pub mirror: bool,
    /// Context of the span in pod-sync that caused the update.
    pub trace: Option<Trace>,
}

/// The outcome of an update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpdateOutcome {
    /// The API server has the status, with this `resourceVersion`.
    Written(String),
    /// The API server has the status without this part and those before it, since it did not take the whole
    /// one.
    Shortened {
        /// `resourceVersion` of the object.
        version: String,
        /// The last part that was left out.
        without: Part,
    },
    /// The object does not exist.
    Gone,
    /// The object has another UID.
    UidMismatch(String),
    /// status-reporter does not take the update: it has an older owner, which has ended, or it is invalid,
    /// which it stays. pod-sync sends an invalid update again to the next process of status-reporter, which
    /// may be of another release.
    Refused(String),
    /// There is no API server (standalone mode).
    NoApi,
    /// The write failed for the given reason and will be retried, or there is no room for the update, which
    /// pod-sync sends again on the next stream.
    Queued(String),
    /// The API server declined the write with this answer. The write is repeated until a newer update
    /// replaces it.
    Retrying(String),
    /// The status was written, and the object deleted.
    Deleted,
}

/// The reply to an update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ack {
    /// The pod of the update.
    pub uid: PodUid,
    /// Stamp of the newest update that the outcome includes.
    pub stamp: Stamp,
    /// The result of the write.
    pub verdict: UpdateOutcome,
}
