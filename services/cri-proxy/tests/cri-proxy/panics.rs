//! A panic in one call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use cri_proxy::policy::Socket;
use cri_proxy::reply::{self, Frames};
use cri_proxy::upstream::Upstream;
use quintlet_cri_api::v1;
use quintlet_kit::contain;
use quintlet_kit::failpoint::{self, Failpoint, Observer, When};
use quintlet_proto::runtime::v1::ReadLogRequest;
use quintlet_proto::runtime::v1::container_logs_client::ContainerLogsClient;
use tokio::sync::Semaphore;

use crate::common::{Act, Bench, eventually, good, got, headers};

const START: &str = "/runtime.v1.RuntimeService/StartContainer";
const STATUS: &str = "/runtime.v1.RuntimeService/ContainerStatus";
const LIST: &str = "/runtime.v1.RuntimeService/StreamContainers";
const LIST_UNARY: &str = "/runtime.v1.RuntimeService/ListContainers";
const EPOCH: (&str, &str) = ("quintlet-owner-epoch", "1");

/// Panics in calls for the pod `bad` while it is enabled.
struct Panics(AtomicBool);

impl Observer for Panics {
    fn reached(&self, failpoint: Failpoint) {
        let is_it = contain::current().is_some_and(|work| work.uid() == "bad");
        assert!(!(is_it && self.0.load(Ordering::SeqCst)), "injected into {:?}", failpoint.name);
    }
}

async fn call(caller: &Upstream, path: &str, pod: &str) -> crate::common::Got {
    let mut map = headers(&[("content-type", "application/grpc"), ("te", "trailers"), EPOCH]);
    map.extend(headers(&[(contain::POD_UID_HEADER, pod)]));
    let body = reply::frame(&v1::StartContainerRequest { container_id: "c".into() });
    let body = if path == LIST { Bytes::from_static(&[0; 5]) } else { body };
    got(caller.send(reply::request(path, map, Frames::from_data(vec![body]))).await.unwrap()).await
}

#[tokio::test]
async fn a_panic_in_one_call_ends_only_that_call_with_internal_and_its_text() {
    let bench = Bench::start().await;
    // Applies to this thread, which runs the whole test.
    let panics = Arc::new(Panics(true.into()));
    failpoint::observe(Arc::clone(&panics) as Arc<dyn Observer>);
    let gate = Arc::new(Semaphore::new(0));
    let status = good(&v1::ContainerStatusResponse::default());
    bench.script.on(STATUS, [Act::After(gate.clone(), Box::new(status))]);
    bench.script.on(START, [good(&v1::StartContainerResponse {})]);
    bench.script.on(LIST_UNARY, [good(&v1::ListContainersResponse::default())]);
    let caller = bench.caller(Socket::Sync);
    let other = tokio::spawn({
        let caller = caller.clone();
        async move { call(&caller, STATUS, "good").await }
    });
    eventually("the other call is in flight", async || bench.script.seen(STATUS).pop()).await;
    for path in [START, STATUS, LIST] {
        let got = call(&caller, path, "bad").await;
        assert_eq!((got.code(), got.outcome()), ("13", "unknown"), "{path}: {got:?}");
        let text = got.meta("grpc-message");
        assert!(text.starts_with("cri-proxy%20panicked%20at%20") && text.contains("injected"), "{text}");
        assert_eq!(call(&caller, START, "good").await.outcome(), "ok", "{path}");
    }
    // The connection and the slots in the queues are not lost.
    gate.add_permits(2);
    assert_eq!(other.await.unwrap().outcome(), "ok");
    panics.0.store(false, Ordering::SeqCst);
    for path in [START, STATUS, LIST] {
        assert_eq!(call(&caller, path, "bad").await.outcome(), "ok", "{path}");
    }
}

/// Panics on a blocking thread, in work for the pod `bad-log`: at the failpoint `name`, after it was passed
/// `passes` times.
struct PanicsInLog {
    name: &'static str,
    passes: AtomicUsize,
}

impl Observer for PanicsInLog {
    fn reached(&self, failpoint: Failpoint) {
        let is_it = contain::current().is_some_and(|work| work.uid() == "bad-log");
        if !is_it || failpoint.name != self.name || failpoint.when != When::Before {
            return;
        }
        let left = self.passes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        assert!(left.is_ok(), "injected into {:?}", failpoint.name);
    }
}

/// The observer of blocking threads, which have none of their own.
static IN_LOG: parking_lot::Mutex<Option<PanicsInLog>> = parking_lot::Mutex::new(None);

struct InLog;

impl Observer for InLog {
    fn reached(&self, failpoint: Failpoint) {
        // A panic releases the lock.
        if let Some(panics) = IN_LOG.lock().as_ref() {
            panics.reached(failpoint);
        }
    }
}

#[tokio::test]
async fn a_panic_while_a_log_is_read_is_an_error_after_the_text_that_was_read() {
    let bench = Bench::start().await;
    let log = bench.dir.path().join("pod-logs/0.log");
    std::fs::create_dir_all(log.parent().unwrap()).unwrap();
    std::fs::write(&log, "the first line\n").unwrap();
    let status = v1::ContainerStatus {
        log_path: log.display().to_string(),
        state: v1::ContainerState::ContainerRunning.into(),
        ..Default::default()
    };
    let answer = v1::ContainerStatusResponse { status: Some(status), ..Default::default() };
    bench.script.on(STATUS, [good(&answer)]);
    failpoint::observe_everywhere(Arc::new(InLog));
    let mut client = ContainerLogsClient::new(quintlet_kit::socket::channel(bench.path(Socket::NodeApi)));
    let mut read = async |follow| {
        let log_request = ReadLogRequest { container_id: "c".into(), tail_lines: None, follow };
        let mut request = tonic::Request::new(log_request);
        request.metadata_mut().insert(contain::POD_UID_HEADER, "bad-log".parse().unwrap());
        let mut text = Vec::new();
        let end = async {
            let mut chunks = client.read(request).await?.into_inner();
            while let Some(chunk) = chunks.message().await? {
                text.extend(chunk.data);
            }
            Ok::<_, tonic::Status>(())
        };
        let end = end.await;
        (String::from_utf8(text).unwrap(), end)
    };
    for follow in [false, true] {
        for (name, passes, want) in
            [("log opened", 0, ""), ("log read", 0, ""), ("log read", 1, "the first line\n")]
        {
            *IN_LOG.lock() = Some(PanicsInLog { name, passes: passes.into() });
            let (text, end) = read(follow).await;
            let error = end.expect_err("a truncated log looks complete");
            assert_eq!((text.as_str(), error.code()), (want, tonic::Code::Internal), "{name} {passes}");
            let (panic, injected) = ("cri-proxy panicked at ", format!("injected into {name:?}"));
            assert!(error.message().starts_with(panic) && error.message().contains(&injected), "{error}");
        }
    }
    *IN_LOG.lock() = None;
    let (text, end) = read(false).await;
    assert_eq!(text, "the first line\n");
    end.unwrap();
}
