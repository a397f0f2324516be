//! Mirror pods while the API server or the Node is unavailable.

use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::Method;
use serde_json::json;

const NAME: &str = "web-sim-node";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_does_not_wait_for_an_api_server_that_hangs_on_its_mirror_pod() {
    let sim = Sim::start(Options::default()).await;
    sim.api.faults().block("create pods");
    sim.manifest("web", &pods::manifest("web"));
    let running =
        |r: &quintlet_testkit::fake_runtime::FakeRuntime| r.containers().into_iter().find(|c| c.running());
    sim.wait_runtime("it runs", |r| running(r).is_some()).await;
    sim.api.wait_for_requests("create pods", 1, LONG).await;
    let first = running(&sim.runtime).unwrap().id().to_owned();
    assert!(sim.runtime.exit(&first, 1));
    sim.wait_runtime("it runs again", |r| running(r).is_some_and(|c| c.id() != first)).await;
    sim.remove_manifest("web");
    sim.wait_runtime("nothing is left", |r| r.sandboxes().is_empty()).await;
    // Each request hangs for 10 s, and so would each pass that waited for it.
    let created = sim.api.counts().of("create pods");
    assert!((1..=2).contains(&created), "{created}: four passes at least waited for the mirror");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mirror_pod_is_created_after_its_node_and_owned_by_it() {
    let sim = Sim::prepare(Options::default()).await;
    sim.api.faults().block("create nodes");
    for service in Service::ALL {
        sim.up(service);
    }
    sim.manifest("web", &pods::manifest("web"));
    sim.wait_runtime("it runs", |r| r.containers().iter().any(|c| c.running())).await;
    assert!(sim.pod(NAME).is_gone());
    sim.api.faults().clear();
    let seen = sim.wait_ready(NAME).await;
    let node = sim.api.get("nodes", "", NODE).unwrap();
    let owners = &seen.0["metadata"]["ownerReferences"];
    assert_eq!(owners[0]["uid"], node["metadata"]["uid"], "{owners}");
    assert_eq!(owners.as_array().map(Vec::len), Some(1));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminating_or_outdated_mirror_pod_is_replaced_and_its_pod_keeps_running() {
    let sim = Sim::start(Options::default()).await;
    sim.manifest("web", &pods::manifest("web"));
    let mut last = sim.wait_ready(NAME).await;
    let container = last.container("c-web");
    for what in ["deleted", "edited"] {
        if what == "deleted" {
            sim.delete(NAME, Some(30));
        } else {
            let edit = |p: &mut serde_json::Value| {
                p["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("another");
            };
            // Annotations of a known mirror pod are not checked.
            sim.kill(Service::PodSync).await;
            sim.api.edit("pods", "default", NAME, edit).unwrap();
            sim.up(Service::PodSync);
        }
        let uid = last.uid().to_owned();
        last = sim.wait_pod(NAME, "a new mirror, Ready", |p| p.is_ready() && p.uid() != uid).await;
        assert_eq!(last.container("c-web"), container, "{what}");
    }
    assert_eq!(sim.runtime.count(Method::StopContainer), 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_that_is_removed_and_written_again_at_once_is_a_new_pod() {
    let mut sim = Sim::prepare(Options::default()).await;
    // No periodic read intervenes.
    sim.set_pod_sync_args(&["--file-check-frequency=1h"]);
    sim.start_all();
    sim.manifest("web", &pods::manifest("web"));
    sim.manifest("other", &pods::manifest("other"));
    let (first, other) = (sim.wait_ready(NAME).await, sim.wait_ready("other-sim-node").await);
    let (path, text) = (sim.manifests_dir().join("web.yaml"), pods::manifest("web").to_string());
    // The fake runtime writes no logs.
    let uid = first.0["metadata"]["annotations"]["kubernetes.io/config.hash"].as_str().unwrap();
    let logs = sim.pod_logs_dir().join(format!("default_{NAME}_{uid}/c-web"));
    std::fs::write(logs.join("0.log"), "").unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, text).unwrap();
    let old = first.container("c-web");
    let new = |p: &quintlet_simulation::Seen| {
        let container = p.container("c-web");
        p.is_ready() && container.id != old.id && container.restarts == 1
    };
    sim.wait_pod(NAME, "another container, Ready", new).await;
    let after = sim.wait_ready("other-sim-node").await;
    assert_eq!((after.uid(), after.container("c-other")), (other.uid(), other.container("c-other")));
    sim.finish().await;
}
