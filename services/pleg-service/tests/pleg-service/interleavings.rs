//! After any history of the runtime and its hints, the cache equals the runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pleg_service::Periods;
use pleg_service::traits::HintKind;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use quintlet_proto::pleg::v1 as pb;
use quintlet_testkit::budget::cases;
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Method, Rule};
use tokio::time::Instant;
use tonic::Code;

use crate::common::{Bench, Watch, options};

#[derive(Debug, Clone)]
enum Act {
    AddSandbox {
        pod: u8,
        attempt: u8,
    },
    AddContainer {
        sandbox: u8,
        started: bool,
    },
    Start(u8),
    /// A start of pod-sync whose command ends before pod-sync observes the container, by this many
    /// milliseconds.
    StartBriefly {
        sandbox: u8,
        before: u8,
    },
    Exit(u8),
    Remove(u8),
    ExitSandbox(u8),
    RemoveSandbox(u8),
    Wait(u16),
    CutHints,
    ForbidHints(bool),
    Observe {
        pod: u8,
        full: bool,
    },
    FailStatus,
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..4u8, 0..3u8).prop_map(|(pod, attempt)| Act::AddSandbox { pod, attempt }),
        6 => (any::<u8>(), any::<bool>()).prop_map(|(sandbox, started)| Act::AddContainer { sandbox, started }),
        2 => any::<u8>().prop_map(Act::Start),
        2 => (any::<u8>(), 0..100u8).prop_map(|(sandbox, before)| Act::StartBriefly { sandbox, before }),
        5 => any::<u8>().prop_map(Act::Exit),
        3 => any::<u8>().prop_map(Act::Remove),
        2 => any::<u8>().prop_map(Act::ExitSandbox),
        2 => any::<u8>().prop_map(Act::RemoveSandbox),
        6 => (0..2500u16).prop_map(Act::Wait),
        1 => Just(Act::CutHints),
        1 => any::<bool>().prop_map(Act::ForbidHints),
        2 => (0..5u8, any::<bool>()).prop_map(|(pod, full)| Act::Observe { pod, full }),
        1 => Just(Act::FailStatus),
        1 => Just(Act::Restart),
    ]
}

/// An act that causes no loss of hints, and no failed inspection.
fn lossless_act() -> impl Strategy<Value = Act> {
    act().prop_filter("causes a list", |act| {
        !matches!(act, Act::CutHints | Act::ForbidHints(_) | Act::FailStatus | Act::Restart)
    })
}

/// Delivery of the hints of one act: lost, sent, or sent twice. Each copy is sent at once or the given number
/// of milliseconds late, so that it may arrive after the hints of later acts.
fn copies() -> impl Strategy<Value = Vec<u16>> {
    let late = prop_oneof![5 => Just(0u16), 2 => 1..50u16, 2 => 50..4000u16];
    prop_oneof![
        2 => Just(Vec::new()),
        5 => late.clone().prop_map(|late| vec![late]),
        1 => (late.clone(), late).prop_map(|(a, b)| vec![a, b]),
    ]
}

type Picture = BTreeMap<String, (BTreeSet<(String, bool)>, BTreeSet<(String, i32)>)>;

fn of_runtime(runtime: &FakeRuntime) -> Picture {
    let mut picture = Picture::new();
    for s in runtime.sandboxes() {
        picture.entry(s.pod_uid().to_owned()).or_default().0.insert((s.id().to_owned(), s.ready()));
    }
    for c in runtime.containers() {
        // The contract has one state more than the CRI.
        picture.entry(c.pod_uid().to_owned()).or_default().1.insert((c.id().to_owned(), c.status.state + 1));
    }
    picture
}

fn of_records<'a>(records: impl Iterator<Item = &'a pb::PodRecord>) -> Picture {
    let pod = |p: &pb::PodRecord| {
        let ready = |s: &pb::Sandbox| (s.id.clone(), s.state() == pb::SandboxState::Ready);
        let sandboxes = p.sandboxes.iter().map(ready).collect();
        (p.uid.clone(), (sandboxes, p.containers.iter().map(|c| (c.id.clone(), c.state)).collect()))
    };
    records.map(pod).collect()
}

fn pick<T: Clone>(all: &[T], n: u8) -> Option<T> {
    (!all.is_empty()).then(|| all[usize::from(n) % all.len()].clone())
}

/// Counts how often each pod lost its last object in the runtime.
fn count_ends(before: &Picture, now: &Picture, ends: &mut BTreeMap<String, usize>) {
    for uid in before.keys().filter(|uid| !now.contains_key(*uid)) {
        *ends.entry(uid.clone()).or_default() += 1;
    }
}

/// Longest time from an inspection that finds nothing to its watchers. Messages take almost no paused time.
const NOTICED: Duration = Duration::from_millis(100);

/// The pods that had objects in the runtime, by time. Each entry holds until the next one.
type Presence = Vec<(Instant, BTreeSet<String>)>;

/// Whether the pod had nothing in the runtime at some moment of the [`NOTICED`] before `at`.
fn was_absent(presence: &Presence, uid: &str, at: Instant) -> bool {
    let ends = presence.iter().skip(1).map(|(begin, _)| *begin).chain([at + NOTICED]);
    let mut times = presence.iter().zip(ends);
    times.any(|((begin, pods), end)| *begin <= at && end + NOTICED >= at && !pods.contains(uid))
}

async fn run(acts: Vec<(Act, Vec<u16>)>, exit_lag: Duration, periods: Periods, settled: Duration) {
    let bench = Bench::with(options(exit_lag), true, periods, |_| {});
    let mut prompt = bench.watch(None).await;
    let gone = Arc::<Mutex<Vec<(String, Instant)>>>::default();
    let (seen, mut presence) = (Arc::clone(&gone), vec![(Instant::now(), BTreeSet::new())]);
    let prompt = tokio::spawn(async move {
        loop {
            prompt.step().await;
            let uid = prompt.log.last().and_then(|word| word.strip_prefix("gone "));
            seen.lock().extend(uid.map(|uid| (uid.to_owned(), Instant::now())));
        }
    });
    let follower = bench.follower(&bench.socket, "follower.sock");
    follower.wait_serving(true).await;
    let mut watches = Vec::new();
    for client in [&bench.client, &follower.client] {
        let mut watch = Watch::open(client, None).await;
        watch.snapshot().await;
        watches.push(watch);
    }
    // A watcher that alternates between the two with its cursor.
    let mut wanderer = bench.watch(None).await;
    wanderer.snapshot().await;
    let mut ends = BTreeMap::new();
    let mut attempts = BTreeMap::<String, u32>::new();
    for (n, (act, copies)) in acts.into_iter().enumerate() {
        let runtime = &bench.runtime;
        let before = of_runtime(runtime);
        if n % 7 == 6 {
            let client = if n % 2 == 0 { &bench.client } else { &follower.client };
            let mut moved = Watch::open(client, wanderer.cursor).await;
            (moved.pods, moved.gone) = (wanderer.pods, wanderer.gone);
            wanderer = moved;
            wanderer.until("hello", |w| !w.log.is_empty()).await;
        }
        let sandboxes: Vec<_> = runtime.sandboxes().iter().map(|s| s.id().to_owned()).collect();
        let containers: Vec<_> = runtime.containers().iter().map(|c| c.id().to_owned()).collect();
        let mut hints = Vec::new();
        match act {
            Act::AddSandbox { pod, attempt } => {
                let id = runtime.add_sandbox(&format!("u{pod}"), "pod", "default", attempt.into());
                hints.push((HintKind::Created, id.clone()));
                hints.push((HintKind::Started, id));
            }
            Act::AddContainer { sandbox, started } => {
                if let Some(sandbox) = pick(&sandboxes, sandbox) {
                    let attempt = attempts.entry(sandbox.clone()).or_default();
                    *attempt += 1;
                    let seed = ContainerSeed {
                        running: started,
                        ..ContainerSeed::running("main").attempt(*attempt)
                    };
                    let id = runtime.add_container(&sandbox, &seed);
                    hints.push((HintKind::Created, id.clone()));
                    hints.extend(started.then_some((HintKind::Started, id)));
                }
            }
            Act::Start(n) => {
                if let Some(id) = pick(&containers, n) {
                    runtime.start_container(&id);
                    hints.push((HintKind::Started, id));
                }
            }
            Act::StartBriefly { sandbox, before } => {
                if let Some(sandbox) = pick(&sandboxes, sandbox) {
                    let attempt = attempts.entry(sandbox.clone()).or_default();
                    *attempt += 1;
                    let seed = ContainerSeed::running("main").attempt(*attempt);
                    let id = runtime.add_container(&sandbox, &seed);
                    runtime.exit(&id, 1);
                    let kinds = [HintKind::Created, HintKind::Started, HintKind::Exiting, HintKind::Exited];
                    kinds.into_iter().for_each(|kind| bench.hints.hint(kind, &id));
                    tokio::time::sleep(Duration::from_millis(before.into())).await;
                    let owner = runtime.containers().into_iter().find(|c| c.id() == id);
                    let uid = owner.map(|c| c.pod_uid().to_owned()).unwrap_or_default();
                    // It fails while the runtime is down.
                    let _ = bench.observe(&uid, false).await;
                }
            }
            Act::Exit(n) => {
                if let Some(id) = pick(&containers, n).filter(|id| runtime.exit(id, 1)) {
                    hints.push((HintKind::Exited, id));
                }
            }
            Act::Remove(n) => {
                if let Some(id) = pick(&containers, n) {
                    runtime.remove(&id);
                    hints.push((HintKind::Deleted, id));
                }
            }
            Act::ExitSandbox(n) => {
                if let Some(id) = pick(&sandboxes, n).filter(|id| runtime.exit(id, 0)) {
                    hints.push((HintKind::Exited, id));
                }
            }
            Act::RemoveSandbox(n) => {
                if let Some(id) = pick(&sandboxes, n) {
                    runtime.remove(&id);
                    hints.push((HintKind::Deleted, id));
                }
            }
            Act::Wait(ms) => tokio::time::sleep(Duration::from_millis(ms.into())).await,
            Act::CutHints => bench.hints.cut(),
            Act::ForbidHints(yes) => bench.hints.allow(!yes),
            Act::Observe { pod, full } => {
                let uid = format!("u{pod}");
                if let Ok(reply) = bench.observe(&uid, full).await
                    && full
                    && exit_lag.is_zero()
                {
                    assert_eq!(
                        of_records(reply.pod.iter()).get(&uid),
                        before.get(&uid),
                        "a full observation is the truth"
                    );
                }
            }
            Act::FailStatus => {
                runtime.script(Rule::on(Method::ContainerStatus).fail(Code::Unknown, "scripted").times(2));
            }
            Act::Restart => {
                runtime.down();
                tokio::time::sleep(Duration::from_millis(50)).await;
                runtime.up().unwrap();
            }
        }
        let now = of_runtime(&bench.runtime);
        count_ends(&before, &now, &mut ends);
        presence.push((Instant::now(), now.into_keys().collect()));
        for late in copies {
            let (hint_stream, hints) = (bench.hints.clone(), hints.clone());
            let send = move || hints.iter().for_each(|(kind, id)| hint_stream.hint(*kind, id));
            if late == 0 {
                send();
            } else {
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(late.into())).await;
                    send();
                });
            }
        }
    }
    bench.runtime.unscript_all();
    tokio::time::sleep(settled).await;
    prompt.abort();
    for (uid, at) in gone.lock().iter() {
        assert!(was_absent(&presence, uid, *at), "{uid} was called gone while the runtime had it");
    }
    let expected = of_runtime(&bench.runtime);
    for watch in watches.iter_mut().chain([&mut wanderer]) {
        let limit = tokio::time::Instant::now() + Duration::from_secs(30);
        // Each step also checks that cursors, and revisions of each pod, only increase.
        while of_records(watch.pods.values()) != expected || watch.pods.values().any(|p| !p.error.is_empty())
        {
            let stepped = tokio::time::timeout_at(limit, watch.step()).await;
            assert!(stepped.is_ok(), "cache:\n{:#?}\nruntime:\n{expected:#?}", watch.pods);
        }
        let revs: Vec<u64> = watch.pods.values().map(|p| p.rev).collect();
        assert!(revs.iter().all(|r| *r <= watch.cursor.unwrap().rev));
        for (uid, gone) in &watch.gone {
            let ended = ends.get(uid).copied().unwrap_or_default();
            assert!(*gone <= ended, "{uid} was called gone {gone} times and went {ended} times");
        }
        assert!(!watch.log.contains(&"resync".to_owned()), "{:?}", watch.log);
    }
}

/// Runs a history in paused time, with a relist every 30 s.
fn check(acts: Vec<(Act, Vec<u16>)>, lag: u64) {
    paused(run(acts, Duration::from_millis(lag), Periods::default(), Duration::from_secs(35)));
}

/// Runs a history in paused time, without a relist after the first one.
fn check_hints(acts: Vec<(Act, Vec<u16>)>, lag: u64) {
    let periods = Periods { relist_live: Duration::from_secs(3600), ..Periods::default() };
    paused(run(acts, Duration::from_millis(lag), periods, Duration::from_secs(15)));
}

fn paused(history: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().start_paused(true).build().unwrap().block_on(history);
}

proptest! {
    // Failing cases are written beside this file, to be committed.
    #![proptest_config(ProptestConfig {
        cases: cases(48),
        max_shrink_iters: 200,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_cache_equals_the_runtime_once_no_change_is_pending(
        acts in proptest::collection::vec((act(), copies()), 1..60),
        lag in prop_oneof![Just(0u64), 1..400u64],
    ) {
        check(acts, lag);
    }

    #[test]
    fn hints_alone_are_enough_while_none_is_lost(
        acts in proptest::collection::vec((lossless_act(), (0..50u16).prop_map(|late| vec![late])), 1..60),
        lag in prop_oneof![Just(0u64), 1..400u64],
    ) {
        check_hints(acts, lag);
    }
}

/// An expected start keeps the owner of a pod after the pod's removal; the restart of the runtime makes an
/// inspection of that owner fail.
#[test]
fn a_removed_pod_is_not_reported_gone_again_after_a_failed_inspection() {
    let history = [
        (Act::AddSandbox { pod: 1, attempt: 0 }, vec![]),
        (Act::ExitSandbox(0), vec![]),
        (Act::Wait(0), vec![]),
        (Act::AddContainer { sandbox: 0, started: true }, vec![0]),
        (Act::Wait(1074), vec![]),
        (Act::Wait(1735), vec![]),
        (Act::RemoveSandbox(0), vec![]),
        (Act::Wait(260), vec![]),
        (Act::AddSandbox { pod: 0, attempt: 0 }, vec![]),
        (Act::Wait(468), vec![0]),
        (Act::Wait(781), vec![715, 0]),
        (Act::Wait(1387), vec![794, 3900]),
        (Act::Restart, vec![]),
        (Act::AddContainer { sandbox: 32, started: true }, vec![1699]),
    ];
    check(history.to_vec(), 240);
}
