//! Requests that wait for the owner of a pod.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_model::ids::PodRef;
use quintlet_model::runtime::{Cursor, SharedPodRuntime};
use quintlet_proto::common::v1::Trace;
use tokio::sync::{Notify, oneshot};

use crate::traits::{HintKind, ReadError};

/// Result of an inspection for a caller: the pod, or none if the runtime does not have it, and the cursor.
pub(crate) type InspectionReply = Result<(Option<SharedPodRuntime>, Cursor), ReadError>;

/// A request to inspect a pod.
#[derive(Debug, Default)]
pub(crate) struct InspectionRequest {
    /// Namespace and name of the pod, if known.
    pub(crate) pod: Option<PodRef>,
    /// Sandboxes of the pod.
    pub(crate) sandboxes: Vec<String>,
    /// Containers of the pod, with their sandboxes.
    pub(crate) containers: Vec<(String, String)>,
    /// Sandboxes or containers. An ID that is not in the entry requires a list by label.
    pub(crate) ids: Vec<String>,
    /// Whether to list the pod by its label.
    pub(crate) list: bool,
    /// The IDs are from a list: they are all IDs of a pod that has no entry.
    pub(crate) complete: bool,
    /// CLOCK_BOOTTIME of the start of the list that contains the pod, if a list caused the request.
    pub(crate) listed: Option<Duration>,
    /// A relist caused the request, which is not urgent.
    pub(crate) by_relist: bool,
    /// The request is an expectation alone: nothing is inspected if the entry shows the change already.
    pub(crate) later: bool,
    /// The change that a hint reported.
    pub(crate) expect: Option<(String, HintKind)>,
    /// Receives the result of an inspection that begins after this request.
    pub(crate) waiter: Option<oneshot::Sender<InspectionReply>>,
    pub(crate) trace: Option<Trace>,
}

/// Requests since the last inspection began.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) requested: bool,
    /// A caller or a hint waits.
    pub(crate) urgent: bool,
    pub(crate) pod: Option<PodRef>,
    pub(crate) sandboxes: BTreeSet<String>,
    pub(crate) containers: HashMap<String, String>,
    pub(crate) ids: BTreeSet<String>,
    pub(crate) list: bool,
    pub(crate) complete: bool,
    pub(crate) listed: Option<Duration>,
    pub(crate) expects: Vec<(String, HintKind)>,
    pub(crate) waiters: Vec<oneshot::Sender<InspectionReply>>,
    pub(crate) trace: Option<Trace>,
}

impl Work {
    pub(crate) fn add(&mut self, n: InspectionRequest) {
        self.requested |= !n.later;
        self.urgent |= !n.by_relist && !n.later;
        self.pod = n.pod.or(self.pod.take());
        self.sandboxes.extend(n.sandboxes);
        self.containers.extend(n.containers);
        self.ids.extend(n.ids);
        self.list |= n.list;
        self.complete |= n.complete;
        self.listed = self.listed.max(n.listed);
        self.expects.extend(n.expect);
        self.waiters.extend(n.waiter);
        // The first cause names the trace; the others share its inspection.
        self.trace = self.trace.take().or(n.trace);
    }

    /// Returns the cause of an inspection for this work, for metrics.
    pub(crate) fn cause(&self) -> &'static str {
        if !self.waiters.is_empty() {
            "observe"
        } else if self.requested && !self.urgent {
            "relist"
        } else {
            // Of the runtime, or looked for again.
            "event"
        }
    }
}

/// The requests for one pod that wait for its owner.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    pub(crate) work: Mutex<Work>,
    pub(crate) wake: Notify,
}
