//! Results of measurements.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::RwLock;
use pod_sync_clients::CallError;
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use tokio::time::Instant;

use crate::file_systems::FileSystems;

/// The last measurement of each pod's volumes, and the usage of the runtime's file systems.
#[derive(Debug, Default)]
pub struct Measured {
    pods: RwLock<HashMap<PodUid, Measurement>>,
    /// Volumes whose drivers were called, by pod and name.
    provided: RwLock<BTreeMap<(PodUid, String), DriverUsage>>,
    file_systems: FileSystems,
}

#[derive(Debug)]
struct Measurement {
    storage: wire::PodStorage,
    measured_at: Instant,
}

#[derive(Debug)]
struct DriverUsage {
    /// `None` if the driver reports no usage.
    storage: Option<wire::VolumeStorage>,
    at: Instant,
}

impl Measured {
    /// Returns the pods whose last measurement is older than `period`. Drops the measurements of pods that
    /// are not in `pods`.
    pub(crate) fn due(&self, pods: &[(PodUid, Arc<Pod>)], period: Duration) -> Vec<(PodUid, Arc<Pod>)> {
        let existing: HashSet<&PodUid> = pods.iter().map(|(uid, _)| uid).collect();
        let mut known = self.pods.write();
        known.retain(|uid, _| existing.contains(uid));
        let is_due = |uid: &PodUid| known.get(uid).is_none_or(|known| known.measured_at.elapsed() >= period);
        pods.iter().filter(|(uid, _)| is_due(uid)).cloned().collect()
    }

    /// Returns the usage of the runtime's file systems. Calls `mount_points` if the cached ones are older
    /// than a minute.
    pub async fn runtime_file_systems<F>(
        &self,
        mount_points: impl FnOnce() -> F,
    ) -> Vec<wire::RuntimeFileSystem>
    where
        F: Future<Output = Result<Vec<String>, CallError>>,
    {
        self.file_systems.usage(mount_points).await
    }

    /// Returns the last result of each pod.
    pub fn all(&self) -> Vec<wire::PodStorage> {
        let known = self.pods.read();
        let mut all: BTreeMap<String, wire::PodStorage> =
            known.values().map(|known| (known.storage.uid.clone(), known.storage.clone())).collect();
        drop(known);
        for ((uid, _), usage) in &*self.provided.read() {
            let new = || wire::PodStorage { uid: uid.to_string(), ..wire::PodStorage::default() };
            if let Some(storage) = &usage.storage {
                all.entry(uid.to_string()).or_insert_with(new).volumes.push(storage.clone());
            }
        }
        all.into_values().collect()
    }

    /// Returns whether the last call for a volume's usage is older than `period`.
    pub(crate) fn is_provided_due(&self, uid: &PodUid, name: &str, period: Duration) -> bool {
        let provided = self.provided.read();
        provided.get(&(uid.clone(), name.to_owned())).is_none_or(|usage| usage.at.elapsed() >= period)
    }

    /// Stores the usage of a driver's volume; `None` if the driver reports no usage.
    pub(crate) fn put_provided(&self, uid: &PodUid, name: &str, storage: Option<wire::VolumeStorage>) {
        let usage = DriverUsage { storage, at: Instant::now() };
        self.provided.write().insert((uid.clone(), name.to_owned()), usage);
    }

    /// Removes the usage of all other drivers' volumes than `mounted`.
    pub(crate) fn retain_provided(&self, mounted: &HashSet<(&PodUid, &str)>) {
        self.provided.write().retain(|(uid, name), _| mounted.contains(&(uid, name.as_str())));
    }

    /// Stores the result of a pod.
    pub(crate) fn put(&self, uid: PodUid, storage: wire::PodStorage) {
        self.pods.write().insert(uid, Measurement { storage, measured_at: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn each_pod_is_measured_once_per_period_and_results_of_removed_pods_are_dropped() {
        let measured = Measured::default();
        let pods = ["u1", "u2"].map(|name| (uid(name), Arc::new(Pod::default())));
        let period = Duration::from_secs(60);
        let due = |pods: &[(PodUid, Arc<Pod>)]| -> Vec<String> {
            measured.due(pods, period).iter().map(|(uid, _)| uid.to_string()).collect()
        };
        let put = |name: &str| {
            let storage = wire::PodStorage { uid: name.to_owned(), ..Default::default() };
            measured.put(uid(name), storage);
        };
        assert_eq!(due(&pods), ["u1", "u2"]);
        put("u1");
        tokio::time::advance(period / 2).await;
        put("u2");
        assert_eq!(due(&pods), [""; 0]);
        tokio::time::advance(period / 2).await;
        assert_eq!(due(&pods), ["u1"]);
        assert_eq!(due(&pods[..1]), ["u1"]);
        let left: Vec<String> = measured.all().into_iter().map(|s| s.uid).collect();
        assert_eq!(left, ["u1"]);
    }
}
