//! A second instance of probe-service that joins in the middle of a burst of pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_kit::socket;
use quintlet_proto::probe::v1::WatchRequest;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::watch_event::Event;
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::Method;
use quintlet_testkit::wait::until;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout_at};

/// Pods of the burst. Both instances have some, except with a probability of 2⁻³⁹.
const PODS: usize = 40;
/// Pause between two pods of the burst.
const PAUSE: Duration = Duration::from_millis(50);
/// Every pod is probed once a second. Within this time each instance probes all of its pods.
const WINDOW: Duration = Duration::from_secs(3);
/// Span in which the attempts of a pod are counted.
const SPAN: Duration = Duration::from_secs(6);
/// Most attempts of a pod within [`SPAN`]: seven of one instance, since both ends count, and two of the other
/// one, since pod-sync waits at most 2 s for a pod's memory. Two instances make twelve.
const MOST: usize = 9;

/// Returns the pods that an instance probes until `end`.
async fn probed_by(sim: &Sim, instance: &str, end: Instant) -> BTreeSet<String> {
    let mut client = ProbeClient::new(socket::channel(sim.paths().probe(instance)));
    let request = WatchRequest { hello: Some(quintlet_proto::hello()), ..WatchRequest::default() };
    let mut events = client.watch(request).await.unwrap().into_inner();
    let mut names = BTreeSet::new();
    while let Ok(event) = timeout_at(end, events.message()).await {
        if let Some(Event::Evaluation(evaluation)) = event.unwrap().unwrap().event {
            names.insert(evaluation.pod_name);
        }
    }
    names
}

/// Returns the times of the attempts of each pod at the runtime, by the command of its probe.
fn attempts(sim: &Sim) -> BTreeMap<String, Vec<Instant>> {
    let mut attempts: BTreeMap<String, Vec<Instant>> = BTreeMap::new();
    for call in sim.runtime.calls_of(Method::ExecSync) {
        let command = call.request::<v1::ExecSyncRequest>().cmd;
        attempts.entry(command.concat()).or_default().push(call.at);
    }
    attempts
}

/// Returns the largest number of attempts within [`SPAN`].
fn most_within_span(times: &[Instant]) -> usize {
    let within = |first: &Instant| times.iter().filter(|at| **at >= *first && **at <= *first + SPAN).count();
    times.iter().map(within).max().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_joins_during_a_burst_shares_its_pods_and_probes_none_beside_the_first() {
    let sim = Sim::start(Options::default()).await;
    let names: Vec<String> = (0..PODS).map(|n| format!("burst-{n}")).collect();
    let mut uids = Vec::new();
    for (n, name) in names.iter().enumerate() {
        if n == PODS / 2 {
            sim.up(Service::SecondProbe);
        }
        let mut pod = pods::single(name);
        pod["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": [name]}, "periodSeconds": 1, "timeoutSeconds": 1});
        uids.push(sim.create(pod));
        sleep(PAUSE).await;
    }
    for name in &names {
        sim.wait_ready(name).await;
    }
    socket::wait_ready(&sim.paths().probe("probe-1"), LONG).await.unwrap();

    let (first, second) = until("each pod at one instance", LONG, async || {
        let end = Instant::now() + WINDOW;
        let shares = tokio::join!(probed_by(&sim, "probe-0", end), probed_by(&sim, "probe-1", end));
        let (first, second) = &shares;
        let is_shared = first.is_disjoint(second) && first.len() + second.len() == PODS;
        if is_shared { Ok(shares) } else { Err(shares) }
    })
    .await;
    assert!(!first.is_empty() && !second.is_empty(), "both have a share: {first:?}, {second:?}");
    // The attempts after the hand-over count as well.
    sleep(SPAN).await;

    let attempts = attempts(&sim);
    for (name, uid) in names.iter().zip(&uids) {
        let most = attempts.get(name).map_or(0, |times| most_within_span(times));
        assert!((1..=MOST).contains(&most), "{name} had {most} attempts within {SPAN:?}");
        assert!(sim.pod(name).is_ready(), "{name} stays Ready");
        sim.assert_started_once(name, uid);
    }
    sim.finish().await;
}
