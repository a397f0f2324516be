//! The health of volumes and of storage, which the drivers report (`pkg/kubelet/volumehealth`).
//!
//! [`run`] is a future that the caller spawns. Once per period, it asks for the health of each volume
//! (`NodeGetVolumeHealth`), one volume of a driver at a time, and each driver for the health of its storage
//! (`NodeGetStorageHealth`). The answers are in [`HealthAnswers`]. A driver that hangs delays no other, and
//! its volumes do not delay its storage. There are no channels.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::VolumeHealthCondition;
use k8s_openapi::api::storage::v1::StorageHealthCondition;
use parking_lot::Mutex;
use pod_sync_csi::client::HealthCall;
use pod_sync_decisions::storage_health;
use pod_sync_decisions::volume_health::{PodVolumeAnswers, are_same};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_telemetry::metrics::gauge_family;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Interval between scans for volumes and drivers that are due.
const SCAN_PERIOD: Duration = Duration::from_secs(10);
/// Period if statistics of volumes are switched off: that of the kubelet.
const DEFAULT_PERIOD: Duration = Duration::from_secs(60);

/// A volume of a pod whose health is asked for: it is mounted, or a mount was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HealthVolume {
    /// Name in the pod.
    pub(crate) name: String,
    pub(crate) driver: String,
    pub(crate) call: HealthCall,
}

/// The volumes of pods and their drivers.
#[async_trait]
pub(crate) trait HealthSource: Send + Sync + 'static {
    /// Returns the pods that have not terminated.
    fn pods(&self) -> Vec<PodUid>;

    /// Returns the volumes of a pod whose health is asked for, and whether the pod has no others.
    fn volumes(&self, uid: &PodUid) -> (Vec<HealthVolume>, bool);

    /// Returns the names of the registered drivers.
    fn drivers(&self) -> BTreeSet<String>;

    /// Returns whether a driver reports the health of volumes. Has a time limit of its own.
    async fn reports_health(&self, driver: &str) -> bool;

    /// Returns what is wrong with a volume, or `None` if its driver does not answer. Has a time limit of its
    /// own.
    async fn health(&self, volume: &HealthVolume) -> Option<Vec<VolumeHealthCondition>>;

    /// Returns what is wrong with the storage of a driver, or `None` if the driver does not answer or does
    /// not report it. Has a time limit of its own.
    async fn storage_health(&self, driver: &str) -> Option<Vec<StorageHealthCondition>>;

    /// Wakes the worker of a pod whose volumes have another health.
    fn wake(&self, uid: &PodUid);

    /// Wakes the task that reports the drivers, after the health of a driver's storage has changed.
    fn wake_reporter(&self);
}

/// The calls for a volume, or for the storage of a driver.
#[derive(Debug)]
struct Calls<T> {
    /// When the driver was called last.
    at: Option<Instant>,
    answer: Option<T>,
}

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self { at: None, answer: None }
    }
}

impl<T> Calls<T> {
    /// Returns whether the last call is older than `period`, and records a call if so.
    fn begin(&mut self, period: Duration) -> bool {
        let is_due = self.at.is_none_or(|at| at.elapsed() >= period);
        if is_due {
            self.at = Some(Instant::now());
        }
        is_due
    }
}

/// A volume of a pod, by its name in the pod.
type VolumeKey = (PodUid, String);

/// The last answers of the drivers.
#[derive(Debug, Default)]
pub(crate) struct HealthAnswers {
    volumes: Mutex<BTreeMap<VolumeKey, Calls<Vec<VolumeHealthCondition>>>>,
    /// By driver.
    storage: Mutex<BTreeMap<String, Calls<Vec<StorageHealthCondition>>>>,
}

impl HealthAnswers {
    pub(crate) fn of(&self, uid: &PodUid, volumes: (Vec<HealthVolume>, bool)) -> PodVolumeAnswers {
        let (volumes, are_all) = volumes;
        let calls = self.volumes.lock();
        let answer = |volume: HealthVolume| {
            let key = (uid.clone(), volume.name);
            let answer = calls.get(&key).and_then(|calls| calls.answer.clone());
            (key.1, answer)
        };
        PodVolumeAnswers { volumes: volumes.into_iter().map(answer).collect(), are_all }
    }

    /// Returns the last answers about storage, by driver.
    pub(crate) fn storage(&self) -> BTreeMap<String, Vec<StorageHealthCondition>> {
        let calls = self.storage.lock();
        calls.iter().filter_map(|(driver, calls)| Some((driver.clone(), calls.answer.clone()?))).collect()
    }

    /// Stores the answer about a volume. Returns whether it differs from the last one.
    fn put(&self, key: &VolumeKey, answer: Vec<VolumeHealthCondition>) -> bool {
        let mut calls = self.volumes.lock();
        // A volume that was unmounted meanwhile has no entry.
        let Some(calls) = calls.get_mut(key) else { return false };
        let is_new = calls.answer.as_ref().is_none_or(|last| !are_same(last, &answer));
        calls.answer = Some(answer);
        is_new
    }

    /// Stores the answer about the storage of a driver. Returns whether it differs from the last one.
    fn put_storage(&self, driver: &str, answer: Vec<StorageHealthCondition>) -> bool {
        let mut calls = self.storage.lock();
        // A driver that was deregistered meanwhile has no entry.
        let Some(calls) = calls.get_mut(driver) else { return false };
        let is_new = calls.answer.as_ref().is_none_or(|last| !storage_health::are_same(last, &answer));
        calls.answer = Some(answer);
        is_new
    }
}

/// Labels of a condition of storage.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StorageLabel {
    driver_name: String,
    status: String,
    reason: String,
}

/// The conditions of storage as metrics.
struct StorageMetrics {
    conditions: Family<StorageLabel, Gauge>,
    shown: HashSet<StorageLabel>,
}

impl StorageMetrics {
    fn new() -> Self {
        let help = "CSI node storage backend health conditions currently reported (1 = present).";
        Self { conditions: gauge_family("csi_node_storage_health_status", help), shown: HashSet::new() }
    }

    /// Shows these answers and no others.
    fn show(&mut self, storage: BTreeMap<String, Vec<StorageHealthCondition>>) {
        let label = |(driver, conditions): (String, Vec<StorageHealthCondition>)| {
            conditions.into_iter().map(move |condition| StorageLabel {
                driver_name: driver.clone(),
                status: condition.status,
                reason: condition.reason,
            })
        };
        let wanted: HashSet<StorageLabel> = storage.into_iter().flat_map(label).collect();
        for gone in self.shown.difference(&wanted) {
            self.conditions.remove(gone);
        }
        for label in wanted.difference(&self.shown) {
            self.conditions.get_or_create(label).set(1);
        }
        self.shown = wanted;
    }
}

/// The calls that a task makes to one driver. A driver has at most one task of each kind.
enum Round {
    Storage,
    Volumes(Vec<(VolumeKey, HealthVolume)>),
}

/// A driver, and whether the calls are about its storage.
type Target = (String, bool);

impl Round {
    async fn execute(self, driver: &str, source: &impl HealthSource, answers: &HealthAnswers) {
        match self {
            Self::Storage => {
                // A failed call is no recovery: the last answer counts.
                let Some(answer) = source.storage_health(driver).await else { return };
                if answers.put_storage(driver, answer) {
                    source.wake_reporter();
                }
            }
            Self::Volumes(volumes) => {
                // A driver without the capability is asked again, since it may be updated.
                if !source.reports_health(driver).await {
                    return;
                }
                for (key, volume) in volumes {
                    // As for storage.
                    let Some(answer) = source.health(&volume).await else { continue };
                    if answers.put(&key, answer) {
                        source.wake(&key.0);
                    }
                }
            }
        }
    }
}

/// Returns the rounds of calls that are due and whose driver is not being called, and records the calls.
fn due(
    source: &impl HealthSource,
    answers: &HealthAnswers,
    busy: &BTreeSet<Target>,
    period: Duration,
) -> Vec<(Target, Round)> {
    let of_pod = |uid: PodUid| {
        let volumes = source.volumes(&uid).0.into_iter();
        volumes.map(|volume| ((uid.clone(), volume.name.clone()), volume)).collect::<Vec<_>>()
    };
    let volumes: Vec<_> = source.pods().into_iter().flat_map(of_pod).collect();
    let mut of_driver: BTreeMap<String, Vec<_>> = BTreeMap::new();
    {
        let known: HashSet<&VolumeKey> = volumes.iter().map(|(key, _)| key).collect();
        let mut calls = answers.volumes.lock();
        calls.retain(|key, _| known.contains(key));
        for (key, volume) in &volumes {
            if !busy.contains(&(volume.driver.clone(), false))
                && calls.entry(key.clone()).or_default().begin(period)
            {
                of_driver.entry(volume.driver.clone()).or_default().push((key.clone(), volume.clone()));
            }
        }
    }
    let of_volumes =
        of_driver.into_iter().map(|(driver, volumes)| ((driver, false), Round::Volumes(volumes)));
    let drivers = source.drivers();
    let mut calls = answers.storage.lock();
    calls.retain(|driver, _| drivers.contains(driver));
    let is_due =
        |target: &Target| !busy.contains(target) && calls.entry(target.0.clone()).or_default().begin(period);
    let of_storage = drivers.into_iter().map(|driver| (driver, true)).filter(is_due);
    of_storage.map(|target| (target, Round::Storage)).chain(of_volumes).collect()
}

/// Asks the drivers until `stop`, for each volume and each driver once per period.
pub(crate) async fn run(
    source: Arc<impl HealthSource>,
    answers: Arc<HealthAnswers>,
    period: Duration,
    stop: CancellationToken,
) {
    let period = if period.is_zero() { DEFAULT_PERIOD } else { period };
    let mut metrics = StorageMetrics::new();
    let mut busy = BTreeSet::new();
    let mut calls: JoinSet<Target> = JoinSet::new();
    loop {
        for (target, round) in due(&*source, &answers, &busy, period) {
            busy.insert(target.clone());
            let (source, answers) = (Arc::clone(&source), Arc::clone(&answers));
            let driver = target.0.clone();
            let call = task::spawn("volume-health", async move {
                round.execute(&driver, &*source, &answers).await;
            });
            calls.spawn(async move {
                // A task that panicked has ended, too.
                let _ended = call.await;
                target
            });
        }
        metrics.show(answers.storage());
        // Each branch only ends a wait. The calls in flight are dropped with the process.
        tokio::select! {
            () = stop.cancelled() => return,
            Some(target) = calls.join_next() => drop(target.map(|target| busy.remove(&target))),
            () = quintlet_kit::timers::pause(SCAN_PERIOD.min(period)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use pod_sync_decisions::storage_health::{StorageProblem, StorageReport};
    use pod_sync_decisions::volume_health::{VolumeProblem, conditions};

    use super::*;

    fn uid() -> PodUid {
        PodUid::parse("u1").unwrap()
    }

    /// Volumes by driver. `hanging` never answers, `plain` does not report health.
    #[derive(Default)]
    struct FakeDrivers {
        volumes: Mutex<Vec<(&'static str, &'static str)>>,
        /// The reason of the condition of each volume; the calls fail without one.
        reasons: Mutex<BTreeMap<&'static str, Option<&'static str>>>,
        calls: Mutex<Vec<String>>,
        woken: Mutex<usize>,
        /// The reason of the condition of each driver's storage; the calls fail without one.
        storage: Mutex<BTreeMap<&'static str, Option<&'static str>>>,
        reported: Mutex<usize>,
    }

    #[async_trait]
    impl HealthSource for FakeDrivers {
        fn pods(&self) -> Vec<PodUid> {
            vec![uid()]
        }

        fn volumes(&self, _: &PodUid) -> (Vec<HealthVolume>, bool) {
            let volume = |&(name, driver): &(&str, &str)| HealthVolume {
                name: name.to_owned(),
                driver: driver.to_owned(),
                call: HealthCall { handle: name.to_owned(), published: None, staged: None },
            };
            (self.volumes.lock().iter().map(volume).collect(), true)
        }

        async fn reports_health(&self, driver: &str) -> bool {
            driver != "plain"
        }

        async fn health(&self, volume: &HealthVolume) -> Option<Vec<VolumeHealthCondition>> {
            self.calls.lock().push(volume.name.clone());
            if volume.driver == "hanging" {
                std::future::pending::<()>().await;
            }
            let reason = (*self.reasons.lock().get(volume.name.as_str())?)?;
            let problem = (VolumeProblem::Degraded, reason.to_owned(), String::new());
            Some(conditions(Some(problem).filter(|_| reason != "well")))
        }

        fn drivers(&self) -> BTreeSet<String> {
            self.storage.lock().keys().map(|name| (*name).to_owned()).collect()
        }

        async fn storage_health(&self, driver: &str) -> Option<Vec<StorageHealthCondition>> {
            self.calls.lock().push(format!("storage of {driver}"));
            let reason = self.storage.lock()[driver];
            if reason == Some("hangs") {
                std::future::pending::<()>().await;
            }
            let report = |reason: &str| StorageReport {
                problem: StorageProblem::Degraded,
                reason: reason.to_owned(),
                message: String::new(),
                access_mode: None,
                volume_mode: None,
            };
            reason.map(|reason| storage_health::conditions((reason != "well").then(|| report(reason))))
        }

        fn wake(&self, _: &PodUid) {
            *self.woken.lock() += 1;
        }

        fn wake_reporter(&self) {
            *self.reported.lock() += 1;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_hangs_delays_no_other_and_a_changed_answer_wakes_the_pod() {
        let drivers = Arc::new(FakeDrivers::default());
        *drivers.volumes.lock() = vec![
            ("a", "good"),
            ("b", "good"),
            ("mute", "plain"),
            ("stuck", "hanging"),
            ("stuck-2", "hanging"),
        ];
        drivers.reasons.lock().extend([("a", Some("Slow")), ("b", Some("well"))]);
        let (answers, stop) = (Arc::new(HealthAnswers::default()), CancellationToken::new());
        let running = run(Arc::clone(&drivers), Arc::clone(&answers), Duration::ZERO, stop.clone());
        let running = task::spawn("health", running);
        let seen = || {
            let of_pod = answers.of(&uid(), drivers.volumes(&uid())).volumes;
            let reasons = |answer: Vec<VolumeHealthCondition>| {
                answer.into_iter().map(|condition| condition.reason).collect::<Vec<_>>().join(",")
            };
            let texts = of_pod
                .into_iter()
                .map(|(name, answer)| format!("{name}={}", answer.map_or_else(|| "?".to_owned(), reasons)));
            texts.collect::<Vec<_>>().join(" ")
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(seen(), "a=Slow b= mute=? stuck=? stuck-2=?");
        assert_eq!(*drivers.woken.lock(), 2);
        // Once per period, and the driver that hangs gets no second call.
        tokio::time::sleep(Duration::from_secs(40)).await;
        assert_eq!(drivers.calls.lock().len(), 3, "{:?}", drivers.calls.lock());
        tokio::time::sleep(Duration::from_secs(60)).await;
        let calls = drivers.calls.lock().clone();
        let count = |name: &str| calls.iter().filter(|call| *call == name).count();
        assert_eq!(
            (count("a"), count("b"), count("mute"), count("stuck"), count("stuck-2")),
            (2, 2, 0, 1, 0),
            "{calls:?}"
        );
        assert_eq!(*drivers.woken.lock(), 2, "nothing has changed");
        // A call that fails is no recovery.
        drivers.reasons.lock().extend([("a", None), ("b", Some("Full"))]);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(seen(), "a=Slow b=Full mute=? stuck=? stuck-2=?");
        assert_eq!(*drivers.woken.lock(), 3);
        // A volume that is mounted again is asked for at once.
        drivers.volumes.lock().retain(|(name, _)| *name != "b");
        tokio::time::sleep(Duration::from_secs(20)).await;
        drivers.volumes.lock().push(("b", "good"));
        assert_eq!(seen(), "a=Slow b=? mute=? stuck=? stuck-2=?");
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(seen(), "a=Slow b=Full mute=? stuck=? stuck-2=?");
        stop.cancel();
        running.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn each_driver_is_called_for_its_storage_once_per_period_whatever_its_volumes_do() {
        let drivers = Arc::new(FakeDrivers::default());
        *drivers.volumes.lock() = vec![("stuck", "hanging")];
        drivers.storage.lock().extend([
            ("good", Some("Slow")),
            ("mute", None),
            ("hanging", Some("Gone")),
            ("stuck-storage", Some("hangs")),
            ("well", Some("well")),
        ]);
        let (answers, stop) = (Arc::new(HealthAnswers::default()), CancellationToken::new());
        let running = run(Arc::clone(&drivers), Arc::clone(&answers), Duration::ZERO, stop.clone());
        let running = task::spawn("health", running);
        let seen = || {
            let text = |(driver, conditions): (String, Vec<StorageHealthCondition>)| {
                let reasons: Vec<String> = conditions.into_iter().map(|condition| condition.reason).collect();
                format!("{driver}={}", reasons.join(","))
            };
            answers.storage().into_iter().map(text).collect::<Vec<_>>().join(" ")
        };
        let shown = || {
            let text = quintlet_telemetry::metrics::text();
            let lines = text.lines().filter(|line| line.starts_with("csi_node_storage_health_status{"));
            let mut lines: Vec<String> = lines.map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let series = |driver: &str, reason: &str| {
            format!(
                "csi_node_storage_health_status{{driver_name=\"{driver}\",status=\"StorageDegraded\",reason=\"{reason}\"}} 1"
            )
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(seen(), "good=Slow hanging=Gone well=");
        assert_eq!(*drivers.reported.lock(), 3);
        assert_eq!(shown(), [series("good", "Slow"), series("hanging", "Gone")]);
        tokio::time::sleep(Duration::from_secs(65)).await;
        let calls = drivers.calls.lock().clone();
        let count =
            |driver: &str| calls.iter().filter(|call| **call == format!("storage of {driver}")).count();
        assert_eq!(
            ["good", "mute", "hanging", "stuck-storage", "well"].map(count),
            [2, 2, 2, 1, 2],
            "{calls:?}"
        );
        assert_eq!(*drivers.reported.lock(), 3, "nothing has changed");
        // A call that fails is no recovery, an empty answer is one, and a driver that is gone is not shown.
        drivers.storage.lock().extend([("good", None), ("hanging", Some("well")), ("well", Some("Full"))]);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(seen(), "good=Slow hanging= well=Full");
        assert_eq!(*drivers.reported.lock(), 5);
        assert_eq!(shown(), [series("good", "Slow"), series("well", "Full")]);
        drivers.storage.lock().remove("well");
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(seen(), "good=Slow hanging=");
        assert_eq!(shown(), [series("good", "Slow")]);
        stop.cancel();
        running.await.unwrap();
    }
}
