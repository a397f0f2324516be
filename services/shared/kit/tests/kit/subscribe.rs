//! The socket for subscribers: what a client that is not part of Quintlet may send, see and keep.

use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_kit::args::SubscriberArgs;
use quintlet_kit::messages::Bounded;
use quintlet_kit::socket::channel;
use quintlet_kit::subscribe::{Subscribers, serve};
use quintlet_proto::common::v1::Hello;
use quintlet_proto::subscribe::v1::containers_client::ContainersClient;
use quintlet_proto::subscribe::v1::containers_server::{Containers, ContainersServer};
use quintlet_proto::subscribe::v1::watch_containers_event::Event;
use quintlet_proto::subscribe::v1::{WatchContainersEvent, WatchContainersRequest};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

/// Sends a greeting, and nothing after it.
struct Greets(Subscribers);

#[tonic::async_trait]
impl Containers for Greets {
    type WatchStream = Bounded<WatchContainersEvent>;

    async fn watch(
        &self,
        request: Request<WatchContainersRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let subscription = self.0.admit(&request)?;
        let hello = Event::Hello(quintlet_proto::hello());
        let first = futures::stream::iter([WatchContainersEvent { event: Some(hello), cursor: None }]);
        let events = first.chain(futures::stream::pending()).map(move |event| {
            let _ = &subscription;
            Ok(event)
        });
        Ok(Response::new(Bounded::new("Containers.Watch", events)))
    }
}

struct Running {
    path: PathBuf,
    subscribers: Subscribers,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
}

fn start() -> Running {
    let dir = tempfile::tempdir().unwrap();
    let (path, stop) = (dir.path().join("subscribe/kit/subscribe.sock"), CancellationToken::new());
    let uid = nix::unistd::geteuid().as_raw();
    let args = SubscriberArgs { subscriber_uid: vec![uid], ..SubscriberArgs::default() };
    let subscribers = Subscribers::new("kit-test");
    let service = ContainersServer::new(Greets(subscribers.clone()));
    serve(&path, &args, &stop, |server| server.add_service(service));
    Running { path, subscribers, stop, _dir: dir }
}

#[tokio::test]
async fn a_request_is_small() {
    let server = start();
    let mut client = ContainersClient::new(channel(server.path.clone()));
    let request = |bytes: usize| {
        let hello = Hello { build: "x".repeat(bytes), ..Hello::default() };
        WatchContainersRequest { hello: Some(hello), resume: None }
    };
    let refused = client.watch(request(65 << 10)).await.map(drop).unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    let mut events = client.watch(request(60 << 10)).await.unwrap().into_inner();
    assert!(matches!(events.message().await.unwrap().unwrap().event, Some(Event::Hello(_))));
    let mut reflection = ServerReflectionClient::new(channel(server.path.clone()));
    let name = MessageRequest::FileContainingSymbol("x".repeat(65 << 10));
    let large = ServerReflectionRequest { host: String::new(), message_request: Some(name) };
    let answers = reflection.server_reflection_info(futures::stream::iter([large])).await.unwrap();
    // A name that reflection decodes is answered with NOT_FOUND.
    assert!(answers.into_inner().message().await.unwrap().is_none(), "the stream ends at the request");
    server.stop.cancel();
}

#[tokio::test]
async fn a_user_that_opens_idle_connections_alone_has_a_quarter_of_the_places() {
    let server = start();
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(UnixStream::connect(&server.path).await.unwrap());
    }
    // A refused connection is closed at once; the server sends its settings on another one.
    let mut open = Vec::new();
    for mut stream in idle {
        if stream.read_u8().await.is_ok() {
            open.push(stream);
        }
    }
    assert_eq!(open.len(), 32);
    let mut client = ContainersClient::new(channel(server.path.clone()));
    assert!(client.watch(WatchContainersRequest::default()).await.is_err());
    drop(open.pop());
    let mut client = ContainersClient::new(channel(server.path.clone()));
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while let Err(status) = client.watch(WatchContainersRequest::default()).await {
        assert!(tokio::time::Instant::now() < deadline, "the place is not free: {status}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.stop.cancel();
}

#[tokio::test]
async fn reflection_lists_the_service_of_the_socket_alone() {
    let server = start();
    let mut reflection = ServerReflectionClient::new(channel(server.path.clone()));
    let request = |message| ServerReflectionRequest { host: String::new(), message_request: Some(message) };
    let requests = [
        request(MessageRequest::ListServices(String::new())),
        request(MessageRequest::FileContainingSymbol("quintlet.subscribe.v1.Containers".to_owned())),
    ];
    let answers = reflection.server_reflection_info(futures::stream::iter(requests)).await.unwrap();
    let answers: Vec<_> = answers.into_inner().map(|answer| answer.unwrap().message_response).collect().await;
    let [Some(MessageResponse::ListServicesResponse(list)), Some(MessageResponse::FileDescriptorResponse(_))] =
        &answers[..]
    else {
        panic!("{answers:?}");
    };
    let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
    assert_eq!(names, ["quintlet.subscribe.v1.Containers"]);
    server.stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_is_stopped_loses_its_connection_and_its_stream() {
    let server = start();
    let mut client = UnixStream::connect(&server.path).await.unwrap();
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    // An empty SETTINGS frame, as the preface of a client.
    client.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
    let began = tokio::time::Instant::now();
    let mut reads = async || {
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.map(drop)
    };
    // The client answers no ping.
    let closed = tokio::time::timeout(Duration::from_secs(200), reads()).await;
    assert!(closed.is_ok(), "the connection is open after {:?}", began.elapsed());
    assert!(began.elapsed() >= Duration::from_secs(60), "{:?}", began.elapsed());
    server.stop.cancel();

    let server = start();
    let mut client = ContainersClient::new(channel(server.path.clone()));
    let mut events = client.watch(WatchContainersRequest::default()).await.unwrap().into_inner();
    events.message().await.unwrap().unwrap();
    let next = tokio::time::timeout(Duration::from_secs(600), events.message()).await;
    assert!(next.is_err(), "a client that answers keeps its stream: {next:?}");
    assert_eq!(server.subscribers.open(), 1);
    server.stop.cancel();
}
