//! Objects of the API server that cannot be decoded.

use quintlet_simulation::{Options, Service, Sim, pods};
use serde_json::{Value, json};

/// The API server accepts this time, but the product's types cannot represent it.
const LAST: &str = "9999-12-31T23:59:59Z";

fn with_claim_template(name: &str) -> Value {
    let mut pod = pods::single(name);
    let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    let template = json!({"metadata": {"deletionTimestamp": LAST}, "spec": spec});
    pod["spec"]["volumes"] = json!([{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]);
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_undecodable_pod_gets_an_event_and_the_other_pods_run() {
    let sim = Sim::start(Options::default()).await;
    let before = sim.create(pods::single("before"));
    sim.wait_ready("before").await;
    let _bad = sim.create(with_claim_template("bad"));
    let late = sim.create(pods::single("late"));
    sim.wait_ready("late").await;
    sim.wait_event("bad", "the field", |e| {
        e.kind == "Warning" && e.reason == "FailedValidation" && e.message.contains("deletionTimestamp")
    })
    .await;
    // The first list of a new process contains the pod as well.
    sim.restart(Service::PodSync).await;
    let later = sim.create(pods::single("later"));
    sim.wait_ready("later").await;
    sim.delete("before", None);
    sim.wait_gone("before").await;
    sim.wait_nothing_left(&before).await;
    for (name, uid) in [("late", &late), ("later", &later)] {
        sim.assert_started_once(name, uid);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undecodable_managed_fields_change_nothing_for_a_running_pod() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("web"));
    sim.wait_ready("web").await;
    let entry = json!([{
        "manager": "kubectl", "operation": "Update", "apiVersion": "v1", "time": LAST,
        "fieldsType": "FieldsV1", "fieldsV1": {},
    }]);
    sim.api.edit("pods", "default", "web", |p| p["metadata"]["managedFields"] = entry).unwrap();
    let edited = sim.pod("web").0;
    assert_eq!(edited["metadata"]["managedFields"][0]["time"], LAST, "{edited}");
    sim.restart(Service::PodSync).await;
    let late = sim.create(pods::single("late"));
    sim.wait_ready("late").await;
    sim.assert_started_once("web", &uid);
    sim.assert_started_once("late", &late);
    sim.delete("web", None);
    sim.wait_gone("web").await;
    sim.finish().await;
}
