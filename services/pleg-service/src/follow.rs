//! A follower: it reads the Watch of another pleg-service, the leader, and serves it to readers of its own.
//!
//! A follower makes no inspections. Epoch, revisions and cursors are the leader's, so that a reader can
//! switch between instances with its cursor. One task copies the leader's Watch into the store and waits for
//! no reader. While the leader is unavailable the store stays unchanged: readers keep their streams, and
//! health is NOT_SERVING. A restarted leader has a new epoch; readers get its snapshot as a Resync.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use parking_lot::Mutex;
use quintlet_kit::messages::Bounded;
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::server::HealthHandle;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_kit::stack::Caller;
use quintlet_model::convert::pod_runtime;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{Cursor, PodRuntime};
use quintlet_proto::common::v1::Trace;
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::pleg_server::Pleg;
use quintlet_proto::pleg::v1::watch_event::Event;
use quintlet_telemetry::propagate;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::SERVICE;
use crate::cri::placed;
use crate::entry::changes;
use crate::metrics::FollowerMetrics;
use crate::readers::Readers;
use crate::server::parsed_uid;

/// Pause after an invalid message, since the next snapshot most likely has it, too.
const RETRY: Duration = Duration::from_secs(1);
/// A leader that sends nothing for three beats is unavailable.
const SILENCE: Duration = Duration::from_secs(15);
/// Limit of a call for the leader's health.
const HEALTH_LIMIT: Duration = Duration::from_secs(2);

type Leader = PlegClient<Caller<Channel>>;

/// State of the connection to the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Link {
    /// The store follows the leader.
    Current,
    /// The leader is unavailable, for the given reason.
    Away(String),
}

/// Reason why the leader's stream ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("{}", .0.message())]
    Stream(Status),
    #[error("no message from the leader within {SILENCE:?}")]
    Silent,
    /// The leader is refused, which `peer` has logged.
    #[error("{}", .0.message())]
    Refused(Status),
    /// A message is invalid.
    #[error("{0}")]
    Data(String),
}

/// The gRPC service of a follower. Clones share it.
#[derive(Clone)]
pub struct Follower {
    socket: Arc<Path>,
    leader: Leader,
    peer: Arc<Neighbour>,
    readers: Readers,
    metrics: FollowerMetrics,
    link: watch::Sender<Link>,
    /// The leader's last health reply, with its time.
    last: Arc<Mutex<Option<(pb::HealthReply, Instant)>>>,
    stop: CancellationToken,
}

/// A snapshot that is being received.
type Snapshot = Vec<(PodRuntime, Option<Trace>)>;

impl Follower {
    pub(crate) fn new(socket: PathBuf, readers: Readers, stop: CancellationToken) -> Self {
        let leader = PlegClient::new(quintlet_kit::socket::caller(socket.clone()));
        Self {
            socket: socket.into(),
            leader,
            peer: Arc::new(Neighbour::new("pleg-service (the leader)", &[])),
            readers,
            metrics: FollowerMetrics::new(),
            link: watch::Sender::new(Link::Away("not connected yet".to_owned())),
            last: Arc::default(),
            stop,
        }
    }

    /// Reads the leader's Watch, and reconnects. Never returns.
    pub(crate) async fn run(self) {
        let mut is_reported = false;
        loop {
            let Err(end) = self.read().await;
            self.metrics.connected.set(0);
            if is_reported {
                tracing::debug!(leader = %self.socket.display(), error = %end, "leader unavailable");
            }
            let was_current = self.set(Link::Away(end.to_string()));
            if (was_current || !is_reported) && !matches!(end, End::Refused(_)) {
                tracing::warn!(leader = %self.socket.display(), error = %end, "leader unavailable");
                is_reported = true;
            }
            let pause = if matches!(end, End::Data(_)) { RETRY } else { CONNECT_INTERVAL };
            tokio::time::sleep(self.peer.next_wait(pause)).await;
        }
    }

    /// Sets the state of the connection. Returns whether the store followed the leader until now.
    fn set(&self, link: Link) -> bool {
        self.link.send_replace(link) == Link::Current
    }

    fn set_current(&self) {
        self.metrics.connected.set(1);
        if !self.set(Link::Current) {
            let cursor = self.readers.store.cursor();
            tracing::info!(leader = %self.socket.display(), epoch = cursor.epoch, rev = cursor.rev, "following leader");
        }
    }

    async fn read(&self) -> Result<std::convert::Infallible, End> {
        let store = &self.readers.store;
        let resume = store.is_primed().then(|| store.cursor());
        let request =
            pb::WatchRequest { hello: Some(quintlet_proto::hello()), resume: resume.map(Into::into) };
        let away = |status| End::Stream(placed(status, &self.socket));
        let mut stream = self.leader.clone().watch(request).await.map_err(away)?.into_inner();
        self.metrics.connects.inc();
        let mut picture: Option<Snapshot> = None;
        loop {
            let next = tokio::time::timeout(SILENCE, stream.message()).await.map_err(|_| End::Silent)?;
            let event =
                next.map_err(away)?.ok_or_else(|| End::Stream(Status::unavailable("it ended the stream")))?;
            let cursor = event.cursor.map(Cursor::from);
            match event.event {
                Some(Event::Hello(hello)) => {
                    self.peer.greeted(&hello).map_err(End::Refused)?;
                    // A leader with the same epoch resumes at the cursor; another one sends a snapshot.
                    if let Some(resume) = resume
                        && self.ask_health().await.is_ok_and(|h| h.epoch == resume.epoch)
                    {
                        self.set_current();
                    }
                }
                Some(Event::Resync(why)) => {
                    self.set(Link::Away(format!("its picture is on the way: {}", why.reason)));
                }
                Some(Event::SnapshotBegin(_)) => picture = Some(Vec::new()),
                Some(Event::Pod(record)) => {
                    let at = cursor.unwrap_or(store.cursor());
                    let uid = record.uid.clone();
                    let pod = pod_runtime(record, at.epoch)
                        .map_err(|e| End::Data(format!("its record of pod {uid:?}: {e}")))?;
                    match &mut picture {
                        Some(picture) => picture.push((pod, event.trace)),
                        None => self.take(pod, event.trace)?,
                    }
                }
                Some(Event::Gone(gone)) => {
                    let uid = PodUid::parse(&gone.uid).map_err(|e| End::Data(format!("gone.uid: {e}")))?;
                    let at = cursor.ok_or_else(|| End::Data("a change without a cursor".to_owned()))?;
                    self.take_gone(&uid, at, event.trace);
                }
                Some(Event::SnapshotEnd(_)) => {
                    let at = cursor.ok_or_else(|| End::Data("a picture without a cursor".to_owned()))?;
                    let pods =
                        picture.take().ok_or_else(|| End::Data("a picture without a begin".to_owned()))?;
                    self.take_picture(pods, at);
                    self.set_current();
                }
                Some(Event::Beat(_)) => store.note_beat(),
                None => return Err(End::Data("an event of a later version".to_owned())),
            }
        }
    }

    fn take(&self, pod: PodRuntime, trace: Option<Trace>) -> Result<(), End> {
        let store = &self.readers.store;
        let (at, names) = (pod.cursor, pod.pod.clone());
        if at <= store.cursor() {
            return Err(End::Data(format!("revision {} after {}", at.rev, store.cursor().rev)));
        }
        let old = store.get(&names.uid);
        let changed = changes(old.as_deref(), Some(&pod));
        store.follow(pod, trace.clone());
        self.readers.announce(changed, &names, at, trace.as_ref());
        Ok(())
    }

    fn take_gone(&self, uid: &PodUid, at: Cursor, trace: Option<Trace>) {
        let store = &self.readers.store;
        let old = store.get(uid);
        store.follow_gone(uid, at.rev, trace.clone());
        if let Some(old) = old {
            self.readers.announce(changes(Some(&old), None), &old.pod, at, trace.as_ref());
        }
    }

    fn take_picture(&self, pods: Snapshot, at: Cursor) {
        let store = &self.readers.store;
        let old = store.pods();
        let epoch = |mut pod: PodRuntime| {
            pod.cursor.epoch = at.epoch;
            pod
        };
        store.replace(at, pods.into_iter().map(|(pod, trace)| (epoch(pod), trace)).collect());
        for new in store.pods() {
            let before = old.iter().find(|o| o.pod.uid == new.pod.uid);
            let changed = changes(before.map(AsRef::as_ref), Some(&new));
            self.readers.announce(changed, &new.pod, at, None);
        }
        for gone in old.iter().filter(|o| store.get(&o.pod.uid).is_none()) {
            self.readers.announce(changes(Some(gone), None), &gone.pod, at, None);
        }
        store.set_primed();
    }

    async fn ask_health(&self) -> Result<pb::HealthReply, Status> {
        let mut leader = self.leader.clone();
        let health = leader.health(pb::HealthRequest {});
        let reply = match tokio::time::timeout(HEALTH_LIMIT, health).await {
            Ok(reply) => reply.map_err(|e| placed(e, &self.socket))?.into_inner(),
            Err(_) => return Err(Status::unavailable(format!("no answer within {HEALTH_LIMIT:?}"))),
        };
        *self.last.lock() = Some((reply.clone(), Instant::now()));
        Ok(reply)
    }

    /// Sets SERVING while the store follows the leader.
    pub(crate) async fn report_health(self, health: HealthHandle) {
        let mut link = self.link.subscribe();
        loop {
            let current = *link.borrow_and_update() == Link::Current;
            for name in ["", SERVICE] {
                if current {
                    health.set_serving(name).await;
                } else {
                    health.set_not_serving(name).await;
                }
            }
            if link.changed().await.is_err() {
                return;
            }
        }
    }
}

#[tonic::async_trait]
impl Pleg for Follower {
    type WatchStream = Bounded<pb::WatchEvent>;
    type LifecycleStream = Bounded<pb::LifecycleEvent>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let resume = request.into_inner().resume.map(Cursor::from);
        let stream = self.readers.watch(resume).take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Bounded::new("Pleg.Watch", stream)))
    }

    /// Forwards the call, since only the leader inspects.
    async fn observe(
        &self,
        request: Request<pb::ObserveRequest>,
    ) -> Result<Response<pb::ObserveReply>, Status> {
        let span = tracing::info_span!("Observe", k8s.pod.uid = request.get_ref().uid, forwarded = true);
        let mut leader = self.leader.clone();
        let health = async move { leader.observe(request.into_inner()).await };
        let answer = health.instrument(span.clone()).await.map_err(|e| placed(e, &self.socket));
        propagate::record_status(&span, &answer);
        Ok(Response::new(answer?.into_inner()))
    }

    async fn lifecycle(
        &self,
        request: Request<pb::LifecycleRequest>,
    ) -> Result<Response<Self::LifecycleStream>, Status> {
        let uid = parsed_uid(&request.into_inner().uid)?;
        let stream = self.readers.events(uid).take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Bounded::new("Pleg.Lifecycle", stream)))
    }

    /// Returns the leader's health, with the epoch and the number of pods of this store.
    async fn health(&self, _: Request<pb::HealthRequest>) -> Result<Response<pb::HealthReply>, Status> {
        let health = self.ask_health().await;
        let why = match (&health, &*self.link.borrow()) {
            (Err(error), _) => Some(error.message().to_owned()),
            (Ok(_), Link::Away(why)) => Some(why.clone()),
            (Ok(_), Link::Current) => None,
        };
        let (mut reply, at) =
            self.last.lock().clone().unwrap_or((pb::HealthReply::default(), Instant::now()));
        let later = at.elapsed().as_secs_f64();
        for age in [&mut reply.last_list_age_seconds, &mut reply.oldest_inspection_seconds] {
            *age = age.map(|age| age + later);
        }
        if let Some(why) = why {
            reply.healthy = false;
            reply.message = format!("the leader at {} is away: {why}", self.socket.display());
        }
        reply.epoch = self.readers.store.epoch();
        reply.pods = u32::try_from(self.readers.store.len()).unwrap_or(u32::MAX);
        Ok(Response::new(reply))
    }
}
