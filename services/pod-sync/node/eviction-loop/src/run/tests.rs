use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::{Mutex, ReentrantMutex};
use pod_sync_eviction::Signal;
use pod_sync_eviction::thresholds::{Amount, Threshold};
use pod_sync_eviction::usage::{Candidate, FileUsage, Observation, PodUsage};
use quintlet_model::quantity::{Format, Quantity};
use serde_json::json;

use super::*;

/// A node whose disk fills by what its pods write. Deleting images frees `images`.
struct Disk {
    began: Instant,
    state: Mutex<State>,
    /// How long an evicted pod holds its files.
    cleanup: Duration,
    /// When a round with all pods is requested.
    request: Option<Duration>,
    /// How long the measurement of pods takes.
    measuring: Duration,
}

struct State {
    /// Units on disk by pod, and whether it was evicted.
    pods: BTreeMap<&'static str, (i64, Option<Instant>)>,
    images: i64,
    /// Units that cannot be deleted.
    foreign: i64,
    /// Units that pods have written since their volumes were measured.
    late_writes: BTreeMap<&'static str, i64>,
    is_disk_hanging: bool,
    has_statistics: bool,
    has_layout: bool,
    /// Free memory of the node, of 1,000 units.
    memory: Option<i64>,
    /// Free process IDs, of 1,000.
    processes: Option<i64>,
    /// After how many seconds the kernel reports that memory is short, and that many units are taken by then.
    alarm: Option<(u64, i64)>,
    log: Vec<(u64, String)>,
    /// The pods that were measured in each round.
    scopes: Vec<(u64, Scope)>,
}

const CAPACITY: i64 = 1000;

impl Disk {
    fn new(images: i64, pods: &[(&'static str, i64)]) -> Arc<Self> {
        let pods = pods.iter().map(|(name, used)| (*name, (*used, None))).collect();
        let has_statistics = true;
        let has_layout = true;
        let log = Vec::new();
        let state = Mutex::new(State {
            pods,
            images,
            foreign: 0,
            late_writes: BTreeMap::new(),
            is_disk_hanging: false,
            has_statistics,
            has_layout,
            memory: None,
            processes: None,
            alarm: None,
            log,
            scopes: Vec::new(),
        });
        let (cleanup, measuring) = (Duration::from_secs(3), Duration::ZERO);
        Arc::new(Self { began: Instant::now(), state, cleanup, request: None, measuring })
    }

    fn note(&self, text: impl Into<String>) {
        let at = self.began.elapsed().as_secs();
        self.state.lock().log.push((at, text.into()));
    }

    fn log(&self) -> Vec<String> {
        self.state.lock().log.iter().map(|(at, text)| format!("{at} {text}")).collect()
    }

    fn free(&self) -> i64 {
        let now = Instant::now();
        let state = self.state.lock();
        let holds = |evicted: &Option<Instant>| evicted.is_none_or(|at| now < at + self.cleanup);
        let used: i64 = state.pods.values().filter(|(_, evicted)| holds(evicted)).map(|(used, _)| used).sum();
        CAPACITY - used - state.images - state.foreign
    }
}

#[async_trait]
impl NodeControl for Arc<Disk> {
    async fn layout(&self) -> Option<Layout> {
        self.state.lock().has_layout.then_some(Layout::Single)
    }

    async fn snapshot(&self, observations: Observations, scope: Scope) -> Option<Snapshot> {
        if !self.measuring.is_zero() {
            sleep(self.measuring).await;
        }
        let mut state = self.state.lock();
        if !state.has_statistics {
            return None;
        }
        state.scopes.push((self.began.elapsed().as_secs(), scope));
        let running = state.pods.iter().filter(|(_, (_, evicted))| evicted.is_none());
        let (mut candidates, mut usages) = (Vec::new(), pod_sync_eviction::usage::PodUsages::new());
        for (name, (used, _)) in running {
            let uid = PodUid::parse(name).unwrap();
            let spec =
                json!({ "containers": [], "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": "500" } }] });
            let pod: Pod =
                serde_json::from_value(json!({ "metadata": { "name": name, "uid": name }, "spec": spec }))
                    .unwrap();
            candidates.push(Candidate { uid: uid.clone(), pod: Arc::new(pod) });
            let volume = FileUsage { bytes: Some(*used), inodes: None };
            let usage = PodUsage { volumes: [("v".to_owned(), volume)].into(), ..PodUsage::default() };
            usages.insert(uid, usage);
        }
        Some(Snapshot { observations, usages, candidates })
    }

    async fn observations(&self) -> Option<Observations> {
        let (memory, processes) = {
            let state = self.state.lock();
            (state.memory, state.processes)
        };
        let free = [
            (Signal::NodeFsAvailable, Some(self.free())),
            (Signal::MemoryAvailable, memory),
            (Signal::PidAvailable, processes),
        ];
        let observed = free.into_iter().filter_map(|(signal, free)| {
            Some((signal, Observation::new(signal, free?, CAPACITY, self.now())?))
        });
        let observed: Observations = observed.collect();
        (!observed.is_empty()).then_some(observed)
    }

    async fn disk_usage(&self, snapshot: &Snapshot) -> Option<PodUsages> {
        let state = self.state.lock();
        if state.is_disk_hanging {
            return None;
        }
        let mut usages = snapshot.usages.clone();
        for (name, used) in &state.late_writes {
            let volume = FileUsage { bytes: Some(*used), inodes: None };
            if let Some(usage) = usages.get_mut(&PodUid::parse(name).unwrap()) {
                usage.volumes.insert("v".to_owned(), volume);
            }
        }
        Some(usages)
    }

    async fn reclaim(&self, what: Reclaim) {
        self.note(format!("reclaim {what:?}"));
        if what == Reclaim::UnusedImages {
            self.state.lock().images = 0;
        }
    }

    async fn evict(&self, eviction: &Eviction) {
        let uid = eviction.candidate.uid.to_string();
        self.note(format!("evict {uid} for {}", eviction.signal));
        sleep(Duration::from_secs(1)).await;
        let mut state = self.state.lock();
        let (_, evicted) = state.pods.iter_mut().find(|(name, _)| **name == uid).unwrap().1;
        *evicted = Some(Instant::now());
    }

    fn unfinished(&self) -> BTreeSet<PodUid> {
        let state = self.state.lock();
        let holds = |evicted: &Option<Instant>| evicted.is_some_and(|at| Instant::now() < at + self.cleanup);
        state
            .pods
            .iter()
            .filter(|(_, (_, evicted))| holds(evicted))
            .map(|(n, _)| PodUid::parse(n).unwrap())
            .collect()
    }

    fn reclaiming(&self, resource: Resource) {
        self.note(format!("event {resource}"));
    }

    async fn memory_alarm(&self, _: &[Threshold], _: &Observations) {
        let alarm = self.state.lock().alarm.take();
        let Some((seconds, units)) = alarm else { return std::future::pending().await };
        sleep(Duration::from_secs(seconds)).await;
        self.state.lock().foreign = units;
    }

    fn now(&self) -> Duration {
        // The machine was started before.
        Duration::from_secs(1000) + self.began.elapsed()
    }
}

fn settings() -> EvictionSettings {
    let threshold = |signal| Threshold {
        signal,
        value: Amount::Quantity(Quantity::from_units(100, Format::Binary)),
        grace: Duration::ZERO,
        minimum_reclaim: None,
    };
    EvictionSettings {
        thresholds: [Signal::NodeFsAvailable, Signal::MemoryAvailable, Signal::PidAvailable]
            .map(threshold)
            .to_vec(),
        layout: Layout::Single,
        transition: Duration::from_secs(60),
        max_grace: 0,
        enforces_limits: true,
        skips_memory_volumes: false,
    }
}

/// Held while a loop runs, since all loops of the process share its metrics. A test that compares metrics
/// holds it all the time.
pub(super) static METRICS: ReentrantMutex<()> = ReentrantMutex::new(());

async fn runs(disk: &Arc<Disk>, seconds: u64) -> watch::Receiver<BTreeSet<PressureCondition>> {
    runs_and_reports(disk, seconds).await.0
}

async fn runs_and_reports(
    disk: &Arc<Disk>,
    seconds: u64,
) -> (watch::Receiver<BTreeSet<PressureCondition>>, watch::Receiver<Option<Arc<LastRound>>>) {
    let _alone = METRICS.lock();
    let (conditions_sender, conditions) = watch::channel(BTreeSet::new());
    let (round_sender, last) = watch::channel(None);
    let full_round = Arc::new(Notify::new());
    let published =
        Published { conditions: conditions_sender, round: round_sender, full_round: Arc::clone(&full_round) };
    let stop = CancellationToken::new();
    let end = async {
        if let Some(after) = disk.request {
            sleep(after).await;
            full_round.notify_one();
        }
        sleep(Duration::from_secs(seconds)).await;
        stop.cancel();
    };
    tokio::join!(run(Arc::clone(disk), settings(), published, stop.clone()), end);
    (conditions, last)
}

#[tokio::test(start_paused = true)]
async fn the_last_round_is_published_with_the_usage_that_decided() {
    let disk = Disk::new(0, &[("a", 20), ("b", 10)]);
    {
        let mut state = disk.state.lock();
        state.foreign = 890;
        state.late_writes.insert("b", 400);
        state.has_statistics = false;
    }
    assert!(runs_and_reports(&disk, 30).await.1.borrow().is_none(), "the node was not measured");
    disk.state.lock().has_statistics = true;
    let mut rounds = runs_and_reports(&disk, 0).await.1;
    let round = rounds.borrow_and_update().clone().unwrap();
    let b = PodUid::parse("b").unwrap();
    let next = round.manager.next(Signal::NodeFsAvailable, &round.snapshot).unwrap();
    assert_eq!(next.uid, b, "measured again before the eviction");
    assert_eq!(round.manager.pressure().crossed().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn images_go_before_pods_and_pods_one_by_one_until_the_disk_has_room() {
    let disk = Disk::new(10, &[("a", 200), ("b", 300), ("c", 480)]);
    let conditions = runs(&disk, 20).await;
    let want = [
        "0 event ephemeral-storage",
        "0 reclaim DeadContainers",
        "0 reclaim UnusedImages",
        "0 evict c for nodefs.available",
    ];
    assert_eq!(disk.log(), want, "a and b fit");
    assert_eq!(*conditions.borrow(), [PressureCondition::Disk].into(), "for the transition period");

    let disk = Disk::new(300, &[("a", 300), ("b", 350)]);
    runs(&disk, 20).await;
    assert_eq!(disk.log().last().unwrap(), "0 reclaim UnusedImages", "no pod, since the images sufficed");
}

#[tokio::test(start_paused = true)]
async fn pressure_and_evictions_are_metrics_before_the_first_of_them() {
    let _alone = METRICS.lock();
    let series = || quintlet_telemetry::metrics::text();
    runs(&Disk::new(0, &[("a", 1)]), 1).await;
    let limits = ["emptydirfs.limit", "ephemeralpodfs.limit", "ephemeralcontainerfs.limit"];
    for signal in Signal::ALL.map(Signal::as_str).into_iter().chain(limits) {
        let name = format!("kubelet_evictions{{eviction_signal=\"{signal}\"}} ");
        assert!(series().contains(&name), "no {name} in {}", series());
    }
    assert!(series().contains("quintlet_node_pressure{condition=\"PIDPressure\"} 0"), "{}", series());
    assert!(series().contains("quintlet_node_pressure{condition=\"MemoryPressure\"} 0"), "{}", series());
    runs(&Disk::new(0, &[("a", 450), ("b", 499)]), 20).await;
    assert!(series().contains("quintlet_node_pressure{condition=\"DiskPressure\"} 1"), "{}", series());
    runs(&Disk::new(0, &[("a", 1)]), 1).await;
    assert!(series().contains("quintlet_node_pressure{condition=\"DiskPressure\"} 0"), "{}", series());
}

#[tokio::test(start_paused = true)]
async fn the_age_of_the_statistics_of_an_eviction_is_a_metric() {
    let _alone = METRICS.lock();
    let ages = || {
        let text = quintlet_telemetry::metrics::text();
        ["count", "sum"].map(|series| {
            let name =
                format!("kubelet_eviction_stats_age_seconds_{series}{{eviction_signal=\"pid.available\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok()).unwrap_or(0.0)
        })
    };
    let disk = Arc::into_inner(Disk::new(0, &[("a", 1)])).unwrap();
    let disk = Arc::new(Disk { measuring: Duration::from_secs(2), ..disk });
    disk.state.lock().processes = Some(99);
    let [count, sum] = ages();
    runs(&disk, 3).await;
    assert_eq!(disk.log().last().unwrap(), "2 evict a for pid.available");
    assert_eq!(ages(), [count + 1.0, sum + 2.0]);
}

#[tokio::test(start_paused = true)]
async fn the_condition_ends_after_the_transition_period() {
    let disk = Disk::new(0, &[("a", 450), ("b", 499)]);
    let mut conditions = runs(&disk, 100).await;
    assert!(conditions.borrow_and_update().is_empty());
    assert_eq!(disk.log().len(), 4, "{:?}", disk.log());
}

#[tokio::test(start_paused = true)]
async fn a_second_pod_is_evicted_only_after_the_first_is_gone() {
    let disk = Disk::new(0, &[("a", 8), ("b", 9), ("c", 7)]);
    disk.state.lock().foreign = 890;
    runs(&disk, 20).await;
    let evictions: Vec<_> = disk.log().into_iter().filter(|line| line.contains("evict ")).collect();
    // b stops after 1 s and holds its files for 3 s. Then 95 units are free, and with the files of a 103.
    assert_eq!(evictions, ["0 evict b for nodefs.available", "14 evict a for nodefs.available"]);
}

#[tokio::test(start_paused = true)]
async fn the_pod_that_wrote_since_the_last_measurement_is_the_one_that_is_evicted() {
    for is_disk_hanging in [false, true] {
        let disk = Disk::new(0, &[("a", 20), ("b", 10)]);
        {
            let mut state = disk.state.lock();
            (state.foreign, state.is_disk_hanging) = (890, is_disk_hanging);
            state.late_writes.insert("b", 400);
        }
        runs(&disk, 5).await;
        let evictions: Vec<_> = disk.log().into_iter().filter(|line| line.contains("evict ")).collect();
        let want: &[&str] = if is_disk_hanging { &[] } else { &["0 evict b for nodefs.available"] };
        assert_eq!(evictions[..evictions.len().min(1)], *want);
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_above_its_own_limit_is_evicted_without_pressure() {
    let disk = Disk::new(0, &[("a", 501), ("b", 100)]);
    let conditions = runs(&disk, 20).await;
    assert_eq!(disk.log(), ["0 evict a for emptydirfs.limit"]);
    assert!(conditions.borrow().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_new_process_waits_for_the_evictions_of_the_one_before() {
    let disk = Disk::new(0, &[("a", 450), ("b", 490)]);
    disk.state.lock().pods.get_mut("b").unwrap().1 = Some(Instant::now());
    runs(&disk, 30).await;
    assert_eq!(disk.log(), [""; 0], "the disk has room when the files of b are gone");
}

#[tokio::test(start_paused = true)]
async fn without_statistics_or_layout_nothing_is_evicted() {
    let disk = Disk::new(0, &[("a", 450), ("b", 490)]);
    disk.state.lock().has_statistics = false;
    runs(&disk, 100).await;
    assert_eq!(disk.log(), [""; 0]);
    disk.state.lock().has_statistics = true;
    disk.state.lock().has_layout = false;
    runs(&disk, 100).await;
    assert_eq!(disk.log(), [""; 0]);
    disk.state.lock().has_layout = true;
    runs(&disk, 15).await;
    assert!(!disk.log().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_runtime_without_known_file_systems_delays_no_eviction_for_memory() {
    let disk = Disk::new(0, &[("a", 450), ("b", 490)]);
    {
        let mut state = disk.state.lock();
        (state.has_layout, state.memory) = (false, Some(99));
    }
    let conditions = runs(&disk, 3).await;
    assert_eq!(disk.log(), ["0 event memory", "0 evict a for memory.available"], "not for the full disk");
    assert_eq!(*conditions.borrow(), [PressureCondition::Memory].into());

    // The disk counts as soon as the runtime has answered.
    let disk = Disk::new(0, &[("a", 450), ("b", 490)]);
    disk.state.lock().has_layout = false;
    let answers = async {
        sleep(Duration::from_secs(15)).await;
        disk.state.lock().has_layout = true;
    };
    tokio::join!(runs(&disk, 22), answers);
    assert_eq!(disk.log().last().unwrap(), "20 evict b for nodefs.available");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_keeps_its_files_is_waited_for_within_a_limit() {
    let disk = Arc::new(Disk {
        cleanup: Duration::from_secs(3600),
        ..Arc::into_inner(Disk::new(0, &[("a", 450), ("b", 490)])).unwrap()
    });
    runs(&disk, 45).await;
    let evictions: Vec<_> = disk.log().into_iter().filter(|line| line.contains("evict ")).collect();
    // 1 s until b has stopped, 30 s of waiting.
    assert_eq!(evictions, ["0 evict b for nodefs.available", "41 evict a for nodefs.available"]);
}

#[tokio::test(start_paused = true)]
async fn the_node_is_measured_at_once_when_the_kernel_reports_that_memory_is_short() {
    for (alarm, want) in [(Some((3, 800)), "3 evict a"), (Some((0, 800)), "1 evict a"), (None, "")] {
        let disk = Disk::new(0, &[("a", 150)]);
        disk.state.lock().alarm = alarm;
        runs(&disk, 9).await;
        let evictions: Vec<_> = disk.log().into_iter().filter(|line| line.contains("evict ")).collect();
        assert!(
            evictions.join(",").starts_with(want) && evictions.is_empty() == want.is_empty(),
            "{evictions:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn all_pods_are_measured_only_when_a_threshold_is_crossed_or_a_round_is_requested() {
    let calm = Disk::new(0, &[("a", 450), ("b", 100)]);
    runs(&calm, 25).await;
    let limited = Scope::Limited;
    assert_eq!(calm.state.lock().scopes, [(0, limited), (10, limited), (20, limited)]);

    let crossed = Disk::new(0, &[("a", 450), ("b", 490)]);
    runs(&crossed, 9).await;
    // After b has released its files, the threshold is no longer crossed.
    assert_eq!(crossed.state.lock().scopes, [(0, Scope::All), (4, limited)]);

    let requested = Disk {
        request: Some(Duration::from_secs(3)),
        ..Arc::into_inner(Disk::new(0, &[("a", 450), ("b", 100)])).unwrap()
    };
    let requested = Arc::new(requested);
    let round = runs_and_reports(&requested, 1).await.1.borrow().clone().unwrap();
    assert_eq!(requested.state.lock().scopes, [(0, limited), (3, Scope::All)]);
    assert_eq!((round.scope, round.snapshot.usages.len()), (Scope::All, 2));
}

#[test]
fn soft_thresholds_of_the_runtimes_file_systems_are_compared_once_these_are_measured() {
    let threshold = |signal, value, grace| Threshold { signal, value, grace, minimum_reclaim: None };
    let amount = |units| Amount::Quantity(Quantity::from_units(units, Format::Binary));
    let soft = Duration::from_secs(60);
    // A tenth of the disk of images is 1,000 units, of that of writable layers 5,000.
    let thresholds = vec![
        threshold(Signal::NodeFsAvailable, Amount::Share(0.1), Duration::ZERO),
        threshold(Signal::NodeFsAvailable, amount(2_000), soft),
        threshold(Signal::ImageFsAvailable, Amount::Share(0.1), Duration::ZERO),
        threshold(Signal::ImageFsAvailable, amount(900), soft),
    ];
    let capacities = [
        (Signal::NodeFsAvailable, 10_000),
        (Signal::ImageFsAvailable, 10_000),
        (Signal::ContainerFsAvailable, 50_000),
    ];
    for (layout, is_measured, want) in [
        (Layout::Single, true, Some(vec![Signal::ImageFsAvailable])),
        // Thresholds of writable layers are those of images, or those of the node.
        (Layout::SeparateImages, true, Some(vec![Signal::ImageFsAvailable])),
        (Layout::Split, true, Some(vec![Signal::ImageFsAvailable, Signal::ContainerFsAvailable])),
        (Layout::Split, false, None),
    ] {
        let settings = EvictionSettings {
            thresholds: thresholds.clone(),
            layout,
            transition: Duration::ZERO,
            max_grace: 0,
            enforces_limits: false,
            skips_memory_volumes: false,
        };
        let mut manager = EvictionManager::new(settings);
        let measured =
            capacities.iter().filter(|(signal, _)| is_measured || *signal == Signal::NodeFsAvailable);
        let observe = |(signal, all): &(Signal, i64)| {
            Some((*signal, Observation::new(*signal, *all, *all, Duration::ZERO)?))
        };
        let observations = measured.filter_map(observe).collect();
        manager.decide(&Snapshot { observations, ..Snapshot::default() }, Duration::ZERO);
        let found = contradictions(&manager).map(|all| all.iter().map(|pair| pair.soft.signal).collect());
        assert_eq!(found, want, "{layout:?}");
    }
}
