//! Other clients change fields of a pod's status that the node agent owns.

use std::time::Duration;

use quintlet_simulation::{Options, Sim, pods};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

/// Changes the status of a pod, like `kubectl patch --subresource=status`.
fn edit(sim: &Sim, name: &str, change: impl FnOnce(&mut Value)) {
    sim.api.edit("pods/status", "default", name, |pod| change(&mut pod["status"])).unwrap();
}

fn set_condition(status: &mut Value, kind: &str, value: &str) {
    let conditions = status["conditions"].as_array_mut().unwrap();
    for c in conditions.iter_mut().filter(|c| c["type"] == kind) {
        c["status"] = json!(value);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_changed_by_another_client_is_restored_with_one_write() {
    let sim = Sim::start(Options::default()).await;
    type Change = fn(&mut Value);
    let changes: [(&str, Change); 6] = [
        ("ready", |s| set_condition(s, "Ready", "False")),
        ("scheduled", |s| set_condition(s, "PodScheduled", "False")),
        ("phase", |s| s["phase"] = json!("Pending")),
        ("address", |s| s["podIP"] = json!("192.0.2.9")),
        ("containers", |s| s["containerStatuses"] = json!([])),
        ("conditions", |s| s["conditions"] = json!([])),
    ];
    let mut before = Vec::new();
    for (name, _) in changes {
        let _uid = sim.create(pods::single(name));
        before.push(sim.wait_ready(name).await);
    }
    // Every status is settled, and no pod is written any more.
    let mut writes = sim.api.counts().of("patch pods/status");
    loop {
        sleep(Duration::from_secs(1)).await;
        let now = sim.api.counts().of("patch pods/status");
        if now == writes {
            break;
        }
        writes = now;
    }
    for ((name, change), was) in changes.into_iter().zip(&before) {
        edit(&sim, name, change);
        let was = |field: &str| was.0["status"][field].clone();
        sim.wait_pod(name, "put right", |p| {
            ["phase", "podIP", "podIPs", "containerStatuses"].iter().all(|f| p.0["status"][*f] == was(f))
                && ["Ready", "ContainersReady", "PodScheduled", "Initialized"]
                    .iter()
                    .all(|c| p.condition(c).0 == "True")
        })
        .await;
    }
    sleep(Duration::from_secs(2)).await;
    let made = sim.api.counts().of("patch pods/status") - writes;
    assert_eq!(made, changes.len() as u64, "one write for each change, and none after it");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_fields_of_other_owners_stay_and_cause_no_write() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("gated");
    pod["spec"]["readinessGates"] = json!([{"conditionType": "example.com/gate"}]);
    let _uid = sim.create(pod);
    sim.wait_pod("gated", "runs", |p| p.condition("ContainersReady").0 == "True").await;
    let add = |kind: &str| {
        let condition = json!({"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        edit(&sim, "gated", |s| s["conditions"].as_array_mut().unwrap().push(condition));
    };
    add("example.com/gate");
    sim.wait_ready("gated").await;
    sleep(Duration::from_secs(1)).await;
    let writes = sim.api.counts().of("patch pods/status");
    add("example.com/other");
    add("DisruptionTarget");
    sleep(Duration::from_secs(3)).await;
    assert_eq!(sim.api.counts().of("patch pods/status"), writes, "{:?}", sim.pod("gated"));
    for kind in ["example.com/gate", "example.com/other", "DisruptionTarget", "Ready"] {
        assert_eq!(sim.pod("gated").condition(kind).0, "True", "{kind}");
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_writers_of_one_status_cause_no_loop() {
    const FIGHT: Duration = Duration::from_secs(8);
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(pods::single("fought"));
    sim.wait_ready("fought").await;
    sleep(Duration::from_secs(1)).await;
    let writes = sim.api.counts().of("patch pods/status");
    let (began, mut edits) = (Instant::now(), 0);
    while began.elapsed() < FIGHT {
        if sim.pod("fought").is_ready() {
            edit(&sim, "fought", |s| set_condition(s, "Ready", "False"));
            edits += 1;
        }
        sleep(Duration::from_millis(20)).await;
    }
    let made = sim.api.counts().of("patch pods/status") - writes;
    // At once, and after 1, 3 and 7 s.
    assert!((3..=5).contains(&made), "{made} writes against {edits} edits in {FIGHT:?}");
    sim.wait_ready("fought").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_statuses_of_a_mirror_pod_and_a_terminated_pod_are_restored() {
    const MIRROR: &str = "static-sim-node";
    let sim = Sim::start(Options::default()).await;
    sim.manifest("static", &pods::manifest("static"));
    sim.wait_ready(MIRROR).await;
    edit(&sim, MIRROR, |s| set_condition(s, "Ready", "False"));
    sim.wait_ready(MIRROR).await;

    let mut once = pods::single("once");
    once["spec"]["restartPolicy"] = json!("Never");
    let uid = sim.create(once);
    sim.wait_ready("once").await;
    let id = sim.runtime.newest(&uid, "c-once").unwrap().id().to_owned();
    assert!(sim.runtime.exit(&id, 0));
    let over = sim.wait_pod("once", "Succeeded", |p| p.phase() == "Succeeded").await;
    edit(&sim, "once", |s| s["containerStatuses"] = json!([]));
    sim.wait_pod("once", "put right", |p| {
        p.0["status"]["containerStatuses"] == over.0["status"]["containerStatuses"]
    })
    .await;
    assert_eq!(sim.pod("once").phase(), "Succeeded");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_has_ended_and_is_changed_later_is_not_taken_for_a_new_one() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("held");
    pod["metadata"]["finalizers"] = json!(["example.com/hold"]);
    let uid = sim.create(pod);
    sim.wait_ready("held").await;
    sim.delete("held", Some(0));
    sim.wait_no_view("held").await;
    let lines =
        |sim: &Sim| -> Vec<Value> { sim.lines().into_iter().filter(|l| l["pod.uid"] == uid).collect() };
    let before = lines(&sim).len();
    for value in ["1", "2"] {
        let annotate = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"example.com/note": value});
        sim.api.edit("pods", "default", "held", annotate).unwrap();
        // The events of a watch are in order.
        let later = format!("later-{value}");
        let _uid = sim.create(pods::single(&later));
        sim.wait_ready(&later).await;
    }
    assert_eq!(lines(&sim).split_off(before), [] as [Value; 0]);
    sim.wait_no_view("held").await;
    sim.api.edit("pods", "default", "held", |pod| pod["metadata"]["finalizers"] = json!([])).unwrap();
    sim.wait_gone("held").await;
    sim.finish().await;
}
