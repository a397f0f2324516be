//! The order of calls to a runtime that is busy.

use quintlet_kit::args::paths::CriSocket;
use quintlet_kit::messages::whole;
use quintlet_kit::socket;
use quintlet_proto::debug::v1::MetricsRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_simulation::{LONG, Options, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;

/// More than the limit of calls in flight, twice.
const PODS: usize = 60;
const SYSTEM_CRITICAL: i32 = 2_000_000_000;

/// Returns the number of calls that wait in the lane of starts.
async fn queued(sim: &Sim) -> usize {
    let mut client = DebugClient::new(socket::channel(sim.paths().cri(CriSocket::Admin)));
    let text = whole(client.metrics(MetricsRequest::default())).await.unwrap().into_inner().text;
    let series = r#"quintlet_cri_queue_depth{lane="start"} "#;
    text.lines().find_map(|line| line.strip_prefix(series)).map_or(0, |count| count.trim().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_critical_pod_is_started_before_pods_that_wait_for_a_busy_runtime() {
    let sim = Sim::start(Options::default()).await;
    let hangs = sim.runtime.script(Rule::on(Method::RunPodSandbox).hang());
    for number in 0..PODS {
        let _uid = sim.create(pods::single(&format!("ordinary-{number}")));
    }
    let in_flight = until("the other calls wait", LONG, async || {
        let in_flight = sim.runtime.in_flight(Method::RunPodSandbox);
        let queued = queued(&sim).await;
        if in_flight > 0 && in_flight + queued == PODS { Ok(in_flight) } else { Err((in_flight, queued)) }
    })
    .await;
    let mut critical = pods::single("critical");
    critical["spec"]["priority"] = json!(SYSTEM_CRITICAL);
    let uid = sim.create(critical);
    until("the call of the critical pod waits as well", LONG, async || {
        let queued = queued(&sim).await;
        if in_flight + queued == PODS + 1 { Ok(()) } else { Err(queued) }
    })
    .await;
    sim.runtime.unscript(hangs);
    sim.wait_ready("critical").await;
    let sent = sim.runtime.calls_of(Method::RunPodSandbox);
    let position = sent.iter().position(|call| call.subjects.contains(&uid)).unwrap();
    // The runtime may receive calls that are dispatched together in another order.
    assert!(position < in_flight * 2, "{position}: it is dispatched as soon as those in flight have ended");
    for number in 0..PODS {
        sim.wait_ready(&format!("ordinary-{number}")).await;
    }
    sim.finish().await;
}
