//! A panic in one call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Act, Bench, eventually, good, got, headers};
use bytes::Bytes;
use cri_proxy::policy::Socket;
use cri_proxy::reply::{self, Frames};
use cri_proxy::upstream::Upstream;
use k8s_cri::v1;
use quintlet_kit::contain;
use quintlet_kit::failpoint::{self, Failpoint, Observer};
use tokio::sync::Semaphore;

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
