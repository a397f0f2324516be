//! Limits of a proxy, and its recovery from failures.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use containerd_client::services::v1::{
    DeleteTaskRequest, GetRequest, GetResponse, KillRequest, WaitResponse,
};
use cri_proxy::policy::Socket;
use cri_proxy::reply::{self, Frames};
use http_body_util::BodyExt as _;
use prost::Message as _;
use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;
use quintlet_proto::runtime::v1::ReadLogRequest;
use quintlet_proto::runtime::v1::container_logs_client::ContainerLogsClient;
use tokio::sync::{Mutex, mpsc};

use crate::common::{Act, Bench, eventually, failing, good, headers};

const LIST: &str = "/runtime.v1.RuntimeService/ListContainers";
const START: &str = "/runtime.v1.RuntimeService/StartContainer";
const STATUS: &str = "/runtime.v1.RuntimeService/ContainerStatus";
const REMOVE: &str = "/runtime.v1.RuntimeService/RemoveContainer";
const EPOCH: (&str, &str) = ("quintlet-owner-epoch", "1");

fn tasks(method: &str) -> String {
    format!("/containerd.services.tasks.v1.Tasks/{method}")
}

fn remove(id: &str) -> Bytes {
    reply::frame(&v1::RemoveContainerRequest { container_id: id.into() })
}

/// Fails like containerd 1.6.
fn cannot_delete() -> Act {
    failing(
        2,
        "failed to delete containerd container \"c\": cannot delete running task c: failed precondition",
    )
}

#[tokio::test]
async fn a_task_that_containerd_lost_is_killed_and_its_container_removed() {
    let bench = Bench::start().await;
    bench.script.on(REMOVE, [cannot_delete(), good(&v1::RemoveContainerResponse {})]);
    bench.script.on(&tasks("Get"), [good(&GetResponse::default())]);
    // The task ended between the two calls, which is no error.
    bench.script.on(&tasks("Kill"), [failing(5, "process already finished: not found")]);
    bench.script.on(&tasks("Wait"), [good(&WaitResponse::default())]);
    bench.script.on(&tasks("Delete"), [good(&v1::RemoveContainerResponse {})]);
    let before = bench.metrics.lost_tasks.get();
    let got = bench.call(Socket::Sync, REMOVE, &[EPOCH], remove("c")).await;
    assert_eq!((got.code(), got.outcome()), ("0", "ok"), "{got:?}");
    assert_eq!(bench.metrics.lost_tasks.get(), before + 1);
    assert_eq!(bench.script.seen(REMOVE).len(), 2, "repeated once");
    let sent = |method: &str| {
        let seen = bench.script.seen(&tasks(method)).pop().unwrap();
        assert_eq!(seen.headers["containerd-namespace"], "k8s.io", "{method}");
        reply::unframe(&seen.body).unwrap()
    };
    assert_eq!(GetRequest::decode(sent("Get")).unwrap().container_id, "c");
    let kill = KillRequest::decode(sent("Kill")).unwrap();
    assert_eq!((kill.container_id.as_str(), kill.signal, kill.all), ("c", 9, true));
    assert_eq!(DeleteTaskRequest::decode(sent("Delete")).unwrap().container_id, "c");
}

#[tokio::test]
async fn a_removal_that_fails_for_another_reason_is_reported_and_not_repeated() {
    let bench = Bench::start().await;
    bench.script.on(REMOVE, [failing(2, "disk is full")]);
    // Cases: no task exists; no tasks service exists, as on CRI-O; the service fails; the task is not
    // deleted.
    let gets = [failing(5, "no running task"), failing(12, "unknown service"), failing(13, "broken")];
    for get in gets {
        bench.script.on(&tasks("Get"), [get]);
        let got = bench.call(Socket::Sync, REMOVE, &[EPOCH], remove("c")).await;
        assert_eq!((got.code(), got.meta("grpc-message")), ("2", "disk is full"), "{got:?}");
    }
    assert!(bench.script.seen(&tasks("Kill")).is_empty());
    bench.script.on(&tasks("Get"), [good(&GetResponse::default())]);
    bench.script.on(&tasks("Kill"), [failing(2, "permission denied")]);
    assert_eq!(bench.call(Socket::Sync, REMOVE, &[EPOCH], remove("c")).await.outcome(), "runtime-error");
    assert!(bench.script.seen(&tasks("Delete")).is_empty());
    assert_eq!(bench.script.seen(REMOVE).len(), 4, "each was sent once");
    // Tasks are looked up only after a failure.
    let gets = bench.script.seen(&tasks("Get")).len();
    bench.script.on(REMOVE, [good(&v1::RemoveContainerResponse {})]);
    assert_eq!(bench.call(Socket::Sync, REMOVE, &[EPOCH], remove("c")).await.outcome(), "ok");
    assert_eq!(bench.script.seen(&tasks("Get")).len(), gets);
}

#[tokio::test]
async fn an_unlimited_reply_is_rejected_and_the_service_continues() {
    let bench = Bench::start().await;
    let head = headers(&[("content-type", "application/grpc")]);
    let tail = headers(&[("grpc-status", "0")]);
    let mib = Bytes::from(vec![0; 1 << 20]);
    let too_much = Act::Reply(head.clone(), vec![mib.clone(); 17], tail.clone());
    let just_fits = Act::Reply(head, vec![mib; 16], tail);
    for (socket, path, meta) in [(Socket::Read, LIST, &[][..]), (Socket::Sync, START, &[EPOCH])] {
        bench.script.on(path, [too_much.clone(), just_fits.clone()]);
        let body = reply::frame(&v1::StartContainerRequest { container_id: "c".into() });
        let body = if path == LIST { Bytes::from_static(&[0; 5]) } else { body };
        let got = bench.call(socket, path, meta, body.clone()).await;
        // The metadata has the outcome of the call, although its reply was not received.
        assert_eq!((got.code(), got.outcome()), ("8", "unknown"), "{path}: {:?}", got.headers);
        assert!(got.body.is_empty());
        let got = bench.call(socket, path, meta, body).await;
        assert_eq!((got.outcome(), got.body.len()), ("ok", 16 << 20), "{path}");
    }
}

#[tokio::test]
async fn open_streams_are_informed_of_the_shutdown_and_counted() {
    let bench = Bench::start().await;
    let path = "/some.future.v9.Service/Watch";
    let (sender, receiver) = mpsc::channel::<Bytes>(4);
    bench.script.on(path, [Act::Stream(Arc::new(Mutex::new(receiver)))]);
    let request = reply::request(path, headers(&[("te", "trailers")]), Frames::from_data(vec![]));
    let mut answer = bench.caller(Socket::Admin).send(request).await.unwrap().into_body();
    sender.send(Bytes::from_static(b"first")).await.unwrap();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "first");
    let before = bench.metrics.closed_streams.get();
    bench.end();
    let end = tokio::time::timeout(Duration::from_secs(10), answer.frame()).await.unwrap();
    let trailers = end.unwrap().expect("a clean end").into_trailers().unwrap();
    assert_eq!(
        (&trailers["grpc-status"], &trailers["quintlet-outcome"]),
        (&14.into(), &"unknown".parse().unwrap())
    );
    assert_eq!(bench.metrics.closed_streams.get(), before + 1);
    eventually("the sockets to close", async || {
        tokio::net::UnixStream::connect(bench.path(Socket::Admin)).await.is_err().then_some(())
    })
    .await;
}

#[tokio::test]
async fn calls_of_one_socket_are_limited_in_bytes_and_other_sockets_continue() {
    fn share(_: Socket) -> usize {
        12 << 20
    }
    let bench = Bench::changed("fake", "1", 64, Clock::system(), |config| config.byte_limit = share).await;
    let head = headers(&[("content-type", "application/grpc")]);
    let tail = headers(&[("grpc-status", "0")]);
    let answer =
        |mib: usize| Act::Reply(head.clone(), vec![Bytes::from(vec![0; 1 << 20]); mib], tail.clone());
    let before = bench.metrics.refused_bytes.get();
    // A client that does not read its reply, which is larger than its window, keeps the reply's bytes
    // reserved.
    bench.script.on(STATUS, [answer(8)]);
    let request = |body: Bytes| {
        let meta = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
        reply::request(STATUS, meta, Frames::from_data(vec![body]))
    };
    let empty = Bytes::from_static(&[0; 5]);
    let caller = bench.caller(Socket::NodeApi);
    let unread = caller.send(request(empty.clone())).await.unwrap();
    // A reply that does not fit: the call was executed, and its outcome is unknown.
    let got = bench.call(Socket::NodeApi, STATUS, &[], empty.clone()).await;
    assert_eq!((got.code(), got.outcome()), ("8", "unknown"), "{:?}", got.headers);
    assert_eq!(bench.metrics.refused_bytes.get(), before + 1);
    // A request that does not fit is not sent.
    let seen = bench.script.seen(STATUS).len();
    let large =
        reply::frame(&v1::ContainerStatusRequest { container_id: "c".repeat(5 << 20), ..Default::default() });
    let got = bench.call(Socket::NodeApi, STATUS, &[], large).await;
    assert_eq!((got.code(), got.outcome()), ("8", "not-dispatched"), "{:?}", got.headers);
    assert_eq!((bench.metrics.refused_bytes.get(), bench.script.seen(STATUS).len()), (before + 2, seen));
    // Each socket has its own limit, and bytes that were read are released.
    let got = bench.call(Socket::Read, STATUS, &[], empty.clone()).await;
    assert_eq!((got.outcome(), got.body.len()), ("ok", 8 << 20));
    assert_eq!(unread.into_body().collect().await.unwrap().to_bytes().len(), 8 << 20);
    eventually("room for the next answer", async || {
        let got = bench.call(Socket::NodeApi, STATUS, &[], empty.clone()).await;
        (got.outcome() == "ok").then_some(())
    })
    .await;
}

#[tokio::test]
async fn connections_of_a_socket_are_limited_and_a_closed_one_frees_its_slot() {
    let bench = Bench::changed("fake", "1", 64, Clock::system(), |config| config.connections = |_| 2).await;
    bench.script.on(STATUS, [good(&v1::ContainerStatusResponse::default())]);
    let call = async |socket| {
        let meta = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
        let caller = bench.caller(socket);
        let request = reply::request(STATUS, meta, Frames::from_data(vec![Bytes::from_static(&[0; 5])]));
        caller.send(request).await.map(|_| caller)
    };
    let before = bench.metrics.refused_connections.get();
    let first = call(Socket::Read).await.unwrap();
    let _second = call(Socket::Read).await.unwrap();
    assert!(call(Socket::Read).await.is_err(), "a third connection");
    assert!(bench.metrics.refused_connections.get() > before);
    assert!(call(Socket::NodeApi).await.is_ok(), "another socket");
    drop(first);
    eventually("room for another connection", async || call(Socket::Read).await.ok().map(drop)).await;
}

#[tokio::test]
async fn a_log_is_read_only_in_the_log_directory_whatever_path_the_runtime_returns() {
    let bench = Bench::start().await;
    let logs = bench.dir.path().join("pod-logs");
    std::fs::create_dir_all(logs.join("ns_pod_uid/c")).unwrap();
    std::fs::write(logs.join("ns_pod_uid/c/0.log"), "mine\n").unwrap();
    let secret = bench.dir.path().join("secret");
    std::fs::write(&secret, "host\n").unwrap();
    std::os::unix::fs::symlink(&secret, logs.join("ns_pod_uid/c/1.log")).unwrap();
    std::os::unix::fs::symlink(bench.dir.path(), logs.join("out")).unwrap();
    let mut client = ContainerLogsClient::new(quintlet_kit::socket::channel(bench.path(Socket::NodeApi)));
    let mut read = async |path: String| {
        let status = v1::ContainerStatus { log_path: path, ..Default::default() };
        let answer = v1::ContainerStatusResponse { status: Some(status), ..Default::default() };
        bench.script.on(STATUS, [good(&answer)]);
        let request = ReadLogRequest { container_id: "c".into(), tail_lines: None, follow: false };
        let mut chunks = client.read(request).await?.into_inner();
        let mut text = Vec::new();
        while let Some(chunk) = chunks.message().await? {
            text.extend(chunk.data);
        }
        Ok::<_, tonic::Status>(String::from_utf8(text).unwrap())
    };
    let inside = logs.display();
    assert_eq!(read(format!("{inside}/ns_pod_uid/c/0.log")).await.unwrap(), "mine\n");
    let outside = [
        secret.display().to_string(),
        format!("{inside}/ns_pod_uid/c/1.log"),
        format!("{inside}/out/secret"),
        format!("{inside}/../secret"),
        "/etc/hostname".to_owned(),
    ];
    for path in outside {
        let error = read(path.clone()).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::Internal, "{path}: {error}");
    }
    assert_eq!(read(format!("{inside}/none/0.log")).await.unwrap_err().code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn environments_are_returned_only_on_the_sockets_of_root() {
    let bench = Bench::start().await;
    let methods =
        ["ContainerStatus", "PodSandboxStatus", "Status"].map(|m| format!("/runtime.v1.RuntimeService/{m}"));
    let container = |verbose| v1::ContainerStatusRequest { container_id: "c".into(), verbose };
    let sandbox = |verbose| v1::PodSandboxStatusRequest { pod_sandbox_id: "s".into(), verbose };
    let bodies = |verbose| {
        [
            reply::frame(&container(verbose)),
            reply::frame(&sandbox(verbose)),
            reply::frame(&v1::StatusRequest { verbose }),
        ]
    };
    for method in &methods {
        bench.script.on(method, [good(&v1::ContainerStatusResponse::default())]);
    }
    for (socket, allowed) in
        [(Socket::Admin, true), (Socket::Sync, true), (Socket::Read, false), (Socket::NodeApi, false)]
    {
        for verbose in [false, true] {
            for (method, body) in methods.iter().zip(bodies(verbose)) {
                let before = bench.script.seen(method).len();
                let got = bench.call(socket, method, &[], body).await;
                let sent = bench.script.seen(method).len() - before;
                let want = if allowed || !verbose { ("0", "ok", 1) } else { ("7", "not-dispatched", 0) };
                assert_eq!((got.code(), got.outcome(), sent), want, "{socket:?} {method} {verbose}");
            }
        }
    }
    // A request that a runtime may decode and this proxy may not: a name that is not UTF-8, the same field
    // again, and verbose.
    let body = [&[0, 0, 0, 0, 8, 0x0a, 1, 0xff, 0x0a, 1, b'c', 0x10, 1][..]].concat();
    let got = bench.call(Socket::Read, &methods[0], &[], body.into()).await;
    assert_eq!((got.code(), got.outcome()), ("3", "not-dispatched"));
}
