//! An API server that accepts requests and does not respond.

use quintlet_simulation::{Options, Service, Sim, pods};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_is_restarted_while_the_api_server_does_not_respond_for_its_objects() {
    let mut sim = Sim::prepare(Options::default()).await;
    // Volumes are refreshed in nearly every sync.
    sim.set_pod_sync_args(&["--sync-frequency=1s"]);
    for service in Service::ALL {
        sim.up(service);
    }
    let object = |name: &str| json!({"metadata": {"name": name}, "data": {"k": "dg=="}});
    sim.api.create("configmaps", "default", object("shown")).unwrap();
    sim.api.create("secrets", "default", object("env")).unwrap();
    let mut pod = pods::single("dies");
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "shown"}}]);
    let container = &mut pod["spec"]["containers"][0];
    container["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    container["envFrom"] = json!([{"secretRef": {"name": "env"}}]);
    let uid = sim.create(pod);
    sim.wait_ready("dies").await;
    let first = sim.runtime.newest(&uid, "c-dies").unwrap().id().to_owned();
    for requests in ["* configmaps", "* secrets"] {
        sim.api.faults().block(requests);
    }
    sim.api.faults().drop_watches();
    // The clients open new watches, which hang.
    for requests in ["watch configmaps", "watch secrets"] {
        sim.api.wait_for_requests(requests, 2, quintlet_simulation::LONG).await;
    }
    assert!(sim.runtime.exit(&first, 1));
    sim.wait_runtime("it runs again", |r| {
        r.newest(&uid, "c-dies").is_some_and(|c| c.running() && c.id() != first)
    })
    .await;
    sim.finish().await;
}
