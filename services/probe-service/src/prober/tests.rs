#![allow(clippy::disallowed_methods)]
use std::collections::VecDeque;

use futures::future::BoxFuture;
use quintlet_model::ids::{ContainerId, PodRef};
use quintlet_model::probe::{ProbeMemory, ProbeResult};
use quintlet_testkit::pod_panics::PodPanics;
use tokio::time::{Instant, sleep, timeout};

use super::*;
use crate::evaluations::NextEvaluation;
use crate::handlers::{Attempt, Broken};
use crate::target::{Handler, Probe, View};

/// Replays scripted attempts, the last one for ever, and records when each began.
struct FakeAttempts {
    script: Mutex<VecDeque<(Duration, Attempt)>>,
    begun: Mutex<Vec<Instant>>,
}

impl Attempts for FakeAttempts {
    fn attempt(&self, _: Arc<Probe>, _: String, _: String) -> BoxFuture<'static, Attempt> {
        self.begun.lock().push(Instant::now());
        let mut script = self.script.lock();
        let next = if script.len() > 1 { script.pop_front() } else { script.front().cloned() };
        let (takes, attempt) = next.expect("a script has at least one attempt");
        Box::pin(async move {
            sleep(takes).await;
            attempt
        })
    }
}

struct Rig {
    prober: Prober,
    attempts: Arc<FakeAttempts>,
    clock: Clock,
    start: Instant,
}

fn pass() -> (Duration, Attempt) {
    (Duration::ZERO, Attempt::Success("ok".into()))
}

fn fail() -> (Duration, Attempt) {
    (Duration::ZERO, Attempt::Failure("no".into()))
}

impl Rig {
    fn new(script: impl IntoIterator<Item = (Duration, Attempt)>) -> Self {
        let attempts = Arc::new(FakeAttempts {
            script: Mutex::new(script.into_iter().collect()),
            begun: Mutex::default(),
        });
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1000));
        let shared: Arc<dyn Attempts> = attempts.clone();
        let prober = Prober::new(shared, clock.clone(), Metrics::new(), Box::new(|| 0.5));
        Self { prober, attempts, clock, start: Instant::now() }
    }

    /// Advances tokio's time and boottime together.
    async fn run(&self, time: Duration) {
        let step = Duration::from_millis(50);
        for _ in 0..time.as_millis() / step.as_millis() {
            sleep(step).await;
            self.clock.advance(step);
        }
    }

    /// Seconds after the start at which attempts began.
    fn begun(&self) -> Vec<f64> {
        self.attempts.begun.lock().iter().map(|at| (*at - self.start).as_secs_f64()).collect()
    }
}

fn uid(uid: &str) -> PodUid {
    PodUid::parse(uid).unwrap()
}

fn view() -> View {
    View {
        container_id: Some(ContainerId::parse("c1").unwrap()),
        running: true,
        started_at: Some(Duration::from_secs(999)),
        started: true,
        pod_ip: "10.0.0.1".into(),
    }
}

fn memory(counter: u64) -> ProbeMemory {
    ProbeMemory {
        container_id: ContainerId::parse("c1").unwrap(),
        counter,
        result: Some(ProbeResult::Success),
        last: ProbeResult::Success,
        run: 1,
        on_hold: false,
    }
}

fn pod(name: &str, generation: u64, view: View, seed: Option<ProbeMemory>) -> Pod {
    let probe = Probe {
        kind: ProbeType::Readiness,
        handler: Handler::Tcp { host: None, port: 80 },
        initial_delay: Duration::ZERO,
        period: Duration::from_secs(1),
        timeout: Duration::from_secs(1),
        success_threshold: 1,
        failure_threshold: 3,
    };
    Pod {
        pod: PodRef { uid: uid(name), namespace: "default".into(), name: name.into() },
        generation,
        probes: vec![Target { container: "app".into(), probe: Arc::new(probe), view, seed }],
    }
}

/// Returns the messages to the driver: results as `counter result`, events as their message, and the names of
/// replies.
async fn messages(driver: &Mailbox) -> Vec<String> {
    let batch = timeout(Duration::from_millis(1), driver.take()).await.unwrap_or_default();
    let one = |report: wire::DriveReport| match report.report.expect("a report has something to say") {
        Report::Hello(_) => "hello".to_owned(),
        Report::Result(r) => {
            let memory = r.memory.unwrap_or_default();
            format!(
                "{} {} {}",
                r.uid,
                memory.counter,
                memory.result().as_str_name().trim_start_matches("OUTCOME_")
            )
        }
        Report::Unhealthy(u) => format!("{}: {}", u.reason, u.message),
        Report::Released(r) => format!("released {} with {}", r.uid, r.memory.len()),
        Report::ReplayEnd(_) => "replay end".to_owned(),
    };
    batch.into_iter().map(one).collect()
}

#[tokio::test(start_paused = true)]
async fn probes_run_at_a_fixed_rate_and_missed_ticks_are_skipped() {
    let slow = (Duration::from_millis(2500), Attempt::Success(String::new()));
    let rig = Rig::new([pass(), slow, pass()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod("a", 1, view(), Some(memory(7))), None).unwrap();
    rig.run(Duration::from_secs(6)).await;
    let begun: Vec<_> = rig.begun().iter().map(|s| s.round()).collect();
    // The slow one from 1 to 3.5 loses the ticks at 2 and 3, and one of them follows it at once.
    assert_eq!(begun[..5], [0.0, 1.0, 4.0, 4.0, 5.0], "{:?}", rig.begun());
}

#[tokio::test(start_paused = true)]
async fn a_changed_view_does_not_move_the_ticks_and_a_started_container_is_probed_at_once() {
    let rig = Rig::new([pass()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod("a", 1, view(), Some(memory(7))), None).unwrap();
    rig.run(Duration::from_millis(1500)).await;
    let moved = View { pod_ip: "10.0.0.2".into(), ..view() };
    rig.prober.set(&driver, pod("a", 1, moved, None), None).unwrap();
    rig.run(Duration::from_millis(700)).await;
    let rounded = |rig: &Rig| rig.begun().iter().map(|s| (s * 10.0).round() / 10.0).collect::<Vec<_>>();
    assert_eq!(rounded(&rig), [0.0, 1.0, 2.0]);

    let restarted = View { container_id: Some(ContainerId::parse("c2").unwrap()), ..view() };
    rig.prober.set(&driver, pod("a", 1, restarted, None), None).unwrap();
    rig.run(Duration::from_millis(1300)).await;
    assert_eq!(rounded(&rig), [0.0, 1.0, 2.0, 2.2, 3.2]);
}

#[tokio::test(start_paused = true)]
async fn the_first_probe_comes_when_the_initial_delay_ends() {
    let rig = Rig::new([pass()]);
    let driver = rig.prober.attach();
    let mut target = pod("a", 1, View { started_at: Some(Duration::from_secs(1000)), ..view() }, None);
    let probe = Arc::make_mut(&mut target.probes[0].probe);
    probe.initial_delay = Duration::from_millis(2500);
    probe.period = Duration::from_secs(10);
    rig.prober.set(&driver, target, None).unwrap();
    rig.run(Duration::from_secs(3)).await;
    let begun = rig.begun();
    assert!(begun.len() == 1 && (2.4..2.7).contains(&begun[0]), "{begun:?}");
}

#[tokio::test(start_paused = true)]
async fn only_changes_are_reported_and_every_failure_is_an_event() {
    let rig = Rig::new([pass(), pass(), pass(), fail(), fail(), fail(), fail(), pass()]);
    let driver = rig.prober.attach();
    assert_eq!(messages(&driver).await, ["replay end"]);
    let fresh = View { started: true, ..view() };
    rig.prober.set(&driver, pod("a", 1, fresh, Some(memory(7))), None).unwrap();
    assert_eq!(messages(&driver).await, ["a 7 SUCCESS"]);
    rig.run(Duration::from_millis(2500)).await;
    assert!(messages(&driver).await.is_empty(), "three more successes are no news");
    rig.run(Duration::from_secs(1)).await;
    assert_eq!(messages(&driver).await, ["a 11 SUCCESS", "Unhealthy: Readiness probe failed: no"]);
    rig.run(Duration::from_secs(2)).await;
    // Two failures on, the driver that was slow sees the last memory and both events.
    let event = "Unhealthy: Readiness probe failed: no";
    assert_eq!(messages(&driver).await, ["a 13 FAILURE", event, event]);
    rig.run(Duration::from_secs(1)).await;
    assert_eq!(messages(&driver).await, [event], "saturated");
    rig.run(Duration::from_secs(1)).await;
    assert_eq!(messages(&driver).await, ["a 15 SUCCESS"]);
}

#[tokio::test(start_paused = true)]
async fn a_probe_error_is_retried_three_times_and_does_not_change_the_result() {
    let broken =
        |event| (Duration::ZERO, Attempt::Broken(Broken { state: "unknown", error: "gone".into(), event }));
    let rig = Rig::new([broken(true), broken(true), broken(true), broken(false)]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod("a", 1, view(), Some(memory(7))), None).unwrap();
    rig.run(Duration::from_millis(500)).await;
    assert_eq!(rig.begun().len(), 3);
    let event = "Unhealthy: Readiness probe errored and resulted in unknown state: gone";
    assert_eq!(messages(&driver).await, ["a 7 SUCCESS", event, "replay end"]);
    // A runtime that is away is no event of the pod either.
    rig.run(Duration::from_secs(3)).await;
    assert_eq!(rig.begun().len(), 12);
    assert!(messages(&driver).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failure_during_a_stall_of_the_prober_is_unknown_and_retried() {
    let slow = (Duration::from_millis(300), Attempt::Failure("timeout".into()));
    let rig = Rig::new([slow, pass(), fail()]);
    let driver = rig.prober.attach();
    let mut target = pod("a", 1, view(), Some(memory(7)));
    Arc::make_mut(&mut target.probes[0].probe).failure_threshold = 1;
    rig.prober.set(&driver, target, None).unwrap();
    rig.run(Duration::from_millis(100)).await;
    rig.clock.advance(Duration::from_secs(5));
    rig.run(Duration::from_millis(500)).await;
    assert_eq!(rig.begun().len(), 2);
    assert_eq!(messages(&driver).await, ["a 7 SUCCESS", "replay end"]);
    rig.run(Duration::from_secs(1)).await;
    assert_eq!(messages(&driver).await[0], "a 9 FAILURE", "without a stall it counts");
}

#[tokio::test(start_paused = true)]
async fn a_second_driver_replaces_the_first_and_receives_all_results_again() {
    let rig = Rig::new([pass()]);
    let first = rig.prober.attach();
    rig.prober.set(&first, pod("a", 3, view(), Some(memory(7))), None).unwrap();
    let second = rig.prober.attach();
    assert!(first.replaced.is_cancelled());
    assert_eq!(messages(&second).await, ["a 7 SUCCESS", "replay end"]);
    assert_eq!(rig.prober.set(&first, pod("b", 3, view(), None), None), Err(Replaced));
    assert_eq!(rig.prober.complete(&first, &HashSet::new()), Err(Replaced));
    rig.prober.detach(&first);
    rig.prober.set(&second, pod("b", 3, view(), Some(memory(1))), None).unwrap();
    assert_eq!(messages(&second).await, ["b 1 SUCCESS"]);
}

#[tokio::test(start_paused = true)]
async fn probes_continue_without_a_driver_and_the_next_driver_receives_their_results() {
    let rig = Rig::new([fail()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod("a", 3, view(), Some(memory(7))), None).unwrap();
    rig.prober.detach(&driver);
    rig.run(Duration::from_millis(3500)).await;
    assert_eq!(rig.begun().len(), 4);
    let next = rig.prober.attach();
    assert_eq!(messages(&next).await, ["a 11 FAILURE", "replay end"]);
    // The outdated memory of the driver does not overwrite later results.
    rig.prober.set(&next, pod("a", 3, view(), Some(memory(7))), None).unwrap();
    assert!(messages(&next).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_removed_only_on_request_and_lower_generations_are_ignored() {
    let rig = Rig::new([pass()]);
    let driver = rig.prober.attach();
    for name in ["a", "b", "c"] {
        rig.prober.set(&driver, pod(name, 3, view(), Some(memory(7))), None).unwrap();
    }
    let pods = |rig: &Rig| {
        let mut pods: Vec<_> = rig.prober.table.lock().pods.keys().map(ToString::to_string).collect();
        pods.sort();
        pods.join(" ")
    };
    rig.prober.remove(&driver, &uid("a"), 2).unwrap();
    assert_eq!(pods(&rig), "a b c", "a lower generation");
    rig.prober.remove(&driver, &uid("a"), 3).unwrap();
    assert_eq!(pods(&rig), "b c");
    rig.prober.complete(&driver, &HashSet::from([uid("b")])).unwrap();
    assert_eq!(pods(&rig), "b");
    messages(&driver).await;

    rig.prober.set(&driver, pod("b", 2, view(), Some(memory(50))), None).unwrap();
    assert!(messages(&driver).await.is_empty(), "a lower generation");
    rig.prober.release(&driver, &uid("b"), 3).unwrap();
    rig.prober.release(&driver, &uid("x"), 1).unwrap();
    assert_eq!(messages(&driver).await, ["released b with 1", "released x with 0"]);
    rig.prober.set(&driver, pod("b", 3, view(), None), None).unwrap();
    assert_eq!(pods(&rig), "", "given away at this generation");
    rig.prober.set(&driver, pod("b", 5, view(), None), None).unwrap();
    assert_eq!(pods(&rig), "b");
    let before = rig.begun().len();
    rig.prober.shutdown();
    rig.run(Duration::from_secs(3)).await;
    assert_eq!(rig.begun().len(), before, "nothing is probed any more");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_container_fails_at_once_and_the_attempt_in_flight_is_ignored() {
    let slow = (Duration::from_millis(500), Attempt::Success(String::new()));
    let rig = Rig::new([slow]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod("a", 3, view(), Some(memory(7))), None).unwrap();
    rig.run(Duration::from_millis(100)).await;
    rig.prober.set(&driver, pod("a", 3, View { running: false, ..view() }, None), None).unwrap();
    assert_eq!(messages(&driver).await[0], "a 8 FAILURE");
    rig.run(Duration::from_secs(2)).await;
    assert!(messages(&driver).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn first_probes_of_old_containers_without_memory_are_spread_over_a_period() {
    let rig = Rig::new([pass()]);
    let driver = rig.prober.attach();
    let old = View { started_at: Some(Duration::from_secs(5)), ..view() };
    rig.prober.set(&driver, pod("a", 1, old.clone(), None), None).unwrap();
    rig.run(Duration::from_millis(300)).await;
    assert!(rig.begun().is_empty());
    rig.prober.set(&driver, pod("b", 1, old, Some(memory(3))), None).unwrap();
    rig.run(Duration::from_millis(100)).await;
    assert_eq!(rig.begun().len(), 1);
    rig.run(Duration::from_millis(300)).await;
    assert_eq!(rig.begun().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_series_of_a_probe_are_removed_with_it_and_observers_receive_every_evaluation() {
    let rig = Rig::new([pass()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod("series", 1, view(), Some(memory(1))), None).unwrap();
    rig.run(Duration::from_millis(1500)).await;
    let series = || {
        let text = quintlet_telemetry::metrics::text();
        text.lines().filter(|l| l.contains("pod=\"series\"")).map(str::to_owned).collect::<Vec<_>>()
    };
    let total = "prober_probe_total{probe_type=\"Readiness\",result=\"successful\",container=\"app\",pod=\"series\",namespace=\"default\",pod_uid=\"series\"} 2";
    assert!(series().iter().any(|l| l == total), "{:?}", series());
    assert!(series().iter().any(|l| l.starts_with("prober_probe_duration_seconds_bucket")), "{:?}", series());
    rig.prober.remove(&driver, &uid("series"), 1).unwrap();
    assert!(series().is_empty(), "{:?}", series());
    let NextEvaluation::Evaluation(1, seen) = rig.prober.evaluations().after(0) else {
        panic!("no evaluation is kept")
    };
    assert_eq!((seen.pod_name.as_str(), seen.run, seen.output.as_str()), ("series", 1, "ok"));
}

#[tokio::test(start_paused = true)]
async fn the_lag_of_a_probe_is_the_delay_of_its_start_and_not_the_duration_of_the_last_attempt() {
    // One attempt of 2.5 s, in which two ticks pass.
    let slow = (Duration::from_millis(2500), Attempt::Success(String::new()));
    let rig = Rig::new([slow, pass()]);
    let driver = rig.prober.attach();
    let lag = || -> f64 {
        let text = quintlet_telemetry::metrics::text();
        let sum = text.lines().find_map(|line| line.strip_prefix("quintlet_probe_lag_seconds_sum "));
        sum.map_or(0.0, |sum| sum.parse().unwrap())
    };
    let before = lag();
    rig.prober.set(&driver, pod("a", 1, view(), Some(memory(1))), None).unwrap();
    rig.run(Duration::from_secs(5)).await;
    assert!(rig.begun().len() >= 3, "{:?}", rig.begun());
    assert!(lag() - before < 0.1, "{} s without a delay", lag() - before);
    // The timers fire late, as on a machine without a free processor.
    tokio::time::advance(Duration::from_secs(6)).await;
    rig.run(Duration::from_millis(100)).await;
    assert!((5.0..6.5).contains(&(lag() - before)), "{} s after a pause of 6 s", lag() - before);
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_probe_affects_no_other_pod_and_is_retried_with_a_back_off() {
    let rig = Rig::new([pass()]);
    let driver = rig.prober.attach();
    let panics = PodPanics::start("a");
    for name in ["a", "b"] {
        rig.prober.set(&driver, pod(name, 1, view(), None), None).unwrap();
    }
    rig.run(Duration::from_secs(5)).await;
    let is_ready = |all: &[String], name: &str| {
        all.iter().any(|line| line.starts_with(name) && line.ends_with("SUCCESS"))
    };
    let all = messages(&driver).await;
    assert!(!is_ready(&all, "a ") && is_ready(&all, "b "), "{all:?}");
    let of_b = rig.begun().len();
    panics.stop();
    rig.run(Duration::from_secs(4)).await;
    assert!(rig.begun().len() <= of_b + 5, "the probe is suspended for ten seconds: {:?}", rig.begun());
    rig.run(Duration::from_secs(4)).await;
    let all = messages(&driver).await;
    assert!(is_ready(&all, "a "), "{all:?}");
}

#[tokio::test(start_paused = true)]
async fn the_largest_value_of_any_field_causes_no_panic() {
    let largest = u32::MAX;
    for (initial_delay_seconds, started_boottime_ns, attempts) in
        [(0, 1, 1), (largest, 1, 0), (0, u64::MAX, 1), (largest, u64::MAX, 0)]
    {
        let rig = Rig::new([fail()]);
        let driver = rig.prober.attach();
        let memory = wire::Memory {
            container_id: "c1".into(),
            counter: u64::MAX,
            result: wire::Outcome::Success as i32,
            last: wire::Outcome::Failure as i32,
            run: largest,
            on_hold: false,
        };
        let spec = wire::ProbeSpec {
            r#type: wire::ProbeType::Readiness as i32,
            handler: Some(wire::probe_spec::Handler::Grpc(wire::Grpc {
                port: largest,
                service: String::new(),
                tls: true,
            })),
            initial_delay_seconds,
            period_seconds: largest,
            period_ms: largest,
            timeout_seconds: largest,
            success_threshold: largest,
            failure_threshold: largest,
            memory: Some(memory),
        };
        let container = wire::ContainerTarget {
            name: "app".into(),
            container_id: "c1".into(),
            running: true,
            started_boottime_ns,
            started: true,
            probes: vec![spec],
        };
        let target = wire::PodTarget {
            uid: "u1".into(),
            generation: u64::MAX,
            pod_ip: "10.0.0.1".into(),
            containers: vec![container],
            ..Default::default()
        };
        rig.prober.set(&driver, crate::convert::pod(target).unwrap(), None).unwrap();
        rig.run(Duration::from_millis(500)).await;
        assert_eq!(rig.begun().len(), attempts, "{initial_delay_seconds} {started_boottime_ns}");
        let table = rig.prober.table.lock();
        assert!(table.workers().all(|worker| !worker.task.is_finished()), "{initial_delay_seconds}");
    }
}

/// Pod `a`, which is ready, with a probe of this period.
fn pod_every(ms: u64) -> Pod {
    let mut target = pod("a", 1, view(), Some(memory(7)));
    Arc::make_mut(&mut target.probes[0].probe).period = Duration::from_millis(ms);
    target
}

/// Returns the begins of all attempts in milliseconds, without the millisecond that a timer adds.
fn begun_ms(rig: &Rig) -> Vec<u64> {
    rig.begun().iter().map(|s| (s * 100.0).round() as u64 * 10).collect()
}

#[tokio::test(start_paused = true)]
async fn a_period_below_a_second_has_no_drift_and_a_probe_that_takes_longer_never_overlaps_itself() {
    let rig = Rig::new([pass()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod_every(100), None).unwrap();
    rig.run(Duration::from_millis(60_050)).await;
    assert_eq!(begun_ms(&rig), (0..=600).map(|n| n * 100).collect::<Vec<u64>>());

    let slow = (Duration::from_millis(250), Attempt::Success(String::new()));
    let rig = Rig::new([slow]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod_every(100), None).unwrap();
    rig.run(Duration::from_millis(5000)).await;
    let begun = begun_ms(&rig);
    assert!(begun.windows(2).all(|pair| pair[1] - pair[0] >= 250), "{begun:?}");
    assert!(begun.len() >= 16, "{begun:?}");
}

#[tokio::test(start_paused = true)]
async fn a_changed_period_counts_from_the_last_evaluation_and_keeps_the_streak() {
    let rig = Rig::new([pass(), pass(), fail(), fail(), pass()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod_every(1000), None).unwrap();
    rig.run(Duration::from_millis(2050)).await;
    // Two failures are left until the third one at 2 s.
    assert_eq!(begun_ms(&rig), [0, 1000, 2000]);
    rig.prober.set(&driver, pod_every(300), None).unwrap();
    rig.run(Duration::from_millis(300)).await;
    assert_eq!(begun_ms(&rig), [0, 1000, 2000, 2300]);
    let counter = |rig: &Rig| {
        let table = rig.prober.table.lock();
        let report = table.workers().next().unwrap().slot.report().unwrap().memory.unwrap();
        (report.counter, report.run, report.last)
    };
    assert_eq!(counter(&rig), (11, 2, wire::Outcome::Failure as i32), "the streak of both periods");
    // The last evaluation is longer ago than the new period.
    rig.prober.set(&driver, pod_every(1000), None).unwrap();
    rig.run(Duration::from_millis(500)).await;
    rig.prober.set(&driver, pod_every(100), None).unwrap();
    rig.run(Duration::from_millis(250)).await;
    assert_eq!(begun_ms(&rig)[4..], [2850, 2950, 3050], "no attempt is made up for");
}

#[tokio::test(start_paused = true)]
async fn an_attempt_in_progress_is_finished_when_the_period_changes() {
    let slow = (Duration::from_millis(500), Attempt::Success(String::new()));
    let rig = Rig::new([slow, pass()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod_every(1000), None).unwrap();
    for ms in [100, 200, 100, 150, 100] {
        rig.run(Duration::from_millis(50)).await;
        rig.prober.set(&driver, pod_every(ms), None).unwrap();
    }
    rig.run(Duration::from_millis(400)).await;
    assert_eq!(begun_ms(&rig), [0, 500, 600], "one attempt at a time");
    let table = rig.prober.table.lock();
    let report = table.workers().next().unwrap().slot.report().unwrap();
    assert_eq!(report.memory.unwrap().counter, 10, "all of them count");
}

#[tokio::test(start_paused = true)]
async fn a_failing_probe_below_a_second_is_reported_at_once_and_has_one_event_per_second() {
    let rig = Rig::new([pass(), pass(), fail()]);
    let driver = rig.prober.attach();
    rig.prober.set(&driver, pod_every(100), None).unwrap();
    rig.run(Duration::from_millis(350)).await;
    let event = "Unhealthy: Readiness probe failed: no";
    assert_eq!(
        messages(&driver).await,
        ["a 7 SUCCESS", event, "replay end"],
        "the streak alone is not urgent"
    );
    rig.run(Duration::from_millis(100)).await;
    // Attempts 3, 4 and 5 failed, the last at 400 ms.
    assert_eq!(messages(&driver).await, ["a 12 FAILURE"]);
    rig.run(Duration::from_millis(700)).await;
    assert!(messages(&driver).await.is_empty(), "the next event is that of 1200 ms");
    rig.run(Duration::from_millis(100)).await;
    assert_eq!(messages(&driver).await, [event]);
    rig.run(Duration::from_secs(3)).await;
    assert_eq!(messages(&driver).await, [event; 3]);
}

#[tokio::test(start_paused = true)]
async fn an_alternating_probe_below_a_second_loses_readiness_at_most_once_a_second() {
    let turns = (0..101).map(|turn| if turn % 2 == 0 { pass() } else { fail() });
    let rig = Rig::new(turns);
    let driver = rig.prober.attach();
    let mut target = pod_every(100);
    Arc::make_mut(&mut target.probes[0].probe).failure_threshold = 1;
    rig.prober.set(&driver, target, None).unwrap();
    let mut reports = Vec::new();
    for _ in 0..200 {
        rig.run(Duration::from_millis(50)).await;
        reports.extend(messages(&driver).await);
    }
    let (events, results): (Vec<_>, Vec<_>) = reports.iter().partition(|report| report.contains("failed"));
    let results: Vec<_> = results.iter().filter_map(|report| report.rsplit(' ').next()).collect();
    let losses = results.windows(2).filter(|pair| **pair == ["SUCCESS", "FAILURE"]).count();
    assert!((7..=10).contains(&losses), "{reports:?}");
    assert!(results.len() <= 33 && events.len() <= 11, "{reports:?}");
    // The pod is ready again once all evaluations pass.
    rig.run(Duration::from_secs(2)).await;
    let last = messages(&driver).await;
    assert!(last.last().is_some_and(|report| report.ends_with("SUCCESS")), "{last:?}");
}
