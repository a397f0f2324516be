//! The volumes and drivers whose health is asked for, and their calls.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::VolumeHealthCondition;
use k8s_openapi::api::storage::v1::StorageHealthCondition;
use pod_sync_csi::client::{HealthCall, HealthEntry, StorageEntry};
use pod_sync_csi::paths::Root;
use pod_sync_csi::volume::AccessMode;
use pod_sync_csi::volume_data::LifecycleMode;
use pod_sync_decisions::storage_health::{self, StorageProblem, StorageReport};
use pod_sync_decisions::volume_health::{PodVolumeAnswers, VolumeProblem, conditions};
use pod_sync_volume_reconcile::desired::{DesiredVolume, Reach};
use pod_sync_volume_reconcile::operations::OperationKey;
use quintlet_kit::error_chain;
use quintlet_model::ids::PodUid;
use quintlet_plugin_api::csi::{StorageHealthErrorType, VolumeHealthErrorType};
use tokio_util::sync::CancellationToken;

use crate::claims::Source;
use crate::health::{self, HealthSource, HealthVolume};
use crate::state::ManagerState;
use crate::tasks::VolumeTasks;

/// Returns the problems of an answer. Those of a later version of CSI are left out.
fn problems(entries: Vec<HealthEntry>) -> impl Iterator<Item = (VolumeProblem, String, String)> {
    entries.into_iter().filter_map(|entry| {
        let problem = match VolumeHealthErrorType::try_from(entry.status) {
            Ok(VolumeHealthErrorType::Inaccessible) => VolumeProblem::Inaccessible,
            Ok(VolumeHealthErrorType::DataLoss) => VolumeProblem::DataLoss,
            Ok(VolumeHealthErrorType::Degraded) => VolumeProblem::Degraded,
            Ok(VolumeHealthErrorType::UnknownVolumeHealthType) | Err(_) => return None,
        };
        Some((problem, entry.reason, entry.message))
    })
}

/// Returns the problems of an answer about storage. Those of a later version of CSI are left out.
fn storage_problems(entries: Vec<StorageEntry>) -> impl Iterator<Item = StorageReport> {
    entries.into_iter().filter_map(|entry| {
        let problem = match StorageHealthErrorType::try_from(entry.status) {
            Ok(StorageHealthErrorType::StorageUnreachable) => StorageProblem::Unreachable,
            Ok(StorageHealthErrorType::StorageDegraded) => StorageProblem::Degraded,
            Ok(StorageHealthErrorType::UnknownStorageHealthErrorType) | Err(_) => return None,
        };
        Some(StorageReport {
            problem,
            reason: entry.reason,
            message: entry.message,
            access_mode: entry.mode.map(AccessMode::name),
            volume_mode: entry.is_block.map(|is_block| if is_block { "Block" } else { "Filesystem" }),
        })
    })
}

/// Returns the volumes of PersistentVolumes of CSI drivers that a pod has, certainly or possibly, and those
/// whose mount was tried. As in the kubelet, inline volumes are left out.
fn volumes(state: &ManagerState, root: &Root, uid: &PodUid) -> Vec<HealthVolume> {
    let volume = |(name, desired): (&str, &DesiredVolume)| {
        let provided = &state.volume(uid, &desired.spec_name)?.provided;
        let Source::Csi(csi) = &provided.source else { return None };
        if csi.lifecycle != LifecycleMode::Persistent || !is_tried(state, uid, desired) {
            return None;
        }
        let actual = state.actual.volume(&desired.name);
        let is_staged = actual.is_some_and(|actual| actual.device.is_some());
        let is_published = state.actual.mount(&desired.name, uid).is_some();
        let (staged, published) = if provided.is_block {
            (root.block(&csi.name).ok().map(|paths| paths.staging), None)
        } else {
            (root.global_mount(&csi.driver, &csi.handle).ok(), root.mount(uid.as_str(), &csi.name).ok())
        };
        let if_so = |is: bool, path: Option<PathBuf>| path.filter(|_| is);
        let call = HealthCall {
            handle: csi.handle.clone(),
            published: if_so(is_published, published),
            staged: if_so(is_staged, staged),
        };
        Some(HealthVolume { name: name.to_owned(), driver: csi.driver.clone(), call })
    };
    state.desired.by_tasks_of(uid).filter_map(volume).collect()
}

fn is_tried(state: &ManagerState, uid: &PodUid, volume: &DesiredVolume) -> bool {
    if state.actual.mount(&volume.name, uid).is_some() {
        return true;
    }
    // Before its attachment, an operation on a volume is no mount.
    let is_attached = volume.reach != Reach::Attachable || state.actual.volume(&volume.name).is_some();
    let keys = [None, Some(uid.clone())].map(|pod| OperationKey { volume: volume.name.clone(), pod });
    is_attached && keys.iter().any(|key| state.running.contains_key(key) || state.errors.contains_key(key))
}

/// The volumes of [`VolumeTasks`].
struct Mounted<P, W> {
    tasks: VolumeTasks,
    pods: P,
    wake: W,
}

#[async_trait]
impl<P, W> HealthSource for Mounted<P, W>
where
    P: Fn() -> Vec<PodUid> + Send + Sync + 'static,
    W: Fn(&PodUid) + Send + Sync + 'static,
{
    fn pods(&self) -> Vec<PodUid> {
        (self.pods)()
    }

    fn volumes(&self, uid: &PodUid) -> (Vec<HealthVolume>, bool) {
        self.tasks.health_volumes(uid)
    }

    fn drivers(&self) -> BTreeSet<String> {
        self.tasks.csi_node().borrow().drivers.keys().cloned().collect()
    }

    async fn reports_health(&self, driver: &str) -> bool {
        match self.tasks.mounter().reports_health(driver).await {
            Ok(reports) => reports,
            Err(error) => {
                let error = error_chain(&error);
                tracing::debug!(driver, error, "failed to read whether a driver reports health");
                false
            }
        }
    }

    async fn health(&self, volume: &HealthVolume) -> Option<Vec<VolumeHealthCondition>> {
        match self.tasks.mounter().health(&volume.driver, &volume.call).await {
            Ok(entries) => Some(conditions(problems(entries))),
            Err(error) => {
                let (driver, error) = (&volume.driver, error_chain(&error));
                tracing::debug!(driver, volume = volume.name, error, "failed to get the health of a volume");
                None
            }
        }
    }

    async fn storage_health(&self, driver: &str) -> Option<Vec<StorageHealthCondition>> {
        match self.tasks.mounter().storage_health(driver).await {
            Ok(entries) => Some(storage_health::conditions(storage_problems(entries?))),
            Err(error) => {
                let error = error_chain(&error);
                tracing::debug!(driver, error, "failed to get the health of a driver's storage");
                None
            }
        }
    }

    fn wake(&self, uid: &PodUid) {
        (self.wake)(uid);
        // The pod may wait for its volumes.
        self.wake_reporter();
    }

    fn wake_reporter(&self) {
        self.tasks.0.changed.send_modify(|changes| *changes = changes.wrapping_add(1));
    }
}

impl VolumeTasks {
    fn health_volumes(&self, uid: &PodUid) -> (Vec<HealthVolume>, bool) {
        let state = self.0.state.lock();
        // Until its first declaration, the volumes of a pod are not known.
        let are_all = state.is_open(uid) && !state.desired.is_incomplete(uid);
        (volumes(&state, &self.0.tools.root, uid), are_all)
    }

    /// Returns the last answers about the health of a pod's volumes.
    #[must_use]
    pub fn health(&self, uid: &PodUid) -> PodVolumeAnswers {
        self.0.health.of(uid, self.health_volumes(uid))
    }

    /// Asks the drivers for the health of their storage and of the volumes of `pods` until `stop`, for each
    /// once per period. `wake` receives the pods whose answers have changed.
    pub async fn watch_health(
        self,
        pods: impl Fn() -> Vec<PodUid> + Send + Sync + 'static,
        wake: impl Fn(&PodUid) + Send + Sync + 'static,
        period: Duration,
        stop: CancellationToken,
    ) {
        let answers = Arc::clone(&self.0.health);
        health::run(Arc::new(Mounted { tasks: self, pods, wake }), answers, period, stop).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_that_are_not_known_are_left_out() {
        let entry = |status| HealthEntry { status, reason: "R".to_owned(), message: String::new() };
        let found: Vec<VolumeProblem> =
            problems((0..6).map(entry).collect()).map(|(problem, ..)| problem).collect();
        // Numbers of CSI 1.13.
        assert_eq!(found, [VolumeProblem::Degraded, VolumeProblem::Inaccessible, VolumeProblem::DataLoss]);
        let entry = |status| StorageEntry {
            status,
            reason: "R".to_owned(),
            message: String::new(),
            mode: Some(AccessMode::ReadWriteMany),
            is_block: (status > 1).then_some(true),
        };
        let brief = |report: StorageReport| (report.problem, report.access_mode, report.volume_mode);
        let found: Vec<_> = storage_problems((0..5).map(entry).collect()).map(brief).collect();
        let many = Some("ReadWriteMany");
        assert_eq!(
            found,
            [(StorageProblem::Degraded, many, None), (StorageProblem::Unreachable, many, Some("Block"))]
        );
    }
}
