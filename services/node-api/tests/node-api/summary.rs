//! `/stats/summary` and `/metrics/cadvisor` with a runtime in memory.

use crate::common::Api;
use http::StatusCode;
use node_api::limits::Limits;
use quintlet_testkit::fake_runtime::Method;
use serde_json::{Value, json};
use tonic::Code;

const OPEN: &[&str] = &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

async fn summary(api: &Api, query: &str) -> Value {
    let (code, body) = api.get(&format!("/stats/summary{query}"), None).await;
    assert_eq!(code, StatusCode::OK, "{body}");
    serde_json::from_str(&body).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_are_as_pod_sync_measured_them() {
    let (api, _runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    let pod = summary(&api, "").await["pods"][0].clone();
    let volume = &pod["volume"][0];
    assert_eq!((&volume["name"], &volume["usedBytes"]), (&json!("scratch"), &json!(4096)));
    assert_eq!(volume["time"], "1970-01-01T00:00:01Z");
    assert_eq!(pod["ephemeral-storage"]["usedBytes"], 4096 + 512, "with the file of hosts");
    assert_eq!(volume.get("pvcRef"), None);
    let claimed = &pod["volume"][1];
    assert_eq!(claimed["pvcRef"], json!({"name": "c1", "namespace": "default"}));
    let light = summary(&api, "?only_cpu_and_memory=true").await["pods"][0].clone();
    assert_eq!((&light["volume"], &light["ephemeral-storage"]), (&Value::Null, &Value::Null));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_pod_statistics_the_runtime_is_asked_for_container_statistics() {
    let (api, runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    for method in [Method::ListPodSandboxStats, Method::StreamPodSandboxStats] {
        runtime.fail(method, Code::Unimplemented, "not here", u32::MAX);
    }
    let pods = summary(&api, "").await["pods"].clone();
    assert_eq!(pods[0]["podRef"], json!({"name": "web", "namespace": "default", "uid": "u1"}));
    assert_eq!(pods[0]["containers"][0]["name"], "main", "{pods}");
    assert_eq!(pods.as_array().unwrap().len(), 1);
    for method in [Method::ListContainerStats, Method::StreamContainerStats] {
        runtime.fail(method, Code::Unavailable, "broken", u32::MAX);
    }
    let (code, body) = api.get("/stats/summary", None).await;
    assert_eq!((code.as_u16(), body.as_str()), (500, "Internal Error: broken\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_usage_of_claims_is_in_the_metrics() {
    let (api, _runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    let (code, page) = api.get("/metrics", None).await;
    let line = "kubelet_volume_stats_used_bytes{namespace=\"default\",persistentvolumeclaim=\"c1\"} 8192\n";
    assert!(code == StatusCode::OK && page.contains(line), "{page}");
    assert!(!page.contains("scratch"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_are_listed_for_cadvisor_only_if_their_statistics_do_not_have_them() {
    let (api, runtime) = Api::with_runtime(Limits::default(), OPEN).await;
    let lists_of_a_scrape = async || {
        runtime.forget_calls();
        let (code, page) = api.get("/metrics/cadvisor", None).await;
        assert_eq!(code, StatusCode::OK, "{page}");
        [Method::ListPodSandbox, Method::StreamPodSandboxes].map(|method| runtime.count(method))
    };
    assert_eq!(lists_of_a_scrape().await, [0, 0]);
    for method in [Method::ListPodSandboxStats, Method::StreamPodSandboxStats] {
        runtime.fail(method, Code::Unimplemented, "not here", u32::MAX);
    }
    assert_eq!(lists_of_a_scrape().await, [1, 0]);
}
