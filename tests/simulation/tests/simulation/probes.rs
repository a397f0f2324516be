//! Probes on a node: the time of the first attempt, and handlers that cannot be used.

use std::time::{Duration, Instant};

use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{ContainerRecord, Method};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(30);

/// Returns the wall time of the first probe of a container, in nanoseconds since 1970.
fn first_probe(sim: &Sim, container: &ContainerRecord) -> Option<i128> {
    let calls = sim.runtime.calls_of(Method::ExecSync);
    let first = calls.iter().find(|c| c.request::<v1::ExecSyncRequest>().container_id == container.id())?;
    let ago = Instant::now().duration_since(first.at.into());
    let now = Clock::system().wall().as_nanosecond();
    Some(now - i128::try_from(ago.as_nanos()).unwrap())
}

/// Returns how long after its start a container was first probed, in seconds.
async fn waited(sim: &Sim, uid: &str, container: &str) -> f64 {
    let record = sim.runtime.newest(uid, container).expect("it runs");
    let first = until(&format!("a probe of {container}"), LONG, async || {
        first_probe(sim, &record).ok_or("no exec yet")
    })
    .await;
    Duration::from_nanos(u64::try_from(first - i128::from(record.status.started_at)).unwrap()).as_secs_f64()
}

fn delayed(name: &str, seconds: u64) -> Value {
    let probe = json!({"exec": {"command": ["up"]}, "initialDelaySeconds": seconds, "periodSeconds": 1});
    let mut sidecar = pods::container(&format!("side-{name}"));
    sidecar["restartPolicy"] = json!("Always");
    sidecar["readinessProbe"] = probe.clone();
    let mut pod = pods::single(name);
    pod["spec"]["initContainers"] = json!([sidecar]);
    pod["spec"]["containers"][0]["readinessProbe"] = probe;
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_container_is_probed_before_its_initial_delay_has_passed() {
    const DELAY: u64 = 2;
    let sim = Sim::start(Options::default()).await;
    // Starts at different fractions of a second.
    let mut all = Vec::new();
    for part in 0..4 {
        let name = format!("late-{part}");
        all.push((sim.create(delayed(&name, DELAY)), name.clone()));
        sim.wait_pod(&name, "runs", |p| p.container(&format!("c-{name}")).kind == "running").await;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    for (uid, name) in &all {
        for container in [format!("c-{name}"), format!("side-{name}")] {
            let waited = waited(&sim, uid, &container).await;
            assert!(waited >= 2.0, "{container} was probed {waited} s after its start");
            assert!(waited < 3.5, "{container} was probed {waited} s after its start: far too late");
        }
        sim.wait_ready(name).await;
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_pod_sync_does_not_shorten_an_initial_delay() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(delayed("again", 4));
    sim.wait_pod("again", "runs", |p| p.container("c-again").kind == "running").await;
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        sim.restart(Service::PodSync).await;
    }
    let waited = waited(&sim, &uid, "c-again").await;
    assert!((4.0..6.0).contains(&waited), "probed {waited} s after its start");
    sim.wait_ready("again").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_of_an_unknown_port_name_has_the_kubelets_message() {
    let sim = Sim::start(Options::default()).await;
    for (name, kind) in [("by-http", "httpGet"), ("by-tcp", "tcpSocket")] {
        let mut pod = pods::single(name);
        pod["spec"]["containers"][0]["readinessProbe"] =
            json!({kind: {"port": "nowhere"}, "periodSeconds": 1});
        let _uid = sim.create(pod);
    }
    let want = "Readiness probe errored and resulted in unknown state: \
                strconv.Atoi: parsing \"nowhere\": invalid syntax";
    for name in ["by-http", "by-tcp"] {
        sim.wait_event(name, "Unhealthy", |e| e.reason == "Unhealthy" && e.message == want).await;
    }
    sim.finish().await;
}
