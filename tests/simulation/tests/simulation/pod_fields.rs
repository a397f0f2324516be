//! Fields of a pod that the node cannot enforce.

use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::Method;
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_resource_claims_waits_with_the_kubelets_event_and_starts_nothing() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("claims");
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "g"}]);
    pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]});
    let uid = sim.create(pod);
    let event = sim
        .wait_event("claims", "FailedPrepareDynamicResources", |e| {
            e.kind == "Warning" && e.reason == "FailedPrepareDynamicResources"
        })
        .await;
    let text = "Failed to prepare dynamic resources: prepare dynamic resources: fetch ResourceClaim g: ";
    assert!(event.message.starts_with(text), "{event:?}");
    // A pod that was created later runs, so the first one had its turn.
    let _uid = sim.create(pods::single("plain"));
    sim.wait_ready("plain").await;
    assert_eq!(sim.sandboxes(&uid).len(), 0);
    assert_eq!(sim.pod("claims").phase(), "Pending");
    let view = sim.view("claims").await.unwrap();
    assert!(view.waiting.is_some_and(|w| w.message.contains("ResourceClaim g")), "explain names the claim");
    sim.delete("claims", None);
    sim.wait_gone("claims").await;
    sim.wait_nothing_left(&uid).await;
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_field_that_is_not_enforced_is_reported_once_and_the_pod_runs() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("limited");
    pod["spec"]["volumes"] = json!([{"name": "e", "emptyDir": {"mode": 0o1777}}]);
    let _uid = sim.create(pod);
    sim.wait_ready("limited").await;
    let event = sim.wait_event("limited", "FieldNotEnforced", |e| e.reason == "FieldNotEnforced").await;
    assert_eq!(event.kind, "Warning");
    assert!(event.message.starts_with("spec.volumes{e}.emptyDir.mode: "), "{event:?}");
    assert_eq!(event.count, 1);
    sim.finish().await;
}
