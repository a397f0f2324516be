//! CRI lists, from runtimes with and without list streams.

use std::collections::BTreeSet;

use quintlet_cri_api::v1;
use quintlet_kit::lists::{self, MAX_MESSAGE};
use quintlet_kit::socket::channel;
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Method, Options, Rule};
use tonic::{Code, Request, Status};

fn fake(streams: bool, containers: usize, bytes: usize) -> (tempfile::TempDir, FakeRuntime) {
    let dir = tempfile::tempdir().unwrap();
    let runtime = FakeRuntime::start(&dir.path().join("cri.sock"), Options::silent()).unwrap();
    runtime.stream_lists(streams);
    let sandbox = runtime.add_sandbox("u1", "web", "default", 0);
    for n in 0..containers {
        let mut seed = ContainerSeed::running(&format!("c{n}"));
        seed.annotations = [("filler".to_owned(), "x".repeat(bytes))].into();
        runtime.add_container(&sandbox, &seed);
    }
    (dir, runtime)
}

fn there(runtime: &FakeRuntime) -> BTreeSet<String> {
    runtime.containers().iter().map(|c| c.id().to_owned()).collect()
}

async fn listed(runtime: &FakeRuntime) -> Result<BTreeSet<String>, Status> {
    let mut ids = Vec::new();
    let take = |m: v1::ListContainersResponse| ids.extend(m.containers.into_iter().map(|c| c.id));
    let request = Request::new(v1::ListContainersRequest::default());
    lists::CONTAINERS.each(channel(runtime.path().to_owned()), request, take).await?;
    let unique: BTreeSet<String> = ids.iter().cloned().collect();
    assert_eq!(unique.len(), ids.len(), "each item once");
    Ok(unique)
}

#[tokio::test]
async fn a_list_is_the_same_by_stream_and_in_one_message() {
    for streams in [true, false] {
        let (_dir, runtime) = fake(streams, 50, 10);
        assert_eq!(listed(&runtime).await.unwrap(), there(&runtime));
        assert_eq!(runtime.count(Method::StreamContainers), u64::from(streams));
        assert_eq!(runtime.count(Method::ListContainers), u64::from(!streams));
    }
}

#[tokio::test]
async fn a_list_larger_than_a_message_needs_the_stream() {
    let (_dir, runtime) = fake(true, 3_000, MAX_MESSAGE / 2_500);
    assert_eq!(listed(&runtime).await.unwrap(), there(&runtime));
    runtime.down();
    runtime.stream_lists(false);
    runtime.up().unwrap();
    assert!(listed(&runtime).await.is_err());
}

#[tokio::test]
async fn an_error_in_the_stream_fails_the_list_without_a_unary_retry() {
    let (_dir, runtime) = fake(true, 50, 10);
    for code in [Code::Internal, Code::Unimplemented] {
        runtime.script(Rule::on(Method::StreamContainers).fail_after(code, "disk on fire").times(1));
        assert_eq!(listed(&runtime).await.unwrap_err().code(), code);
    }
    assert_eq!(runtime.count(Method::ListContainers), 0);
    runtime.down();
    assert_eq!(listed(&runtime).await.unwrap_err().code(), Code::Unavailable);
}
