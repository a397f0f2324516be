//! Pod statuses on their way to the API server, newest per pod.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use parking_lot::Mutex;
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_proto::common::v1::Trace;
use quintlet_proto::status::v1 as wire;
use quintlet_proto::status::v1::status_reporter_client::StatusReporterClient;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::Wakes;

/// Local sockets are tried again this often.
const RETRY: Duration = Duration::from_millis(100);
/// Updates written to the stream and not yet taken by it. The map behind holds the newest of each pod, so a full
/// stream only makes it wait.
const STREAM: usize = 64;

/// What became of the newest status of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ack {
    /// The API server has it.
    Written,
    /// There is no such object.
    Gone,
    /// Another object has that name.
    UidMismatch,
    /// The API server refuses it.
    Refused(String),
    /// There is no API server.
    NoApi,
    /// Written, and the object is deleted.
    Deleted,
}

#[derive(Debug, Default)]
struct Inner {
    // With the trace of the pass that made it.
    latest: HashMap<PodUid, (wire::PodStatusUpdate, Option<Trace>)>,
    dirty: BTreeSet<PodUid>,
    acks: HashMap<PodUid, (u64, Ack)>,
    // resourceVersion of the last write.
    written: HashMap<PodUid, String>,
}

/// Client of status-reporter's Report stream.
#[derive(Debug)]
pub struct Statuses {
    client: StatusReporterClient<Channel>,
    inner: Mutex<Inner>,
    changed: Notify,
    wakes: Arc<Wakes>,
}

impl Statuses {
    /// Uses the socket at `path`; it need not be there yet.
    #[must_use]
    pub fn new(path: PathBuf, wakes: Arc<Wakes>) -> Self {
        let client = StatusReporterClient::new(quintlet_kit::socket::channel(path));
        Self { client, inner: Mutex::default(), changed: Notify::new(), wakes }
    }

    /// A client for unary calls to status-reporter.
    #[must_use]
    pub fn client(&self) -> StatusReporterClient<Channel> {
        self.client.clone()
    }

    /// Hands over a status; it replaces the last one of the same pod.
    pub fn report(&self, uid: &PodUid, update: wire::PodStatusUpdate) {
        failpoint::around!(Status, "status handed over", || {
            let mut inner = self.inner.lock();
            inner.latest.insert(uid.clone(), (update, quintlet_telemetry::propagate::current_trace()));
            inner.dirty.insert(uid.clone());
            drop(inner);
            self.changed.notify_one();
        });
    }

    /// Forgets a pod.
    pub fn forget(&self, uid: &PodUid) {
        let mut inner = self.inner.lock();
        inner.latest.remove(uid);
        inner.dirty.remove(uid);
        inner.acks.remove(uid);
        inner.written.remove(uid);
    }

    /// What became of version `version` of a pod's status or a later one; none while it is on its way.
    #[must_use]
    pub fn ack(&self, uid: &PodUid, version: u64) -> Option<Ack> {
        self.inner.lock().acks.get(uid).filter(|(v, _)| *v >= version).map(|(_, ack)| ack.clone())
    }

    /// resourceVersion of the last status of a pod that was written; empty where none was.
    #[must_use]
    pub fn written(&self, uid: &PodUid) -> String {
        self.inner.lock().written.get(uid).cloned().unwrap_or_default()
    }

    /// Keeps the stream open until told to stop.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            // A cut stream loses nothing: everything is sent again on the next.
            tokio::select! {
                () = stop.cancelled() => return,
                ended = self.stream() => if let Err(status) = ended {
                    tracing::debug!(error = status.message(), "status stream ended");
                },
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn stream(&self) -> Result<(), tonic::Status> {
        let (tx, rx) = mpsc::channel(STREAM);
        let hello = wire::ReportRequest {
            request: Some(wire::report_request::Request::Hello(quintlet_proto::hello())),
            trace: None,
        };
        let _ = tx.try_send(hello);
        let mut client = self.client.clone();
        let mut replies = client.report(ReceiverStream::new(rx)).await?.into_inner();
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
        // Either end closes both; what was not acked is sent again.
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
            Ok(wire::AckKind::Written) => Ack::Written,
            Ok(wire::AckKind::Gone) => Ack::Gone,
            Ok(wire::AckKind::UidMismatch) => Ack::UidMismatch,
            Ok(wire::AckKind::Refused) => Ack::Refused(ack.detail.clone()),
            Ok(wire::AckKind::NoApi) => Ack::NoApi,
            Ok(wire::AckKind::Deleted) => Ack::Deleted,
            Ok(wire::AckKind::Queued | wire::AckKind::Unspecified) | Err(_) => return,
        };
        {
            let mut inner = self.inner.lock();
            // An ack of an earlier owner says nothing about this one's versions.
            if inner.latest.get(&uid).is_none_or(|(u, _)| u.owner_epoch != ack.owner_epoch) {
                return;
            }
            if kind == Ack::Written && !ack.resource_version.is_empty() {
                inner.written.insert(uid.clone(), ack.resource_version.clone());
            }
            inner.acks.insert(uid.clone(), (ack.version, kind));
        }
        self.wakes.wake(&uid);
    }
}
