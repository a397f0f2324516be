//! Pods that must not be treated as deleted, and pods that return.

use quintlet_cri_api::v1;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_pod_with_pending_admission_is_no_orphan() {
    let mut options = Options::default();
    options.runtime.features =
        Some(v1::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() });
    options.runtime.handlers = vec![v1::RuntimeHandler::default()];
    let sim = Sim::start(options).await;
    let mut strict = pods::single("strict");
    strict["spec"]["securityContext"] = json!({"supplementalGroupsPolicy": "Strict"});
    let uid = sim.create(strict);
    let before = sim.wait_ready("strict").await;

    // A pod-sync without records and without the runtime's features.
    sim.kill(Service::PodSync).await;
    std::fs::remove_file(sim.paths().state_dir().join(&uid)).unwrap();
    let hung = sim.runtime.hang(Method::Status);
    // Housekeeping removes this after it has looked for orphans in the runtime.
    let nobody = sim.root_dir().join("pods/nobody");
    std::fs::create_dir_all(&nobody).unwrap();
    sim.up(Service::PodSync);
    until(
        "housekeeping has looked for orphans",
        LONG,
        async || {
            if nobody.exists() { Err("not yet") } else { Ok(()) }
        },
    )
    .await;
    sim.runtime.unscript(hung);
    sim.wait_view("strict", "taken over", |v| v.status == "Running").await;
    let _uid = sim.create(pods::single("after"));
    sim.wait_ready("after").await;
    assert_eq!(sim.runtime.count(Method::StopContainer), 0, "no container was stopped");
    let now = sim.pod("strict");
    assert_eq!(now.container("c-strict"), before.container("c-strict"));
    assert_eq!(now.condition("Ready"), before.condition("Ready"));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_pod_that_appears_during_its_orphan_removal_starts_again() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("back"));
    sim.wait_ready("back").await;
    let first = sim.runtime.newest(&uid, "c-back").unwrap().id().to_owned();
    sim.kill(Service::PodSync).await;
    std::fs::remove_file(sim.paths().state_dir().join(&uid)).unwrap();
    // A list without the pod, as from a stale API server.
    let bound_to = |node: &'static str| {
        sim.api
            .edit("pods/binding", "default", "back", move |p| p["spec"]["nodeName"] = json!(node))
            .unwrap();
    };
    bound_to("elsewhere");
    let hung = sim.runtime.hang(Method::StopContainer);
    sim.up(Service::PodSync);
    sim.wait_calls(Method::StopContainer, &first, 1).await;
    bound_to(NODE);
    // The watch delivers pods in order.
    let _uid = sim.create(pods::single("marker"));
    sim.wait_ready("marker").await;
    sim.runtime.unscript(hung);
    sim.wait_runtime("it runs again", |r| {
        r.newest(&uid, "c-back").is_some_and(|c| c.running() && c.id() != first)
    })
    .await;
    sim.wait_pod("back", "Ready again", |p| p.is_ready() && !p.container("c-back").id.ends_with(&first))
        .await;
    let metrics = quintlet_telemetry::metrics::text();
    assert!(metrics.contains("kubelet_restarted_pods_total{static=\"\"} 1\n"), "{metrics}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orphan_that_cannot_be_stopped_is_reported() {
    let sim = Sim::prepare(Options::default()).await;
    sim.runtime.add_sandbox("u-lost", "lost", "default", 0);
    std::fs::create_dir_all(sim.root_dir().join("pods/u-lost")).unwrap();
    sim.runtime.script(Rule::on(Method::StopPodSandbox).fail(Code::Internal, "no network").times(1));
    for service in Service::ALL {
        sim.up(service);
    }
    sim.wait_event("lost", "FailedKillPod", |e| {
        e.kind == "Warning" && e.reason == "FailedKillPod" && e.message.starts_with("error killing pod: ")
    })
    .await;
    sim.wait_nothing_left("u-lost").await;
    sim.finish().await;
}
