//! Calls of users beside those of services.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cri_proxy::policy::Socket;
use cri_proxy::reply;
use quintlet_cri_api::v1;

use crate::common::{Act, Bench, eventually, good};

const TEST_TIMEOUT: Duration = Duration::from_secs(10);
const IMAGE_FS: &str = "/runtime.v1.ImageService/ImageFsInfo";
const STATS: &str = "/runtime.v1.RuntimeService/ContainerStats";
const SANDBOXES: &str = "/runtime.v1.RuntimeService/ListPodSandbox";
const RUN: &str = "/runtime.v1.RuntimeService/ExecSync";
const EXEC: &str = "/runtime.v1.RuntimeService/Exec";

/// Sends calls of node-api that the runtime does not answer, until a further one waits in the queue.
async fn fill(bench: &Arc<Bench>, path: &'static str, slots: usize, body: Bytes) {
    bench.script.on(path, [Act::Hang]);
    for _ in 0..slots + 1 {
        let (bench, body) = (bench.clone(), body.clone());
        tokio::spawn(async move { bench.call(Socket::NodeApi, path, &[], body).await });
    }
    eventually("a full lane", async || (bench.script.seen(path).len() == slots).then_some(())).await;
}

/// Sends a call that must not wait for others.
async fn outcome(bench: &Bench, socket: Socket, path: &'static str, body: Bytes) -> String {
    let called = tokio::time::timeout(TEST_TIMEOUT, bench.call(socket, path, &[], body)).await;
    called.map_or_else(|_| format!("{path} waits"), |got| got.outcome().to_owned())
}

#[tokio::test]
async fn calls_of_users_that_hang_delay_neither_evictions_nor_relists() {
    let bench = Arc::new(Bench::start().await);
    let stats = reply::frame(&v1::ContainerStatsRequest { container_id: "c".into() });
    fill(&bench, STATS, 4, stats).await;
    bench.script.on(IMAGE_FS, [good(&v1::ImageFsInfoResponse::default())]);
    let empty = || Bytes::from_static(&[0; 5]);
    assert_eq!(outcome(&bench, Socket::Sync, IMAGE_FS, empty()).await, "ok");

    fill(&bench, SANDBOXES, 4, empty()).await;
    bench.script.on(SANDBOXES, [good(&v1::ListPodSandboxResponse::default())]);
    assert_eq!(outcome(&bench, Socket::Read, SANDBOXES, empty()).await, "ok");
}

#[tokio::test]
async fn commands_of_users_that_do_not_end_do_not_delay_an_exec() {
    let bench = Arc::new(Bench::start().await);
    let command = v1::ExecSyncRequest { container_id: "c".into(), cmd: vec!["sleep".into()], timeout: 0 };
    fill(&bench, RUN, 16, reply::frame(&command)).await;
    bench.script.on(EXEC, [good(&v1::ExecResponse { url: "http://127.0.0.1:1/".into() })]);
    let exec =
        reply::frame(&v1::ExecRequest { container_id: "c".into(), stdout: true, ..Default::default() });
    assert_eq!(outcome(&bench, Socket::NodeApi, EXEC, exec).await, "ok");
}
