//! Concurrent calls to the runtime, on a node whose lists are larger than a message.

use http_body_util::BodyExt as _;
use node_api::pods;
use node_api_base::services::Services;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Method, Options};

#[tokio::test]
async fn running_pods_are_listed_even_if_the_list_is_larger_than_a_message() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths::new(dir.path());
    let runtime = FakeRuntime::start(&paths.cri(CriSocket::NodeApi), Options::silent()).unwrap();
    runtime.stream_lists(true);
    for n in 0..300 {
        let sandbox = runtime.add_sandbox(&format!("u{n}"), &format!("web-{n}"), "default", 0);
        for c in 0..10 {
            let mut seed = ContainerSeed::running(&format!("c{c}"));
            seed.annotations = [("notes".to_owned(), "x".repeat(6_000))].into();
            runtime.add_container(&sandbox, &seed);
        }
    }
    let answer = pods::running(&Services::new(paths)).await;
    assert_eq!(answer.status(), 200);
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let list: serde_json::Value = serde_json::from_slice(&body).unwrap();
    let pods = list["items"].as_array().unwrap();
    assert_eq!(pods.len(), 300);
    assert!(pods.iter().all(|p| p["spec"]["containers"].as_array().unwrap().len() == 10));
    assert_eq!(runtime.count(Method::ListContainers), 0, "asked for by the stream");
}
