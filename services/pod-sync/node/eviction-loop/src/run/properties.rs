//! Properties of the loop, whatever it observes, reclaims and waits for.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use pod_sync_eviction::Signal;
use pod_sync_eviction::thresholds::{Amount, Threshold, with_container_fs};
use pod_sync_eviction::usage::{Candidate, FileUsage, Observation, PodUsage};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use quintlet_model::quantity::{Format, Quantity};
use serde_json::json;

use super::*;

const CAPACITY: i64 = 1000;
/// Limit of the volume of each pod, and a usage above it.
const LIMIT: i64 = 500;
const ABOVE: i64 = 600;
/// Time after which a hanging measurement is given up.
const HANG: Duration = Duration::from_secs(20);
const CRITICAL: [&str; 3] = ["static", "mirror", "priority"];
const PODS: [&str; 9] = ["a", "b", "c", "d", "e", "f", "static", "mirror", "priority"];
const SIGNALS: [Signal; 6] = [
    Signal::MemoryAvailable,
    Signal::NodeFsAvailable,
    Signal::NodeFsInodesFree,
    Signal::ImageFsAvailable,
    Signal::ContainerFsAvailable,
    Signal::PidAvailable,
];

/// The node for some time.
#[derive(Debug, Clone)]
struct Step {
    /// In seconds.
    lasts: u64,
    /// Available amounts. Below zero and above the capacity are implausible.
    available: Vec<(Signal, i64)>,
    /// Amount that dead containers and unused images free on each disk.
    freed: i64,
    /// The statistics of the node, of its pods and of their disks that hang.
    hangs: [bool; 3],
    /// Memory of each pod; `None` without statistics.
    used: Vec<Option<i64>>,
    /// Whether the volume of each pod is above its limit.
    exceeds: Vec<bool>,
    /// How long an evicted pod holds its resources, in seconds.
    holds: u64,
    /// The kernel reports that memory is short.
    alarms: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let amount = prop_oneof![3 => 0_i64..150, 2 => 150_i64..1000, 1 => -50_i64..1100];
    let available = proptest::collection::vec(proptest::option::weighted(0.5, amount), SIGNALS.len());
    let used = proptest::collection::vec(proptest::option::weighted(0.9, 0..1000_i64), PODS.len());
    let exceeds = proptest::collection::vec(proptest::bool::weighted(0.03), PODS.len());
    let hangs = [0.1, 0.1, 0.1].map(proptest::bool::weighted);
    let alarms = proptest::bool::weighted(0.2);
    (1..60_u64, available, 0..400_i64, hangs, used, exceeds, 0..45_u64, alarms).prop_map(
        |(lasts, available, freed, hangs, used, exceeds, holds, alarms)| {
            let available = SIGNALS.into_iter().zip(available).filter_map(|(s, a)| Some((s, a?))).collect();
            Step { lasts, available, freed, hangs, used, exceeds, holds, alarms }
        },
    )
}

#[derive(Debug, Clone)]
enum Entry {
    /// Measurements, `None` or false if they hung.
    Node(Option<Observations>),
    Pods(bool),
    Disks(bool),
    Reclaimed,
    Evicted {
        uid: String,
        signal: &'static str,
        released: Duration,
    },
}

struct World {
    began: Instant,
    layout: Layout,
    steps: Vec<Step>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    log: Vec<Entry>,
    /// When each evicted pod releases its resources.
    evicted: BTreeMap<&'static str, Duration>,
    /// The step in which the node reclaimed.
    reclaimed: Option<usize>,
}

impl World {
    fn at(&self) -> usize {
        let mut left = self.began.elapsed();
        for (at, step) in self.steps.iter().enumerate() {
            match left.checked_sub(Duration::from_secs(step.lasts)) {
                Some(rest) => left = rest,
                None => return at,
            }
        }
        self.steps.len() - 1
    }

    fn step(&self) -> &Step {
        &self.steps[self.at()]
    }

    fn note(&self, entry: Entry) {
        self.state.lock().log.push(entry);
    }

    async fn hangs(&self, what: usize) -> bool {
        let hangs = self.step().hangs[what];
        if hangs {
            sleep(HANG).await;
        }
        hangs
    }

    fn usages(&self) -> PodUsages {
        let step = self.step();
        let usage = |at: usize| {
            let volume = if step.exceeds[at] { ABOVE } else { 0 };
            let volume = FileUsage { bytes: Some(volume), inodes: Some(1) };
            let volumes = [("v".to_owned(), volume)].into();
            Some(PodUsage { working_set: Some(step.used[at]?), volumes, ..PodUsage::default() })
        };
        let all = PODS.iter().enumerate();
        all.filter_map(|(at, name)| Some((PodUid::parse(name).unwrap(), usage(at)?))).collect()
    }
}

fn pod(name: &str) -> Pod {
    let (annotations, priority) = match name {
        "static" => (json!({ "kubernetes.io/config.source": "file" }), 0),
        "mirror" => (json!({ "kubernetes.io/config.mirror": "hash" }), 0),
        "priority" => (json!({}), 2_000_000_000),
        "a" => (json!({}), -1),
        _ => (json!({}), 0),
    };
    let volume = json!({ "name": "v", "emptyDir": { "sizeLimit": LIMIT.to_string() } });
    let spec = json!({ "containers": [], "priority": priority, "volumes": [volume] });
    let metadata = json!({ "name": name, "uid": name, "annotations": annotations });
    serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
}

#[async_trait]
impl NodeControl for Arc<World> {
    async fn layout(&self) -> Option<Layout> {
        Some(self.layout)
    }

    async fn observations(&self) -> Option<Observations> {
        if self.hangs(0).await {
            self.note(Entry::Node(None));
            return None;
        }
        let is_reclaimed = self.state.lock().reclaimed == Some(self.at());
        let is_disk = |s: Signal| matches!(s.resource(), Resource::EphemeralStorage | Resource::Inodes);
        let observed = self.step().available.iter().filter_map(|(signal, available)| {
            let freed = if is_reclaimed && is_disk(*signal) { self.step().freed } else { 0 };
            Some((*signal, Observation::new(*signal, available + freed, CAPACITY, self.now())?))
        });
        let observed: Observations = observed.collect();
        self.note(Entry::Node(Some(observed.clone())));
        Some(observed)
    }

    async fn snapshot(&self, observations: Observations, _: Scope) -> Option<Snapshot> {
        let hung = self.hangs(1).await;
        self.note(Entry::Pods(!hung));
        if hung {
            return None;
        }
        let evicted = self.state.lock().evicted.clone();
        let running = PODS.iter().filter(|name| !evicted.contains_key(*name));
        let candidate =
            |name: &&str| Candidate { uid: PodUid::parse(name).unwrap(), pod: Arc::new(pod(name)) };
        Some(Snapshot { observations, usages: self.usages(), candidates: running.map(candidate).collect() })
    }

    async fn disk_usage(&self, _: &Snapshot) -> Option<PodUsages> {
        let hung = self.hangs(2).await;
        self.note(Entry::Disks(!hung));
        (!hung).then(|| self.usages())
    }

    async fn reclaim(&self, _: Reclaim) {
        self.state.lock().reclaimed = Some(self.at());
        self.note(Entry::Reclaimed);
    }

    async fn evict(&self, eviction: &Eviction) {
        let uid = eviction.candidate.uid.to_string();
        let name = PODS.into_iter().find(|name| *name == uid).unwrap();
        let holds = Duration::from_secs(self.step().holds);
        sleep(Duration::from_secs(1)).await;
        let released = self.now() + holds;
        self.note(Entry::Evicted {
            uid,
            signal: eviction.signal,
            released: self.now() + holds.min(CLEANUP_TIMEOUT),
        });
        self.state.lock().evicted.insert(name, released);
    }

    fn unfinished(&self) -> BTreeSet<PodUid> {
        let now = self.now();
        let state = self.state.lock();
        let held = state.evicted.iter().filter(|(_, released)| now < **released);
        held.map(|(name, _)| PodUid::parse(name).unwrap()).collect()
    }

    fn reclaiming(&self, _: Resource) {}

    async fn memory_alarm(&self, _: &[Threshold], _: &Observations) {
        if !self.step().alarms {
            std::future::pending().await
        }
    }

    fn now(&self) -> Duration {
        Duration::from_secs(1000) + self.began.elapsed()
    }
}

fn thresholds() -> Vec<Threshold> {
    let threshold = |signal, below, grace| Threshold {
        signal,
        value: Amount::Quantity(Quantity::from_units(below, Format::Binary)),
        grace: Duration::from_secs(grace),
        minimum_reclaim: None,
    };
    vec![
        threshold(Signal::MemoryAvailable, 100, 0),
        threshold(Signal::MemoryAvailable, 200, 30),
        threshold(Signal::NodeFsAvailable, 100, 0),
        threshold(Signal::NodeFsInodesFree, 50, 0),
        threshold(Signal::ImageFsAvailable, 150, 0),
        threshold(Signal::PidAvailable, 50, 0),
    ]
}

async fn history(steps: Vec<Step>, layout: Layout) -> Vec<Entry> {
    let lasts: u64 = steps.iter().map(|step| step.lasts).sum();
    let world = Arc::new(World { began: Instant::now(), layout, steps, state: Mutex::default() });
    let settings = EvictionSettings {
        thresholds: thresholds(),
        layout,
        transition: Duration::from_secs(60),
        max_grace: 0,
        enforces_limits: true,
        skips_memory_volumes: false,
    };
    let (conditions, _conditions) = watch::channel(BTreeSet::new());
    let (round, _round) = watch::channel(None);
    let published = Published { conditions, round, full_round: Arc::default() };
    let stop = CancellationToken::new();
    let end = async {
        sleep(Duration::from_secs(lasts)).await;
        stop.cancel();
    };
    tokio::join!(run(Arc::clone(&world), settings, published, stop.clone()), end);
    world.state.lock().log.clone()
}

/// Numbers of cases in the histories. A property must not hold for want of an example.
#[derive(Debug, Default)]
struct Seen {
    for_thresholds: Cell<u32>,
    several_for_limits: Cell<u32>,
    relieved: Cell<u32>,
    hung: Cell<u32>,
}

fn more(count: &Cell<u32>) {
    count.set(count.get() + 1);
}

/// The round that the log is in.
#[derive(Default)]
struct Round {
    /// Observations that began it.
    first: Observations,
    /// Observations after reclaiming, if the node reclaimed.
    last: Observations,
    hung: bool,
    has_reclaimed: bool,
    for_thresholds: usize,
    for_limits: usize,
}

fn check(log: &[Entry], layout: Layout, seen: &Seen) -> Result<(), TestCaseError> {
    let thresholds = with_container_fs(&thresholds(), layout);
    let crosses = |observations: &Observations, signal: Option<Signal>| {
        thresholds
            .iter()
            .filter(|t| signal.is_none_or(|signal| t.signal == signal))
            .any(|t| observations.get(&t.signal).is_some_and(|o| o.available < t.value.of(o.capacity)))
    };
    let mut round = Round::default();
    let mut released = Duration::ZERO;
    let mut before = None;
    for entry in log {
        match entry {
            Entry::Node(measured) => {
                let observed = measured.clone().unwrap_or_default();
                if matches!(before, Some(Entry::Reclaimed)) {
                    if crosses(&round.first, None) && !crosses(&observed, None) && measured.is_some() {
                        more(&seen.relieved);
                    }
                    round.last = observed;
                } else {
                    if round.for_limits > 1 {
                        more(&seen.several_for_limits);
                    }
                    round = Round { first: observed.clone(), last: observed, ..Round::default() };
                }
                round.hung |= measured.is_none();
            }
            Entry::Pods(came) | Entry::Disks(came) => round.hung |= !came,
            Entry::Reclaimed => round.has_reclaimed = true,
            Entry::Evicted { uid, signal, released: until } => {
                prop_assert!(!CRITICAL.contains(&uid.as_str()), "{uid} is critical");
                prop_assert!(!round.hung, "{uid} was evicted for {signal} without statistics");
                if let Some(signal) = Signal::parse(signal) {
                    more(&seen.for_thresholds);
                    round.for_thresholds += 1;
                    prop_assert_eq!(round.for_thresholds, 1, "two for one observation of {}", signal);
                    prop_assert_eq!(round.for_limits, 0, "{} after limits", signal);
                    prop_assert!(crosses(&round.first, Some(signal)), "{signal} was not crossed");
                    let at = round.first.get(&signal).map(|o| o.at).unwrap_or_default();
                    prop_assert!(at >= released, "{signal} was measured before the last pod was gone");
                    let suffices = round.has_reclaimed && !crosses(&round.last, None);
                    prop_assert!(!suffices, "reclaiming sufficed for {signal}");
                } else {
                    round.for_limits += 1;
                }
                released = released.max(*until);
            }
        }
        if round.hung {
            more(&seen.hung);
        }
        before = Some(entry.clone());
    }
    Ok(())
}

#[test]
fn one_observation_costs_one_pod_at_most_and_none_that_is_critical_or_unmeasured_or_not_needed() {
    let _alone = super::tests::METRICS.lock();
    let seen = Seen::default();
    let layouts = proptest::sample::select(vec![Layout::Single, Layout::SeparateImages, Layout::Split]);
    let histories = (proptest::collection::vec(step(), 1..12), layouts);
    let checked = TestRunner::default().run(&histories, |(steps, layout)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let log = runtime.unwrap().block_on(history(steps, layout));
        check(&log, layout, &seen)
    });
    if let Err(failure) = checked {
        panic!("{failure}");
    }
    for count in [&seen.for_thresholds, &seen.several_for_limits, &seen.relieved, &seen.hung] {
        assert!(count.get() > 0, "the histories do not show everything: {seen:?}");
    }
}
