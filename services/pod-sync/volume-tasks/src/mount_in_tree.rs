//! Mounts volumes without a driver: `local` and `hostPath` PersistentVolumes, and nfs.

use pod_sync_in_tree::error::Error;
use pod_sync_in_tree::mount::{Group, Mounter};
use pod_sync_in_tree::volume::Volume;
use pod_sync_volume_manager::actual::Outcome;
use quintlet_model::ids::PodUid;

use crate::resolve::Resolved;
use crate::work::{Mounted, Step, Tell, on_root_mismatch};

/// Reason of the event that a pod shares a volume whose files have another group (`WarnAlreadyMountedVolume`).
pub(crate) const ALREADY_MOUNTED: &str = "AlreadyMountedVolume";

/// Mounts a volume for a pod, and its device first if `stage` is set. Returns a warning for the pod, too.
pub(crate) async fn mount(
    mounter: &Mounter,
    volume: &Resolved,
    of: &Volume,
    uid: &PodUid,
    stage: bool,
    tell: Tell<'_>,
) -> (Mounted, Option<String>) {
    let at = tell.at;
    let failed = |step: &str, error: Error, outcome| volume.failure(step, &error.to_string(), outcome);
    at(Step::SetUp);
    let device = stage.then_some(Ok(()));
    if of.is_block {
        if let Err(error) = mounter.check_block(of).await {
            let step = "NewBlockVolumeMapper initialization";
            return (failed(step, error, Outcome::Transient).into(), None);
        }
        let mapped = mounter.map(of, uid).await;
        let result = mapped.map_err(|error| failed("MapBlockVolume", error, Outcome::Uncertain));
        return (Mounted { device, expansion: None, result }, None);
    }
    if let Err(error) = mounter.check(of).await {
        return (failed("NewMounter initialization", error, Outcome::Transient).into(), None);
    }
    if let Err(error) = mounter.check_options(of) {
        return (failed("MountOptionSupport check", error, Outcome::Transient).into(), None);
    }
    if stage {
        at(Step::MountDevice);
        if let Err(error) = mounter.stage(of).await {
            // The volume of the pod is as it was before.
            let failure = failed("MountDevice", error, Outcome::Transient);
            return (
                Mounted { device: Some(Err(Outcome::Uncertain)), expansion: None, result: Err(failure) },
                None,
            );
        }
        at(Step::SetUp);
    }
    let group = Group {
        id: volume.fs_group().and_then(|group| u32::try_from(group).ok()),
        only_if_root_differs: on_root_mismatch(&volume.pod),
        report: tell.slow,
    };
    match mounter.publish(of, uid, group).await {
        Ok(warning) => (Mounted { device, expansion: None, result: Ok(()) }, warning),
        Err(error) => {
            let result = Err(failed("SetUp", error, Outcome::Uncertain));
            (Mounted { device, expansion: None, result }, None)
        }
    }
}
