//! Lists and their streams, with runtimes that support them, lack them or lose them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cri_proxy::forward::{MAX_BUFFERED, MIN_INTERVAL};
use cri_proxy::policy::Socket;
use cri_proxy::{lists, reply};
use prost::Message;
use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Method, Options, Rule};
use tokio::sync::{Mutex, mpsc};
use tonic::Code;

use crate::common::{Act, Bench, Got, eventually, failing, good, headers, messages};

const LIST: &str = "/runtime.v1.RuntimeService/ListContainers";
const STREAM: &str = "/runtime.v1.RuntimeService/StreamContainers";

fn all() -> Bytes {
    reply::frame(&v1::ListContainersRequest::default())
}

fn ids(got: &Got) -> BTreeSet<String> {
    let messages = messages(&got.body);
    let read = |m: Bytes| v1::ListContainersResponse::decode(m).unwrap().containers;
    let all: Vec<String> = messages.into_iter().flat_map(read).map(|c| c.id).collect();
    let unique: BTreeSet<String> = all.iter().cloned().collect();
    assert_eq!(unique.len(), all.len(), "each item once");
    unique
}

/// Starts a proxy in front of a fake runtime with containers whose annotations are `bytes` long.
async fn fake(streams: bool, containers: usize, bytes: usize) -> (tempfile::TempDir, FakeRuntime, Bench) {
    let dir = tempfile::tempdir().unwrap();
    let runtime = FakeRuntime::start(&dir.path().join("fake.sock"), Options::silent()).unwrap();
    runtime.stream_lists(streams);
    let mut sandbox = String::new();
    for n in 0..containers {
        if n % 36 == 0 {
            sandbox = runtime.add_sandbox(&format!("u{n}"), &format!("web-{n}"), "default", 0);
        }
        let mut seed = ContainerSeed::running(&format!("c{n}"));
        seed.annotations = [("filler".to_owned(), "x".repeat(bytes))].into();
        runtime.add_container(&sandbox, &seed);
    }
    let path = runtime.path().to_owned();
    let bench = Bench::changed("silent", "1", 64, Clock::system(), |c| c.runtime = path).await;
    (dir, runtime, bench)
}

fn there(runtime: &FakeRuntime) -> BTreeSet<String> {
    runtime.containers().iter().map(|c| c.id().to_owned()).collect()
}

#[tokio::test]
async fn a_runtime_with_list_streams_is_called_by_stream_for_any_caller() {
    let (_dir, runtime, bench) = fake(true, 20, 10).await;
    for path in [LIST, STREAM] {
        let got = bench.call(Socket::Read, path, &[], all()).await;
        assert_eq!((got.code(), got.outcome()), ("0", "ok"));
        assert_eq!(ids(&got), there(&runtime), "{path}");
    }
    assert_eq!(runtime.count(Method::StreamContainers), 2);
    assert_eq!(runtime.count(Method::ListContainers), 0);
    let one = there(&runtime).pop_first().unwrap();
    let filter = v1::ContainerFilter { id: one.clone(), ..Default::default() };
    let request = reply::frame(&v1::ListContainersRequest { filter: Some(filter) });
    let got = bench.call(Socket::Sync, LIST, &[], request).await;
    assert_eq!(ids(&got), [one].into(), "the filter goes with it");
    for (method, path) in [
        (Method::StreamPodSandboxes, "RuntimeService/ListPodSandbox"),
        (Method::StreamContainerStats, "RuntimeService/ListContainerStats"),
        (Method::StreamPodSandboxStats, "RuntimeService/StreamPodSandboxStats"),
        (Method::StreamImages, "ImageService/ListImages"),
    ] {
        let empty = Bytes::from_static(&[0; 5]);
        let got = bench.call(Socket::Read, &format!("/runtime.v1.{path}"), &[], empty).await;
        assert_eq!(got.code(), "0", "{path}");
        assert!(!messages(&got.body)[0].is_empty(), "{path}");
        assert_eq!(runtime.count(method), 1, "{path}");
    }
}

#[tokio::test]
async fn list_streams_are_tried_once_per_connection_of_a_runtime_without_them() {
    let mut bench = Bench::start().await;
    let container = v1::Container { id: "a".into(), ..Default::default() };
    bench.script.on(LIST, [good(&v1::ListContainersResponse { containers: vec![container] })]);
    for path in [STREAM, LIST, STREAM] {
        assert_eq!(ids(&bench.call(Socket::Read, path, &[], all()).await), ["a".to_owned()].into());
    }
    assert_eq!((bench.script.seen(STREAM).len(), bench.script.seen(LIST).len()), (1, 3));
    bench.down();
    bench.up();
    // Connections are refused for the 100 ms between two attempts.
    eventually("an answer of the runtime that is back", async || {
        let got = bench.call(Socket::Read, LIST, &[], all()).await;
        (got.code() == "0").then_some(())
    })
    .await;
    bench.call(Socket::Read, LIST, &[], all()).await;
    assert_eq!(bench.script.seen(STREAM).len(), 2, "once more on the new connection");
}

#[tokio::test]
async fn list_streams_are_detected_after_an_upgrade_and_dropped_after_a_downgrade() {
    let (_dir, runtime, bench) = fake(false, 7, 10).await;
    let mut streamed = 0;
    for streams in [false, true, false, true] {
        runtime.down();
        runtime.stream_lists(streams);
        runtime.up().unwrap();
        let listed = runtime.count(Method::ListContainers);
        let got = eventually("an answer of the new runtime", async || {
            let got = bench.call(Socket::Read, STREAM, &[], all()).await;
            (got.code() == "0").then_some(got)
        })
        .await;
        assert_eq!(ids(&got), there(&runtime));
        streamed += u64::from(streams);
        assert_eq!(runtime.count(Method::StreamContainers), streamed);
        assert_eq!(runtime.count(Method::ListContainers), listed + u64::from(!streams));
    }
}

#[tokio::test]
async fn a_list_stream_that_fails_midway_returns_its_error_without_items() {
    let (_dir, runtime, bench) = fake(true, 100, 10).await;
    for path in [LIST, STREAM] {
        runtime
            .script(Rule::on(Method::StreamContainers).fail_after(Code::Internal, "disk on fire").times(1));
        let got = bench.call(Socket::Read, path, &[], all()).await;
        assert_eq!((got.code(), got.meta("grpc-message")), ("13", "disk%20on%20fire"), "{path}");
        assert_eq!((got.body.len(), got.outcome()), (0, "runtime-error"), "{path}");
        assert_eq!(ids(&bench.call(Socket::Read, path, &[], all()).await).len(), 100, "{path}");
    }
    assert_eq!(runtime.count(Method::ListContainers), 0, "an error is no reason to ask for the whole");
    // Unimplemented after items is an ordinary error.
    runtime.script(Rule::on(Method::StreamContainers).fail_after(Code::Unimplemented, "half").times(1));
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    assert_eq!((got.code(), got.body.len()), ("12", 0));
    assert_eq!(runtime.count(Method::ListContainers), 0);
}

#[tokio::test]
async fn a_stream_that_does_not_end_runs_into_the_calls_deadline_as_a_whole() {
    let bench =
        Bench::changed("fake", "1", 64, Clock::system(), |c| c.timeout = Duration::from_millis(300)).await;
    let (frames, receiver) = mpsc::channel(4);
    let container = v1::Container { id: "a".into(), ..Default::default() };
    let item = reply::frame(&v1::ListContainersResponse { containers: vec![container] });
    bench.script.on(STREAM, [Act::Stream(Arc::new(Mutex::new(receiver)))]);
    frames.send(item).await.unwrap();
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    assert_eq!((got.code(), got.body.len(), got.outcome()), ("4", 0, "unknown"));
}

#[tokio::test]
async fn a_list_larger_than_a_message_is_streamed_and_never_sent_as_one() {
    let (_dir, runtime, bench) = fake(true, 9_000, 2_000).await;
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    assert_eq!(got.code(), "0");
    let sizes: Vec<usize> = messages(&got.body).iter().map(Bytes::len).collect();
    assert!(sizes.iter().sum::<usize>() > 16 << 20, "{sizes:?}");
    assert!(sizes.iter().all(|size| *size <= lists::CHUNK), "{sizes:?}");
    assert_eq!(ids(&got), there(&runtime));
    let got = bench.call(Socket::Read, LIST, &[], all()).await;
    assert_eq!((got.code(), got.body.len()), ("8", 0));
    assert!(got.meta("grpc-message").contains("request%20its%20stream"));
}

#[tokio::test]
async fn a_large_unary_reply_is_split_for_a_caller_of_the_list_stream() {
    let (_dir, runtime, bench) = fake(false, 3_000, 2_000).await;
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    let sizes: Vec<usize> = messages(&got.body).iter().map(Bytes::len).collect();
    assert!(sizes.len() > 5 && sizes.iter().all(|size| *size <= lists::CHUNK), "{sizes:?}");
    assert_eq!(ids(&got), there(&runtime));
}

#[tokio::test]
async fn an_invalid_reply_is_an_error_of_the_runtime() {
    let bench = Bench::start().await;
    let ok = || headers(&[("grpc-status", "0")]);
    let head = || headers(&[("content-type", "application/grpc")]);
    for bytes in [&[0u8, 0, 0, 0, 9, 1][..], &[1, 0, 0, 0, 0]] {
        bench.script.on(STREAM, [Act::Reply(head(), vec![Bytes::from_static(bytes)], ok())]);
        let got = bench.call(Socket::Read, STREAM, &[], all()).await;
        assert_eq!((got.code(), got.body.len()), ("13", 0), "{bytes:?}");
    }
    bench.script.on(STREAM, [failing(12, "unknown method")]);
    let cut = vec![Bytes::from_static(&[0, 0, 0, 0, 2, 0x0a, 9])];
    bench.script.on(LIST, [Act::Reply(head(), cut, ok())]);
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    assert_eq!(got.code(), "13");
    assert!(got.meta("grpc-message").contains("byte%200%20of%20a%20message"), "{got:?}");
}

fn container(id: &str, bytes: usize) -> v1::Container {
    v1::Container { id: id.into(), image_ref: "x".repeat(bytes), ..Default::default() }
}

/// Returns a frame with one message of the stream.
fn item(id: &str, bytes: usize) -> Bytes {
    reply::frame(&v1::ListContainersResponse { containers: vec![container(id, bytes)] })
}

#[tokio::test]
async fn of_18_000_containers_a_few_messages_are_here_at_once_and_none_is_large() {
    let (_dir, runtime, bench) = fake(true, 18_000, 1_500).await;
    for path in [STREAM, "/runtime.v1.RuntimeService/StreamPodSandboxes"] {
        assert_eq!(bench.call(Socket::Read, path, &[], Bytes::from_static(&[0; 5])).await.code(), "0");
    }
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    assert!(got.body.len() > 32 << 20, "{}", got.body.len());
    assert_eq!(ids(&got), there(&runtime));
    let metrics = &bench.metrics;
    let largest = usize::try_from(metrics.list_message_largest.get()).unwrap();
    assert_eq!(messages(&got.body).iter().map(Bytes::len).max(), Some(largest - 5));
    assert!(largest - 5 <= lists::CHUNK && largest > lists::CHUNK / 2, "{largest}");
    let most = usize::try_from(metrics.list_bytes_most.get()).unwrap();
    assert!(most > lists::CHUNK && most <= MAX_BUFFERED, "{most} of {MAX_BUFFERED}");
    eventually("nothing is left here", async || (metrics.list_bytes.get() == 0).then_some(())).await;
    assert_eq!(runtime.count(Method::ListContainers), 0);
}

#[tokio::test]
async fn the_unary_reply_of_a_runtime_is_forwarded_in_parts_to_a_stream() {
    // The largest list of such a runtime: its reply is close to the limit of 16 MiB of a message.
    let (_dir, runtime, bench) = fake(false, 18_000, 250).await;
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    assert!(got.body.len() > 12 << 20, "{}", got.body.len());
    assert_eq!(ids(&got), there(&runtime));
    let most = usize::try_from(bench.metrics.list_bytes_most.get()).unwrap();
    assert!(most > lists::CHUNK && most <= MAX_BUFFERED, "{most} of {MAX_BUFFERED}");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_does_not_read_stalls_only_its_own_list_until_the_time_limit() {
    let bench = Bench::start().await;
    let (frames, receiver) = mpsc::channel(1);
    let slow = Act::Stream(Arc::new(Mutex::new(receiver)));
    bench.script.on(STREAM, [slow, good(&v1::ListContainersResponse::default())]);
    let endless = tokio::spawn(async move {
        let mut sent = 0;
        while frames.send(item("a", 60_000)).await.is_ok() {
            sent += 60_000;
        }
        sent
    });
    let head = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
    let caller = bench.caller(Socket::Read);
    let response =
        caller.send(reply::request(STREAM, head, reply::Frames::from_data(vec![all()]))).await.unwrap();
    // No other task is runnable, so paused time advances until the caller is abandoned.
    let sent = endless.await.unwrap();
    assert!(sent < 20 << 20, "{sent} bytes were taken from the runtime for a caller that reads none");
    assert_eq!(bench.call(Socket::Read, STREAM, &[], all()).await.code(), "0", "others get theirs");
    let got = crate::common::got(response).await;
    assert_eq!((got.code(), got.outcome()), ("8", "unknown"));
    assert!(got.meta("grpc-message").contains("the%20caller%20read%20nothing%20for%2010%20s"), "{got:?}");
    assert!(messages(&got.body).len() > 1, "what was given away before");
}

#[tokio::test(start_paused = true)]
async fn a_large_list_is_sent_at_a_limited_rate_and_a_small_one_at_once() {
    let bench = Bench::start().await;
    let list = |n: usize| {
        let containers = (0..n).map(|n| container(&n.to_string(), 500_000)).collect();
        good(&v1::ListContainersResponse { containers })
    };
    bench.script.on(STREAM, [list(1), list(12)]);
    for (items, pauses) in [(1, 0), (12, 4)] {
        let began = tokio::time::Instant::now();
        let got = bench.call(Socket::Read, STREAM, &[], all()).await;
        assert_eq!(ids(&got).len(), items);
        // Two items per message; the last message is sent with the end. The clock is the test's.
        assert!(
            began.elapsed() >= MIN_INTERVAL * pauses && began.elapsed() < MIN_INTERVAL * (pauses + 2),
            "{items}"
        );
    }
}

#[tokio::test]
async fn a_status_is_answered_while_a_list_is_being_read() {
    let bench = Bench::start().await;
    let (frames, receiver) = mpsc::channel(1);
    bench.script.on(STREAM, [Act::Stream(Arc::new(Mutex::new(receiver)))]);
    let status = "/runtime.v1.RuntimeService/ContainerStatus";
    bench.script.on(status, [good(&v1::ContainerStatusResponse::default())]);
    let head = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
    let request = |path: &str| reply::request(path, head.clone(), reply::Frames::from_data(vec![all()]));
    let (caller, list) = (bench.caller(Socket::Read), request(STREAM));
    let same = caller.clone();
    let list = tokio::spawn(async move { same.send(list).await.unwrap() });
    for n in 0..40 {
        frames.send(item(&format!("a{n}"), 60_000)).await.unwrap();
    }
    // The begin of the list has arrived, and not its end: one connection delivers both in order.
    let list = list.await.unwrap();
    assert_eq!(crate::common::got(caller.send(request(status)).await.unwrap()).await.code(), "0");
    drop(frames);
    let got = crate::common::got(list).await;
    assert!(!messages(&got.body).is_empty());
}

#[tokio::test]
async fn an_interrupted_list_is_repeated_until_its_first_message_was_forwarded() {
    let bench = Bench::start().await;
    let whole = v1::ListContainersResponse { containers: vec![container("a", 1)] };
    bench.script.on(STREAM, [Act::Cut, good(&whole)]);
    let got = bench.call(Socket::Read, STREAM, &[], all()).await;
    assert_eq!((got.code(), ids(&got)), ("0", ["a".to_owned()].into()));
    let (frames, receiver) = mpsc::channel(1);
    bench.script.on(STREAM, [Act::Stream(Arc::new(Mutex::new(receiver)))]);
    let head = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
    let request = reply::request(STREAM, head, reply::Frames::from_data(vec![all()]));
    let caller = bench.caller(Socket::Read);
    let giving = tokio::spawn(async move { caller.send(request).await.unwrap() });
    for n in 0..40 {
        frames.send(item(&format!("a{n}"), 60_000)).await.unwrap();
    }
    let response = giving.await.unwrap();
    bench.down();
    let got = crate::common::got(response).await;
    assert_eq!((got.code(), got.outcome()), ("14", "unknown"));
    assert!(!got.body.is_empty() && messages(&got.body).iter().all(|m| !m.is_empty()));
}
