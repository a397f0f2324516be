//! Hints from a scripted runtime to subscribers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use containerd_client::events::{TaskDelete, TaskExit};
use containerd_client::types::Envelope;
use cri_proxy::policy::Socket;
use cri_proxy::reply;
use prost::Message as _;
use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;
use quintlet_proto::runtime::v1 as pb;
use quintlet_proto::runtime::v1::runtime_event::Event;
use tokio::sync::{Mutex, Semaphore, mpsc};

use crate::common::{Act, Bench, eventually, failing, good};

const SUBSCRIBE: &str = "/containerd.services.events.v1.Events/Subscribe";
const CRI_EVENTS: &str = "/runtime.v1.RuntimeService/GetContainerEvents";

fn stream() -> (mpsc::Sender<Bytes>, Act) {
    let (sender, receiver) = mpsc::channel(64);
    (sender, Act::Stream(Arc::new(Mutex::new(receiver))))
}

fn exit(container: &str, process: &str) -> Bytes {
    let exit =
        TaskExit { container_id: container.into(), id: process.into(), exit_status: 7, ..Default::default() };
    reply::frame(&Envelope {
        topic: "/tasks/exit".into(),
        event: Some(prost_types::Any {
            type_url: "containerd.events.TaskExit".into(),
            value: exit.encode_to_vec(),
        }),
        ..Default::default()
    })
}

fn deleted(container: &str) -> Bytes {
    let deleted = TaskDelete { container_id: container.into(), ..Default::default() };
    reply::frame(&Envelope {
        topic: "/tasks/delete".into(),
        event: Some(prost_types::Any {
            type_url: "containerd.events.TaskDelete".into(),
            value: deleted.encode_to_vec(),
        }),
        ..Default::default()
    })
}

async fn watch(bench: &Bench) -> tonic::Streaming<pb::RuntimeEvent> {
    let channel = quintlet_kit::socket::channel(bench.path(Socket::Read));
    let mut client = pb::runtime_events_client::RuntimeEventsClient::new(channel);
    client.watch(pb::WatchHintsRequest::default()).await.unwrap().into_inner()
}

async fn next(events: &mut tonic::Streaming<pb::RuntimeEvent>) -> Event {
    let next = tokio::time::timeout(Duration::from_secs(10), events.message()).await;
    next.expect("an event within 10 s").unwrap().unwrap().event.unwrap()
}

async fn until_live(events: &mut tonic::Streaming<pb::RuntimeEvent>, live: bool) -> pb::SourceState {
    loop {
        if let Event::Source(state) = next(events).await
            && state.live == live
        {
            return state;
        }
    }
}

#[tokio::test]
async fn one_reader_serves_all_subscribers_and_exec_exits_are_skipped() {
    let bench = Bench::with("containerd", "1.6.20", 64, Clock::system()).await;
    let (sender, act) = stream();
    bench.script.on(SUBSCRIBE, [act]);
    let mut subscribers = [watch(&bench).await, watch(&bench).await];
    for events in &mut subscribers {
        assert!(matches!(next(events).await, Event::Hello(_)));
        assert_eq!(until_live(events, true).await.source(), pb::HintSource::Containerd);
    }
    sender.send(exit("c", "exec-1")).await.unwrap();
    sender.send(exit("c", "c")).await.unwrap();
    for events in &mut subscribers {
        let Event::Hint(hint) = next(events).await else { panic!("a hint") };
        assert_eq!((hint.kind(), hint.id.as_str(), hint.exit_code), (pb::HintKind::Exiting, "c", 7));
    }
    assert_eq!(bench.script.seen(SUBSCRIBE).len(), 1);
    let request = &bench.script.seen(SUBSCRIBE)[0];
    assert_eq!(request.headers["containerd-namespace"], "k8s.io");
}

#[tokio::test]
async fn an_interrupted_event_stream_is_reported_and_resumed() {
    let bench = Bench::with("containerd", "1.6.20", 64, Clock::system()).await;
    let (first, act) = stream();
    let (second, again) = stream();
    bench.script.on(SUBSCRIBE, [act, again]);
    let mut events = watch(&bench).await;
    until_live(&mut events, true).await;
    drop(first);
    assert!(!until_live(&mut events, false).await.detail.is_empty());
    until_live(&mut events, true).await;
    second.send(exit("d", "d")).await.unwrap();
    assert!(matches!(next(&mut events).await, Event::Hint(h) if h.id == "d"));
}

#[tokio::test]
async fn an_exit_during_its_stop_is_not_urgent() {
    let bench = Arc::new(Bench::with("containerd", "1.6.20", 64, Clock::system()).await);
    let (sender, act) = stream();
    bench.script.on(SUBSCRIBE, [act]);
    let mut events = watch(&bench).await;
    until_live(&mut events, true).await;
    for path in ["StopContainer", "StopPodSandbox"].map(|m| format!("/runtime.v1.RuntimeService/{m}")) {
        let gate = Arc::new(Semaphore::new(0));
        bench.script.on(&path, [Act::After(gate.clone(), Box::new(good(&v1::StopContainerResponse {})))]);
        // Both requests begin with the ID.
        let body = reply::frame(&v1::StopContainerRequest { container_id: "c".into(), timeout: 0 });
        let (caller, method) = (bench.clone(), path.clone());
        let epoch = ("quintlet-owner-epoch", "1");
        let stop = tokio::spawn(async move { caller.call(Socket::Sync, &method, &[epoch], body).await });
        eventually("the stop", async || (bench.script.seen(&path).len() == 1).then_some(())).await;
        let mut kind_of = async |container: &str| {
            sender.send(deleted(container)).await.unwrap();
            let Event::Hint(hint) = next(&mut events).await else { panic!("a hint") };
            assert_eq!(hint.id, container);
            hint.kind()
        };
        assert_eq!(kind_of("c").await, pb::HintKind::Exiting, "{path}");
        assert_eq!(kind_of("other").await, pb::HintKind::Exited, "{path}");
        gate.add_permits(1);
        assert_eq!(stop.await.unwrap().outcome(), "ok");
        assert_eq!(kind_of("c").await, pb::HintKind::Exited, "{path} has ended");
    }
}

#[tokio::test]
async fn a_missing_event_source_is_replaced_by_the_other_one_or_none() {
    let bench = Bench::with("containerd", "1.6.20", 64, Clock::system()).await;
    bench.script.on(SUBSCRIBE, [failing(12, "none")]);
    let (sender, act) = stream();
    bench.script.on(CRI_EVENTS, [act]);
    let mut events = watch(&bench).await;
    assert_eq!(until_live(&mut events, true).await.source(), pb::HintSource::Cri);
    let mut event = v1::ContainerEventResponse { container_id: "c".into(), ..Default::default() };
    event.set_container_event_type(v1::ContainerEventType::ContainerStoppedEvent);
    sender.send(reply::frame(&event)).await.unwrap();
    assert!(matches!(next(&mut events).await, Event::Hint(h) if h.kind() == pb::HintKind::Exited));

    let bench = Bench::with("docker", "1", 64, Clock::system()).await;
    let mut events = watch(&bench).await;
    loop {
        if let Event::Source(state) = next(&mut events).await
            && state.detail.contains("has no events")
        {
            assert_eq!((state.source(), state.live), (pb::HintSource::None, false));
            break;
        }
    }
}

#[tokio::test]
async fn health_and_information_follow_the_runtime() {
    let mut bench = Bench::with("containerd", "1.6.20", 64, Clock::system()).await;
    let channel = quintlet_kit::socket::channel(bench.path(Socket::NodeApi));
    let mut client = pb::proxy_info_client::ProxyInfoClient::new(channel.clone());
    let mut info = async |connected: bool| {
        eventually("the runtime's state", async || {
            let info = client.get(pb::ProxyInfoRequest {}).await.unwrap().into_inner();
            (info.connected == connected).then_some(info)
        })
        .await
    };
    assert_eq!(info(true).await.runtime_version, "1.6.20");
    bench.down();
    assert!(info(false).await.error.contains("runtime.sock"));
    bench.up();
    info(true).await;
}
