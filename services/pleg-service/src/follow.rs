//! A follower: a reader of another pleg-service that serves what it reads to readers of its own.
//!
//! It inspects nothing. Epoch, revisions and places are the leader's, so that a reader may go from one to another with its cursor.
//! One task reads the leader's Watch into the store and waits for no reader. While the leader is away its last picture stays: readers
//! keep their streams and are told of nothing, health says NOT_SERVING. A leader that was restarted has a new epoch; once its picture
//! is in, readers get it as a Resync.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use quintlet_kit::server::HealthHandle;
use quintlet_model::convert::pod_runtime;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{Cursor, PodRuntime};
use quintlet_proto::common::v1::Trace;
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::pleg_server::Pleg;
use quintlet_proto::pleg::v1::watch_event::Event;
use quintlet_telemetry::propagate::{self, PropagatingInterceptor};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::SERVICE;
use crate::cri::placed;
use crate::entry::changes;
use crate::metrics::FollowerMetrics;
use crate::readers::Readers;
use crate::server::{WatchStream, parsed_uid};

/// The largest record taken from the leader: as much as readers of a leader take.
const MAX_MESSAGE: usize = 64 << 20;

/// Pause before the leader is asked again.
const RECONNECT: Duration = Duration::from_millis(100);
/// The same after it sent what cannot be understood: the next picture will most likely be the same.
const RETRY: Duration = Duration::from_secs(1);
/// A leader that is silent for three of its beats is away, whatever its socket says.
const SILENCE: Duration = Duration::from_secs(15);
/// For the leader's word on its own health.
const HEALTH_LIMIT: Duration = Duration::from_secs(2);

type Leader = PlegClient<InterceptedService<Channel, PropagatingInterceptor>>;

/// How it stands with the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Link {
    /// What the store has is what the leader has, but for what is on the way.
    Current,
    /// It is not, and why.
    Away(String),
}

/// Why a reading of the leader's stream ended.
#[derive(Debug, thiserror::Error)]
enum End {
    /// It is away.
    #[error("{}", .0.message())]
    Stream(Status),
    /// It said nothing for too long.
    #[error("nothing came for {SILENCE:?}")]
    Silent,
    /// It sent something else than the contract has.
    #[error("{0}")]
    Data(String),
}

/// The service; clones share everything.
#[derive(Clone)]
pub struct Follower {
    socket: Arc<Path>,
    leader: Leader,
    readers: Readers,
    metrics: FollowerMetrics,
    link: watch::Sender<Link>,
    /// The leader's last word on its health, and when it said so.
    last: Arc<Mutex<Option<(pb::HealthReply, Instant)>>>,
    stop: CancellationToken,
}

/// A picture on its way in.
type Picture = Vec<(PodRuntime, Option<Trace>)>;

impl Follower {
    pub(crate) fn new(socket: PathBuf, readers: Readers, stop: CancellationToken) -> Self {
        let channel = quintlet_kit::socket::channel(socket.clone());
        Self {
            socket: socket.into(),
            leader: PlegClient::with_interceptor(channel, PropagatingInterceptor)
                .max_decoding_message_size(MAX_MESSAGE),
            readers,
            metrics: FollowerMetrics::new(),
            link: watch::Sender::new(Link::Away("not connected yet".to_owned())),
            last: Arc::default(),
            stop,
        }
    }

    /// Reads the leader, again and again. Never ends.
    pub(crate) async fn run(self) {
        let mut told = false;
        loop {
            let Err(end) = self.read().await;
            self.metrics.connected.set(0);
            if told {
                tracing::debug!(leader = %self.socket.display(), error = %end, "the leader is away");
            }
            if self.set(Link::Away(end.to_string())) || !told {
                tracing::warn!(leader = %self.socket.display(), error = %end, "the leader is away");
                told = true;
            }
            let pause = if matches!(end, End::Data(_)) { RETRY } else { RECONNECT };
            tokio::time::sleep(pause).await;
        }
    }

    /// Sets how it stands. True: it was current until now.
    fn set(&self, link: Link) -> bool {
        self.link.send_replace(link) == Link::Current
    }

    fn set_current(&self) {
        self.metrics.connected.set(1);
        if !self.set(Link::Current) {
            let cursor = self.readers.store.cursor();
            tracing::info!(leader = %self.socket.display(), epoch = cursor.epoch, rev = cursor.rev, "following");
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
        let mut picture: Option<Picture> = None;
        loop {
            let next = tokio::time::timeout(SILENCE, stream.message()).await.map_err(|_| End::Silent)?;
            let event =
                next.map_err(away)?.ok_or_else(|| End::Stream(Status::unavailable("it ended the stream")))?;
            let cursor = event.cursor.map(Cursor::from);
            match event.event {
                Some(Event::Hello(_)) => {
                    // The run that has our epoch resumes where we were; of another the picture is awaited.
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

    fn take_picture(&self, pods: Picture, at: Cursor) {
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
        let asked = leader.health(pb::HealthRequest {});
        let reply = match tokio::time::timeout(HEALTH_LIMIT, asked).await {
            Ok(reply) => reply.map_err(|e| placed(e, &self.socket))?.into_inner(),
            Err(_) => return Err(Status::unavailable(format!("no answer within {HEALTH_LIMIT:?}"))),
        };
        *self.last.lock() = Some((reply.clone(), Instant::now()));
        Ok(reply)
    }

    /// SERVING while what is served is what the leader has.
    pub(crate) async fn judge(self, health: HealthHandle) {
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
    type WatchStream = WatchStream;
    type LifecycleStream = BoxStream<'static, Result<pb::LifecycleEvent, Status>>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let resume = request.into_inner().resume.map(Cursor::from);
        let stream = self.readers.watch(resume).take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(stream.boxed()))
    }

    /// Only the leader inspects.
    async fn observe(
        &self,
        request: Request<pb::ObserveRequest>,
    ) -> Result<Response<pb::ObserveReply>, Status> {
        let span = tracing::info_span!("Observe", pod.uid = request.get_ref().uid, forwarded = true);
        propagate::set_parent(&span, request.metadata());
        let mut leader = self.leader.clone();
        let asked = async move { leader.observe(request.into_inner()).await };
        let answer = asked.instrument(span).await.map_err(|e| placed(e, &self.socket))?;
        Ok(Response::new(answer.into_inner()))
    }

    async fn lifecycle(
        &self,
        request: Request<pb::LifecycleRequest>,
    ) -> Result<Response<Self::LifecycleStream>, Status> {
        let uid = parsed_uid(&request.into_inner().uid)?;
        let stream = self.readers.events(uid).take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(stream.boxed()))
    }

    /// The leader's, where it is there; epoch and pods are what is served here.
    async fn health(&self, _: Request<pb::HealthRequest>) -> Result<Response<pb::HealthReply>, Status> {
        let asked = self.ask_health().await;
        let why = match (&asked, &*self.link.borrow()) {
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
