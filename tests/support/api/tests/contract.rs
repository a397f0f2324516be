//! The contract, and features of this server only: faults, counters, expiry.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use quintlet_testapi::{Failure, Options, TestApi, run_contract, run_node_contract};
use serde_json::{Value, json};

fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "busybox:1"}]}})
}

fn code<T: std::fmt::Debug>(result: kube::Result<T>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("not an API error: {other:?}"),
    }
}

#[tokio::test]
async fn the_contract_holds() {
    let api = TestApi::start().await;
    run_contract(api.client(), "contract").await;
    // A second run, with the leftovers of the first.
    run_contract(api.client(), "contract").await;
}

#[tokio::test]
async fn the_contract_holds_over_tls_and_through_a_kubeconfig() {
    let api = TestApi::start_with(Options { tls: true, ..Options::default() }).await.unwrap();
    let file = std::env::temp_dir().join(format!("testapi-{}.kubeconfig", std::process::id()));
    api.kubeconfig(&file).unwrap();
    let config = kube::config::Kubeconfig::read_from(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await.unwrap();
    run_contract(kube::Client::try_from(config).unwrap(), "contract").await;
}

#[tokio::test]
async fn the_contract_with_nodes_holds() {
    let api = TestApi::start().await;
    run_node_contract(api.client(), api.node_client("contract-self"), "contract-self", "contract").await;
    run_node_contract(api.client(), api.node_client("contract-self"), "contract-self", "contract").await;
}

/// Returns a client from the kubeconfig in an environment variable.
async fn real(variable: &str) -> kube::Client {
    let file = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} names no kubeconfig"));
    let config = kube::config::Kubeconfig::read_from(&file).unwrap();
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await.unwrap();
    kube::Client::try_from(config).unwrap()
}

/// `QUINTLET_KUBECONFIG=admin.kubeconfig cargo nextest run -p quintlet-testapi --run-ignored only real`
#[tokio::test]
#[ignore = "needs a real API server in QUINTLET_KUBECONFIG"]
async fn the_contract_holds_on_a_real_api_server() {
    run_contract(real("QUINTLET_KUBECONFIG").await, "quintlet-contract").await;
}

/// Needs in addition `QUINTLET_NODE_KUBECONFIG` of the identity `system:node:$QUINTLET_NODE`, whose Node does
/// not run.
#[tokio::test]
#[ignore = "needs a real API server in QUINTLET_KUBECONFIG and QUINTLET_NODE_KUBECONFIG"]
async fn the_contract_with_nodes_holds_on_a_real_api_server() {
    let (admin, node) = (real("QUINTLET_KUBECONFIG").await, real("QUINTLET_NODE_KUBECONFIG").await);
    let name = std::env::var("QUINTLET_NODE").expect("QUINTLET_NODE is the name of the node");
    run_node_contract(admin, node, &name, "quintlet-contract-node").await;
}

#[tokio::test]
async fn declared_features_of_a_node_must_be_sorted_and_unique() {
    let api = TestApi::start().await;
    let node =
        |features: &[&str]| json!({"metadata": {"name": "n1"}, "status": {"declaredFeatures": features}});
    assert!(api.create("nodes", "", node(&["B", "A"])).is_err());
    api.create("nodes", "", node(&["A", "B"])).unwrap();
    for (features, is_taken) in
        [(&["A", "C"][..], true), (&["C", "A"], false), (&["A", "A"], false), (&[], true)]
    {
        let edited =
            api.edit("nodes/status", "", "n1", |n| n["status"]["declaredFeatures"] = json!(features));
        assert_eq!(edited.is_ok(), is_taken, "{features:?}");
    }
}

#[tokio::test]
async fn faults_occur_as_often_as_requested_and_are_counted() {
    let api = TestApi::start().await;
    api.create_pod(pod("p"));
    let pods: Api<Pod> = Api::namespaced(api.client(), "default");
    let patch = || async {
        let body = json!({"status": {"message": "x"}});
        pods.patch_status("p", &PatchParams::default(), &Patch::Strategic(body)).await
    };
    for (failure, want) in
        [(Failure::Internal, 500), (Failure::Conflict, 409), (Failure::Gone, 410), (Failure::Invalid, 422)]
    {
        api.faults().fail("patch pods/status", 2, failure);
        assert_eq!((code(patch().await), code(patch().await)), (want, want));
        patch().await.unwrap();
    }
    assert_eq!(api.counts().of("patch pods/status"), 12);
    assert_eq!(api.counts().of("get *"), 0);
    assert_eq!(api.requests("patch pods/status default/p")[0].body, json!({"status": {"message": "x"}}));
    api.faults().fail("patch pods/status", 1, Failure::Disconnect);
    assert!(patch().await.is_err());
    api.faults().set_down(true);
    assert!(patch().await.is_err());
    api.faults().set_down(false);
    patch().await.unwrap();
}

#[tokio::test]
async fn too_many_requests_has_retry_after() {
    let api = TestApi::start().await;
    api.faults().fail("list pods", 1, Failure::TooManyRequests(7));
    let request = http::Request::get("/api/v1/pods").body(kube::client::Body::empty()).unwrap();
    let response = api.client().send(request).await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (429, "7"));
}

#[tokio::test]
async fn a_blocked_request_hangs_until_cleared_and_a_slow_one_is_late() {
    let api = TestApi::start().await;
    let pods: Api<Pod> = Api::namespaced(api.client(), "default");
    api.faults().block("list pods");
    let params = ListParams::default();
    let list = pods.list(&params);
    tokio::pin!(list);
    assert!(tokio::time::timeout(Duration::from_millis(100), &mut list).await.is_err());
    api.faults().clear();
    list.await.unwrap();
    api.faults().latency("list pods", Duration::from_millis(80));
    let start = tokio::time::Instant::now();
    pods.list(&ListParams::default()).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(80));
}

#[tokio::test]
async fn the_kube_watcher_survives_disconnections_and_expiry() {
    for strategy in [watcher::InitialListStrategy::ListWatch, watcher::InitialListStrategy::StreamingList] {
        let api = TestApi::start().await;
        api.create_pod(pod("first"));
        let config = watcher::Config { initial_list_strategy: strategy, ..watcher::Config::default() };
        let stream = watcher(Api::<Pod>::all(api.client()), config.fields("spec.nodeName=n1"));
        tokio::pin!(stream);
        let mut lists = 0;
        // Reads until the pod is in a change or a list. The watcher recovers from errors.
        let mut read_until = async |name: &str| {
            let seen = async {
                loop {
                    match stream.try_next().await {
                        Ok(Some(watcher::Event::Apply(p) | watcher::Event::InitApply(p)))
                            if p.name_any() == name =>
                        {
                            return;
                        }
                        Ok(Some(watcher::Event::Init)) => lists += 1,
                        Ok(Some(_)) | Err(_) => {}
                        Ok(None) => panic!("the watcher ended"),
                    }
                }
            };
            tokio::time::timeout(Duration::from_secs(10), seen)
                .await
                .unwrap_or_else(|_| panic!("{name} is not seen"));
        };
        read_until("first").await;
        api.create_pod(pod("second"));
        read_until("second").await;
        api.faults().drop_watches();
        api.create_pod(pod("third"));
        read_until("third").await;
        api.expire();
        api.create_pod(pod("fourth"));
        read_until("fourth").await;
        assert_eq!(lists, 2, "only an expired version needs a new list");
    }
}

#[tokio::test]
async fn a_resource_version_older_than_the_history_is_expired() {
    let api = TestApi::start_with(Options { history: 3, ..Options::default() }).await.unwrap();
    let first = api.create_pod(pod("p"));
    for n in 0..10 {
        api.edit("pods/status", "default", "p", |p| p["status"]["message"] = json!(n.to_string())).unwrap();
    }
    let rv = first["metadata"]["resourceVersion"].as_str().unwrap();
    let path = format!("/api/v1/pods?watch=1&timeoutSeconds=1&resourceVersion={rv}");
    let request = http::Request::get(path).body(Vec::new()).unwrap();
    let text = api.client().request_text(request).await.unwrap();
    let line: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&line["type"], &line["object"]["code"], &line["object"]["reason"]),
        (&json!("ERROR"), &json!(410), &json!("Expired"))
    );
}
