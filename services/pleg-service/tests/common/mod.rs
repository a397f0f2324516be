//! pleg-service in this process, with a fake runtime and scripted hints.
#![allow(unreachable_pub, dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use pleg_service::Periods;
use pleg_service::cri::CriRuntime;
use pleg_service::traits::{HintEvent, HintKind, HintStream};
use quintlet_kit::clock::Clock;
use quintlet_kit::server::Server;
use quintlet_kit::socket::{PeerPolicy, bind_unix, channel};
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::watch_event::Event;
use quintlet_testkit::fake_runtime::{FakeRuntime, Options};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

type Stream = mpsc::UnboundedSender<Result<HintEvent, Status>>;

/// A scripted source of hints: connections are refused until they are allowed.
#[derive(Clone, Default)]
pub struct Hints {
    allowed: Arc<Mutex<bool>>,
    open: Arc<Mutex<Option<Stream>>>,
}

#[async_trait::async_trait]
impl HintStream for Hints {
    async fn open(&self) -> Result<BoxStream<'static, Result<HintEvent, Status>>, Status> {
        if !*self.allowed.lock() {
            return Err(Status::unavailable("no hints"));
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let _ = sender.send(Ok(HintEvent::Source { name: "containerd", live: true }));
        *self.open.lock() = Some(sender);
        Ok(tokio_stream::wrappers::UnboundedReceiverStream::new(receiver).boxed())
    }
}

impl Hints {
    pub fn allow(&self, yes: bool) {
        *self.allowed.lock() = yes;
        if !yes {
            *self.open.lock() = None;
        }
    }

    /// Ends the stream with an error. It may be opened again at once.
    pub fn cut(&self) {
        if let Some(sender) = self.open.lock().take() {
            let _ = sender.send(Err(Status::unavailable("cut")));
        }
    }

    pub fn event(&self, event: HintEvent) {
        if let Some(sender) = &*self.open.lock() {
            let _ = sender.send(Ok(event));
        }
    }

    pub fn hint(&self, kind: HintKind, id: &str) {
        self.event(HintEvent::Hint { kind, id: id.to_owned(), pod: None, trace: None, at_unix_ns: 0 });
    }
}

pub struct Bench {
    pub runtime: FakeRuntime,
    pub hints: Hints,
    pub client: PlegClient<Channel>,
    pub socket: PathBuf,
    periods: Periods,
    stop: CancellationToken,
    dir: tempfile::TempDir,
}

pub fn options(exit_lag: Duration) -> Options {
    Options { exit_lag, ..Options::silent() }
}

impl Bench {
    pub fn new(options: Options, live: bool, fill: impl FnOnce(&FakeRuntime)) -> Self {
        Self::with(options, live, Periods::default(), fill)
    }

    pub fn with(options: Options, live: bool, periods: Periods, fill: impl FnOnce(&FakeRuntime)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let runtime = FakeRuntime::start(&dir.path().join("runtime.sock"), options).unwrap();
        fill(&runtime);
        let hints = Hints::default();
        hints.allow(live);
        let socket = dir.path().join("pleg.sock");
        let client = PlegClient::new(channel(socket.clone()));
        let mut bench = Self { runtime, hints, client, socket, periods, stop: CancellationToken::new(), dir };
        bench.up();
        bench
    }

    /// Starts another pleg-service in place of one that has stopped.
    pub fn up(&mut self) {
        self.stop = CancellationToken::new();
        let server = Server::new("pleg-service");
        let services = pleg_service::start(
            Arc::new(CriRuntime::new(self.runtime.path().to_owned(), self.periods.call)),
            Arc::new(self.hints.clone()),
            Clock::system(),
            self.periods,
            server.health(),
            &self.stop,
        );
        let listener = bind_unix(&self.socket, 0o600).unwrap();
        tokio::spawn(server.add_service(services.pleg).serve(listener, PeerPolicy::Any, self.stop.clone()));
    }

    pub fn down(&self) {
        self.stop.cancel();
        let _ = std::fs::remove_file(&self.socket);
    }

    /// Starts a follower of the pleg-service at `leader`, which serves at `name`.
    pub fn follower(&self, leader: &Path, name: &str) -> Follower {
        let socket = self.dir.path().join(name);
        let stop = CancellationToken::new();
        let server = Server::new("pleg-service");
        let health = server.health();
        let services =
            pleg_service::start_following(leader.to_owned(), Clock::system(), self.periods, health, &stop);
        let listener = bind_unix(&socket, 0o600).unwrap();
        tokio::spawn(server.add_service(services.pleg).serve(listener, PeerPolicy::Any, stop.clone()));
        let channel = channel(socket.clone());
        Follower { client: PlegClient::new(channel.clone()), check: HealthClient::new(channel), socket, stop }
    }

    /// Returns a connection to the leader that can be interrupted.
    pub fn line(&self) -> Line {
        let path = self.dir.path().join("line.sock");
        let listener = bind_unix(&path, 0o600).unwrap();
        let cut = Arc::new(Mutex::new(CancellationToken::new()));
        let (target, cuts) = (self.socket.clone(), Arc::clone(&cut));
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (target, cut) = (target.clone(), cuts.lock().clone());
                tokio::spawn(cut.run_until_cancelled_owned(async move {
                    if let Ok(mut target) = tokio::net::UnixStream::connect(target).await {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut target).await;
                    }
                }));
            }
        });
        Line { path, cut }
    }

    pub async fn watch(&self, resume: Option<pb::Cursor>) -> Watch {
        Watch::open(&self.client, resume).await
    }

    pub async fn observe(&self, uid: &str, full: bool) -> Result<pb::ObserveReply, Status> {
        let request = pb::ObserveRequest { uid: uid.to_owned(), full, ..Default::default() };
        self.client.clone().observe(request).await.map(tonic::Response::into_inner)
    }

    pub async fn health(&self) -> pb::HealthReply {
        self.client.clone().health(pb::HealthRequest {}).await.unwrap().into_inner()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.stop.cancel();
        self.runtime.down();
    }
}

pub struct Follower {
    pub client: PlegClient<Channel>,
    check: HealthClient<Channel>,
    pub socket: PathBuf,
    stop: CancellationToken,
}

impl Follower {
    pub async fn is_serving(&self) -> bool {
        let reply = self.check.clone().check(HealthCheckRequest::default()).await;
        reply.is_ok_and(|reply| reply.get_ref().status() == ServingStatus::Serving)
    }

    pub async fn wait_serving(&self, yes: bool) {
        let limit = tokio::time::Instant::now() + Duration::from_secs(60);
        while self.is_serving().await != yes {
            assert!(tokio::time::Instant::now() < limit, "not serving={yes} within 60 s");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn health(&self) -> pb::HealthReply {
        self.client.clone().health(pb::HealthRequest {}).await.unwrap().into_inner()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub struct Line {
    pub path: PathBuf,
    cut: Arc<Mutex<CancellationToken>>,
}

impl Line {
    /// Breaks the open connections. New ones are accepted.
    pub fn cut(&self) {
        std::mem::take(&mut *self.cut.lock()).cancel();
    }
}

/// A reader that keeps the received records, as pod-sync does.
pub struct Watch {
    stream: Streaming<pb::WatchEvent>,
    pub pods: BTreeMap<String, pb::PodRecord>,
    pub cursor: Option<pb::Cursor>,
    /// One word per message.
    pub log: Vec<String>,
    /// How often each pod was reported gone.
    pub gone: BTreeMap<String, usize>,
    revs: BTreeMap<String, (u64, u64)>,
    picture: Option<BTreeMap<String, pb::PodRecord>>,
}

impl Watch {
    pub async fn open(client: &PlegClient<Channel>, resume: Option<pb::Cursor>) -> Self {
        let request = pb::WatchRequest { hello: Some(quintlet_proto::hello()), resume };
        let stream = client.clone().watch(request).await.unwrap().into_inner();
        let (pods, revs, gone) = Default::default();
        Self { stream, pods, cursor: resume, log: Vec::new(), picture: None, revs, gone }
    }

    /// Checks that cursors only increase, also per pod: no change is received twice.
    fn check(&mut self, event: &pb::WatchEvent) {
        if matches!(event.event, Some(Event::Resync(_))) {
            // The earlier cursor is invalid.
            self.cursor = None;
        }
        let place = |c: pb::Cursor| (c.epoch, c.rev);
        let (before, now) = (self.cursor.map(place), event.cursor.map(place));
        let grows = matches!(event.event, Some(Event::Pod(_) | Event::Gone(_)));
        if let Some(now) = now {
            assert!(
                before.is_none_or(|b| if grows { now > b } else { now >= b }),
                "{now:?} after {before:?}"
            );
        }
        let (epoch, revision) = match &event.event {
            Some(Event::Pod(pod)) => (now.map_or(0, |n| n.0), (pod.uid.clone(), pod.rev)),
            Some(Event::Gone(gone)) => (now.map_or(0, |n| n.0), (gone.uid.clone(), now.map_or(0, |n| n.1))),
            _ => return,
        };
        if epoch > 0
            && let Some((last, rev)) = self.revs.insert(revision.0.clone(), (epoch, revision.1))
        {
            assert!((epoch, revision.1) > (last, rev), "{revision:?} after {rev} of epoch {last}");
        }
    }

    pub async fn step(&mut self) {
        let event = self.stream.message().await.unwrap().expect("the stream continues");
        self.check(&event);
        self.cursor = event.cursor.or(self.cursor);
        let word = match event.event.expect("an event") {
            Event::Hello(_) => "hello".to_owned(),
            Event::SnapshotBegin(_) => {
                self.picture = Some(BTreeMap::new());
                "begin".to_owned()
            }
            Event::SnapshotEnd(_) => {
                self.pods = self.picture.take().expect("a snapshot began");
                "end".to_owned()
            }
            Event::Pod(pod) => {
                let word = format!("pod {}", pod.uid);
                self.picture.as_mut().unwrap_or(&mut self.pods).insert(pod.uid.clone(), pod);
                word
            }
            Event::Gone(gone) => {
                self.pods.remove(&gone.uid);
                *self.gone.entry(gone.uid.clone()).or_default() += 1;
                format!("gone {}", gone.uid)
            }
            Event::Resync(_) => "resync".to_owned(),
            Event::Beat(_) => "beat".to_owned(),
        };
        self.log.push(word);
    }

    /// Reads until `done`, at most 60 s.
    pub async fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let limit = tokio::time::Instant::now() + Duration::from_secs(60);
        while !done(self) {
            if tokio::time::timeout_at(limit, self.step()).await.is_err() {
                panic!("no {what} within 60 s; seen: {:?}; pods: {:#?}", self.log, self.pods);
            }
        }
    }

    pub async fn snapshot(&mut self) {
        self.until("end of the snapshot", |w| w.log.iter().any(|l| l == "end")).await;
    }

    pub fn state(&self, uid: &str, id: &str) -> Option<pb::ContainerState> {
        self.pods.get(uid)?.containers.iter().find(|c| c.id == id).map(pb::Container::state)
    }
}
