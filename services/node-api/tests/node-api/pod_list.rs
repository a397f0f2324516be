//! `/pods` of a node whose pods are large, or arrive slowly.

use std::time::Duration;

use axum::body::Body;
use http_body_util::BodyExt as _;
use node_api::pods::pods;
use node_api_base::services::Services;
use quintlet_kit::args::paths::Paths;
use tokio::time::Instant;
use tokio_util::sync::DropGuard;

use crate::common::{TEST_TIMEOUT, serve_large_podsync};

const HOUR: Duration = Duration::from_secs(3600);

/// A pod-sync that pauses before each event after the first `prompt` ones, and a client of it.
async fn node(count: usize, bytes: usize, prompt: usize, pause: Duration) -> (Services, impl Sized) {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths::new(dir.path());
    let served: DropGuard = serve_large_podsync(&paths, count, bytes, prompt, pause).await;
    (Services::new(paths), (served, dir))
}

async fn next(body: &mut Body) -> Option<String> {
    let frame = body.frame().await?.ok()?;
    Some(String::from_utf8(frame.into_data().ok()?.to_vec()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn each_pod_of_a_list_is_sent_as_it_arrives() {
    let (services, _node) = node(100, 0, 0, Duration::from_secs(3)).await;
    let start = Instant::now();
    let mut body = pods(&services).await.into_body();
    assert_eq!(
        next(&mut body).await.unwrap(),
        r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#
    );
    let first = next(&mut body).await.unwrap();
    assert!(first.contains(r#""name":"web""#), "{first}");
    assert!(start.elapsed() < Duration::from_secs(9), "{:?}", start.elapsed());
    let rest = body.collect().await.unwrap().to_bytes();
    assert!(start.elapsed() > Duration::from_secs(300), "{:?}", start.elapsed());
    let rest = String::from_utf8(rest.to_vec()).unwrap();
    assert!(rest.starts_with(",{") && rest.ends_with("}]}"), "{rest}");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_ends_early_is_an_error_and_not_a_short_list() {
    // The events are hello and three pods.
    let (services, _node) = node(10, 0, 4, HOUR).await;
    let answer = pods(&services).await;
    assert_eq!(answer.status(), 200, "the first pod has arrived");
    assert!(answer.into_body().collect().await.is_err());
    let (services, _node) = node(10, 0, 0, HOUR).await;
    assert_eq!(pods(&services).await.status(), 500);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_a_list_for_a_minute_gets_no_more_of_it() {
    let (services, _node) = node(10, 0, 12, HOUR).await;
    let mut body = pods(&services).await.into_body();
    next(&mut body).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(body.collect().await.is_err());
    // A client that reads gets the whole list.
    let (services, _node) = node(10, 0, 12, HOUR).await;
    let body = pods(&services).await.into_body().collect().await.unwrap().to_bytes();
    let list: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(list["items"].as_array().unwrap().len(), 10);
}

#[tokio::test]
async fn clients_that_do_not_read_large_lists_delay_no_other_call() {
    let (services, _node) = node(10, 1 << 20, 12, HOUR).await;
    let mut stalled = Vec::new();
    for _ in 0..16 {
        let mut body = pods(&services).await.into_body();
        next(&mut body).await.unwrap();
        stalled.push(body);
    }
    let other = tokio::time::timeout(TEST_TIMEOUT, services.pod("default", "web")).await;
    assert_eq!(other.expect("an answer").unwrap().unwrap().uid, "u1");
    let statistics = tokio::time::timeout(TEST_TIMEOUT, services.pods_for_statistics()).await;
    assert_eq!(statistics.expect("an answer").unwrap().len(), 10);
}
