//! Serves `quintlet.status.v1` over gRPC.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use quintlet_kit::error_chain;
use quintlet_kit::messages::Bounded;
use quintlet_kit::neighbour::{Neighbour, is_refusal};
use quintlet_model::ids::PodUid;
use quintlet_proto::status::v1 as wire;
use quintlet_proto::status::v1::report_reply::Reply;
use quintlet_proto::status::v1::report_request::Request as Inbound;
use quintlet_proto::status::v1::status_reporter_server::StatusReporter;
use quintlet_telemetry::propagate;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{Instrument as _, Span, debug, info_span, warn};

use crate::api::{ApiClient, ApiFailure};
use crate::convert;
use crate::events::Occurrence;
use crate::events::recorder::{EventOutcome, Recorder};
use crate::mirror;
use crate::node::volumes::VolumeBoard;
use crate::node::{FactBoard, Facts};
use crate::reporter::Reporter;
use crate::update::{Ack, Stamp, UpdateOutcome};

/// The gRPC service.
pub(crate) struct Service {
    /// Takes statuses of pods.
    pub reporter: Reporter,
    /// Takes events.
    pub events: Recorder,
    /// Takes facts of the node.
    pub facts: FactBoard,
    /// Takes volumes of the node.
    pub volumes: VolumeBoard,
    /// Client for mirror pods; none in standalone mode.
    pub api: Option<ApiClient>,
    /// Name of the node, for mirror pods.
    pub node: String,
    /// The caller of the streams.
    pub caller: Arc<Neighbour>,
    /// Ends the streams at the stop.
    pub stop: CancellationToken,
}

fn reply(reply: Reply) -> wire::ReportReply {
    wire::ReportReply { reply: Some(reply), trace: propagate::current_trace() }
}

impl Service {
    fn api(&self) -> Result<&ApiClient, Status> {
        self.api.as_ref().ok_or_else(|| Status::failed_precondition("there is no API server: standalone"))
    }
}

/// Returns the message unless it is the `Hello` of an incompatible caller.
fn admitted(
    caller: &Neighbour,
    message: Option<wire::ReportRequest>,
) -> Result<Option<wire::ReportRequest>, Status> {
    if let Some(Inbound::Hello(hello)) = message.as_ref().and_then(|message| message.request.as_ref()) {
        caller.greeted(hello)?;
    }
    Ok(message)
}

/// Applies one message. Returns an ack if the message needs no write.
fn take(reporter: &Reporter, message: wire::ReportRequest) -> Option<wire::Ack> {
    match message.request {
        Some(Inbound::Hello(hello)) => {
            debug!(build = %hello.build, schema = hello.schema, "report stream opened");
            None
        }
        Some(Inbound::Update(update)) => {
            let uid = update.uid.clone();
            let epoch = update.owner_epoch;
            let version = update.version;
            match convert::update(update, message.trace) {
                Ok(update) => {
                    reporter.submit(update);
                    None
                }
                Err(error) => {
                    warn!(pod.uid = %uid, why = error.message(), "invalid update ignored");
                    let uid = PodUid::parse(&uid).ok()?;
                    let verdict = UpdateOutcome::Refused(error.message().to_owned());
                    Some(convert::ack(Ack { uid, stamp: Stamp { epoch, version }, verdict }))
                }
            }
        }
        Some(Inbound::Complete(set)) => {
            let uids: HashSet<PodUid> = set.uids.iter().filter_map(|uid| PodUid::parse(uid).ok()).collect();
            reporter.retain(&uids);
            None
        }
        None => {
            warn!("unknown message ignored");
            None
        }
    }
}

fn status(failure: &ApiFailure) -> Status {
    let text = failure.to_string();
    match failure {
        ApiFailure::NotFound(_) => Status::not_found(text),
        ApiFailure::AlreadyExists(_) => Status::already_exists(text),
        ApiFailure::Conflict(_) => Status::aborted(text),
        ApiFailure::Invalid(_) | ApiFailure::Refused(_) | ApiFailure::TooLarge(_) => {
            Status::invalid_argument(text)
        }
        ApiFailure::Denied(_) | ApiFailure::NamespaceEnding(_) => Status::permission_denied(text),
        ApiFailure::TooMany { .. } => Status::resource_exhausted(text),
        ApiFailure::Server(_) | ApiFailure::Unreachable(_) => Status::unavailable(text),
        ApiFailure::Panicked(_) => Status::internal(text),
    }
}

#[tonic::async_trait]
impl StatusReporter for Service {
    type ReportStream = Bounded<wire::ReportReply>;

    async fn report(
        &self,
        request: Request<Streaming<wire::ReportRequest>>,
    ) -> Result<Response<Self::ReportStream>, Status> {
        let mut inbound = request.into_inner();
        let (held, acks) = self.reporter.listen();
        let (reporter, caller) = (self.reporter.clone(), Arc::clone(&self.caller));
        let ended = self.stop.child_token();
        // The queue has acks of invalid updates and the error of the stream: few, so that the reader may wait
        // for room.
        let (unreadable, refusals) = quintlet_kit::queue::channel("status-refusals", 16);
        let closing = ended.clone();
        quintlet_kit::task::spawn("report-stream", async move {
            let _closing = closing.drop_guard();
            loop {
                match inbound.message().await.and_then(|message| admitted(&caller, message)) {
                    Ok(Some(message)) => {
                        if let Some(ack) = take(&reporter, message)
                            && unreadable.send(Ok(ack)).await.is_err()
                        {
                            return;
                        }
                    }
                    Ok(None) => return,
                    Err(error) => {
                        debug!(why = %error_chain(&error), "report stream ended");
                        // The caller receives the error if it is still connected; then the acks end.
                        if unreadable.send(Err(error)).await.is_ok() {
                            unreadable.closed().await;
                        }
                        return;
                    }
                }
            }
        });
        let hello = reply(Reply::Hello(quintlet_proto::hello()));
        let held = held.into_iter().map(|(uid, stamp)| {
            reply(Reply::Held(wire::Held {
                uid: uid.into(),
                owner_epoch: stamp.epoch,
                version: stamp.version,
            }))
        });
        let opening: Vec<_> =
            std::iter::once(hello).chain(held).chain([reply(Reply::HeldEnd(wire::HeldEnd {}))]).collect();
        let acks = ReceiverStream::new(acks).map(convert::ack);
        // A closed receiver of acks ends the stream.
        let acks = acks.map(|ack| Some(Ok(ack))).chain(stream::once(async { None }));
        let refusals = ReceiverStream::new(refusals).map(Some);
        let acks = stream::select(acks, refusals)
            .take_while(|ack| futures::future::ready(ack.is_some()))
            .filter_map(futures::future::ready)
            .map(|ack: Result<wire::Ack, Status>| Ok(reply(Reply::Ack(ack?))))
            .take_until(ended.cancelled_owned());
        let replies = stream::iter(opening).map(Ok).chain(acks);
        Ok(Response::new(Bounded::new("StatusReporter.Report", replies)))
    }

    async fn record_event(
        &self,
        request: Request<wire::RecordEventRequest>,
    ) -> Result<Response<wire::RecordEventReply>, Status> {
        let event = request.into_inner();
        if !matches!(event.r#type.as_str(), "Normal" | "Warning") {
            return Err(Status::invalid_argument("type: neither Normal nor Warning"));
        }
        let span = event_span(&event);
        let occurrence = Occurrence {
            kind: event.kind,
            namespace: if event.namespace.is_empty() {
                String::new()
            } else {
                convert::segment("namespace", event.namespace)?
            },
            name: convert::segment("name", event.name)?,
            uid: event.uid,
            resource_version: event.resource_version,
            field_path: event.field_path,
            event_type: event.r#type,
            reason: event.reason,
            message: event.message,
            annotations: event.annotations.into_iter().collect(),
            at: Some(event.at_unix_ns)
                .filter(|at| *at > 0)
                .and_then(|at| jiff::Timestamp::from_nanosecond(at.into()).ok()),
        };
        match self.events.write(event.id, occurrence).instrument(span.clone()).await {
            EventOutcome::Done => Ok(Response::new(wire::RecordEventReply { queued: true })),
            EventOutcome::QueueFull => {
                propagate::record_error(&span, "the queue of events is full");
                Ok(Response::new(wire::RecordEventReply { queued: false }))
            }
            EventOutcome::Stopped => {
                let status = Status::unavailable("status-reporter is stopping");
                propagate::record_error(&span, status.message());
                Err(status)
            }
        }
    }

    async fn update_node(
        &self,
        request: Request<wire::UpdateNodeRequest>,
    ) -> Result<Response<wire::UpdateNodeReply>, Status> {
        let facts = request.into_inner();
        if facts.source.is_empty() {
            return Err(Status::invalid_argument("source: empty"));
        }
        let facts = Facts {
            node: convert::object("node", &facts.node)?,
            source: facts.source,
            not_ready: facts.not_ready,
            observed: Duration::from_nanos(facts.observed_boottime_ns),
        };
        if let Some(trace) = propagate::continued_trace() {
            self.facts.set_trace(trace.traceparent);
        }
        if !self.facts.put(facts) {
            return Err(Status::resource_exhausted("source: too many sources"));
        }
        Ok(Response::new(wire::UpdateNodeReply { has_api: self.api.is_some() }))
    }

    type NodeVolumesStream = Bounded<wire::NodeVolumesReply>;

    async fn node_volumes(
        &self,
        request: Request<Streaming<wire::NodeVolumesRequest>>,
    ) -> Result<Response<Self::NodeVolumesStream>, Status> {
        // A full channel delays only the next reply, which has the newest state.
        let (replies, receiver) = quintlet_kit::queue::channel("node-volumes-replies", 1);
        let (board, has_api) = (self.volumes.clone(), self.api.is_some());
        let caller = Arc::clone(&self.caller);
        let stream = volumes_stream(board, has_api, caller, request.into_inner(), replies);
        let stop = self.stop.clone();
        quintlet_kit::task::spawn("node-volumes-stream", async move {
            // A dropped stream loses nothing: the caller sends its newest state on the next one.
            tokio::select! {
                () = stream => {}
                () = stop.cancelled() => {}
            }
        });
        Ok(Response::new(Bounded::new("StatusReporter.NodeVolumes", ReceiverStream::new(receiver))))
    }

    async fn ensure_mirror(
        &self,
        request: Request<wire::EnsureMirrorRequest>,
    ) -> Result<Response<wire::EnsureMirrorReply>, Status> {
        let api = self.api()?.clone();
        let pod = convert::object("pod", &request.into_inner().pod)?;
        for field in ["name", "namespace"] {
            let text = pod["metadata"][field].as_str().unwrap_or_default().to_owned();
            convert::segment(&format!("pod.metadata.{field}"), text)?;
        }
        let node = self.node.clone();
        let metadata = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
        let span = mirror_span(metadata("namespace"), metadata("name"));
        // The call continues if its caller disconnects.
        let work = async move { mirror::ensure(&api, &node, &pod).await };
        let work = quintlet_kit::task::spawn("ensure-mirror", work.instrument(span.clone()));
        let made = finished(work.await);
        propagate::record_status(&span, &made);
        let (uid, created) = made?;
        Ok(Response::new(wire::EnsureMirrorReply { uid, created }))
    }

    async fn delete_mirror(
        &self,
        request: Request<wire::DeleteMirrorRequest>,
    ) -> Result<Response<wire::DeleteMirrorReply>, Status> {
        let api = self.api()?.clone();
        let mirror = request.into_inner();
        let namespace = convert::segment("namespace", mirror.namespace)?;
        let name = convert::segment("name", mirror.name)?;
        let uid = convert::segment("uid", mirror.uid)?;
        let span = mirror_span(&namespace, &name);
        let work = async move { mirror::delete(&api, &namespace, &name, &uid).await };
        let work = quintlet_kit::task::spawn("delete-mirror", work.instrument(span.clone()));
        let deleted = finished(work.await);
        propagate::record_status(&span, &deleted);
        let deleted = deleted?;
        Ok(Response::new(wire::DeleteMirrorReply { deleted }))
    }
}

/// Returns the span of the write of an event, in the trace in which the event occurred. Other events have
/// none: they are most events of the node.
fn event_span(event: &wire::RecordEventRequest) -> Span {
    if event.trace.is_none() {
        return Span::none();
    }
    let of_pod = |text| Some(text).filter(|_| event.kind == "Pod");
    let span = info_span!(
        "write event",
        k8s.pod.uid = of_pod(event.uid.as_str()),
        k8s.namespace.name = of_pod(event.namespace.as_str()),
        k8s.pod.name = of_pod(event.name.as_str()),
        reason = event.reason,
    );
    propagate::set_parent(&span, &event.trace);
    span
}

/// Returns the span of the write of a mirror pod. A call without a trace, such as a retry, has none.
fn mirror_span(namespace: &str, name: &str) -> Span {
    if propagate::continued_trace().is_none() {
        return Span::none();
    }
    info_span!("write mirror pod", k8s.namespace.name = namespace, k8s.pod.name = name)
}

/// Serves one stream until the caller closes it or sends an invalid request.
async fn volumes_stream(
    board: VolumeBoard,
    has_api: bool,
    caller: Arc<Neighbour>,
    mut inbound: Streaming<wire::NodeVolumesRequest>,
    replies: tokio::sync::mpsc::Sender<Result<wire::NodeVolumesReply, Status>>,
) {
    let mut nodes = board.nodes();
    // Number and generation of the newest request of this stream.
    let mut newest = None::<(u64, u64)>;
    let mut sent = None;
    loop {
        let mut reply =
            nodes.borrow_and_update().as_ref().map_or_else(Default::default, convert::node_volumes);
        let written = nodes.borrow().as_ref().and_then(|seen| seen.written);
        reply.generation = newest.filter(|(number, _)| Some(*number) == written).map_or(0, |(_, own)| own);
        reply.has_api = has_api;
        if sent.as_ref() != Some(&reply) {
            let hello = sent.is_none().then(quintlet_proto::hello);
            let message = wire::NodeVolumesReply { hello, ..reply.clone() };
            if replies.send(Ok(message)).await.is_err() {
                return;
            }
            sent = Some(reply);
        }
        // Each branch only changes what the next reply is made of, and a dropped `message` loses no message.
        tokio::select! {
            message = inbound.message() => match message {
                Ok(Some(request)) => {
                    let generation = request.generation;
                    let admitted = request.hello.as_ref().map_or(Ok(()), |hello| caller.greeted(hello));
                    match admitted.and_then(|()| convert::volumes(request)) {
                        Ok(volumes) => newest = Some((board.put(volumes), generation)),
                        Err(error) => {
                            // A refused caller is logged where it greets.
                            if !is_refusal(&error) {
                                warn!(why = error.message(), "invalid volumes of the node refused");
                            }
                            // The receiver may have been dropped; that is not an error.
                            let _ = replies.send(Err(error)).await;
                            return;
                        }
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    debug!(why = %error_chain(&error), "node volumes stream ended");
                    // A corrupt request ends the stream with an error. The receiver may have been dropped.
                    let _ = replies.send(Err(error)).await;
                    return;
                }
            },
            // The board has a sender of the channel.
            Ok(()) = nodes.changed() => {}
        }
    }
}

fn finished<T>(work: Result<Result<T, ApiFailure>, tokio::task::JoinError>) -> Result<T, Status> {
    match work {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(failure)) => Err(status(&failure)),
        Err(_) => Err(Status::internal("the task ended early")),
    }
}
