//! Calls whose effect happened and whose answer was lost.

use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_makes_nothing_twice_and_warns_of_nothing() {
    let sim = Sim::start(Options::default()).await;
    for (name, method) in [
        ("run", Method::RunPodSandbox),
        ("create", Method::CreateContainer),
        ("start", Method::StartContainer),
    ] {
        sim.runtime.script(Rule::on(method).fail_after(Code::Unavailable, "transport is closing").times(1));
        let uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
        sim.assert_started_once(name, &uid);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_to_a_stop_ends_the_pod_without_a_warning() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("stop"));
    sim.wait_ready("stop").await;
    sim.runtime.script(Rule::on(Method::StopContainer).fail_after(Code::Unavailable, "closing").times(1));
    sim.runtime.script(Rule::on(Method::StopPodSandbox).fail_after(Code::Unavailable, "closing").times(1));
    sim.delete("stop", None);
    sim.wait_gone("stop").await;
    sim.wait_runtime("nothing of the pod is left", |r| r.sandboxes().is_empty() && r.containers().is_empty())
        .await;
    assert_eq!(sim.warnings("stop"), [], "{uid}");
    sim.finish().await;
}
