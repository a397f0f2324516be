//! Reactions to the API server and to its faults.

use std::time::Duration;

use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testapi::Failure;
use quintlet_testkit::fake_runtime::{Behaviour, Method, Rule, StopReply};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_while_it_starts_leaves_nothing() {
    let sim = Sim::start(Options::default()).await;
    for (name, method) in [
        ("run", Method::RunPodSandbox),
        ("create", Method::CreateContainer),
        ("start", Method::StartContainer),
    ] {
        let slow = sim.runtime.script(Rule::on(method).latency(Duration::from_millis(500)));
        let calls = sim.runtime.count(method);
        let _uid = sim.create(pods::single(name));
        sim.runtime.wait_count(method, calls + 1).await;
        sim.delete(name, Some(2));
        sim.wait_gone(name).await;
        sim.wait_runtime("nothing of the pod is left", |r| {
            r.sandboxes().is_empty() && r.containers().is_empty()
        })
        .await;
        sim.runtime.unscript(slow);
        assert_eq!(sim.warnings(name), []);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_writes_are_repeated_with_the_newest_status() {
    let sim = Sim::start(Options::default()).await;
    for (i, failure) in [
        Failure::TooManyRequests(1),
        Failure::Internal,
        Failure::Unavailable,
        Failure::Conflict,
        Failure::Gone,
        Failure::Disconnect,
        Failure::LoseReply,
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("p{i}");
        sim.api.faults().fail("patch pods/status", 2, failure);
        let uid = sim.create(pods::single(&name));
        sim.wait_ready(&name).await;
        sim.assert_started_once(&name, &uid);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_keep_running_without_the_api_server_and_their_statuses_are_written_later() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("dies"));
    let stays_uid = sim.create(pods::single("stays"));
    sim.wait_ready("dies").await;
    let stays = sim.wait_ready("stays").await;
    sim.api.faults().set_down(true);
    let first = sim.runtime.newest(&uid, "c-dies").unwrap().id().to_owned();
    assert!(sim.runtime.exit(&first, 1));
    sim.wait_runtime("restarted without the API server", |r| {
        r.newest(&uid, "c-dies").is_some_and(|c| c.running() && c.id() != first)
    })
    .await;
    // A pod-sync that starts without the API server keeps its pods.
    sim.restart(Service::PodSync).await;
    let second = sim.runtime.newest(&uid, "c-dies").unwrap().id().to_owned();
    assert!(sim.runtime.exit(&second, 1));
    sim.wait_runtime("restarted by the new pod-sync", |r| {
        r.newest(&uid, "c-dies").is_some_and(|c| c.running() && c.id() != second)
    })
    .await;
    sim.delete("stays", None);
    sim.api.faults().set_down(false);
    sim.wait_pod("dies", "Ready with two restarts", |p| p.is_ready() && p.restarts() == 2).await;
    sim.wait_gone("stays").await;
    assert_eq!(stays.restarts(), 0, "{stays_uid}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_expire_or_are_dropped_lose_no_pod() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(pods::single("before"));
    sim.wait_ready("before").await;
    sim.api.expire();
    let _uid = sim.create(pods::single("expired"));
    sim.wait_ready("expired").await;
    sim.api.faults().drop_watches();
    let _uid = sim.create(pods::single("dropped"));
    sim.delete("before", None);
    sim.wait_ready("dropped").await;
    sim.wait_gone("before").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_final_delete_follows_the_end_of_the_containers() {
    let sim = Sim::start(Options::default()).await;
    let stop = StopReply::Exits { after: Duration::from_secs(2), code: 0 };
    sim.runtime.behave("c-slow", Behaviour { exit: None, stop });
    let uid = sim.create(pods::single("slow"));
    sim.wait_ready("slow").await;
    sim.delete("slow", None);
    sim.wait_calls(Method::StopContainer, sim.runtime.newest(&uid, "c-slow").unwrap().id(), 1).await;
    // The process is checked before the object: the other order would prove nothing.
    loop {
        let running = sim.runtime.containers().iter().any(|c| c.pod_uid() == uid && c.running());
        let there = !sim.pod("slow").is_gone();
        assert!(there || !running, "the object went before the process");
        if !running {
            break;
        }
        tokio::task::yield_now().await;
    }
    sim.wait_gone("slow").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_does_not_fit_is_failed_with_the_reason() {
    let sim = Sim::start(Options::default()).await;
    let mut selective = pods::single("selective");
    selective["spec"]["nodeSelector"] = json!({"disk": "nowhere"});
    let mut large = pods::single("large");
    large["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1000"}});
    for (pod, reason) in [(selective, "NodeAffinity"), (large, "OutOfcpu")] {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        let uid = sim.create(pod);
        sim.wait_pod(&name, "Failed", |p| p.phase() == "Failed" && p.text("/status/reason") == reason).await;
        sim.wait_event(&name, reason, |e| e.kind == "Warning" && e.reason == reason).await;
        assert_eq!(sim.sandboxes(&uid).len(), 0);
        sim.delete(&name, Some(0));
        sim.wait_gone(&name).await;
    }
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_has_a_mirror_pod_that_is_recreated_and_removed_with_it() {
    let sim = Sim::start(Options::default()).await;
    sim.manifest("web", &pods::manifest("web"));
    let name = "web-sim-node";
    let first = sim.wait_ready(name).await;
    sim.delete(name, Some(0));
    let second =
        sim.wait_pod(name, "another mirror, Ready", |p| p.is_ready() && p.uid() != first.uid()).await;
    assert_eq!(second.container("c-web").id, first.container("c-web").id, "a mirror's end stops nothing");
    assert_eq!(sim.runtime.count(Method::CreateContainer), 1);
    sim.remove_manifest("web");
    sim.wait_gone(name).await;
    sim.wait_runtime("nothing is left", |r| r.sandboxes().is_empty()).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_failed_writes_only_the_newest_status_is_written() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("dies"));
    sim.wait_ready("dies").await;
    sim.api.faults().block("patch pods/status");
    let mut last = sim.runtime.newest(&uid, "c-dies").unwrap().id().to_owned();
    for _ in 0..2 {
        assert!(sim.runtime.exit(&last, 1));
        sim.wait_runtime("restarted while nothing can be written", |r| {
            r.newest(&uid, "c-dies").is_some_and(|c| c.running() && c.id() != last)
        })
        .await;
        last = sim.runtime.newest(&uid, "c-dies").unwrap().id().to_owned();
    }
    sim.api.faults().clear();
    let seen = sim.wait_pod("dies", "Ready with two restarts", |p| p.is_ready() && p.restarts() == 2).await;
    assert!(seen.container("c-dies").id.ends_with(&last), "{seen:?}");
    sim.finish().await;
}
