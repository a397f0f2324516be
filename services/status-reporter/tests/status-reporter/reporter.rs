//! The driver of pod statuses against a test API server.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::clock::Clock;
use quintlet_model::ids::PodUid;
use quintlet_model::pod_status::shorten::Part;
use quintlet_testapi::{Failure, TestApi};
use quintlet_testkit::pod_panics::PodPanics;
use serde_json::{Value, json};
use status_reporter::api::ApiClient;
use status_reporter::metrics::Metrics;
use status_reporter::reporter::{DEFERRAL, Reporter};
use status_reporter::update::{Ack, Stamp, Update, UpdateOutcome};
use tokio::sync::mpsc;

const TEST_TIMEOUT: Duration = Duration::from_secs(10);

struct Bench {
    api: TestApi,
    reporter: Reporter,
    acks: mpsc::Receiver<Ack>,
}

impl Bench {
    async fn start() -> Self {
        Self::with_deferral(DEFERRAL).await
    }

    async fn with_deferral(deferral: Duration) -> Self {
        let api = TestApi::start().await;
        let client = Some(ApiClient::new(api.client()));
        let reporter = Reporter::with_deferral(client, Clock::system(), Metrics::register(), deferral);
        let (_, acks) = reporter.listen();
        Self { api, reporter, acks }
    }

    fn pod(&self, name: &str) -> Value {
        let spec = json!({"nodeName": "n1", "containers": [{"name": "main", "image": "busybox:1"}]});
        self.api.create_pod(json!({"metadata": {"name": name}, "spec": spec}))
    }

    fn live(&self, name: &str) -> Value {
        self.api.get("pods", "default", name).unwrap_or(Value::Null)
    }

    async fn ack(&mut self) -> Ack {
        tokio::time::timeout(TEST_TIMEOUT, self.acks.recv())
            .await
            .expect("an ack comes")
            .expect("the reporter lives")
    }

    /// The next ack that is final.
    async fn verdict(&mut self) -> UpdateOutcome {
        loop {
            let ack = self.ack().await;
            if !matches!(ack.verdict, UpdateOutcome::Queued(_) | UpdateOutcome::Retrying(_)) {
                return ack.verdict;
            }
        }
    }

    /// Waits for the next ack that is final, in paused time.
    async fn last_verdict(&mut self) -> UpdateOutcome {
        loop {
            let ack = self.acks.recv().await.expect("the reporter lives");
            if !matches!(ack.verdict, UpdateOutcome::Queued(_) | UpdateOutcome::Retrying(_)) {
                return ack.verdict;
            }
        }
    }

    async fn written(&mut self) {
        let verdict = self.verdict().await;
        assert!(matches!(verdict, UpdateOutcome::Written(_)), "{verdict:?}");
    }
}

fn update(pod: &Value, version: u64, desired: Value) -> Update {
    let meta = &pod["metadata"];
    let text = |field: &str| meta[field].as_str().unwrap().to_owned();
    Update {
        uid: PodUid::parse(&text("uid")).unwrap(),
        api_uid: text("uid"),
        namespace: text("namespace"),
        name: text("name"),
        stamp: Stamp { epoch: 1, version },
        base: Arc::new(pod["status"].clone()),
        base_version: text("resourceVersion").parse().unwrap(),
        desired,
        could_run: true,
        finished: false,
        deleting: false,
        mirror: false,
        trace: None,
    }
}

fn running(ready: &str) -> Value {
    json!({"phase": "Running", "qosClass": "BestEffort", "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}]})
}

fn ready(pod: &Value) -> &str {
    let conditions = pod["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    conditions.iter().find(|c| c["type"] == "Ready").and_then(|c| c["status"].as_str()).unwrap_or_default()
}

#[tokio::test]
async fn a_pod_beyond_the_capacity_waits_and_is_written_once_forgotten_pods_make_room() {
    let api = TestApi::start().await;
    let client = Some(ApiClient::new(api.client()));
    let reporter = Reporter::with_limits(client, Clock::system(), Metrics::register(), DEFERRAL, 2);
    let (_, acks) = reporter.listen();
    let mut bench = Bench { api, reporter, acks };
    let [forgotten, kept, late] = ["forgotten", "kept", "late"].map(|name| bench.pod(name));
    for pod in [&forgotten, &kept] {
        bench.reporter.submit(update(pod, 1, running("True")));
        bench.written().await;
    }
    tokio::time::pause();
    bench.reporter.submit(update(&late, 1, running("True")));
    let turned_away = UpdateOutcome::Queued("more than 2 pods are known".to_owned());
    assert_eq!(bench.acks.recv().await.unwrap().verdict, turned_away);
    // pod-sync sends everything again when its stream ends, and then which pods it has.
    assert_eq!(bench.acks.recv().await, None);
    let uid = |pod: &Value| PodUid::parse(pod["metadata"]["uid"].as_str().unwrap()).unwrap();
    bench.acks = bench.reporter.listen().1;
    bench.reporter.submit(update(&late, 1, running("True")));
    bench.reporter.retain(&HashSet::from([uid(&kept), uid(&late)]));
    assert_eq!(bench.acks.recv().await.unwrap().verdict, turned_away);
    assert_eq!(bench.acks.recv().await, None);
    tokio::time::resume();
    bench.acks = bench.reporter.listen().1;
    bench.reporter.submit(update(&late, 1, running("True")));
    bench.written().await;
    assert_eq!(ready(&bench.live("late")), "True");
}

#[tokio::test]
async fn an_ordinary_pod_causes_one_patch_per_change_and_no_read() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.reporter.submit(update(&pod, 1, running("False")));
    bench.written().await;
    // The base is older than our own last write: the change back must reach the server all the same.
    bench.reporter.submit(update(&pod, 2, running("True")));
    bench.written().await;
    bench.reporter.submit(update(&pod, 3, running("False")));
    bench.written().await;
    assert_eq!(ready(&bench.live("web")), "False");
    bench.reporter.submit(update(&pod, 4, running("False")));
    bench.written().await;
    assert_eq!((bench.api.counts().of("patch pods/status"), bench.api.counts().of("get *")), (3, 0));
    let bodies = bench.api.requests("patch pods/status");
    assert!(bodies.iter().all(|r| r.body["metadata"]["uid"] == pod["metadata"]["uid"]));
    assert_eq!(
        bodies[2].body["status"],
        json!({"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}]})
    );
}

#[tokio::test]
async fn foreign_conditions_and_spec_are_untouched() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.reporter.submit(update(&pod, 1, running("False")));
    bench.written().await;
    let foreign = json!({"type": "example.com/gate", "status": "True"});
    bench
        .api
        .edit("pods/status", "default", "web", |p| {
            p["status"]["conditions"].as_array_mut().unwrap().push(foreign.clone())
        })
        .unwrap();
    bench.reporter.submit(update(&pod, 2, running("True")));
    bench.written().await;
    let live = bench.live("web");
    assert!(live["status"]["conditions"].as_array().unwrap().contains(&foreign), "{live:#}");
    assert_eq!((ready(&live), &live["spec"], bench.api.counts().of("get *")), ("True", &pod["spec"], 0));
}

#[tokio::test]
async fn only_the_newest_status_is_written_and_a_pod_has_one_write_in_flight() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().block("patch pods/status");
    for version in 1..=50 {
        let mut desired = running("False");
        desired["message"] = json!(format!("v{version}"));
        bench.reporter.submit(update(&pod, version, desired));
        tokio::task::yield_now().await;
    }
    bench.api.wait_for_requests("patch pods/status", 1, TEST_TIMEOUT).await;
    bench.api.faults().clear();
    let mut last = 0;
    while last < 50 {
        let ack = bench.ack().await;
        assert!(ack.stamp.version > last, "order is kept: {ack:?} after {last}");
        last = ack.stamp.version;
    }
    assert_eq!(bench.live("web")["status"]["message"], "v50");
    assert!(bench.api.counts().of("patch pods/status") <= 2, "{:?}", bench.api.counts());
    let mut old = update(&pod, 7, running("True"));
    old.desired["message"] = json!("old");
    bench.reporter.submit(old);
    bench.reporter.submit(update(&pod, 51, running("True")));
    bench.written().await;
    assert_eq!(ready(&bench.live("web")), "True");
}

#[tokio::test]
async fn every_failure_is_recovered_from() {
    for failure in [
        Failure::Internal,
        Failure::Unavailable,
        Failure::Conflict,
        Failure::Gone,
        Failure::Forbidden,
        Failure::Disconnect,
        Failure::LoseReply,
    ] {
        let mut bench = Bench::start().await;
        let pod = bench.pod("web");
        bench.api.faults().fail("patch pods/status", 3, failure.clone());
        bench.reporter.submit(update(&pod, 1, running("True")));
        bench.written().await;
        assert_eq!(ready(&bench.live("web")), "True", "{failure:?}");
    }
}

// In paused time, which advances only while all tasks wait: a busy machine does not count.
#[tokio::test(start_paused = true)]
async fn after_an_outage_the_newest_statuses_are_written_within_two_seconds() {
    let mut bench = Bench::start().await;
    let pods: Vec<Value> = (0..100).map(|n| bench.pod(&format!("p{n}"))).collect();
    bench.api.faults().set_down(true);
    for (version, value) in [(1, "False"), (2, "True")] {
        for pod in &pods {
            bench.reporter.submit(update(pod, version, running(value)));
        }
    }
    assert!(matches!(bench.ack().await.verdict, UpdateOutcome::Queued(_)), "held, and acknowledged as held");
    bench.api.faults().set_down(false);
    let settled = async {
        let mut left: HashSet<PodUid> =
            pods.iter().map(|p| PodUid::parse(p["metadata"]["uid"].as_str().unwrap()).unwrap()).collect();
        while !left.is_empty() {
            let ack = bench.acks.recv().await.unwrap();
            if matches!(ack.verdict, UpdateOutcome::Written(_)) && ack.stamp.version == 2 {
                left.remove(&ack.uid);
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(2), settled).await.expect("all are written within 2 s");
}

#[tokio::test]
async fn retry_after_is_obeyed() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().fail("patch pods/status", 1, Failure::TooManyRequests(1));
    let start = tokio::time::Instant::now();
    bench.reporter.submit(update(&pod, 1, running("True")));
    bench.written().await;
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(bench.api.counts().of("patch pods/status"), 2);
}

#[tokio::test]
async fn a_status_that_the_server_rejects_waits_after_one_read_of_the_live_object_and_a_newer_one_does_not() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().fail("patch pods/status", 100, Failure::Invalid);
    bench.reporter.submit(update(&pod, 1, running("True")));
    let verdict = bench.ack().await.verdict;
    assert!(matches!(&verdict, UpdateOutcome::Retrying(why) if why.contains("on demand")), "{verdict:?}");
    assert_eq!((bench.api.counts().of("patch pods/status"), bench.api.counts().of("get pods")), (2, 1));
    bench.api.faults().clear();
    bench.reporter.submit(update(&pod, 2, running("True")));
    bench.written().await;
    assert_eq!(bench.api.counts().of("patch pods/status"), 3);
}

/// Returns an update that ends with the deletion of the pod.
fn last_update(pod: &Value) -> Update {
    let ended = json!({"phase": "Failed", "qosClass": "BestEffort"});
    Update { finished: true, deleting: true, could_run: false, ..update(pod, 1, ended) }
}

fn policy(code: u16) -> Failure {
    let message = "pods \"web\" is forbidden: ValidatingAdmissionPolicy 'freeze' denied request".to_owned();
    Failure::Declined { code, message }
}

// In paused time, which advances only while all tasks wait.
#[tokio::test(start_paused = true)]
async fn a_pod_whose_last_writes_were_refused_for_a_minute_is_deleted_soon_after() {
    for code in [400, 403, 405, 413, 415, 422] {
        for call in ["patch pods/status", "delete pods"] {
            let mut bench = Bench::start().await;
            let pod = bench.pod("web");
            bench.api.faults().fail(call, usize::MAX, policy(code));
            bench.reporter.submit(last_update(&pod));
            let ack = bench.acks.recv().await.unwrap();
            let UpdateOutcome::Retrying(why) = &ack.verdict else { panic!("{call} {code}: {ack:?}") };
            assert!(why.contains("ValidatingAdmissionPolicy 'freeze'"), "{call} {code}: {why}");
            tokio::time::sleep(Duration::from_secs(60)).await;
            bench.api.faults().clear();
            let (cleared, verdict) = (tokio::time::Instant::now(), bench.last_verdict().await);
            assert_eq!(verdict, UpdateOutcome::Deleted, "{call} {code}");
            assert!(cleared.elapsed() <= Duration::from_secs(40), "{call} {code}: {:?}", cleared.elapsed());
            assert!(bench.live("web").is_null(), "{call} {code}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_write_is_repeated_after_ten_seconds_and_then_with_growing_pauses_up_to_two_minutes() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().fail("delete pods", usize::MAX, policy(400));
    let start = tokio::time::Instant::now();
    bench.reporter.submit(last_update(&pod));
    let mut times = Vec::new();
    for _ in 0..7 {
        let ack = bench.acks.recv().await.unwrap();
        assert!(matches!(ack.verdict, UpdateOutcome::Retrying(_)), "{ack:?}");
        times.push(start.elapsed().as_secs());
    }
    assert_eq!(times, [0, 10, 30, 70, 150, 270, 390]);
    assert_eq!((bench.api.counts().of("patch pods/status"), bench.api.counts().of("delete pods")), (1, 7));
}

#[tokio::test(start_paused = true)]
async fn a_newer_status_replaces_a_refused_one_together_with_its_retry() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().fail("patch pods/status", usize::MAX, policy(413));
    let start = tokio::time::Instant::now();
    for version in 1..=5 {
        let mut desired = running("False");
        desired["message"] = json!(format!("v{version}"));
        bench.reporter.submit(update(&pod, version, desired));
        let ack = bench.acks.recv().await.unwrap();
        assert!(matches!(ack.verdict, UpdateOutcome::Retrying(_)) && ack.stamp.version == version, "{ack:?}");
    }
    assert!(start.elapsed() < Duration::from_secs(1), "each is tried at once: {:?}", start.elapsed());
    // The fifth refusal in a row has a pause of two minutes; those before it have no retries left.
    tokio::time::sleep(Duration::from_secs(110)).await;
    assert_eq!(bench.api.counts().of("patch pods/status"), 5);
    bench.api.faults().clear();
    assert!(matches!(bench.last_verdict().await, UpdateOutcome::Written(_)));
    assert_eq!(bench.live("web")["status"]["message"], "v5");
    assert_eq!(bench.api.counts().of("patch pods/status"), 6);
}

#[tokio::test(start_paused = true)]
async fn a_status_that_arrives_during_a_refused_write_is_written_at_once() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().latency("patch pods/status", Duration::from_secs(4));
    bench.api.faults().fail("patch pods/status", 1, policy(400));
    let start = tokio::time::Instant::now();
    bench.reporter.submit(update(&pod, 1, running("False")));
    tokio::time::sleep(Duration::from_secs(1)).await;
    bench.reporter.submit(update(&pod, 2, running("True")));
    assert!(matches!(bench.last_verdict().await, UpdateOutcome::Written(_)));
    assert_eq!((ready(&bench.live("web")), start.elapsed().as_secs()), ("True", 8));
}

#[tokio::test]
async fn failed_writes_are_counted_by_the_code_of_their_answer() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().fail("patch pods/status", 1, policy(418));
    bench.reporter.submit(update(&pod, 1, running("True")));
    assert!(matches!(bench.ack().await.verdict, UpdateOutcome::Retrying(_)));
    let counted = quintlet_telemetry::metrics::text();
    assert!(counted.contains("quintlet_status_write_failures_total{code=\"418\"} 1"), "{counted}");
}

#[tokio::test]
async fn a_missing_pod_is_reported_gone_and_a_recreated_one_as_a_uid_mismatch() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.delete("pods", "default", "web", Some(0)).unwrap();
    bench.reporter.submit(update(&pod, 1, running("True")));
    assert_eq!(bench.verdict().await, UpdateOutcome::Gone);
    let new = bench.pod("web");
    bench.reporter.submit(update(&pod, 2, running("True")));
    assert_eq!(
        bench.verdict().await,
        UpdateOutcome::UidMismatch(new["metadata"]["uid"].as_str().unwrap().to_owned())
    );
    assert_eq!(bench.live("web"), new, "the other pod is untouched");
    let mut mirrorless = update(&pod, 3, running("True"));
    mirrorless.api_uid = String::new();
    bench.reporter.submit(mirrorless);
    assert_eq!(bench.verdict().await, UpdateOutcome::Gone, "a static pod without mirror");
}

/// Returns a status with observed generations.
fn observed(phase: &str, ready: &str, generation: u64) -> Value {
    let condition = json!({"type": "Ready", "status": ready, "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"});
    json!({"phase": phase, "qosClass": "BestEffort", "observedGeneration": generation, "conditions": [condition]})
}

#[tokio::test]
async fn the_generation_of_a_deleted_pod_is_written_together_with_its_end() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.reporter.submit(update(&pod, 1, observed("Running", "True", 1)));
    bench.written().await;
    bench.api.delete("pods", "default", "web", Some(30)).unwrap();
    let deleting = |version, desired| Update { deleting: true, ..update(&pod, version, desired) };
    bench.reporter.submit(deleting(2, observed("Running", "True", 2)));
    bench.reporter.idle().await;
    // A repeated update, as after a reconnection of pod-sync.
    bench.reporter.submit(deleting(2, observed("Running", "True", 2)));
    bench.reporter.idle().await;
    assert_eq!(bench.live("web")["status"]["observedGeneration"], 1);
    let ended = Update { could_run: false, ..deleting(3, observed("Succeeded", "False", 2)) };
    bench.reporter.submit(ended);
    bench.written().await;
    let live = bench.live("web");
    assert_eq!(
        (&live["status"]["phase"], &live["status"]["observedGeneration"]),
        (&json!("Succeeded"), &json!(2))
    );
    let last = Update { finished: true, could_run: false, ..deleting(4, observed("Succeeded", "False", 2)) };
    bench.reporter.submit(last);
    assert_eq!(bench.verdict().await, UpdateOutcome::Deleted);
    assert_eq!((bench.api.counts().of("patch pods/status"), bench.api.counts().of("delete pods")), (2, 1));
}

#[tokio::test]
async fn the_generation_of_a_deleted_pod_that_keeps_running_is_written_after_a_while() {
    let mut bench = Bench::with_deferral(Duration::from_millis(100)).await;
    let pod = bench.pod("web");
    bench.reporter.submit(update(&pod, 1, observed("Running", "True", 1)));
    bench.written().await;
    bench.api.delete("pods", "default", "web", Some(30)).unwrap();
    bench.reporter.submit(Update { deleting: true, ..update(&pod, 2, observed("Running", "True", 2)) });
    bench.written().await;
    assert_eq!(bench.live("web")["status"]["observedGeneration"], 2);
}

#[tokio::test]
async fn other_changes_of_a_deleted_pod_are_written_at_once() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.reporter.submit(update(&pod, 1, observed("Running", "True", 1)));
    bench.written().await;
    // The generation of a pod that is not being deleted, and then the readiness of the deleted pod.
    bench.reporter.submit(update(&pod, 2, observed("Running", "True", 2)));
    bench.written().await;
    bench.api.delete("pods", "default", "web", Some(30)).unwrap();
    bench.reporter.submit(Update { deleting: true, ..update(&pod, 3, observed("Running", "False", 3)) });
    bench.written().await;
    assert_eq!(ready(&bench.live("web")), "False");
    assert_eq!(bench.api.counts().of("patch pods/status"), 3);
}

#[tokio::test]
async fn a_pod_is_deleted_only_when_its_resources_are_released() {
    let ended = json!({"phase": "Succeeded", "qosClass": "BestEffort"});
    // (finished, deleting, could run, mirror, phase) and whether it goes.
    let cases = [
        (false, true, false, false, ended.clone(), false),
        (true, false, false, false, ended.clone(), false),
        (true, true, true, false, ended.clone(), false),
        (true, true, false, true, ended.clone(), false),
        (true, true, false, false, running("False"), false),
        (true, true, false, false, ended, true),
    ];
    for (finished, deleting, could_run, mirror, desired, goes) in cases {
        let mut bench = Bench::start().await;
        let pod = bench.pod("web");
        let what = format!("{finished} {deleting} {could_run} {mirror} {desired}");
        let update = Update { finished, deleting, could_run, mirror, ..update(&pod, 1, desired) };
        bench.reporter.submit(update);
        let verdict = bench.verdict().await;
        assert_eq!(verdict == UpdateOutcome::Deleted, goes, "{what}: {verdict:?}");
        assert_eq!(bench.live("web").is_null(), goes, "{what}");
        assert_eq!(bench.api.counts().of("delete pods"), u64::from(goes), "{what}");
        if goes {
            let body = &bench.api.requests("delete pods")[0].body;
            assert_eq!(
                (&body["gracePeriodSeconds"], &body["preconditions"]["uid"]),
                (&json!(0), &pod["metadata"]["uid"])
            );
        }
    }
}

#[tokio::test]
async fn a_failed_delete_is_repeated_without_writing_the_status_again() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().fail("delete pods", 2, Failure::Internal);
    let ended = json!({"phase": "Failed", "qosClass": "BestEffort"});
    bench.reporter.submit(Update {
        finished: true,
        deleting: true,
        could_run: false,
        ..update(&pod, 1, ended)
    });
    assert_eq!(bench.verdict().await, UpdateOutcome::Deleted);
    assert_eq!((bench.api.counts().of("patch pods/status"), bench.api.counts().of("delete pods")), (1, 3));
}

#[tokio::test]
async fn a_conflict_is_settled_by_reading_once() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.faults().fail("patch pods/status", 1, Failure::Conflict);
    bench.reporter.submit(update(&pod, 1, running("True")));
    bench.written().await;
    assert_eq!((bench.api.counts().of("patch pods/status"), bench.api.counts().of("get pods")), (2, 1));
}

#[tokio::test]
async fn a_new_stream_receives_the_held_statuses_and_acknowledgements() {
    let mut bench = Bench::start().await;
    let (pod, other) = (bench.pod("web"), bench.pod("other"));
    bench.reporter.submit(update(&other, 1, running("True")));
    bench.written().await;
    bench.api.faults().block("patch pods/status");
    bench.reporter.submit(update(&pod, 9, running("True")));
    let (held, mut acks) = bench.reporter.listen();
    let uid = PodUid::parse(pod["metadata"]["uid"].as_str().unwrap()).unwrap();
    assert_eq!(held, [(uid.clone(), Stamp { epoch: 1, version: 9 })]);
    // The same update again, as pod-sync sends its full set.
    bench.reporter.submit(update(&pod, 9, running("True")));
    bench.api.faults().clear();
    let ack = tokio::time::timeout(TEST_TIMEOUT, acks.recv()).await.unwrap().unwrap();
    assert_eq!(
        (ack.uid, ack.stamp.version, matches!(ack.verdict, UpdateOutcome::Written(_))),
        (uid, 9, true)
    );
    // One that is settled is acked again without a write.
    let before = bench.api.counts().of("patch pods/status");
    bench.reporter.submit(update(&other, 1, running("True")));
    let ack = tokio::time::timeout(TEST_TIMEOUT, acks.recv()).await.unwrap().unwrap();
    assert!(matches!(ack.verdict, UpdateOutcome::Written(_)));
    assert_eq!(bench.api.counts().of("patch pods/status"), before);
}

#[tokio::test]
async fn a_restarted_reporter_does_not_trust_an_old_base() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.reporter.submit(update(&pod, 1, running("True")));
    bench.written().await;
    // A new process: it has no memory, and pod-sync has not yet seen the write above.
    let reporter =
        Reporter::new(Some(ApiClient::new(bench.api.client())), Clock::system(), Metrics::register());
    let (held, mut acks) = reporter.listen();
    assert!(held.is_empty());
    let mut desired = running("False");
    desired["conditions"][0]["reason"] = json!("ContainersNotReady");
    let mut stale = update(&pod, 2, desired);
    stale.base = Arc::new(running("False"));
    reporter.submit(stale);
    let ack = tokio::time::timeout(TEST_TIMEOUT, acks.recv()).await.unwrap().unwrap();
    assert!(matches!(ack.verdict, UpdateOutcome::Written(_)));
    assert_eq!(ready(&bench.live("web")), "False");
    assert_eq!(bench.api.counts().of("get *"), 0);
}

#[tokio::test]
async fn a_foreign_edit_that_pod_sync_reports_is_reverted() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.reporter.submit(update(&pod, 1, running("True")));
    bench.written().await;
    let edited = bench
        .api
        .edit("pods/status", "default", "web", |p| p["status"]["conditions"][0]["status"] = json!("False"))
        .unwrap();
    // pod-sync reports the same status again, with a new version and the edited object as its base.
    bench.reporter.submit(update(&edited, 2, running("True")));
    bench.written().await;
    assert_eq!(ready(&bench.live("web")), "True");
    assert_eq!(bench.api.counts().of("patch pods/status"), 2);
}

#[tokio::test]
async fn an_older_owner_is_refused_and_forgotten_pods_are_dropped() {
    let mut bench = Bench::start().await;
    let (pod, other) = (bench.pod("web"), bench.pod("other"));
    bench
        .reporter
        .submit(Update { stamp: Stamp { epoch: 2, version: 1 }, ..update(&pod, 1, running("False")) });
    bench.written().await;
    bench.reporter.submit(update(&pod, 99, running("True")));
    assert!(matches!(bench.verdict().await, UpdateOutcome::Refused(_)));
    assert_eq!(ready(&bench.live("web")), "False");
    bench.api.faults().fail("patch pods/status", 1000, Failure::Internal);
    bench
        .reporter
        .submit(Update { stamp: Stamp { epoch: 2, version: 1 }, ..update(&other, 1, running("True")) });
    assert!(matches!(bench.ack().await.verdict, UpdateOutcome::Queued(_)));
    bench.reporter.retain(&HashSet::new());
    bench.api.faults().clear();
    bench.reporter.idle().await;
    assert!(bench.reporter.listen().0.is_empty());
}

#[tokio::test]
async fn urgent_writes_precede_others() {
    let mut bench = Bench::start().await;
    let routine: Vec<Value> = (0..200).map(|n| bench.pod(&format!("r{n}"))).collect();
    let urgent = bench.pod("urgent");
    bench.api.faults().block("patch pods/status");
    for pod in &routine {
        bench.reporter.submit(update(pod, 1, running("False")));
    }
    bench.reporter.submit(update(&urgent, 1, running("True")));
    bench.api.wait_for_requests("patch pods/status", 16, TEST_TIMEOUT).await;
    bench.api.faults().clear();
    let mut place = 0;
    while bench.ack().await.uid.as_str() != urgent["metadata"]["uid"].as_str().unwrap() {
        place += 1;
    }
    assert!(place < 40, "16 were in flight, the urgent one is among the next: {place}");
}

#[tokio::test]
async fn standalone_mode_acknowledges_at_once_without_an_api_server() {
    let reporter = Reporter::new(None, Clock::system(), Metrics::register());
    let (_, mut acks) = reporter.listen();
    let pod = json!({"metadata": {"uid": "u", "namespace": "n", "name": "p", "resourceVersion": "1"}, "status": {}});
    reporter.submit(update(&pod, 1, running("True")));
    assert_eq!(acks.recv().await.unwrap().verdict, UpdateOutcome::NoApi);
}

#[tokio::test]
async fn a_panic_in_one_status_write_affects_no_other_pod_and_the_next_write_succeeds() {
    let mut bench = Bench::start().await;
    let (bad, good) = (bench.pod("bad"), bench.pod("good"));
    let panics = PodPanics::start(bad["metadata"]["uid"].as_str().unwrap());
    bench.reporter.submit(update(&bad, 1, running("False")));
    let ack = bench.ack().await;
    let UpdateOutcome::Queued(why) = ack.verdict else { panic!("{ack:?}") };
    assert!(why.starts_with("status-reporter panicked at ") && why.contains("injected"), "{why}");
    bench.reporter.submit(update(&good, 1, running("True")));
    bench.written().await;
    assert_eq!(ready(&bench.live("good")), "True");
    panics.stop();
    bench.reporter.submit(update(&bad, 2, running("True")));
    bench.written().await;
    assert_eq!(ready(&bench.live("bad")), "True");
}

/// Returns a status whose container waits with a message of this length.
fn waiting(phase: &str, message: usize) -> Value {
    let container = json!({"name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
        "resources": {"limits": {"cpu": "1"}}, "state": {"waiting": {"reason": "R", "message": "m".repeat(message)}}});
    json!({"phase": phase, "qosClass": "BestEffort", "containerStatuses": [container]})
}

#[tokio::test]
async fn a_status_that_the_api_server_does_not_take_is_written_without_parts() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.limit_objects(4000);
    let message = |bench: &Bench| {
        let state = bench.live("web")["status"]["containerStatuses"][0]["state"].clone();
        state["waiting"]["message"].as_str().map(str::len)
    };
    let patches = |bench: &Bench| bench.api.counts().of("patch pods/status");
    bench.reporter.submit(update(&pod, 1, waiting("Pending", 4000)));
    let shortened = |verdict: UpdateOutcome, part: Part| matches!(verdict, UpdateOutcome::Shortened { without, .. } if without == part);
    assert!(shortened(bench.verdict().await, Part::LongTexts));
    assert_eq!((message(&bench), patches(&bench)), (Some(128), 2));
    // The size that was refused is known.
    bench.reporter.submit(update(&pod, 2, waiting("Running", 4001)));
    assert!(shortened(bench.verdict().await, Part::LongTexts));
    assert_eq!((message(&bench), patches(&bench)), (Some(128), 3));
    bench.reporter.submit(update(&pod, 3, waiting("Running", 200)));
    bench.written().await;
    assert_eq!((message(&bench), patches(&bench)), (Some(200), 4));
    // The request itself is too large.
    bench.api.faults().fail("patch pods/status", 2, policy(413));
    bench.reporter.submit(update(&pod, 4, waiting("Running", 201)));
    assert!(shortened(bench.verdict().await, Part::Repeated));
    assert_eq!((message(&bench), patches(&bench)), (Some(128), 7));
    let live = bench.live("web");
    assert!(live["status"]["containerStatuses"][0].get("resources").is_none(), "{live}");
}

#[tokio::test]
async fn a_finished_pod_is_deleted_even_if_no_status_of_it_can_be_written() {
    let mut bench = Bench::start().await;
    let pod = bench.pod("web");
    bench.api.limit_objects(1);
    bench.reporter.submit(update(&pod, 1, waiting("Running", 10)));
    let UpdateOutcome::Retrying(answer) = bench.ack().await.verdict else { panic!("the answer is acked") };
    assert_eq!(answer, "too large: etcdserver: request is too large");
    bench.api.delete("pods", "default", "web", Some(30)).unwrap();
    let ended = Update { could_run: false, deleting: true, ..update(&pod, 2, waiting("Failed", 10)) };
    bench.reporter.submit(ended.clone());
    assert!(matches!(bench.ack().await.verdict, UpdateOutcome::Retrying(_)), "something is left on the node");
    let stamp = Stamp { epoch: 1, version: 3 };
    bench.reporter.submit(Update { finished: true, stamp, ..ended });
    assert_eq!(bench.verdict().await, UpdateOutcome::Deleted);
    assert_eq!(bench.live("web"), Value::Null);
    assert_eq!(bench.api.counts().of("delete pods"), 1);
}
