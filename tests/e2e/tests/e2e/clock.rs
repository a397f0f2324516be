//! Steps the wall clock under all five services at once: back-offs, grace periods, evictions.

use std::time::Duration;

use jiff::Timestamp;
use quintlet_e2e::{LONG, NODE, Node, Options, pods, until};
use serde_json::{Value, json};

const HOUR: i64 = 3_600;

/// Renews the lease every 2 s, so that a step of the clock is soon seen in it.
const LEASE: (&str, &str) = ("status-reporter", "--node-lease-duration-seconds=8");

fn renewed(lease: &Value) -> Option<Timestamp> {
    lease["spec"]["renewTime"].as_str()?.parse().ok()
}

/// Waits until the lease has been renewed by a clock that differs by `off` seconds from the machine's.
async fn wait_lease(node: &Node, off: i64) {
    node.api()
        .wait_for("leases", "kube-node-lease", NODE, LONG, |lease| {
            renewed(lease).is_some_and(|at| (at.as_second() - Timestamp::now().as_second() - off).abs() < 300)
        })
        .await;
}

/// Returns the time between the creations of an instance and the next, by the runtime's clock, once the next
/// exists.
async fn pause(node: &Node, uid: &str, after: u32) -> Duration {
    let times = until("the next instance", LONG, async || {
        let instances = node.listed().await.attempts(uid, "main");
        match (instances.get(&after), instances.get(&(after + 1))) {
            (Some(first), Some(next)) => Ok((*first, *next)),
            _ => Err(instances),
        }
    })
    .await;
    Duration::from_nanos(u64::try_from(times.1 - times.0).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_of_the_wall_clock_by_an_hour_affects_no_pod() {
    let extra = vec![(LEASE.0, LEASE.1.to_owned())];
    let node = Node::start(Options { own_clock: true, extra, ..Options::with_api("clock") }).await;
    let api = node.api();
    // The container is killed at the end of its grace period, and prints the machine's uptime until then.
    let dir = node.scratch();
    let mut stubborn = pods::script(
        "stubborn",
        "trap 'touch /v/asked' TERM
         while :; do [ -e /v/asked ] && cut -d ' ' -f 1 /proc/uptime >> /v/alive; sleep 0.1; done",
    );
    stubborn["spec"]["terminationGracePeriodSeconds"] = json!(12);
    let stubborn = pods::with_dir(stubborn, &dir, "/v");
    for pod in [pods::probed("web"), pods::script("crasher", "sleep 1; exit 3"), stubborn] {
        api.create_pod(pods::bound(pod));
    }
    node.wait_ready("web").await;
    let stubborn = node.wait_ready("stubborn").await;
    wait_lease(&node, 0).await;
    let waits = |restarts: i64| {
        move |p: &Value| {
            let status = &p["status"]["containerStatuses"][0];
            status["restartCount"] == restarts && status["state"]["waiting"]["reason"] == "CrashLoopBackOff"
        }
    };
    let crasher = api.wait_for("pods", "default", "crasher", LONG, waits(1)).await;
    let crasher = crasher["metadata"]["uid"].as_str().unwrap().to_owned();
    let before = node.steady(&["web"]).await;
    let recorder = node.record().await;

    // The clock is stepped during the first back-off of one pod (the first restart has none) and the grace
    // period of the other.
    api.delete("pods", "default", "stubborn", None).unwrap();
    until(
        "the container was stopped",
        LONG,
        async || if dir.join("alive").exists() { Ok(()) } else { Err(()) },
    )
    .await;
    node.step_clock(HOUR);
    wait_lease(&node, HOUR).await;
    let waited = pause(&node, &crasher, 1).await;
    assert!(waited >= Duration::from_secs(10), "a clock that went forward ended a back-off after {waited:?}");
    node.wait_gone(stubborn.uid()).await;
    let alive = std::fs::read_to_string(dir.join("alive")).unwrap();
    let at = |line: Option<&str>| line.unwrap().parse::<f64>().unwrap();
    let lived = at(alive.lines().last()) - at(alive.lines().next());
    // If the step ended the grace period, it would have been a moment.
    assert!((6.0..LONG.as_secs_f64()).contains(&lived), "a grace of 12 s took {lived} s");

    // The second back-off is twice as long. A clock that is set back must not extend it to an hour.
    api.wait_for("pods", "default", "crasher", LONG, waits(2)).await;
    node.step_clock(-HOUR);
    wait_lease(&node, -HOUR).await;
    let waited = pause(&node, &crasher, 2).await;
    assert!(waited >= Duration::from_secs(20), "a back-off of 20 s took {waited:?}");

    assert_eq!(node.steady(&["web"]).await, before);
    recorder.assert_steady("the clock was stepped", &before);
    // New pods start, too.
    api.create_pod(pods::bound(pods::sleeper("new")));
    node.wait_ready("new").await;
    node.step_clock(0);
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_of_the_wall_clock_evicts_no_pod() {
    // The soft threshold is crossed from the start: the machine uses more than 1% of its memory.
    let args = [
        "--eviction-hard=memory.available<0%",
        "--eviction-soft=memory.available<99%",
        "--eviction-soft-grace-period=memory.available=30m",
        "--eviction-pressure-transition-period=30m",
    ];
    let args = args.map(|arg| ("pod-sync", arg)).into_iter().chain([LEASE]);
    let extra = args.map(|(service, arg)| (service, arg.to_owned())).collect();
    let node = Node::start(Options { own_clock: true, extra, ..Options::with_api("clock-eviction") }).await;
    let mut pod = pods::bound(pods::sleeper("web"));
    // Best-effort pods are not admitted meanwhile.
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": "10Mi"}});
    node.api().create_pod(pod);
    node.wait_ready("web").await;
    let has_pressure = |n: &Value| {
        let all = n["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().any(|c| c["type"] == "MemoryPressure" && c["status"] == "True")
    };
    node.api().wait_for("nodes", "", NODE, LONG, has_pressure).await;
    let before = node.steady(&["web"]).await;
    for off in [HOUR, -HOUR, 0] {
        node.step_clock(off);
        wait_lease(&node, off).await;
        // Requests a round of evictions and waits for its decision.
        let done = node.quintctl(&["pressure", "-o", "json"]).output().await.unwrap();
        let report: Value = serde_json::from_slice(&done.stdout).unwrap();
        let memory = report["signals"].as_array().unwrap().iter().find(|s| s["signal"] == "memory.available");
        assert!(!memory.unwrap()["thresholds"][0]["crossedSince"].is_null(), "{report}");
        assert_eq!(node.steady(&["web"]).await, before, "the clock is {off} s off");
        assert!(has_pressure(&node.api().get("nodes", "", NODE).unwrap()), "the clock is {off} s off");
    }
    node.down().await;
}
