use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
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
    log: Vec<(u64, String)>,
}

const CAPACITY: i64 = 1000;

impl Disk {
    fn new(images: i64, pods: &[(&'static str, i64)]) -> Arc<Self> {
        let pods = pods.iter().map(|(name, used)| (*name, (*used, None))).collect();
        let (has_statistics, has_layout, log) = (true, true, Vec::new());
        let state = Mutex::new(State {
            pods,
            images,
            foreign: 0,
            late_writes: BTreeMap::new(),
            is_disk_hanging: false,
            has_statistics,
            has_layout,
            log,
        });
        Arc::new(Self { began: Instant::now(), state, cleanup: Duration::from_secs(3) })
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
impl Node for Arc<Disk> {
    async fn layout(&self) -> Option<Layout> {
        self.state.lock().has_layout.then_some(Layout::Single)
    }

    async fn snapshot(&self) -> Option<Snapshot> {
        if !self.state.lock().has_statistics {
            return None;
        }
        let observations = self.observations().await?;
        let state = self.state.lock();
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
        let free = Observation::new(Signal::NodeFsAvailable, self.free(), CAPACITY, self.now())?;
        Some([(Signal::NodeFsAvailable, free)].into())
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

    fn now(&self) -> Duration {
        // The machine was started before.
        Duration::from_secs(1000) + self.began.elapsed()
    }
}

fn settings() -> EvictionSettings {
    let threshold = Threshold {
        signal: Signal::NodeFsAvailable,
        value: Amount::Quantity(Quantity::from_units(100, Format::Binary)),
        grace: Duration::ZERO,
        minimum_reclaim: None,
    };
    EvictionSettings {
        thresholds: vec![threshold],
        layout: Layout::Single,
        transition: Duration::from_secs(60),
        max_grace: 0,
        enforces_limits: true,
    }
}

async fn runs(disk: &Arc<Disk>, seconds: u64) -> watch::Receiver<BTreeSet<PressureCondition>> {
    let (sender, conditions) = watch::channel(BTreeSet::new());
    let stop = CancellationToken::new();
    let end = async {
        sleep(Duration::from_secs(seconds)).await;
        stop.cancel();
    };
    tokio::join!(run(Arc::clone(disk), settings(), sender, stop.clone()), end);
    conditions
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
    assert_eq!(evictions, ["0 evict b for nodefs.available", "4 evict a for nodefs.available"]);
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
async fn a_pod_that_keeps_its_files_is_waited_for_within_a_limit() {
    let disk = Arc::new(Disk {
        cleanup: Duration::from_secs(3600),
        ..Arc::into_inner(Disk::new(0, &[("a", 450), ("b", 490)])).unwrap()
    });
    runs(&disk, 45).await;
    let evictions: Vec<_> = disk.log().into_iter().filter(|line| line.contains("evict ")).collect();
    // 1 s until b has stopped, 30 s of waiting.
    assert_eq!(evictions, ["0 evict b for nodefs.available", "31 evict a for nodefs.available"]);
}
