//! Serves `quintlet.probe.v1` over gRPC.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, OnceLock};

use futures::StreamExt as _;
use quintlet_kit::messages::Bounded;
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::{error_chain, task};
use quintlet_proto::probe::v1 as wire;
use quintlet_proto::probe::v1::drive_report::Report;
use quintlet_proto::probe::v1::drive_request::Request as DriveCommand;
use quintlet_proto::probe::v1::probe_server::Probe;
use quintlet_proto::probe::v1::watch_event::Event;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::convert;
use crate::evaluations::{NextEvaluation, Start};
use crate::mailbox::Mailbox;
use crate::prober::{Prober, Replaced};

/// The gRPC service. Its streams end when `stop` is cancelled.
#[derive(Debug, Clone)]
pub(crate) struct ProbeService {
    prober: Prober,
    driver: Arc<Neighbour>,
    stop: CancellationToken,
}

impl ProbeService {
    /// Returns the gRPC service of a prober. Streams end when `stop` is cancelled.
    #[must_use]
    pub(crate) fn new(prober: Prober, stop: CancellationToken) -> Self {
        Self { prober, driver: Arc::new(Neighbour::new("pod-sync", &[])), stop }
    }
}

#[tonic::async_trait]
impl Probe for ProbeService {
    type DriveStream = Bounded<wire::DriveReport>;
    type WatchStream = Bounded<wire::WatchEvent>;

    async fn drive(
        &self,
        request: Request<Streaming<wire::DriveRequest>>,
    ) -> Result<Response<Self::DriveStream>, Status> {
        let driver = self.prober.attach();
        // Ends the reports with the driver's requests.
        let closed = CancellationToken::new();
        let peer = Arc::clone(&self.driver);
        let receiving =
            receive_requests(self.prober.clone(), Arc::clone(&driver), peer, request.into_inner());
        // The error that ended the requests.
        let failed = Arc::new(OnceLock::new());
        task::spawn("drive", {
            let stop = self.stop.clone();
            let closed = closed.clone();
            let failed = Arc::clone(&failed);
            async move {
                // An open request stream would keep the connection open at the stop. A request that is
                // dropped is not applied.
                tokio::select! {
                    () = stop.cancelled() => {}
                    ended = receiving => {
                        if let Err(status) = ended {
                            // This task alone sets it, once.
                            let _first = failed.set(status);
                        }
                        closed.cancel();
                    }
                }
            }
        });
        let hello = Report::Hello(quintlet_proto::hello());
        let first = vec![wire::DriveReport { report: Some(hello), trace: None }];
        let (stop, state) = (self.stop.clone(), (driver, first.into_iter()));
        let reports = futures::stream::unfold(Some(state), move |state| {
            let stop = stop.clone();
            let closed = closed.clone();
            let failed = Arc::clone(&failed);
            async move {
                let (driver, mut batch) = state?;
                loop {
                    if let Some(report) = batch.next() {
                        return Some((Ok(report), Some((driver, batch))));
                    }
                    // Reports that are not taken stay in the mailbox.
                    tokio::select! {
                        biased;
                        () = driver.replaced.cancelled() => {
                            return Some((Err(Status::aborted(Replaced.to_string())), None));
                        }
                        () = stop.cancelled() => return None,
                        reports = driver.take() => batch = reports.into_iter(),
                        () = closed.cancelled() => return failed.get().map(|s: &Status| (Err(s.clone()), None)),
                    }
                }
            }
        });
        Ok(Response::new(Bounded::new("Probe.Drive", reports)))
    }

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let wire::WatchRequest { uid, resume, .. } = request.into_inner();
        let observer = Observer::new(self.prober.clone(), uid, resume);
        let events = futures::stream::unfold(observer, |mut observer| async move {
            let event = observer.next().await;
            Some((Ok(event), observer))
        });
        let events = events.take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Bounded::new("Probe.Watch", events)))
    }
}

/// One Watch stream and its position in the evaluations.
struct Observer {
    prober: Prober,
    /// The pod to report; all pods if empty.
    uid: String,
    last: watch::Receiver<u64>,
    at: u64,
    /// Events to send before evaluations.
    first: VecDeque<Event>,
}

impl Observer {
    fn new(prober: Prober, uid: String, resume: Option<wire::Cursor>) -> Self {
        let last = prober.evaluations().last();
        let mut first = VecDeque::from([Event::Hello(quintlet_proto::hello())]);
        let at = match prober.evaluations().start(resume) {
            Start::After(at) => at,
            Start::Resync(at, reason) => {
                first.push_back(Event::Resync(wire::Resync { reason: reason.to_owned() }));
                at
            }
        };
        Self { prober, uid, last, at, first }
    }

    async fn next(&mut self) -> wire::WatchEvent {
        let event = loop {
            if let Some(first) = self.first.pop_front() {
                break first;
            }
            self.last.mark_unchanged();
            match self.prober.evaluations().after(self.at) {
                NextEvaluation::Evaluation(at, evaluation) => {
                    self.at = at;
                    if self.uid.is_empty() || evaluation.uid == self.uid {
                        break Event::Evaluation(wire::Evaluation::clone(&evaluation));
                    }
                }
                NextEvaluation::Missed(count, at) => {
                    self.at = at;
                    self.prober.count_missed(count);
                    break Event::Missed(wire::Missed { count });
                }
                // The sender exists as long as the prober.
                NextEvaluation::End => {
                    let _ = self.last.changed().await;
                }
            }
        };
        let cursor = Some(self.prober.evaluations().cursor(self.at));
        wire::WatchEvent { event: Some(event), cursor, trace: None }
    }
}

/// Applies the driver's requests until they end or another driver replaces it.
///
/// # Errors
/// Fails if a request cannot be read, or the driver is incompatible. The driver receives the error.
async fn receive_requests(
    prober: Prober,
    driver: Arc<Mailbox>,
    peer: Arc<Neighbour>,
    mut requests: Streaming<wire::DriveRequest>,
) -> Result<(), Status> {
    let mut wanted = HashSet::new();
    let ended = loop {
        // A dropped read loses at most a request of a driver that is replaced.
        let request = tokio::select! {
            () = driver.replaced.cancelled() => break Ok(()),
            request = requests.message() => request,
        };
        match request {
            Ok(Some(request)) => {
                if let Some(DriveCommand::Hello(hello)) = &request.request
                    && let Err(refusal) = peer.greeted(hello)
                {
                    break Err(refusal);
                }
                if apply_request(&prober, &driver, &mut wanted, request).is_err() {
                    break Ok(());
                }
            }
            Ok(None) => break Ok(()),
            Err(status) => {
                tracing::info!(error = %error_chain(&status), "driver disconnected, probing continues");
                break Err(status);
            }
        }
    };
    prober.detach(&driver);
    ended
}

/// Applies one request. A request that is invalid is logged and ignored.
fn apply_request(
    prober: &Prober,
    driver: &Arc<Mailbox>,
    wanted: &mut HashSet<quintlet_model::ids::PodUid>,
    request: wire::DriveRequest,
) -> Result<(), Replaced> {
    let wire::DriveRequest { request, trace } = request;
    let uid = match &request {
        Some(DriveCommand::Target(wire::PodTarget { uid, .. })) => convert::uid(uid),
        Some(DriveCommand::Remove(wire::RemovePod { uid, .. })) => convert::uid(uid),
        Some(DriveCommand::Release(wire::ReleasePod { uid, .. })) => convert::uid(uid),
        Some(DriveCommand::Complete(_)) => return prober.complete(driver, wanted),
        Some(DriveCommand::Hello(hello)) => {
            tracing::info!(build = hello.build, schema = hello.schema, "driver connected");
            return Ok(());
        }
        None => {
            tracing::warn!("unknown driver request ignored");
            return Ok(());
        }
    };
    let uid = match uid {
        Ok(uid) => uid,
        Err(error) => {
            tracing::warn!(error = %error_chain(&error), "invalid driver request ignored");
            return Ok(());
        }
    };
    match request {
        Some(DriveCommand::Target(target)) => {
            // A pod with an invalid target still exists.
            wanted.insert(uid.clone());
            match convert::pod(target) {
                Ok(pod) => prober.set(driver, pod, trace.as_ref()),
                Err(error) => {
                    tracing::warn!(pod.uid = %uid, error = %error_chain(&error), "invalid target ignored");
                    Ok(())
                }
            }
        }
        Some(DriveCommand::Remove(remove)) => {
            wanted.remove(&uid);
            prober.remove(driver, &uid, remove.generation)
        }
        Some(DriveCommand::Release(release)) => {
            wanted.remove(&uid);
            prober.release(driver, &uid, release.generation)
        }
        Some(DriveCommand::Complete(_) | DriveCommand::Hello(_)) | None => Ok(()),
    }
}
