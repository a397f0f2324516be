//! pleg-service in-process, on a fake runtime and scripted hints.
#![allow(unreachable_pub, dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use pleg_service::Periods;
use pleg_service::cri::CriRuntime;
use pleg_service::seams::{HintEvent, HintKind, HintStream};
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

type Stream = mpsc::UnboundedSender<Result<HintEvent, Status>>;

/// Hints by script: refused until allowed, then whatever the test sends.
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
        let (to, from) = mpsc::unbounded_channel();
        let _ = to.send(Ok(HintEvent::Source { name: "containerd", live: true }));
        *self.open.lock() = Some(to);
        Ok(tokio_stream::wrappers::UnboundedReceiverStream::new(from).boxed())
    }
}

impl Hints {
    pub fn allow(&self, yes: bool) {
        *self.allowed.lock() = yes;
        if !yes {
            *self.open.lock() = None;
        }
    }

    /// Ends the stream with an error; it may be opened again at once.
    pub fn cut(&self) {
        if let Some(to) = self.open.lock().take() {
            let _ = to.send(Err(Status::unavailable("cut")));
        }
    }

    pub fn event(&self, event: HintEvent) {
        if let Some(to) = &*self.open.lock() {
            let _ = to.send(Ok(event));
        }
    }

    pub fn hint(&self, kind: HintKind, id: &str) {
        self.event(HintEvent::Hint { kind, id: id.to_owned(), pod: None, trace: None });
    }
}

pub struct Bench {
    pub runtime: FakeRuntime,
    pub hints: Hints,
    pub client: PlegClient<Channel>,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
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
        let stop = CancellationToken::new();
        let server = Server::new("pleg-service");
        let service = pleg_service::start(
            Arc::new(CriRuntime::new(runtime.path().to_owned())),
            Arc::new(hints.clone()),
            Clock::system(),
            periods,
            server.health(),
            &stop,
        );
        let socket = dir.path().join("pleg.sock");
        let listener = bind_unix(&socket, 0o600).unwrap();
        tokio::spawn(server.add_service(service).serve(listener, PeerPolicy::Any, stop.clone()));
        Self { runtime, hints, client: PlegClient::new(channel(socket)), stop, _dir: dir }
    }

    pub async fn watch(&self, resume: Option<pb::Cursor>) -> Watch {
        let request = pb::WatchRequest { hello: Some(quintlet_proto::hello()), resume };
        let stream = self.client.clone().watch(request).await.unwrap().into_inner();
        Watch { stream, pods: BTreeMap::new(), cursor: None, log: Vec::new(), picture: None }
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

/// A reader that keeps what it was told, as pod-sync does.
pub struct Watch {
    stream: Streaming<pb::WatchEvent>,
    pub pods: BTreeMap<String, pb::PodRecord>,
    pub cursor: Option<pb::Cursor>,
    /// One word per message.
    pub log: Vec<String>,
    picture: Option<BTreeMap<String, pb::PodRecord>>,
}

impl Watch {
    pub async fn step(&mut self) {
        let event = self.stream.message().await.unwrap().expect("the stream goes on");
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
