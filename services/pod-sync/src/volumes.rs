//! The service Volumes of podsync.v1, and the volumes of claims and CSI drivers whose usage is reported.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use pod_sync_csi::PLUGIN;
use pod_sync_csi::client::{Usage, VolumeStats};
use pod_sync_volume_manager::{MountedFileSystem, VolumeState, VolumeTasks, VolumeView};
use pod_sync_volume_usage::{Drivers, ProvidedVolume};
use quintlet_kit::clock::Clock;
use quintlet_kit::messages::{self, Bounded};
use quintlet_kit::{error_chain, task};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::volumes_server::Volumes;
use tonic::{Request, Response, Status};

use pod_sync_worker::context::Reporting;

/// Lists the volumes of pods.
#[derive(Debug, Clone)]
pub(crate) struct VolumeLists {
    pub(crate) clock: Clock,
    pub(crate) reporting: Arc<Reporting>,
    pub(crate) volume_tasks: VolumeTasks,
}

#[tonic::async_trait]
impl Volumes for VolumeLists {
    type ListStream = Bounded<wire::ListVolumesReply>;

    async fn list(&self, _: Request<wire::ListVolumesRequest>) -> Result<Response<Self::ListStream>, Status> {
        self.reporting.views.restored().await;
        let volumes = messages::chunks(self.of_pods(None));
        let volumes = volumes.map(|volumes| wire::ListVolumesReply { volumes });
        Ok(Response::new(Bounded::of_chunks("Volumes.List", volumes)))
    }
}

impl VolumeLists {
    /// Returns the volumes of a pod or of all pods, sorted by the name of the pod.
    pub(crate) fn of_pods(&self, pod: Option<&PodUid>) -> Vec<wire::VolumeView> {
        let pods = self.reporting.views.all();
        let name =
            |view: &pod_sync_views::PodView| format!("{}/{}", view.pod_ref.namespace, view.pod_ref.name);
        let names: HashMap<&PodUid, String> =
            pods.iter().map(|view| (&view.pod_ref.uid, name(view))).collect();
        let now = self.clock.wall();
        let volumes = self.volume_tasks.views(pod).into_iter();
        let pod = |volume: &VolumeView| names.get(&volume.pod).cloned().unwrap_or_default();
        let mut volumes: Vec<_> = volumes.map(|volume| wire_volume(pod(&volume), volume, now)).collect();
        volumes.sort_by(|a, b| (&a.pod, &a.pod_uid, &a.name).cmp(&(&b.pod, &b.pod_uid, &b.name)));
        volumes
    }
}

fn wire_volume(pod: String, volume: VolumeView, now: Timestamp) -> wire::VolumeView {
    let nanoseconds = |time: Timestamp| i64::try_from(time.as_nanosecond()).unwrap_or(i64::MAX);
    let state = match volume.state {
        VolumeState::Unresolved => wire::VolumeState::Unresolved,
        VolumeState::NotAttached => wire::VolumeState::NotAttached,
        VolumeState::NotMounted => wire::VolumeState::NotMounted,
        VolumeState::Uncertain => wire::VolumeState::Uncertain,
        VolumeState::Mounted => wire::VolumeState::Mounted,
    };
    let (call, call_since_unix_ns) = volume.step.map_or_else(Default::default, |(step, age)| {
        (step.name().to_owned(), now.checked_sub(age).map_or(0, nanoseconds))
    });
    let (error, error_unix_ns) =
        volume.error.map_or_else(Default::default, |(error, at)| (error, nanoseconds(at)));
    wire::VolumeView {
        pod_uid: volume.pod.to_string(),
        pod,
        name: volume.name,
        spec_name: volume.spec_name,
        volume: volume.volume,
        state: state.into(),
        call,
        call_since_unix_ns,
        error,
        error_unix_ns,
        needed_since_unix_ns: volume.needed_since.map_or(0, nanoseconds),
    }
}

/// The mounted volumes that tasks mount: those of CSI drivers, and those without a driver.
pub(crate) struct MountedVolumes {
    pub(crate) tasks: VolumeTasks,
}

#[async_trait]
impl Drivers for MountedVolumes {
    fn mounted(&self, uid: &PodUid) -> Vec<ProvidedVolume> {
        let mounted = self.tasks.file_systems(uid).into_iter();
        let provided = mounted.map(|MountedFileSystem { name, volume, path, has_driver }| {
            let driver = driver(volume.as_str()).to_owned();
            ProvidedVolume { driver, has_driver, name, path }
        });
        provided.collect()
    }

    async fn usage(&self, volume: &ProvidedVolume) -> Option<wire::DiskUsage> {
        if !volume.has_driver {
            let path = volume.path.clone();
            return task::blocking(move || pod_sync_volume_usage::file_system_usage(&path)).await.ok();
        }
        match self.tasks.mounter().stats_at(&volume.path).await {
            Ok(stats) => provided(stats?),
            Err(error) => {
                let (driver, error) = (&volume.driver, error_chain(&error));
                tracing::debug!(driver, volume = volume.name, error, "failed to get volume statistics");
                None
            }
        }
    }
}

/// Returns the usage of a volume; `None` if its driver reports none (`NodeGetVolumeStats` in
/// `csi_client.go`).
fn provided(stats: VolumeStats) -> Option<wire::DiskUsage> {
    (stats.bytes.is_some() || stats.inodes.is_some()).then(|| disk_usage(stats))
}

/// Returns the driver in the unique name of a volume. The name of an inline volume has none, and is returned
/// as it is.
fn driver(volume: &str) -> &str {
    let handle = volume.strip_prefix(PLUGIN).and_then(|rest| rest.strip_prefix('/'));
    handle.and_then(|handle| handle.split_once('^')).map_or(volume, |(driver, _)| driver)
}

/// Returns the usage that a driver reports. Missing and negative values are zero (`NodeGetVolumeStats` in
/// `csi_client.go`).
fn disk_usage(stats: VolumeStats) -> wire::DiskUsage {
    let value = |usage: Option<Usage>, amount: fn(&Usage) -> i64| {
        usage.map_or(0, |usage| u64::try_from(amount(&usage)).unwrap_or(0))
    };
    wire::DiskUsage {
        available_bytes: value(stats.bytes, |usage| usage.available),
        capacity_bytes: value(stats.bytes, |usage| usage.total),
        used_bytes: value(stats.bytes, |usage| usage.used),
        inodes: value(stats.inodes, |usage| usage.total),
        inodes_free: value(stats.inodes, |usage| usage.available),
        inodes_used: value(stats.inodes, |usage| usage.used),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pod_sync_volume_manager::OperationStep;

    use super::*;

    #[test]
    fn the_view_of_a_volume_has_the_call_in_progress_and_the_last_error() {
        let now: Timestamp = "2026-11-23T10:00:00Z".parse().unwrap();
        let volume = VolumeView {
            pod: PodUid::parse("u1").unwrap(),
            name: "data".to_owned(),
            spec_name: "pv-1".to_owned(),
            volume: "kubernetes.io/csi/d.csi^h".to_owned(),
            state: VolumeState::NotAttached,
            needed_since: Some(now),
            step: Some((OperationStep::Stage, Duration::from_secs(12))),
            error: Some(("boom".to_owned(), now)),
        };
        let view = wire_volume("shop/db-0".to_owned(), volume, now);
        assert_eq!((view.state(), view.call.as_str()), (wire::VolumeState::NotAttached, "NodeStageVolume"));
        let at = i64::try_from(now.as_nanosecond()).unwrap();
        assert_eq!(view.needed_since_unix_ns, at);
        assert_eq!(view.call_since_unix_ns, at - 12_000_000_000);
        assert_eq!((view.error.as_str(), view.error_unix_ns), ("boom", at));
    }

    #[test]
    fn a_volume_is_of_its_driver_and_missing_usage_is_zero() {
        assert_eq!(driver("kubernetes.io/csi/d.csi^h^x"), "d.csi");
        assert_eq!(driver("kubernetes.io/csi/u1-inline"), "kubernetes.io/csi/u1-inline");
        let bytes = Usage { available: 3, total: 10, used: -7 };
        let usage = disk_usage(VolumeStats { bytes: Some(bytes), ..VolumeStats::default() });
        assert_eq!(
            (usage.available_bytes, usage.capacity_bytes, usage.used_bytes, usage.inodes),
            (3, 10, 0, 0)
        );
    }

    #[test]
    fn a_driver_that_reports_neither_bytes_nor_inodes_reports_no_usage() {
        let usage = || Some(Usage { available: 3, total: 10, used: 7 });
        let table =
            [(usage(), None, true), (None, usage(), true), (usage(), usage(), true), (None, None, false)];
        for (bytes, inodes, expected) in table {
            assert_eq!(provided(VolumeStats { bytes, inodes }).is_some(), expected, "{bytes:?} {inodes:?}");
        }
    }
}
