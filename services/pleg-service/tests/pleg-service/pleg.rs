//! pleg-service against a fake runtime, with time paused.

use std::time::Duration;

use pleg_service::Periods;
use pleg_service::traits::{HintEvent, HintKind};
use quintlet_proto::pleg::v1 as pb;
use quintlet_testkit::fake_runtime::{Call, ContainerSeed, FakeRuntime, Method, Rule};
use quintlet_testkit::pod_panics::PodPanics;
use tokio::time::Instant;
use tonic::Code;

use crate::common::{Bench, options};

fn web(runtime: &FakeRuntime) -> (String, String) {
    let sandbox = runtime.add_sandbox("u1", "web", "default", 0);
    let id = runtime.add_container(&sandbox, &ContainerSeed::running("main"));
    (sandbox, id)
}

fn ten_minutes() -> Periods {
    Periods { relist_live: Duration::from_secs(600), ..Periods::default() }
}

#[tokio::test(start_paused = true)]
async fn the_first_snapshot_has_every_pod_and_follows_the_first_list() {
    let bench = Bench::new(options(Duration::ZERO), false, |r| {
        web(r);
        r.add_sandbox("u2", "other", "kube-system", 0);
        r.latency(Method::ListPodSandbox, Duration::from_secs(7));
    });
    let mut watch = bench.watch(None).await;
    assert!(!bench.health().await.healthy);
    assert_eq!(bench.health().await.message, "pleg has yet to be successful");
    watch.snapshot().await;
    assert_eq!(watch.log[..2], ["hello", "beat"], "no pod is reported before the list");
    assert_eq!(watch.pods.keys().collect::<Vec<_>>(), ["u1", "u2"]);
    let pod = &watch.pods["u1"];
    assert_eq!((pod.name.as_str(), pod.namespace.as_str()), ("web", "default"));
    assert_eq!(pod.containers[0].state(), pb::ContainerState::Running);
    assert_eq!(pod.sandboxes[0].ips.len(), 1);
    assert!(bench.health().await.healthy);
}

#[tokio::test(start_paused = true)]
async fn an_exit_is_observed_although_its_hint_precedes_the_state_change() {
    let mut id = String::new();
    let bench = Bench::with(options(Duration::from_millis(80)), true, ten_minutes(), |r| id = web(r).1);
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let began = Instant::now();
    bench.runtime.exit(&id, 3);
    bench.hints.hint(HintKind::Exited, &id);
    watch.until("exit", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
    assert!(began.elapsed() < Duration::from_millis(200), "{:?}", began.elapsed());
    assert_eq!(watch.pods["u1"].containers[0].exit_code, 3);
}

/// A command that cannot be executed: the container ends before pod-sync observes its start, and the CRI
/// shows it as running for a while. Events of containerd name no pod, events of the CRI do.
#[tokio::test(start_paused = true)]
async fn an_exit_of_a_container_that_was_never_inspected_is_observed() {
    let lag = Duration::from_millis(80);
    let bench = Bench::with(options(lag), true, ten_minutes(), |_| {});
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    let (sandbox, _) = web(&bench.runtime);
    bench.observe("u1", true).await.unwrap();
    let u1 = || quintlet_model::ids::PodUid::parse("u1").ok();
    for (kind, pod, latest) in [
        (HintKind::Exited, None, Duration::from_millis(200)),
        (HintKind::Exited, u1(), Duration::from_millis(200)),
        (HintKind::Exiting, None, Duration::from_millis(6200)),
        (HintKind::Exiting, u1(), Duration::from_millis(5200)),
    ] {
        let name = format!("{}-{}", kind.name(), if pod.is_some() { "with" } else { "without" });
        let id = bench.runtime.add_container(&sandbox, &ContainerSeed::running(&name));
        let began = Instant::now();
        bench.runtime.exit(&id, 1);
        bench.hints.event(HintEvent::Hint { kind, id: id.clone(), pod, trace: None, at_unix_ns: 0 });
        watch.until("exit", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
        assert!(began.elapsed() < latest, "{name}: {:?}", began.elapsed());
    }
    // A container that is gone already, or that the CRI never had: one list, and no further look.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let lists = || bench.runtime.count(Method::ListContainers);
    for kind in [HintKind::Exited, HintKind::Exiting] {
        let before = lists();
        let id = "gone".to_owned();
        bench.hints.event(HintEvent::Hint { kind, id, pod: u1(), trace: None, at_unix_ns: 0 });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(lists(), before + 1, "{kind:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hint_with_an_unknown_id_is_resolved_to_its_pod_or_dropped() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (sandbox, id) = web(&bench.runtime);
    bench.hints.hint(HintKind::Started, &id);
    watch.until("new pod", |w| w.state("u1", &id) == Some(pb::ContainerState::Running)).await;
    assert_eq!(watch.pods["u1"].sandboxes[0].id, sandbox, "its sandbox was found by label");
    bench.hints.hint(HintKind::Exited, "0000");
    tokio::time::sleep(Duration::from_secs(10)).await;
    let lists = bench.runtime.count(Method::ListContainers);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(bench.runtime.count(Method::ListContainers), lists, "the lookup has ended");
}

/// The runtime reports the removal of the sandbox, which includes that of its containers.
#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_removed_soon_after_an_exit_of_its_container_leaves_no_container() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |r| drop(web(r)));
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let second = bench.runtime.add_sandbox("u1", "web", "default", 1);
    bench.hints.hint(HintKind::Created, &second);
    let id = bench.runtime.add_container(&second, &ContainerSeed::running("main"));
    bench.runtime.exit(&id, 1);
    bench.hints.hint(HintKind::Exited, &id);
    watch.until("exit", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
    assert_eq!(watch.pods["u1"].sandboxes.len(), 2, "no container without its sandbox");
    bench.runtime.remove(&second);
    bench.hints.hint(HintKind::Deleted, &second);
    watch.until("removal", |w| w.pods["u1"].containers.len() == 1).await;
}

/// The first inspection of the sandbox has read it, and waits for another call.
#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_removed_during_its_first_inspection_does_not_stay() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |r| drop(web(r)));
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let second = bench.runtime.add_sandbox("u1", "web", "default", 1);
    bench.runtime.forget_calls();
    let slow = bench.runtime.hang(Method::ContainerStatus);
    let request = pb::ObserveRequest {
        uid: "u1".to_owned(),
        sandboxes: vec![second.clone()],
        ..pb::ObserveRequest::default()
    };
    let mut client = bench.client.clone();
    let observed = tokio::spawn(async move { client.observe(request).await });
    bench.runtime.wait_count(Method::ContainerStatus, 1).await;
    bench.runtime.wait_count(Method::PodSandboxStatus, 2).await;
    while bench.runtime.in_flight(Method::PodSandboxStatus) > 0 {
        tokio::task::yield_now().await;
    }
    bench.runtime.remove(&second);
    bench.hints.hint(HintKind::Deleted, &second);
    // Paused time passes only after the hint is handled.
    tokio::time::sleep(Duration::from_millis(1)).await;
    bench.runtime.unscript(slow);
    observed.await.unwrap().unwrap();
    watch.until("second sandbox", |w| w.pods["u1"].sandboxes.len() == 2).await;
    watch.until("removal", |w| w.pods["u1"].sandboxes.len() == 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_observed_within_ten_seconds_of_its_hint_needs_no_list() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let lists = || bench.runtime.count(Method::ListPodSandbox) + bench.runtime.count(Method::ListContainers);
    let before = lists();
    let (sandbox, id) = web(&bench.runtime);
    bench.hints.hint(HintKind::Created, &sandbox);
    bench.hints.hint(HintKind::Started, &sandbox);
    tokio::time::sleep(Duration::from_millis(9900)).await;
    assert_eq!(lists(), before, "its creation may still be under way");
    let known = pb::KnownContainer { id, sandbox_id: sandbox.clone() };
    let request = pb::ObserveRequest {
        uid: "u1".to_owned(),
        sandboxes: vec![sandbox],
        containers: vec![known],
        ..Default::default()
    };
    bench.client.clone().observe(request).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(lists(), before);
}

/// A burst: starts that take longer than ten seconds.
#[tokio::test(start_paused = true)]
async fn new_ids_that_are_not_urgent_share_a_list() {
    quintlet_kit::timers::align();
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    // The time of the boot in this test is not a whole second before its begin.
    tokio::time::sleep_until(quintlet_kit::timers::next_tick(Duration::from_secs(1))).await;
    let before = bench.runtime.count(Method::ListContainers);
    let began = Instant::now();
    for n in 0..9 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let id = bench.runtime.add_sandbox(&format!("u{n}"), "pod", "default", 0);
        bench.hints.hint(HintKind::Created, &id);
    }
    watch.until("nine pods", |w| w.pods.len() == 9).await;
    assert_eq!(began.elapsed().as_millis() / 10, 1100, "ten seconds, and up to one more");
    let of_pods = 9;
    assert_eq!(bench.runtime.count(Method::ListContainers), before + 1 + of_pods);
}

#[tokio::test(start_paused = true)]
async fn on_a_full_node_new_ids_are_looked_for_by_themselves_and_not_in_a_list_of_everything() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |r| {
        for n in 0..320 {
            r.add_sandbox(&format!("p{n}"), "pod", "default", 0);
        }
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let full = || {
        let request = |c: Call| c.request::<quintlet_cri_api::v1::ListContainersRequest>();
        let lists = bench.runtime.calls_of(Method::ListContainers).into_iter().map(request);
        lists.filter(|r| r.filter.is_none()).count()
    };
    let before = full();
    for n in 0..5 {
        let id = bench.runtime.add_sandbox(&format!("new{n}"), "pod", "default", 0);
        bench.hints.hint(HintKind::Created, &id);
    }
    watch.until("new pods", |w| w.pods.len() == 325).await;
    assert_eq!(full(), before);
    for n in 5..11 {
        let id = bench.runtime.add_sandbox(&format!("new{n}"), "pod", "default", 0);
        bench.hints.hint(HintKind::Created, &id);
    }
    watch.until("new pods", |w| w.pods.len() == 331).await;
    assert!(full() > before, "six at once are more than a list of everything costs");
}

#[tokio::test(start_paused = true)]
async fn an_observe_request_with_ids_needs_no_list_and_its_hints_no_inspection() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    // The list at the start of a hint stream.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let calls = || {
        let calls = |method| bench.runtime.count(method);
        (calls(Method::ListPodSandbox), calls(Method::ListContainers), calls(Method::ContainerStatus))
    };
    let before = calls();
    let (sandbox, id) = web(&bench.runtime);
    bench.hints.hint(HintKind::Created, &sandbox);
    bench.hints.hint(HintKind::Created, &id);
    bench.hints.hint(HintKind::Started, &id);
    let known = pb::KnownContainer { id: id.clone(), sandbox_id: sandbox.clone() };
    let request = pb::ObserveRequest {
        uid: "u1".to_owned(),
        sandboxes: vec![sandbox],
        containers: vec![known],
        ..Default::default()
    };
    let seen = bench.client.clone().observe(request).await.unwrap().into_inner().pod.unwrap();
    assert_eq!(seen.containers[0].id, id);
    assert_eq!(calls(), (before.0, before.1, before.2 + 1), "one inspection and no list");
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(calls(), (before.0, before.1, before.2 + 1), "the hints concerned known changes");
    // A later exit is inspected at once.
    bench.runtime.exit(&id, 3);
    bench.hints.hint(HintKind::Exited, &id);
    watch.until("exit", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
}

#[tokio::test(start_paused = true)]
async fn an_exit_is_inspected_once_when_the_runtime_has_cleaned_up_or_after_five_seconds() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let (sandbox, id) = web(&bench.runtime);
    let other = bench.runtime.add_container(&sandbox, &ContainerSeed::running("other"));
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let inspections = || bench.runtime.count(Method::PodSandboxStatus);
    let before = inspections();
    bench.hints.hint(HintKind::Exiting, &id);
    tokio::time::sleep(Duration::from_millis(4900)).await;
    assert_eq!(inspections(), before, "the CRI does not show the exit yet");
    bench.runtime.exit(&id, 3);
    bench.hints.hint(HintKind::Exited, &id);
    watch.until("exit", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
    for kind in [HintKind::Exited, HintKind::Exiting] {
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(inspections(), before + 1, "the entry shows the exit");
        bench.hints.hint(kind, &id);
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(inspections(), before + 1);
    // The second hint is lost.
    let began = tokio::time::Instant::now();
    bench.runtime.exit(&other, 3);
    bench.hints.hint(HintKind::Exiting, &other);
    watch.until("exit", |w| w.state("u1", &other) == Some(pb::ContainerState::Exited)).await;
    assert_eq!(began.elapsed().as_millis() / 10, 500);
    assert_eq!(inspections(), before + 2);
    bench.runtime.remove(&other);
    bench.hints.hint(HintKind::Deleted, &other);
    watch.until("removal", |w| w.state("u1", &other).is_none()).await;
    assert_eq!(inspections(), before + 3);
}

/// A start that takes 4.9 s, as on a busy machine: the hint precedes the change by as much.
#[tokio::test(start_paused = true)]
async fn a_start_is_inspected_once_when_pod_sync_observes_it_or_after_five_seconds() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let sandbox = bench.runtime.add_sandbox("u1", "web", "default", 0);
    let [id, of_others] =
        ["main", "other"].map(|name| bench.runtime.add_container(&sandbox, &ContainerSeed::created(name)));
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let inspections = || bench.runtime.count(Method::PodSandboxStatus);
    let before = inspections();
    bench.hints.hint(HintKind::Started, &id);
    tokio::time::sleep(Duration::from_millis(4900)).await;
    assert_eq!(inspections(), before, "the start is still under way");
    bench.runtime.start_container(&id);
    bench.observe("u1", false).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(inspections(), before + 1, "the entry shows the start");
    // Another client starts a container, and observes nothing.
    let began = Instant::now();
    bench.hints.hint(HintKind::Started, &of_others);
    bench.runtime.start_container(&of_others);
    watch.until("start", |w| w.state("u1", &of_others) == Some(pb::ContainerState::Running)).await;
    assert_eq!(began.elapsed().as_millis() / 10, 500);
}

#[tokio::test(start_paused = true)]
async fn an_inspection_before_the_first_look_for_a_container_does_not_replace_it() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let (sandbox, _) = web(&bench.runtime);
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    // As the CRI's events: the pod is known, the container is not.
    let id = "later".to_owned();
    let (kind, pod) = (HintKind::Created, quintlet_model::ids::PodUid::parse("u1").ok());
    bench.hints.event(HintEvent::Hint { kind, id, pod, trace: None, at_unix_ns: 0 });
    tokio::time::sleep(Duration::from_secs(3)).await;
    bench.observe("u1", false).await.unwrap();
    let id = bench.runtime.add_container(&sandbox, &ContainerSeed::created("later"));
    let began = Instant::now();
    watch.until("container", |w| w.state("u1", &id).is_some()).await;
    assert_eq!(began.elapsed().as_millis() / 10, 200);
}

#[tokio::test(start_paused = true)]
async fn an_observe_request_after_removals_lists_the_pod_and_reads_no_status_of_what_is_gone() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let (sandbox, id) = web(&bench.runtime);
    let other = bench.runtime.add_container(&sandbox, &ContainerSeed::running("other"));
    bench.watch(None).await.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let statuses = || {
        let calls = |method| bench.runtime.count(method);
        (calls(Method::PodSandboxStatus), calls(Method::ContainerStatus))
    };
    let observe = async || {
        let known = |id: &String| pb::KnownContainer { id: id.clone(), sandbox_id: sandbox.clone() };
        let request = pb::ObserveRequest {
            uid: "u1".to_owned(),
            sandboxes: vec![sandbox.clone()],
            containers: vec![known(&id), known(&other)],
            full: true,
            ..Default::default()
        };
        bench.client.clone().observe(request).await.unwrap().into_inner().pod
    };
    let before = statuses();
    bench.runtime.remove(&other);
    assert_eq!(observe().await.map(|pod| pod.containers.len()), Some(1));
    assert_eq!(statuses(), (before.0 + 1, before.1 + 1), "of the sandbox and of the container that is left");
    bench.runtime.remove(&id);
    bench.runtime.remove(&sandbox);
    assert_eq!(observe().await, None);
    assert_eq!(statuses(), (before.0 + 1, before.1 + 1));
}

#[tokio::test(start_paused = true)]
async fn an_id_that_the_cri_shows_late_is_found() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    let (sandbox, id) = web(&bench.runtime);
    // As with containerd, the event precedes the change in the CRI.
    let hidden = bench.runtime.script(Rule::on(Method::ListContainers).fail(Code::Unavailable, "not yet"));
    bench.hints.hint(HintKind::Created, &id);
    tokio::time::sleep(Duration::from_millis(5500)).await;
    bench.runtime.unscript(hidden);
    watch.until("new pod", |w| w.pods.contains_key("u1")).await;
    assert_eq!(watch.pods["u1"].sandboxes[0].id, sandbox);
}

#[tokio::test(start_paused = true)]
async fn a_lost_hint_is_repaired_by_the_next_list() {
    let mut id = String::new();
    let bench = Bench::new(options(Duration::ZERO), true, |r| id = web(r).1);
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let began = Instant::now();
    bench.runtime.exit(&id, 1);
    watch.until("exit", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
    let took = began.elapsed();
    assert!(took > Duration::from_secs(20) && took < Duration::from_secs(31), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_broken_hint_stream_causes_a_list_at_once_every_second_and_at_its_return() {
    let bench = Bench::new(options(Duration::ZERO), true, |r| {
        web(r);
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let lists = || bench.runtime.count(Method::ListPodSandbox);
    let before = lists();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(lists(), before, "every 30 s with live hints");
    assert!(bench.health().await.hints_live);
    bench.hints.allow(false);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(lists(), before + 1, "at once");
    tokio::time::sleep(Duration::from_secs(10)).await;
    let cut = lists();
    assert!((before + 10..=before + 12).contains(&cut), "every second: {before} {cut}");
    assert!(!bench.health().await.hints_live);
    // The pod was removed while there was no hint stream. Its return causes a list, which detects the
    // removal.
    bench.hints.allow(true);
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert!(lists() > cut, "a list on return");
    let back = lists();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(lists() <= back + 1, "and then every 30 s");
}

#[tokio::test(start_paused = true)]
async fn an_overrun_lists_everything() {
    let mut id = String::new();
    let bench = Bench::new(options(Duration::ZERO), true, |r| id = web(r).1);
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    bench.runtime.exit(&id, 1);
    let began = Instant::now();
    bench.hints.event(HintEvent::Overrun { missed: 3 });
    watch.until("exit", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn lost_hints_are_logged_once_a_minute_for_each_reason() {
    let lines = quintlet_testkit::logs::Lines::default();
    let log = quintlet_testkit::logs::capture("test", tracing::Level::WARN, &lines);
    let _of_this_thread = tracing::dispatcher::set_default(&log);
    let bench = Bench::new(options(Duration::ZERO), true, |r| drop(web(r)));
    bench.watch(None).await.snapshot().await;
    let lost = || -> Vec<String> {
        lines.all().into_iter().filter(|line| line.contains("lost hints, listing all pods")).collect()
    };
    for _ in 0..100 {
        bench.hints.event(HintEvent::Overrun { missed: 3 });
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let overruns = lost();
    assert!(overruns.len() == 1 && overruns[0].contains("read in time"), "{overruns:?}");
    // More than the resolver and its queue take.
    for number in 0..3000 {
        bench.hints.hint(HintKind::Created, &format!("unknown-{number}"));
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let both = lost();
    assert!(both.len() == 2 && both[1].contains("about unknown IDs wait"), "{both:?}");
    tokio::time::sleep(Duration::from_secs(60)).await;
    bench.hints.event(HintEvent::Overrun { missed: 7 });
    tokio::time::sleep(Duration::from_secs(5)).await;
    let all = lost();
    // The line counts the 99 losses that were not logged, and its own.
    assert!(all.len() == 3 && all[2].contains("\"hints\":7") && all[2].contains("\"losses\":100"), "{all:?}");
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_resumes_within_the_buffer_receives_exactly_the_missed_records() {
    let (mut sandbox, mut id) = Default::default();
    let bench = Bench::new(options(Duration::ZERO), false, |r| {
        (sandbox, id) = web(r);
        r.add_sandbox("u2", "other", "default", 0);
        r.add_sandbox("u3", "third", "default", 0);
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    let cursor = watch.cursor;
    let pods = watch.pods.clone();
    drop(watch);
    bench.runtime.exit(&id, 0);
    let u3 = bench.runtime.sandboxes().iter().find(|s| s.pod_uid() == "u3").unwrap().id().to_owned();
    bench.runtime.remove(&u3);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut watch = bench.watch(cursor).await;
    watch.pods = pods;
    watch.until("both changes", |w| w.log.len() >= 3).await;
    let mut log = watch.log[1..3].to_vec();
    log.sort();
    assert_eq!(log, ["gone u3", "pod u1"]);
    let cursor = watch.cursor;
    let mut again = bench.watch(cursor).await;
    again.until("beat", |w| w.log.len() >= 2).await;
    assert_eq!(again.log, ["hello", "beat"], "nothing missed, nothing sent");
}

#[tokio::test(start_paused = true)]
async fn a_cursor_of_another_epoch_or_from_the_future_is_resynced_with_a_picture() {
    let bench = Bench::new(options(Duration::ZERO), false, |r| {
        web(r);
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    let now = watch.cursor.unwrap();
    for cursor in [
        pb::Cursor { epoch: now.epoch - 1, rev: now.rev },
        pb::Cursor { epoch: now.epoch + 1, rev: now.rev },
        pb::Cursor { epoch: now.epoch, rev: now.rev + 1 },
    ] {
        let mut watch = bench.watch(Some(cursor)).await;
        watch.snapshot().await;
        assert_eq!(watch.log, ["hello", "resync", "begin", "pod u1", "end"], "{cursor:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_does_not_read_affects_no_other_and_skips_to_the_latest_state() {
    // Each record is large, so that a few fill all buffers between the service and its reader.
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |r| {
        for n in 0..8 {
            let id = r.add_sandbox(&format!("p{n}"), "pod", "default", 0);
            r.edit_sandbox(&id, |s| s.annotations = [("notes".to_owned(), "x".repeat(64 << 10))].into());
        }
    });
    let mut slow = bench.watch(None).await;
    let mut quick = bench.watch(None).await;
    slow.snapshot().await;
    quick.snapshot().await;
    let has_last = |p: &pb::PodRecord| p.containers.len() == 1 && p.containers[0].attempt == 39;
    let reader = tokio::spawn(async move {
        quick.until("all", |w| w.pods.values().all(has_last)).await;
        quick
    });
    let sandboxes = bench.runtime.sandboxes();
    let mut last = Vec::<String>::new();
    for round in 0..40 {
        for gone in last.drain(..) {
            bench.runtime.remove(&gone);
        }
        for sandbox in &sandboxes {
            let seed = ContainerSeed::running("c").attempt(round);
            last.push(bench.runtime.add_container(sandbox.id(), &seed));
            bench.observe(sandbox.pod_uid(), true).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let quick = reader.await.unwrap();
    slow.until("all", |w| w.pods.values().all(has_last)).await;
    assert!(slow.log.len() < quick.log.len(), "{} {}", slow.log.len(), quick.log.len());
}

#[tokio::test(start_paused = true)]
async fn an_observe_request_is_never_served_by_an_earlier_inspection() {
    let mut id = String::new();
    let bench = Bench::new(options(Duration::ZERO), false, |r| id = web(r).1);
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    // An inspection reads "running" and then hangs in the sandbox's status.
    let hang = bench.runtime.script(Rule::on(Method::PodSandboxStatus).hang());
    let calls = bench.runtime.count(Method::PodSandboxStatus);
    let client = bench.client.clone();
    let ask = |mut client: quintlet_proto::pleg::v1::pleg_client::PlegClient<_>| async move {
        let request = pb::ObserveRequest { uid: "u1".to_owned(), full: false, ..Default::default() };
        client.observe(request).await.unwrap().into_inner()
    };
    let first = tokio::spawn(ask(client.clone()));
    bench.runtime.wait_count(Method::PodSandboxStatus, calls + 1).await;
    bench.runtime.wait_count(Method::ContainerStatus, calls + 1).await;
    bench.runtime.exit(&id, 7);
    let second = tokio::spawn(ask(client));
    tokio::time::sleep(Duration::from_millis(100)).await;
    bench.runtime.unscript(hang);
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    let state = |r: &pb::ObserveReply| r.pod.as_ref().unwrap().containers[0].state();
    assert_eq!(state(&first), pb::ContainerState::Running);
    assert_eq!(state(&second), pb::ContainerState::Exited);
    assert!(second.cursor.unwrap().rev > first.cursor.unwrap().rev);
    watch.until("the same is published", |w| w.state("u1", &id) == Some(pb::ContainerState::Exited)).await;
}

#[tokio::test(start_paused = true)]
async fn an_observe_request_returns_the_runtimes_error_and_works_before_the_first_list() {
    let bench = Bench::new(options(Duration::ZERO), false, |r| {
        web(r);
        r.hang(Method::ListPodSandbox);
    });
    bench.runtime.wait_count(Method::ListPodSandbox, 1).await;
    bench.runtime.unscript_all();
    let seen = bench.observe("u1", true).await.unwrap();
    assert_eq!(seen.pod.unwrap().containers.len(), 1);
    assert!(bench.observe("nobody", true).await.unwrap().pod.is_none());
    bench.runtime.fail(Method::ContainerStatus, Code::Unknown, "disk on fire", 1);
    let error = bench.observe("u1", false).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Unavailable, "ContainerStatus: disk on fire"));
    bench.runtime.down();
    assert_eq!(bench.observe("u1", true).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(bench.observe("../x", true).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(start_paused = true)]
async fn unreadable_data_is_an_error_of_its_pod_only_and_foreign_containers_are_skipped() {
    let mut id = String::new();
    let bench = Bench::new(options(Duration::ZERO), false, |r| {
        id = web(r).1;
        r.edit_container(&id, |c| c.metadata = None);
        r.add_sandbox("u2", "good", "default", 0);
        let stranger = r.add_sandbox("u3", "stranger", "default", 0);
        r.edit_sandbox(&stranger, |s| s.labels.clear());
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    assert_eq!(watch.pods.keys().collect::<Vec<_>>(), ["u1", "u2"]);
    assert!(watch.pods["u1"].error.contains("metadata: missing"), "{}", watch.pods["u1"].error);
    assert_eq!((watch.pods["u1"].name.as_str(), watch.pods["u2"].error.as_str()), ("web", ""));
    let seen = bench.observe("u1", false).await.unwrap().pod.unwrap();
    assert!(seen.error.contains("metadata: missing"));
    bench.runtime.edit_container(&id, |c| {
        c.metadata = Some(quintlet_cri_api::v1::ContainerMetadata { name: "main".to_owned(), attempt: 0 });
    });
    watch.until("recovery", |w| w.pods["u1"].error.is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn lists_that_fail_too_long_are_unhealthy_with_the_kubelets_text_until_one_succeeds() {
    let bench = Bench::new(options(Duration::ZERO), false, |r| {
        web(r);
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    bench.runtime.down();
    tokio::time::sleep(Duration::from_secs(170)).await;
    assert!(bench.health().await.healthy);
    tokio::time::sleep(Duration::from_secs(15)).await;
    let health = bench.health().await;
    assert!(!health.healthy);
    assert!(health.message.starts_with("pleg was last seen active 3m"), "{}", health.message);
    assert!(health.message.ends_with(" ago; threshold is 3m0s"), "{}", health.message);
    assert_eq!(watch.pods.len(), 1, "an unavailable runtime removes no pod");
    bench.runtime.up().unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert!(bench.health().await.healthy);
}

#[tokio::test(start_paused = true)]
async fn lifecycle_events_report_each_change_of_a_pod() {
    use quintlet_proto::pleg::v1::lifecycle_event::Event;
    let (mut sandbox, mut id) = Default::default();
    let bench = Bench::new(options(Duration::ZERO), true, |r| (sandbox, id) = web(r));
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let request = pb::LifecycleRequest { hello: None, uid: "u1".to_owned() };
    let mut events = bench.client.clone().lifecycle(request).await.unwrap().into_inner();
    assert!(matches!(events.message().await.unwrap().unwrap().event, Some(Event::Hello(_))));
    bench.runtime.exit(&id, 5);
    bench.hints.hint(HintKind::Exited, &id);
    let Some(Event::Lifecycle(died)) = events.message().await.unwrap().unwrap().event else { panic!() };
    assert_eq!((died.kind(), died.container.as_str(), died.exit_code), (pb::LifecycleKind::Died, "main", 5));
    bench.runtime.remove(&sandbox);
    bench.hints.hint(HintKind::Deleted, &id);
    let mut kinds = Vec::new();
    for _ in 0..3 {
        let Some(Event::Lifecycle(e)) = events.message().await.unwrap().unwrap().event else { panic!() };
        kinds.push((e.kind(), e.id == sandbox));
    }
    kinds.sort_by_key(|(k, s)| (*s, *k as i32));
    use pb::LifecycleKind::{Died, Removed};
    assert_eq!(kinds, [(Removed, false), (Died, true), (Removed, true)]);
    watch.until("gone", |w| !w.pods.contains_key("u1")).await;
}

#[tokio::test(start_paused = true)]
async fn a_hanging_inspection_is_an_error_of_its_pod_in_the_first_snapshot_and_delays_no_other() {
    let mut id = String::new();
    let bench = Bench::new(options(Duration::ZERO), true, |r| {
        id = web(r).1;
        r.add_sandbox("u2", "good", "default", 0);
        r.script(Rule::on(Method::ContainerStatus).about(&id).hang());
    });
    let began = Instant::now();
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    assert_eq!(watch.pods["u1"].error, "pod inspection: no answer from the runtime within 5s");
    assert_eq!(watch.pods["u2"].error, "");
    let sandbox = bench.runtime.sandboxes().iter().find(|s| s.pod_uid() == "u2").unwrap().id().to_owned();
    bench.runtime.exit(&sandbox, 0);
    bench.hints.hint(HintKind::Exited, &sandbox);
    watch.until("exit of u2", |w| w.pods["u2"].sandboxes[0].state() == pb::SandboxState::NotReady).await;
    bench.runtime.unscript_all();
    watch.until("recovery", |w| w.state("u1", &id) == Some(pb::ContainerState::Running)).await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_list_is_awaited_for_the_configured_time() {
    let slow = |r: &FakeRuntime| {
        web(r);
        r.latency(Method::ListPodSandbox, Duration::from_secs(50));
    };
    let call = |seconds| Periods { call: Duration::from_secs(seconds), ..Periods::default() };
    let bench = Bench::with(options(Duration::ZERO), false, call(60), slow);
    bench.watch(None).await.snapshot().await;
    assert!(bench.health().await.healthy);
    let bench = Bench::with(options(Duration::ZERO), false, call(40), slow);
    bench.runtime.wait_count(Method::ListPodSandbox, 3).await;
    assert_eq!(bench.health().await.message, "pleg has yet to be successful");
}

#[tokio::test(start_paused = true)]
async fn health_reports_the_duration_of_the_oldest_inspection_in_flight() {
    let bench = Bench::new(options(Duration::ZERO), true, |r| {
        web(r);
        r.add_sandbox("u2", "other", "default", 0);
    });
    bench.watch(None).await.snapshot().await;
    assert_eq!(bench.health().await.oldest_inspection_seconds, None);
    bench.runtime.script(Rule::on(Method::PodSandboxStatus).hang());
    let calls = bench.runtime.count(Method::PodSandboxStatus);
    for (n, uid) in ["u1", "u2"].into_iter().enumerate() {
        let mut client = bench.client.clone();
        let request = pb::ObserveRequest { uid: uid.to_owned(), full: false, ..Default::default() };
        tokio::spawn(async move { client.observe(request).await });
        bench.runtime.wait_count(Method::PodSandboxStatus, calls + 1 + n as u64).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    let oldest = bench.health().await.oldest_inspection_seconds.unwrap();
    assert!((20.0..21.0).contains(&oldest), "{oldest}");
    bench.runtime.unscript_all();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.health().await.oldest_inspection_seconds, None);
}

#[tokio::test(start_paused = true)]
async fn too_many_hints_with_unknown_ids_cause_a_list() {
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |_| {});
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let began = Instant::now();
    // The lookup of unknown IDs hangs in this list.
    let hang = bench.runtime.hang(Method::ListContainers);
    let calls = bench.runtime.count(Method::ListContainers);
    bench.hints.hint(HintKind::Started, "first");
    bench.runtime.wait_count(Method::ListContainers, calls + 1).await;
    let ids: Vec<String> =
        (0..1_200).map(|n| bench.runtime.add_sandbox(&format!("u{n}"), "p", "default", 0)).collect();
    for id in &ids {
        bench.hints.hint(HintKind::Started, id);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    bench.runtime.unscript(hang);
    watch.until("all", |w| w.pods.len() == ids.len()).await;
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_the_owner_of_one_pod_affects_no_other_and_the_pod_is_inspected_again() {
    let (mut bad, mut good) = (String::new(), String::new());
    let bench = Bench::with(options(Duration::ZERO), true, ten_minutes(), |r| {
        bad = web(r).1;
        let sandbox = r.add_sandbox("u2", "other", "default", 0);
        good = r.add_container(&sandbox, &ContainerSeed::running("main"));
    });
    let mut watch = bench.watch(None).await;
    watch.snapshot().await;
    let panics = PodPanics::start("u1");
    for id in [&bad, &good] {
        bench.runtime.exit(id, 3);
        bench.hints.hint(HintKind::Exited, id);
    }
    watch.until("exit of the other", |w| w.state("u2", &good) == Some(pb::ContainerState::Exited)).await;
    assert_eq!(watch.state("u1", &bad), Some(pb::ContainerState::Running), "its owner panics");
    panics.stop();
    watch.until("exit", |w| w.state("u1", &bad) == Some(pb::ContainerState::Exited)).await;
    assert!(bench.health().await.healthy, "no inspection is left under way");
    assert!(bench.observe("u1", false).await.is_ok());
}
