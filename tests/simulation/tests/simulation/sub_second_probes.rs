//! Probes with a period below one second, which the annotation `quintlet.dev/probe-period-ms` sets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_proto::podsync::v1::ExplainRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{ExecReply, Method};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

const ANNOTATION: &str = "quintlet.dev/probe-period-ms";
/// Reason of the event of an annotation without an effect.
const IGNORED: &str = "ProbePeriodIgnored";
/// Longest time from the end of a pod to a status that is not ready: three attempts and the way of the
/// result.
const LIMIT: Duration = Duration::from_millis(500);

/// Returns a pod with a readiness probe of the command `name`.
fn probed(name: &str, period_ms: Option<&str>) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": [name]}, "periodSeconds": 1, "failureThreshold": 3});
    if let Some(period_ms) = period_ms {
        pod["metadata"]["annotations"] = json!({ANNOTATION: period_ms});
    }
    pod
}

/// Starts a node that allows this number of exec attempts per second.
async fn node(exec_rate: u32) -> Sim {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&[&format!("--sub-second-exec-probe-rate={exec_rate}")]);
    sim.start_all();
    sim
}

/// Returns how often the command `name` has run.
fn execs(sim: &Sim, name: &str) -> usize {
    let calls = sim.runtime.calls_of(Method::ExecSync);
    calls.iter().filter(|call| call.request::<v1::ExecSyncRequest>().cmd == [name]).count()
}

/// Returns how often the commands ran during `span`.
async fn execs_during<const N: usize>(sim: &Sim, names: [&str; N], span: Duration) -> [usize; N] {
    let before = names.map(|name| execs(sim, name));
    sleep(span).await;
    let mut made = names.map(|name| execs(sim, name));
    made.iter_mut().zip(before).for_each(|(made, before)| *made -= before);
    made
}

/// Sets or removes the annotation, like `kubectl annotate --overwrite`.
fn annotate(sim: &Sim, name: &str, period_ms: Option<&str>) {
    sim.api
        .edit("pods", "default", name, |pod| {
            let annotations = &mut pod["metadata"]["annotations"];
            match period_ms {
                Some(period_ms) => annotations[ANNOTATION] = json!(period_ms),
                None => drop(annotations.as_object_mut().unwrap().remove(ANNOTATION)),
            }
        })
        .unwrap();
}

/// Waits until the condition Ready of a pod is `wanted`, and returns how long that took.
async fn readiness_takes(sim: &Sim, name: &str, wanted: &str) -> Duration {
    let begin = Instant::now();
    while sim.pod(name).condition("Ready").0 != wanted {
        assert!(begin.elapsed() < Duration::from_secs(30), "{name} does not become {wanted}");
        sleep(Duration::from_millis(2)).await;
    }
    begin.elapsed()
}

/// Waits until `quintctl explain` has an error about the annotation of a pod, or has none.
async fn wait_explained(sim: &Sim, name: &str, wanted: bool) {
    let path = sim.paths().podsync();
    until(&format!("an error about the annotation: {wanted}"), LONG, async || {
        let mut client = PodSyncClient::new(quintlet_kit::socket::channel(path.clone()));
        let request = ExplainRequest { pod: format!("default/{name}") };
        let errors = client.explain(request).await.unwrap().into_inner().last_errors;
        if errors.iter().any(|error| error.contains(ANNOTATION)) == wanted { Ok(()) } else { Err(errors) }
    })
    .await;
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort();
    all[all.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_pod_is_not_ready_in_the_api_server_within_500_ms_and_its_neighbour_is_probed_as_before() {
    let sim = node(100).await;
    let dead = Arc::new(AtomicBool::new(false));
    let is_dead = Arc::clone(&dead);
    sim.runtime.on_exec(move |_, command| {
        let fails = command == ["fast"] && is_dead.load(Ordering::SeqCst);
        ExecReply { exit_code: fails.into(), after: Duration::from_millis(20), ..ExecReply::default() }
    });
    for pod in [probed("fast", Some("100")), probed("neighbour", None)] {
        let _uid = sim.create(pod);
    }
    for name in ["fast", "neighbour"] {
        sim.wait_ready(name).await;
    }
    let [fast, neighbour] = execs_during(&sim, ["fast", "neighbour"], Duration::from_secs(20)).await;
    println!("{fast} attempts in 20 s, {neighbour} of the neighbour");
    assert!((150..=202).contains(&fast), "{fast}");
    assert!((19..=21).contains(&neighbour), "{neighbour}");
    let mut losses = Vec::new();
    for phase in [0, 13, 37, 58, 91] {
        sleep(Duration::from_millis(1500 + phase)).await;
        dead.store(true, Ordering::SeqCst);
        losses.push(readiness_takes(&sim, "fast", "False").await);
        dead.store(false, Ordering::SeqCst);
        readiness_takes(&sim, "fast", "True").await;
    }
    println!("not ready after {losses:?}");
    // Three attempts that fail take at least 200 ms. One loss may meet other work of the machine.
    assert!(median(losses.clone()) <= LIMIT, "{losses:?}");
    assert!(losses.iter().all(|loss| *loss >= Duration::from_millis(200)), "{losses:?}");
    assert!(sim.pod("neighbour").is_ready());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn network_probes_need_no_configuration_and_their_connection_ends_the_readiness() {
    let sim = Sim::start(Options::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let accepted = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&accepted);
    let server = quintlet_kit::task::spawn("server", async move {
        while let Ok((_stream, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::SeqCst);
        }
    });
    let mut pod = probed("net", Some("100"));
    pod["spec"]["containers"][0]["readinessProbe"] = json!({
        "tcpSocket": {"host": "127.0.0.1", "port": port}, "periodSeconds": 1, "failureThreshold": 3,
    });
    sim.manifest("net", &pod);
    let name = format!("net-{}", quintlet_simulation::NODE);
    sim.wait_ready(&name).await;
    let before = accepted.load(Ordering::SeqCst);
    sleep(Duration::from_secs(5)).await;
    let made = accepted.load(Ordering::SeqCst) - before;
    assert!((40..=52).contains(&made), "{made} connections in 5 s, of a static pod");
    server.abort();
    let took = readiness_takes(&sim, &name, "False").await;
    println!("not ready after {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_annotation_of_a_running_pod_is_followed_and_a_bad_one_costs_an_event() {
    let sim = node(100).await;
    let _uid = sim.create(probed("turns", None));
    let ready = sim.wait_ready("turns").await;
    let span = Duration::from_secs(5);
    annotate(&sim, "turns", Some("200"));
    sleep(Duration::from_millis(300)).await;
    let [made] = execs_during(&sim, ["turns"], span).await;
    assert!((20..=27).contains(&made), "{made} attempts in 5 s");
    annotate(&sim, "turns", Some("99"));
    let event = sim.wait_event("turns", "the event", |e| e.reason == IGNORED).await;
    assert_eq!(
        event.message,
        "annotation quintlet.dev/probe-period-ms: \"99\" is no whole number of milliseconds from 100 to 1000. \
         The probes run with their periodSeconds."
    );
    wait_explained(&sim, "turns", true).await;
    let [made] = execs_during(&sim, ["turns"], span).await;
    assert!((4..=6).contains(&made), "{made} attempts in 5 s");
    annotate(&sim, "turns", Some("100"));
    wait_explained(&sim, "turns", false).await;
    let [made] = execs_during(&sim, ["turns"], span).await;
    assert!((40..=52).contains(&made), "{made} attempts in 5 s");
    annotate(&sim, "turns", None);
    sleep(Duration::from_millis(300)).await;
    let [made] = execs_during(&sim, ["turns"], span).await;
    assert!((4..=6).contains(&made), "{made} attempts in 5 s");
    let after = sim.pod("turns");
    assert_eq!(after.condition("Ready"), ready.condition("Ready"), "it was ready all the time");
    assert_eq!(sim.warnings("turns").len(), 1);
    assert_eq!(after.restarts(), 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_beyond_the_rate_of_the_node_keep_their_period_until_there_is_room() {
    let sim = node(10).await;
    for name in ["first", "second"] {
        let _uid = sim.create(probed(name, Some("100")));
        sim.wait_ready(name).await;
    }
    let event = sim.wait_event("second", "the event", |e| e.reason == IGNORED).await;
    assert_eq!(
        event.message,
        "annotation quintlet.dev/probe-period-ms: the node allows 10 attempts per second of exec probes of all pods \
         (subSecondProbes.execRate), so these probes run with their periodSeconds"
    );
    let span = Duration::from_secs(5);
    let [first, second] = execs_during(&sim, ["first", "second"], span).await;
    assert!((40..=52).contains(&first) && (4..=6).contains(&second), "{first}, {second}");
    sim.delete("first", Some(1));
    sim.wait_gone("first").await;
    sleep(Duration::from_millis(300)).await;
    let [second] = execs_during(&sim, ["second"], span).await;
    assert!((40..=52).contains(&second), "{second} attempts in 5 s");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_values_cost_their_pod_one_event_each_and_other_pods_nothing() {
    let sim = node(0).await;
    let long = "9".repeat(100_000);
    let values = [
        "",
        "0",
        "-1",
        "99",
        "1001",
        "4294967396",
        "18446744073709551716",
        "1e3",
        "100 ",
        "\u{202e}100",
        "[100]",
        &long,
    ];
    let names: Vec<String> = (0..values.len()).map(|n| format!("hostile-{n}")).collect();
    for (name, value) in names.iter().zip(values) {
        let _uid = sim.create(probed(name, Some(value)));
    }
    let _uid = sim.create(probed("neighbour", None));
    // Exec probes are off unless the configuration has a rate.
    let _uid = sim.create(probed("refused", Some("100")));
    for name in names.iter().map(String::as_str).chain(["neighbour", "refused"]) {
        sim.wait_ready(name).await;
    }
    let made = execs_during(&sim, ["neighbour", "hostile-0", "refused"], Duration::from_secs(10)).await;
    assert!(made.iter().all(|made| (9..=11).contains(made)), "{made:?}");
    for name in names.iter().map(String::as_str).chain(["refused"]) {
        let warnings = sim.warnings(name);
        assert!(warnings.len() == 1 && warnings[0].reason == IGNORED, "{name}: {warnings:?}");
        assert!(warnings[0].message.len() < 300, "{name}: {}", warnings[0].message);
    }
    assert_eq!(sim.warnings("neighbour").len(), 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alternating_pod_causes_no_more_writes_than_with_a_period_of_a_second() {
    let sim = node(100).await;
    let turn = Arc::new(AtomicUsize::new(0));
    let turns = Arc::clone(&turn);
    sim.runtime.on_exec(move |_, _| {
        let fails = turns.fetch_add(1, Ordering::SeqCst) % 2 == 1;
        ExecReply { exit_code: fails.into(), ..ExecReply::default() }
    });
    let mut pod = probed("turns", Some("100"));
    pod["spec"]["containers"][0]["readinessProbe"]["failureThreshold"] = json!(1);
    let _uid = sim.create(pod);
    sim.wait_ready("turns").await;
    let patches = || sim.api.requests("patch pods/status default/turns").len();
    let before = (patches(), turn.load(Ordering::SeqCst));
    sleep(Duration::from_secs(20)).await;
    let (writes, attempts) = (patches() - before.0, turn.load(Ordering::SeqCst) - before.1);
    println!("{writes} writes for {attempts} attempts");
    assert!(attempts >= 150, "{attempts}");
    // A loss and a return each 1.2 s.
    assert!((16..=40).contains(&writes), "{writes} writes in 20 s");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_of_both_services_keep_the_period_and_the_readiness() {
    let sim = node(100).await;
    let _uid = sim.create(probed("kept", Some("100")));
    let ready = sim.wait_ready("kept").await;
    for service in [Service::PodSync, Service::Probe] {
        sim.restart(service).await;
        until("fast attempts", LONG, async || {
            let [made] = execs_during(&sim, ["kept"], Duration::from_secs(1)).await;
            if made >= 8 { Ok(()) } else { Err(made) }
        })
        .await;
        assert_eq!(sim.pod("kept").condition("Ready"), ready.condition("Ready"), "after {service:?}");
    }
    assert_eq!(sim.pod("kept").restarts(), 0);
    sim.finish().await;
}
