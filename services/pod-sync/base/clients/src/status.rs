//! Pod statuses on their way to the API server, newest per pod.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use parking_lot::Mutex;
use quintlet_kit::failpoint;
use quintlet_kit::messages::{bounded_requests, fits_inside};
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::queue;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_kit::stack::Caller;
use quintlet_model::ids::PodUid;
use quintlet_model::pod_status::shorten::{self, Part};
use quintlet_proto::common::v1::Trace;
use quintlet_proto::limits;
use quintlet_proto::status::v1 as wire;
use quintlet_proto::status::v1::status_reporter_client::StatusReporterClient;
use serde_json::Value;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::WorkerWakeups;

/// Updates that wait in the stream. The map behind it has the latest status of each pod, so a full stream
/// only delays them.
const STREAM: usize = 64;

/// The stream of statuses, in metrics.
const REPORT: &str = "StatusReporter.Report";

/// Outcome of a pod status at the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatusAck {
    /// The API server has the whole status.
    Written,
    /// The status was written without this part and those before it, since the API server did not take the
    /// whole one.
    Shortened(String),
    /// The API server has no such pod.
    Gone,
    /// The pod of that name has another UID.
    UidMismatch,
    /// status-reporter did not take the status, with this message.
    Refused(String),
    /// status-reporter has no API server.
    NoApi,
    /// The status was written and the pod was deleted.
    Deleted,
}

/// The Node was not reported.
#[derive(Debug, thiserror::Error)]
pub enum NodeReportError {
    /// The Node has no JSON form.
    #[error("failed to encode the Node")]
    Encode(#[source] serde_json::Error),
    /// status-reporter answered with an error, or not at all.
    #[error("status-reporter rejected the Node")]
    Refused(#[source] tonic::Status),
}

/// A mirror pod was not created or deleted.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// The pod has no JSON form.
    #[error("{0}")]
    Encode(serde_json::Error),
    /// The message is that of status-reporter.
    #[error("{}", .0.message())]
    Refused(tonic::Status),
}

#[derive(Debug, Default)]
struct Inner {
    // With the trace of the sync that produced the status.
    latest: HashMap<PodUid, (wire::PodStatusUpdate, Option<Trace>)>,
    dirty: BTreeSet<PodUid>,
    acks: HashMap<PodUid, (u64, StatusAck)>,
    // The API server's last answer to a write that it declined and that status-reporter repeats.
    declined: HashMap<PodUid, String>,
    // resourceVersion that the last write returned.
    written: HashMap<PodUid, String>,
}

/// Shortens an update to the size of a message. The base is the first part that is left out: without it,
/// status-reporter writes all fields of the status. Returns the last part of the status that was left out.
fn shorten_to_item(update: &mut wire::PodStatusUpdate) -> Option<Part> {
    if fits_inside(update).is_ok() {
        return None;
    }
    update.base_status = Vec::new();
    update.base_resource_version = String::new();
    let too_large = fits_inside(update).err()?;
    let mut status: Value = serde_json::from_slice(&update.desired_status).ok()?;
    let excess = too_large.bytes.saturating_sub(limits::ITEM);
    let without = shorten::shorten_to(&mut status, update.desired_status.len().saturating_sub(excess));
    update.desired_status = serde_json::to_vec(&status).ok()?;
    without
}

/// Client of status-reporter. Holds the latest status of every pod until it is acknowledged.
#[derive(Debug)]
pub struct Statuses {
    client: StatusReporterClient<Caller<Channel>>,
    peer: Neighbour,
    inner: Mutex<Inner>,
    changed: Notify,
    wakes: Arc<WorkerWakeups>,
}

impl Statuses {
    /// Creates a client of the socket at `path`, which need not exist yet.
    #[must_use]
    pub fn new(path: PathBuf, wakes: Arc<WorkerWakeups>) -> Self {
        let client = StatusReporterClient::new(quintlet_kit::socket::caller(path));
        let peer = Neighbour::new("status-reporter", &[]);
        Self { client, peer, inner: Mutex::default(), changed: Notify::new(), wakes }
    }

    /// Reports the Node object. The node is Ready if `not_ready`, the reasons against it, is empty.
    /// `observed` is the time of the observation (CLOCK_BOOTTIME).
    ///
    /// # Errors
    /// status-reporter did not take the report.
    pub async fn report_node(
        &self,
        node: &Node,
        not_ready: Vec<String>,
        observed: Duration,
    ) -> Result<(), NodeReportError> {
        let request = wire::UpdateNodeRequest {
            source: "pod-sync".to_owned(),
            node: serde_json::to_vec(node).map_err(NodeReportError::Encode)?,
            not_ready,
            observed_boottime_ns: u64::try_from(observed.as_nanos()).unwrap_or(u64::MAX),
        };
        self.peer.check().map_err(NodeReportError::Refused)?;
        self.client.clone().update_node(request).await.map_err(NodeReportError::Refused)?;
        Ok(())
    }

    /// Creates the mirror pod `pod` unless it exists.
    ///
    /// # Errors
    /// status-reporter did not create it.
    pub async fn ensure_mirror(&self, pod: &Pod) -> Result<(), MirrorError> {
        self.peer.check().map_err(MirrorError::Refused)?;
        let pod = serde_json::to_vec(pod).map_err(MirrorError::Encode)?;
        let created = self.client.clone().ensure_mirror(wire::EnsureMirrorRequest { pod }).await;
        created.map(drop).map_err(MirrorError::Refused)
    }

    /// Deletes the mirror pod with this name and UID.
    ///
    /// # Errors
    /// status-reporter did not delete it.
    pub async fn delete_mirror(&self, mirror: &ObjectMeta) -> Result<(), MirrorError> {
        self.peer.check().map_err(MirrorError::Refused)?;
        let request = wire::DeleteMirrorRequest {
            namespace: mirror.namespace.clone().unwrap_or_default(),
            name: mirror.name.clone().unwrap_or_default(),
            uid: mirror.uid.clone().unwrap_or_default(),
        };
        self.client.clone().delete_mirror(request).await.map(drop).map_err(MirrorError::Refused)
    }

    /// Queues a status; it replaces the previous one of the same pod. A status that is too large for a
    /// message is shortened. Returns the last part that was left out.
    pub fn report(&self, uid: &PodUid, mut update: wire::PodStatusUpdate) -> Option<Part> {
        let without = shorten_to_item(&mut update);
        let trace = quintlet_telemetry::propagate::current_trace();
        failpoint::around!(Status, "status handed over", || {
            let mut inner = self.inner.lock();
            inner.latest.insert(uid.clone(), (update, trace));
            inner.dirty.insert(uid.clone());
            drop(inner);
            self.changed.notify_one();
        });
        without
    }

    /// Drops the status and the acknowledgement of a pod.
    pub fn forget(&self, uid: &PodUid) {
        let mut inner = self.inner.lock();
        inner.latest.remove(uid);
        inner.dirty.remove(uid);
        inner.acks.remove(uid);
        inner.declined.remove(uid);
        inner.written.remove(uid);
    }

    /// Returns the outcome of version `version` of a pod's status or of a later one; `None` while it is in
    /// flight.
    #[must_use]
    pub fn ack(&self, uid: &PodUid, version: u64) -> Option<StatusAck> {
        self.inner.lock().acks.get(uid).filter(|(v, _)| *v >= version).map(|(_, ack)| ack.clone())
    }

    /// Returns the API server's answer to the last write of a pod's status, or to its final deletion, if the
    /// API server declined it. status-reporter repeats the write.
    #[must_use]
    pub fn declined(&self, uid: &PodUid) -> Option<String> {
        self.inner.lock().declined.get(uid).cloned()
    }

    /// Returns the resourceVersion of the last status of a pod that was written; empty if there was none.
    #[must_use]
    pub fn written_version(&self, uid: &PodUid) -> String {
        self.inner.lock().written.get(uid).cloned().unwrap_or_default()
    }

    /// Keeps the Report stream open until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            // Dropping the stream loses nothing: the next one sends every status again.
            tokio::select! {
                () = stop.cancelled() => return,
                ended = self.stream() => if let Err(status) = ended {
                    tracing::debug!(error = status.message(), "status stream ended");
                },
            }
            tokio::time::sleep(self.peer.next_wait(CONNECT_INTERVAL)).await;
        }
    }

    async fn stream(&self) -> Result<(), tonic::Status> {
        let (tx, rx) = queue::channel("statuses", STREAM);
        let hello = wire::ReportRequest {
            request: Some(wire::report_request::Request::Hello(quintlet_proto::hello())),
            trace: None,
        };
        let _ = queue::offer(&tx, "statuses", hello);
        let mut client = self.client.clone();
        let mut replies = client.report(bounded_requests(REPORT, rx)).await?.into_inner();
        // Before the first status: an incompatible peer gets none.
        let first = replies.message().await?;
        if let Some(wire::report_reply::Reply::Hello(hello)) = first.and_then(|first| first.reply) {
            self.peer.greeted(&hello)?;
        }
        {
            let mut inner = self.inner.lock();
            let all: Vec<_> = inner.latest.keys().cloned().collect();
            inner.dirty.extend(all);
        }
        self.changed.notify_one();
        let write = async {
            let mut first = true;
            loop {
                self.changed.notified().await;
                while let Some((update, trace)) = self.next() {
                    let request = wire::ReportRequest {
                        request: Some(wire::report_request::Request::Update(update)),
                        trace,
                    };
                    failpoint::reached!(Status, Before, "status sent");
                    if tx.send(request).await.is_err() {
                        return;
                    }
                    failpoint::reached!(Status, After, "status sent");
                }
                if std::mem::take(&mut first) {
                    let uids = self.inner.lock().latest.keys().map(ToString::to_string).collect();
                    let complete = wire::report_request::Request::Complete(wire::FullSetComplete { uids });
                    if tx.send(wire::ReportRequest { request: Some(complete), trace: None }).await.is_err() {
                        return;
                    }
                }
            }
        };
        let read = async {
            while let Some(reply) = replies.next().await {
                if let Some(wire::report_reply::Reply::Ack(ack)) = reply?.reply {
                    failpoint::around!(Status, "status acked", || self.acked(&ack));
                }
            }
            Ok(())
        };
        // When one half ends, both are dropped; the next stream sends every status again.
        tokio::select! {
            () = write => Ok(()),
            ended = read => ended,
        }
    }

    fn next(&self) -> Option<(wire::PodStatusUpdate, Option<Trace>)> {
        let mut inner = self.inner.lock();
        let uid = inner.dirty.pop_first()?;
        inner.latest.get(&uid).cloned()
    }

    fn acked(&self, ack: &wire::Ack) {
        let Ok(uid) = PodUid::parse(&ack.uid) else { return };
        let kind = match wire::AckKind::try_from(ack.kind) {
            Ok(wire::AckKind::Written) if ack.detail.is_empty() => StatusAck::Written,
            Ok(wire::AckKind::Written) => StatusAck::Shortened(ack.detail.clone()),
            Ok(wire::AckKind::Gone) => StatusAck::Gone,
            Ok(wire::AckKind::UidMismatch) => StatusAck::UidMismatch,
            Ok(wire::AckKind::Refused) => StatusAck::Refused(ack.detail.clone()),
            Ok(wire::AckKind::NoApi) => StatusAck::NoApi,
            Ok(wire::AckKind::Deleted) => StatusAck::Deleted,
            Ok(wire::AckKind::Retrying) => return self.declined_by(&uid, ack),
            Ok(wire::AckKind::Queued | wire::AckKind::Unspecified) | Err(_) => return,
        };
        {
            let mut inner = self.inner.lock();
            // Versions of an earlier pod-sync are not comparable with ours.
            if inner.latest.get(&uid).is_none_or(|(u, _)| u.owner_epoch != ack.owner_epoch) {
                return;
            }
            let is_written = matches!(kind, StatusAck::Written | StatusAck::Shortened(_));
            if is_written && !ack.resource_version.is_empty() {
                inner.written.insert(uid.clone(), ack.resource_version.clone());
            }
            inner.acks.insert(uid.clone(), (ack.version, kind));
            inner.declined.remove(&uid);
        }
        self.wakes.wake(&uid);
    }

    fn declined_by(&self, uid: &PodUid, ack: &wire::Ack) {
        {
            let mut inner = self.inner.lock();
            if inner.latest.get(uid).is_none_or(|(u, _)| u.owner_epoch != ack.owner_epoch)
                || inner.declined.get(uid) == Some(&ack.detail)
            {
                return;
            }
            inner.declined.insert(uid.clone(), ack.detail.clone());
        }
        self.wakes.wake(uid);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_declined_write_is_no_acknowledgement_and_its_answer_wakes_the_worker_once() {
        let uid = PodUid::parse("u").unwrap();
        let wakes = Arc::new(WorkerWakeups::default());
        let worker = wakes.register(&uid);
        let statuses = Statuses::new(PathBuf::from("/nonexistent"), wakes);
        let update = wire::PodStatusUpdate { owner_epoch: 7, version: 3, ..wire::PodStatusUpdate::default() };
        assert_eq!(statuses.report(&uid, update), None);
        let ack = |owner_epoch, kind: wire::AckKind, detail: &str| {
            let (uid, detail) = (uid.to_string(), detail.to_owned());
            statuses.acked(&wire::Ack {
                uid,
                owner_epoch,
                version: 3,
                kind: kind.into(),
                detail,
                ..wire::Ack::default()
            });
        };
        let is_woken = || futures::FutureExt::now_or_never(worker.notified()).is_some();
        ack(6, wire::AckKind::Retrying, "an answer to an earlier pod-sync");
        assert_eq!((statuses.declined(&uid), is_woken()), (None, false));
        ack(7, wire::AckKind::Retrying, "policy 'freeze'");
        assert_eq!(statuses.declined(&uid).as_deref(), Some("policy 'freeze'"));
        assert_eq!((statuses.ack(&uid, 3), is_woken()), (None, true));
        ack(7, wire::AckKind::Retrying, "policy 'freeze'");
        assert!(!is_woken(), "the same answer changes nothing");
        ack(7, wire::AckKind::Deleted, "");
        assert_eq!((statuses.declined(&uid), statuses.ack(&uid, 3)), (None, Some(StatusAck::Deleted)));
        assert!(is_woken());
        ack(7, wire::AckKind::Retrying, "policy 'freeze'");
        statuses.forget(&uid);
        assert_eq!(statuses.declined(&uid), None);
    }

    #[tokio::test]
    async fn a_status_that_is_too_large_for_a_message_is_sent_without_parts() {
        let uid = PodUid::parse("u").unwrap();
        let statuses = Statuses::new(PathBuf::from("/nonexistent"), Arc::new(WorkerWakeups::default()));
        let report = |base: usize, message: usize, name: usize| {
            let state = json!({"waiting": {"message": "m".repeat(message)}});
            let container = json!({"name": "n".repeat(name), "state": state});
            let status = json!({"phase": "Failed", "containerStatuses": [container]});
            let update = wire::PodStatusUpdate {
                base_status: vec![b' '; base],
                base_resource_version: "7".to_owned(),
                desired_status: serde_json::to_vec(&status).unwrap(),
                ..wire::PodStatusUpdate::default()
            };
            let without = statuses.report(&uid, update);
            let (sent, _) = statuses.next().unwrap();
            assert!(fits_inside(&sent).is_ok());
            let now: Value = serde_json::from_slice(&sent.desired_status).unwrap();
            let left = now["containerStatuses"].as_array().map(Vec::len);
            (without, sent.base_status.len(), sent.base_resource_version, left)
        };
        let large = limits::ITEM;
        for (base, message, name, want) in [
            (10, 10, 2, (None, 10, "7".to_owned(), Some(1))),
            // The base makes the difference.
            (large, 10, 2, (None, 0, String::new(), Some(1))),
            (10, large, 2, (Some(Part::LongTexts), 0, String::new(), Some(1))),
            (10, 10, large, (Some(Part::Containers), 0, String::new(), None)),
        ] {
            assert_eq!(report(base, message, name), want, "{base} {message} {name}");
        }
    }
}
