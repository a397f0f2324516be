//! The contract pleg.v1.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _};
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::Cursor;
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::lifecycle_event::Event as LifecycleOneof;
use quintlet_proto::pleg::v1::pleg_server::Pleg;
use quintlet_proto::pleg::v1::watch_event::Event;
use quintlet_telemetry::propagate;
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::core::{Core, LifecycleChange, Nomination};
use crate::entry::ChangeKind;
use crate::health;
use crate::store::{Latest, Next};

/// The service; clones share everything.
#[derive(Clone)]
pub struct PlegService {
    core: Arc<Core>,
    /// Ends the streams, so that a stop does not wait for readers.
    stop: CancellationToken,
}

impl PlegService {
    pub(crate) fn new(core: Arc<Core>, stop: CancellationToken) -> Self {
        Self { core, stop }
    }
}

/// One Watch: a place in the changes, and what is on its way out.
struct Watcher {
    core: Arc<Core>,
    revs: watch::Receiver<u64>,
    primed: watch::Receiver<bool>,
    /// Sent so far; None before the first snapshot or resumption.
    at: Option<u64>,
    resume: Option<Cursor>,
    out: VecDeque<pb::WatchEvent>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.core.metrics.watchers.dec();
    }
}

fn message(event: Event, cursor: Option<Cursor>) -> pb::WatchEvent {
    pb::WatchEvent { event: Some(event), cursor: cursor.map(Into::into), trace: None }
}

fn change(epoch: u64, latest: Latest) -> pb::WatchEvent {
    let event = match &latest.pod {
        Some(pod) => Event::Pod(pod.as_ref().into()),
        None => Event::Gone(pb::PodGone { uid: latest.uid.to_string() }),
    };
    let cursor = Some(Cursor { epoch, rev: latest.rev }.into());
    pb::WatchEvent { event: Some(event), cursor, trace: latest.trace }
}

impl Watcher {
    fn new(core: Arc<Core>, resume: Option<Cursor>) -> Self {
        core.metrics.watchers.inc();
        let (revs, primed) = (core.store.revs(), core.store.primed());
        let hello = message(Event::Hello(quintlet_proto::hello()), None);
        Self { core, revs, primed, at: None, resume, out: VecDeque::from([hello]) }
    }

    /// Everything there is, as of now. Positions count from its end on: half a picture cannot be resumed.
    fn snapshot(&mut self) {
        let (pods, cursor) = self.core.store.snapshot();
        self.out.push_back(message(Event::SnapshotBegin(pb::SnapshotBegin {}), None));
        self.out.extend(pods.into_iter().map(|l| pb::WatchEvent { cursor: None, ..change(cursor.epoch, l) }));
        self.out.push_back(message(Event::SnapshotEnd(pb::SnapshotEnd {}), Some(cursor)));
        self.at = Some(cursor.rev);
    }

    fn resync(&mut self, reason: &str) {
        self.core.metrics.resyncs.inc();
        self.out.push_back(message(Event::Resync(pb::Resync { reason: reason.to_owned() }), None));
        self.snapshot();
    }

    fn begin(&mut self) {
        match self.resume.take() {
            None => self.snapshot(),
            Some(cursor) => match self.core.store.resumable(cursor) {
                Ok(()) => self.at = Some(cursor.rev),
                Err(reason) => self.resync(reason),
            },
        }
    }

    async fn next(&mut self) -> pb::WatchEvent {
        loop {
            if let Some(event) = self.out.pop_front() {
                return event;
            }
            let beat = tokio::time::sleep(self.core.periods.beat);
            let Some(at) = self.at else {
                // An empty table is no answer before the first full list.
                tokio::select! {
                    // Dropping a wait loses nothing.
                    ready = self.primed.wait_for(|p| *p) => {
                        let _ = ready;
                    }
                    () = beat => return message(Event::Beat(pb::Beat {}), None),
                }
                self.begin();
                continue;
            };
            self.revs.mark_unchanged();
            match self.core.store.next_after(at) {
                Next::Change(latest) => {
                    self.at = Some(latest.rev);
                    return change(self.core.store.epoch(), latest);
                }
                Next::Lost => self.resync("this reader was too slow"),
                Next::End => tokio::select! {
                    // Dropping a wait loses nothing.
                    changed = self.revs.changed() => {
                        let _ = changed;
                    }
                    () = beat => {
                        let cursor = Cursor { epoch: self.core.store.epoch(), rev: at };
                        return message(Event::Beat(pb::Beat {}), Some(cursor));
                    }
                },
            }
        }
    }
}

fn lifecycle(change: &LifecycleChange) -> pb::LifecycleEvent {
    let kind = match change.kind {
        ChangeKind::Started => pb::LifecycleKind::Started,
        ChangeKind::Died => pb::LifecycleKind::Died,
        ChangeKind::Removed => pb::LifecycleKind::Removed,
        ChangeKind::Changed => pb::LifecycleKind::Changed,
    };
    let event = pb::Lifecycle {
        kind: kind as i32,
        uid: change.pod.uid.to_string(),
        pod_name: change.pod.name.to_string(),
        pod_namespace: change.pod.namespace.to_string(),
        id: change.id.clone(),
        container: change.container.clone(),
        exit_code: change.exit_code,
        at_unix_ns: i64::try_from(change.at.as_nanosecond()).unwrap_or(0),
    };
    pb::LifecycleEvent {
        event: Some(LifecycleOneof::Lifecycle(event)),
        cursor: Some(change.cursor.into()),
        trace: change.trace.clone(),
    }
}

fn lifecycle_stream(
    core: Arc<Core>,
    uid: Option<PodUid>,
) -> impl Stream<Item = Result<pb::LifecycleEvent, Status>> + Send {
    let from = core.lifecycle.subscribe();
    let hello = pb::LifecycleEvent {
        event: Some(LifecycleOneof::Hello(quintlet_proto::hello())),
        cursor: Some(core.store.cursor().into()),
        trace: None,
    };
    futures::stream::unfold((core, uid, from, Some(hello)), |(core, uid, mut from, hello)| async move {
        if let Some(hello) = hello {
            return Some((Ok(hello), (core, uid, from, None)));
        }
        loop {
            let event = match from.recv().await {
                Ok(change) if uid.as_ref().is_none_or(|uid| *uid == change.pod.uid) => lifecycle(&change),
                Ok(_) => continue,
                Err(broadcast::error::RecvError::Lagged(count)) => {
                    core.metrics.lifecycle_missed.inc_by(count);
                    let missed = LifecycleOneof::Missed(pb::Missed { count });
                    pb::LifecycleEvent { event: Some(missed), cursor: None, trace: None }
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            };
            return Some((Ok(event), (core, uid, from, None)));
        }
    })
}

fn pod_uid(text: &str) -> Result<PodUid, Status> {
    PodUid::parse(text).map_err(|e| Status::invalid_argument(format!("uid: {e}")))
}

#[tonic::async_trait]
impl Pleg for PlegService {
    type WatchStream = BoxStream<'static, Result<pb::WatchEvent, Status>>;
    type LifecycleStream = BoxStream<'static, Result<pb::LifecycleEvent, Status>>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let resume = request.into_inner().resume.map(Cursor::from);
        let watcher = Watcher::new(Arc::clone(&self.core), resume);
        let stream = futures::stream::unfold(watcher, |mut watcher| async move {
            let event = watcher.next().await;
            Some((Ok(event), watcher))
        });
        Ok(Response::new(stream.take_until(self.stop.clone().cancelled_owned()).boxed()))
    }

    async fn observe(
        &self,
        request: Request<pb::ObserveRequest>,
    ) -> Result<Response<pb::ObserveReply>, Status> {
        let span = tracing::info_span!("Observe", pod.uid = request.get_ref().uid);
        propagate::set_parent(&span, request.metadata());
        let request = request.into_inner();
        async move {
            let uid = pod_uid(&request.uid)?;
            // What is known of the pod by its ids is as good as a list of it.
            let knows = !(request.sandboxes.is_empty() && request.containers.is_empty());
            let complete = knows && !request.full;
            let nomination = Nomination {
                sandboxes: request.sandboxes.into_iter().filter(|id| !id.is_empty()).collect(),
                containers: request
                    .containers
                    .into_iter()
                    .filter(|c| !c.id.is_empty())
                    .map(|c| (c.id, c.sandbox_id))
                    .collect(),
                complete,
                ids: request.ids.into_iter().filter(|id| !id.is_empty()).collect(),
                // Before the first full list nothing is known that could stand in for a list.
                list: request.full || !self.core.store.is_primed(),
                trace: propagate::current_trace(),
                ..Nomination::default()
            };
            let answer = self.core.inspect(&uid, nomination).await;
            match answer {
                Ok(Ok((pod, cursor))) => Ok(Response::new(pb::ObserveReply {
                    pod: pod.map(|p| p.as_ref().into()),
                    cursor: Some(cursor.into()),
                })),
                Ok(Err(error)) => Err(Status::unavailable(error.to_string())),
                Err(_) => Err(Status::unavailable("the service is stopping")),
            }
        }
        .instrument(span)
        .await
    }

    async fn lifecycle(
        &self,
        request: Request<pb::LifecycleRequest>,
    ) -> Result<Response<Self::LifecycleStream>, Status> {
        let uid = request.into_inner().uid;
        let uid = if uid.is_empty() { None } else { Some(pod_uid(&uid)?) };
        let stream = lifecycle_stream(Arc::clone(&self.core), uid);
        Ok(Response::new(stream.take_until(self.stop.clone().cancelled_owned()).boxed()))
    }

    async fn health(&self, _: Request<pb::HealthRequest>) -> Result<Response<pb::HealthReply>, Status> {
        let age = self.core.last_list_age();
        let problem = health::problem(age, self.core.periods.threshold);
        let hints = *self.core.hints.borrow();
        Ok(Response::new(pb::HealthReply {
            healthy: problem.is_none(),
            message: problem.unwrap_or_default(),
            last_list_age_seconds: age.map(|a: Duration| a.as_secs_f64()),
            hint_source: hints.source.to_owned(),
            hints_live: hints.live,
            relist_period_seconds: self.core.relist_period().as_secs_f64(),
            epoch: self.core.store.epoch(),
            pods: u32::try_from(self.core.store.len()).unwrap_or(u32::MAX),
        }))
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use quintlet_kit::clock::Clock;
    use quintlet_model::ids::PodRef;
    use quintlet_model::runtime::{Container, Sandbox};

    use super::*;
    use crate::core::Periods;
    use crate::seams::{ContainerRuntime, Filter, ListedContainer, ListedSandbox, ReadError};

    struct Nothing;

    #[async_trait]
    impl ContainerRuntime for Nothing {
        async fn sandboxes(&self, _: Filter) -> Result<Vec<ListedSandbox>, ReadError> {
            Ok(Vec::new())
        }
        async fn containers(&self, _: Filter) -> Result<Vec<ListedContainer>, ReadError> {
            Ok(Vec::new())
        }
        async fn sandbox(&self, _: &str) -> Result<Option<(PodRef, Sandbox)>, ReadError> {
            Ok(None)
        }
        async fn container(&self, _: &str, _: &str) -> Result<Option<Container>, ReadError> {
            Ok(None)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_lifecycle_reader_is_told_how_much_it_missed() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1));
        let core = Core::new(Arc::new(Nothing), clock, Periods::default());
        let mut events = std::pin::pin!(lifecycle_stream(Arc::clone(&core), None));
        let pod =
            PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() };
        for n in 0..2000 {
            let change = LifecycleChange {
                kind: ChangeKind::Died,
                pod: pod.clone(),
                id: n.to_string(),
                container: String::new(),
                exit_code: 0,
                at: jiff::Timestamp::UNIX_EPOCH,
                cursor: Cursor::default(),
                trace: None,
            };
            core.lifecycle.send(Arc::new(change)).unwrap();
        }
        let (mut missed, mut seen) = (0, Vec::new());
        while missed + seen.len() as u64 != 2000 {
            match events.next().await.unwrap().unwrap().event.unwrap() {
                LifecycleOneof::Hello(_) => {}
                LifecycleOneof::Missed(m) => missed += m.count,
                LifecycleOneof::Lifecycle(e) => seen.push(e.id.parse::<u64>().unwrap()),
            }
        }
        assert!(missed > 0 && seen.is_sorted() && seen.last() == Some(&1999), "{missed}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_falls_behind_the_tombstones_is_resynced() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1));
        let core = Core::new(Arc::new(Nothing), clock, Periods::default());
        core.store.set_primed();
        let mut watcher = Watcher::new(Arc::clone(&core), None);
        while !matches!(watcher.next().await.event, Some(Event::SnapshotEnd(_))) {}
        for n in 0..=crate::store::TOMBSTONES {
            let uid = PodUid::parse(&format!("u{n}")).unwrap();
            let pod = PodRef { uid: uid.clone(), namespace: "default".into(), name: "web".into() };
            let pod = quintlet_model::runtime::PodRuntime::empty(pod, Cursor::default(), Duration::ZERO);
            core.store.publish(pod, None);
            core.store.remove(&uid, None);
        }
        assert!(matches!(watcher.next().await.event, Some(Event::Resync(_))));
        assert!(matches!(watcher.next().await.event, Some(Event::SnapshotBegin(_))));
        let end = watcher.next().await;
        assert!(matches!(end.event, Some(Event::SnapshotEnd(_))));
        assert_eq!(Cursor::from(end.cursor.unwrap()), core.store.cursor());
    }
}
