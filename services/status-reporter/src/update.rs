//! What pod-sync reports and what it hears back.

use quintlet_model::ids::PodUid;
use quintlet_proto::common::v1::Trace;
use serde_json::Value;

/// Order of the updates of one pod: the owner's epoch, then its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Grows when another pod-sync takes over.
    pub epoch: u64,
    /// Grows with each status of the pod.
    pub version: u64,
}

/// One status of one pod.
#[derive(Debug, Clone)]
pub struct Update {
    /// UID pod-sync works with.
    pub uid: PodUid,
    /// UID of the object in the API server; empty if it has none.
    pub api_uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Which of two is newer.
    pub stamp: Stamp,
    /// Status in the API server as pod-sync last read it.
    pub base: Value,
    /// Version of the object the base was read from; 0 if unknown.
    pub base_version: u64,
    /// The status wanted.
    pub desired: Value,
    /// Containers may still run.
    pub could_run: bool,
    /// Nothing is left on this node.
    pub finished: bool,
    /// The pod is being deleted.
    pub deleting: bool,
    /// The object mirrors a static pod.
    pub mirror: bool,
    /// What caused it.
    pub trace: Option<Trace>,
}

/// What became of an update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The API server has it, at this version.
    Written(String),
    /// There is no such object.
    Gone,
    /// The object of that name has another UID.
    UidMismatch(String),
    /// The API server will never take it.
    Refused(String),
    /// There is no API server.
    NoApi,
    /// Held; why it is not written yet.
    Queued(String),
    /// Written, and the object deleted after.
    Deleted,
}

/// An update's verdict on its way back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ack {
    /// The pod.
    pub uid: PodUid,
    /// The update.
    pub stamp: Stamp,
    /// What became of it.
    pub verdict: Verdict,
}
