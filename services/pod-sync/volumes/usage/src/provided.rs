//! Usage of volumes of claims and CSI drivers, which the drivers report (`pkg/volume/csi: metricsCsi`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::measured::Measured;
use crate::{Pods, SCAN_PERIOD, StorageSettings};

/// A mounted volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvidedVolume {
    /// Name in the pod.
    pub name: String,
    /// Driver of the volume, or the name of a volume without one.
    pub driver: String,
    /// The driver reports the usage, which is that of the file system otherwise.
    pub has_driver: bool,
    /// Mount point of the volume.
    pub path: PathBuf,
}

/// The volumes of drivers.
#[async_trait]
pub trait Drivers: Send + Sync + 'static {
    /// Returns the mounted volumes of a pod, without block volumes.
    fn mounted(&self, uid: &PodUid) -> Vec<ProvidedVolume>;

    /// Returns the usage of a volume, or `None` if its driver does not report any. Has a time limit of its
    /// own.
    async fn usage(&self, volume: &ProvidedVolume) -> Option<wire::DiskUsage>;
}

/// Requests the usage of all volumes once per period until `stop`. One call per driver is in flight at a
/// time, and a driver that hangs delays no other.
pub async fn run(
    pods: Arc<impl Pods>,
    drivers: Arc<impl Drivers>,
    measured: Arc<Measured>,
    settings: StorageSettings,
    stop: CancellationToken,
) {
    let period = settings.period;
    if period.is_zero() {
        return;
    }
    let mut busy = BTreeSet::new();
    let mut calls: JoinSet<String> = JoinSet::new();
    loop {
        let running = pods.running();
        let mounted = |(uid, pod): &(PodUid, Arc<Pod>)| {
            let volumes = drivers.mounted(uid).into_iter();
            volumes.map(|volume| (uid.clone(), Arc::clone(pod), volume)).collect::<Vec<_>>()
        };
        let volumes: Vec<(PodUid, Arc<Pod>, ProvidedVolume)> = running.iter().flat_map(mounted).collect();
        measured
            .retain_provided(&volumes.iter().map(|(uid, _, volume)| (uid, volume.name.as_str())).collect());
        let mut of_driver: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for volume in volumes {
            let is_due = measured.is_provided_due(&volume.0, &volume.2.name, period);
            if is_due && !busy.contains(&volume.2.driver) {
                of_driver.entry(volume.2.driver.clone()).or_default().push(volume);
            }
        }
        for (driver, volumes) in of_driver {
            busy.insert(driver.clone());
            let drivers = Arc::clone(&drivers);
            let measured = Arc::clone(&measured);
            let clock = settings.clock.clone();
            let call = task::spawn("volume-usage", async move {
                for (uid, pod, volume) in volumes {
                    let usage = drivers.usage(&volume).await;
                    let storage = usage.map(|usage| wire::VolumeStorage {
                        name: volume.name.clone(),
                        is_ephemeral: false,
                        measured_unix_ns: i64::try_from(clock.wall().as_nanosecond()).unwrap_or(i64::MAX),
                        usage: Some(usage),
                        claim: claim(&pod, &volume.name),
                    });
                    measured.put_provided(&uid, &volume.name, storage);
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

/// Returns the claim of a volume. That of a generic ephemeral volume is named after the pod and the volume.
fn claim(pod: &Pod, name: &str) -> Option<wire::ClaimReference> {
    let spec = pod.spec.as_ref()?;
    let volume = spec.volumes.iter().flatten().find(|volume| volume.name == name)?;
    let claim = match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => claim.claim_name.clone(),
        (None, Some(_)) => format!("{}-{name}", pod.metadata.name.as_deref().unwrap_or_default()),
        (None, None) => return None,
    };
    Some(wire::ClaimReference { namespace: pod.metadata.namespace.clone().unwrap_or_default(), name: claim })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use parking_lot::Mutex;
    use pod_sync_direct_volumes::quotas::ProjectQuotas;
    use pod_sync_metrics::PodMetrics;
    use quintlet_kit::clock::Clock;
    use serde_json::json;

    use super::*;

    fn uid() -> PodUid {
        PodUid::parse("u1").unwrap()
    }

    struct OnePod;

    impl Pods for OnePod {
        fn running(&self) -> Vec<(PodUid, Arc<Pod>)> {
            let pod = serde_json::from_value(json!({
                "metadata": {"name": "db-0", "namespace": "shop"},
                "spec": {"containers": [], "volumes": [
                    {"name": "data", "persistentVolumeClaim": {"claimName": "data-db-0"}},
                    {"name": "scratch", "ephemeral": {}},
                    {"name": "inline", "csi": {"driver": "good"}},
                ]},
            }));
            vec![(uid(), Arc::new(pod.unwrap()))]
        }

        fn measure<T>(&self, _: &PodUid, _: impl FnOnce() -> T) -> Option<T> {
            None
        }
    }

    /// The driver `hanging` never answers, and `plain` reports no usage.
    #[derive(Default)]
    struct FakeDrivers {
        volumes: Mutex<Vec<ProvidedVolume>>,
        calls: Mutex<Vec<String>>,
    }

    #[async_trait]
    impl Drivers for FakeDrivers {
        fn mounted(&self, _: &PodUid) -> Vec<ProvidedVolume> {
            self.volumes.lock().clone()
        }

        async fn usage(&self, volume: &ProvidedVolume) -> Option<wire::DiskUsage> {
            self.calls.lock().push(volume.name.clone());
            match volume.driver.as_str() {
                "hanging" => std::future::pending().await,
                "plain" => None,
                _ => Some(wire::DiskUsage { used_bytes: 7, ..wire::DiskUsage::default() }),
            }
        }
    }

    fn volume(name: &str, driver: &str) -> ProvidedVolume {
        ProvidedVolume {
            name: name.to_owned(),
            driver: driver.to_owned(),
            has_driver: true,
            path: PathBuf::from("/p"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_hangs_delays_no_other_and_each_volume_has_its_claim() {
        let (measured, stop) = (Arc::new(Measured::default()), CancellationToken::new());
        let volumes = [
            volume("stuck", "hanging"),
            volume("data", "good"),
            volume("scratch", "good"),
            volume("inline", "good"),
            volume("mute", "plain"),
        ];
        let drivers = Arc::new(FakeDrivers { volumes: Mutex::new(volumes.into()), ..FakeDrivers::default() });
        let settings = StorageSettings {
            root_dir: PathBuf::from("/r"),
            period: Duration::from_secs(60),
            clock: Clock::system(),
            metrics: PodMetrics::default(),
            quotas: ProjectQuotas::default(),
        };
        let running =
            run(Arc::new(OnePod), Arc::clone(&drivers), Arc::clone(&measured), settings, stop.clone());
        let running = task::spawn("volume-usages", running);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let all = measured.all();
        assert_eq!(all.len(), 1);
        let found = |name: &str| all[0].volumes.iter().find(|volume| volume.name == name);
        let claim = |name: &str| {
            found(name).and_then(|volume| volume.claim.clone()).map(|c| format!("{}/{}", c.namespace, c.name))
        };
        assert_eq!(claim("data").as_deref(), Some("shop/data-db-0"));
        assert_eq!(claim("scratch").as_deref(), Some("shop/db-0-scratch"));
        assert_eq!((claim("inline"), found("inline").is_some()), (None, true));
        assert!(found("stuck").is_none() && found("mute").is_none());
        // Each volume once per period, also one without usage, and the hanging driver gets no second call.
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(drivers.calls.lock().len(), 5, "{:?}", drivers.calls.lock());
        tokio::time::sleep(Duration::from_secs(60)).await;
        let calls = drivers.calls.lock().clone();
        let count = |name: &str| calls.iter().filter(|call| *call == name).count();
        assert_eq!((count("stuck"), count("data"), count("mute")), (1, 2, 2), "{calls:?}");
        // The usage of a volume that is no longer mounted is dropped.
        drivers.volumes.lock().retain(|volume| volume.name == "data");
        tokio::time::sleep(Duration::from_secs(30)).await;
        let left = measured.all();
        let names: Vec<&str> =
            left.iter().flat_map(|pod| &pod.volumes).map(|volume| volume.name.as_str()).collect();
        assert_eq!(names, ["data"]);
        stop.cancel();
        running.await.unwrap();
    }
}
