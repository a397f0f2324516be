//! The health of volumes, which their drivers report (`pkg/kubelet/volumehealth`).
//!
//! [`run`] is a future that the caller spawns. It asks for the health of each volume once per period (`NodeGetVolumeHealth`), one volume of
//! a driver at a time, and stores the answers in [`HealthAnswers`]. A driver that hangs delays no other. There are no channels.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::VolumeHealthCondition;
use parking_lot::Mutex;
use pod_sync_csi::client::HealthCall;
use pod_sync_decisions::volume_health::{PodVolumeAnswers, are_same};
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Interval between scans for volumes that are due.
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

    /// Returns whether a driver reports the health of volumes. Has a time limit of its own.
    async fn reports_health(&self, driver: &str) -> bool;

    /// Returns what is wrong with a volume, or `None` if its driver does not answer. Has a time limit of its own.
    async fn health(&self, volume: &HealthVolume) -> Option<Vec<VolumeHealthCondition>>;

    /// Wakes the worker of a pod whose volumes have another health.
    fn wake(&self, uid: &PodUid);
}

#[derive(Debug, Default)]
struct VolumeCall {
    /// When the driver was asked last.
    at: Option<Instant>,
    answer: Option<Vec<VolumeHealthCondition>>,
}

/// The last answers of the drivers, by pod and volume.
#[derive(Debug, Default)]
pub(crate) struct HealthAnswers(Mutex<BTreeMap<(PodUid, String), VolumeCall>>);

impl HealthAnswers {
    pub(crate) fn of(&self, uid: &PodUid, volumes: (Vec<HealthVolume>, bool)) -> PodVolumeAnswers {
        let (volumes, are_all) = volumes;
        let calls = self.0.lock();
        let answer = |volume: HealthVolume| {
            let key = (uid.clone(), volume.name);
            let answer = calls.get(&key).and_then(|call| call.answer.clone());
            (key.1, answer)
        };
        PodVolumeAnswers { volumes: volumes.into_iter().map(answer).collect(), are_all }
    }

    /// Returns whether the last call for a volume is older than `period`, and records a call if so.
    fn begin(&self, key: (PodUid, String), period: Duration) -> bool {
        let mut calls = self.0.lock();
        let call = calls.entry(key).or_default();
        let is_due = call.at.is_none_or(|at| at.elapsed() >= period);
        if is_due {
            call.at = Some(Instant::now());
        }
        is_due
    }

    /// Stores an answer. Returns whether it differs from the last one.
    fn put(&self, key: &(PodUid, String), answer: Vec<VolumeHealthCondition>) -> bool {
        let mut calls = self.0.lock();
        // A volume that was unmounted meanwhile has no entry.
        let Some(call) = calls.get_mut(key) else { return false };
        let is_new = call.answer.as_ref().is_none_or(|last| !are_same(last, &answer));
        call.answer = Some(answer);
        is_new
    }

    fn retain(&self, volumes: &HashSet<(PodUid, String)>) {
        self.0.lock().retain(|key, _| volumes.contains(key));
    }
}

/// Asks the drivers for the health of volumes until `stop`, each volume once per period.
pub(crate) async fn run(
    source: Arc<impl HealthSource>,
    answers: Arc<HealthAnswers>,
    period: Duration,
    stop: CancellationToken,
) {
    let period = if period.is_zero() { DEFAULT_PERIOD } else { period };
    let mut busy = BTreeSet::new();
    let mut calls: JoinSet<String> = JoinSet::new();
    loop {
        let of_pod = |uid: PodUid| {
            let volumes = source.volumes(&uid).0.into_iter();
            volumes.map(|volume| ((uid.clone(), volume.name.clone()), volume)).collect::<Vec<_>>()
        };
        let volumes: Vec<_> = source.pods().into_iter().flat_map(of_pod).collect();
        answers.retain(&volumes.iter().map(|(key, _)| key.clone()).collect());
        let mut of_driver: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for (key, volume) in volumes {
            if !busy.contains(&volume.driver) && answers.begin(key.clone(), period) {
                of_driver.entry(volume.driver.clone()).or_default().push((key, volume));
            }
        }
        for (driver, volumes) in of_driver {
            busy.insert(driver.clone());
            let (source, answers) = (Arc::clone(&source), Arc::clone(&answers));
            let name = driver.clone();
            let call = task::spawn("volume-health", async move {
                // A driver without the capability is asked again, since it may be updated.
                if !source.reports_health(&name).await {
                    return;
                }
                for (key, volume) in volumes {
                    // A failed call is no recovery: the last answer counts.
                    let Some(answer) = source.health(&volume).await else { continue };
                    if answers.put(&key, answer) {
                        source.wake(&key.0);
                    }
                }
            });
            calls.spawn(async move {
                // A task that panicked has ended, too.
                let _ended = call.await;
                driver
            });
        }
        // Each branch only ends a wait. The calls in flight are dropped with the process.
        tokio::select! {
            () = stop.cancelled() => return,
            Some(driver) = calls.join_next() => drop(driver.map(|driver| busy.remove(&driver))),
            () = quintlet_kit::timers::pause(SCAN_PERIOD.min(period)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
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

        fn wake(&self, _: &PodUid) {
            *self.woken.lock() += 1;
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
}
