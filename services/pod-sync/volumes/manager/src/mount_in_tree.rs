//! Mounts volumes without a driver: `local` and `hostPath` PersistentVolumes, nfs, iscsi and fc.

use std::path::PathBuf;

use pod_sync_clients::EventType;
use pod_sync_in_tree::block::BlockMapper;
use pod_sync_in_tree::error::Error;
use pod_sync_in_tree::iscsi::Chap;
use pod_sync_in_tree::mount::Group;
use pod_sync_in_tree::volume::Volume;
use pod_sync_volume_reconcile::actual::Certainty;
use quintlet_model::ids::PodUid;
use tokio_util::sync::CancellationToken;

use crate::claims::SecretName;
use crate::resolve::Resolved;
use crate::tools::{SecretError, Tools, secrets};
use crate::work::{
    Attempt, Failure, Mounted, OperationStep, ProgressReceivers, expand_if_larger, on_root_mismatch,
};

/// Reason of the event that a pod shares a volume whose files have another group
/// (`WarnAlreadyMountedVolume`).
pub(crate) const ALREADY_MOUNTED: &str = "AlreadyMountedVolume";

/// Mounts a volume for a pod, and its device first if the attempt says so. Returns a warning for the pod,
/// too. `released` is cancelled when the pod is released.
pub(crate) async fn mount(
    tools: &Tools,
    volume: &Resolved,
    in_tree: &Volume,
    uid: &PodUid,
    attempt: Attempt,
    receivers: ProgressReceivers<'_>,
    released: &CancellationToken,
) -> (Mounted, Option<String>) {
    let (mounter, at) = (&tools.in_tree, receivers.at);
    let failed = |step: &str, error: Error, certainty| {
        report_mismatch(tools, volume, &error);
        volume.failure(step, &error.to_string(), certainty)
    };
    at(OperationStep::SetUp);
    let checked = match in_tree.is_block {
        true => BlockMapper::of(mounter).check(in_tree).await,
        false => mounter.check(in_tree).await,
    };
    let kind = if in_tree.is_block { "NewBlockVolumeMapper" } else { "NewMounter" };
    if let Err(error) = checked {
        let failure = failed(&format!("{kind} initialization"), error, Certainty::Transient);
        return (failure.into(), None);
    }
    if !in_tree.is_block
        && let Err(error) = mounter.check_options(in_tree)
    {
        return (failed("MountOptionSupport check", error, Certainty::Transient).into(), None);
    }
    let stage = attempt.stage;
    let (device, attached) = match attach(tools, volume, in_tree, kind, stage, receivers).await {
        Ok(attached) => (stage.then_some(Ok(())), attached),
        Err(mounted) => return (mounted, None),
    };
    if in_tree.is_block {
        at(OperationStep::SetUp);
        let mapped = BlockMapper::of(mounter).map(in_tree, attached.as_deref(), uid).await;
        let result = mapped.map_err(|error| failed("MapBlockVolume", error, Certainty::Uncertain));
        return (expanded(tools, volume, uid, attempt, receivers, device, result).await, None);
    }
    if stage {
        at(OperationStep::MountDevice);
        if let Err(error) = mounter.stage(in_tree, attached.as_deref(), volume.desired.label.as_deref()).await
        {
            return (not_staged(failed("MountDevice", error, Certainty::Transient)), None);
        }
        at(OperationStep::SetUp);
    }
    let group = Group {
        id: volume.fs_group().and_then(|group| u32::try_from(group).ok()),
        only_if_root_differs: on_root_mismatch(&volume.pod),
        report: receivers.slow,
    };
    let (result, warning) = match mounter.publish(in_tree, uid, group, released).await {
        Ok(warning) => (Ok(()), warning),
        Err(error) => (Err(failed("SetUp", error, Certainty::Uncertain)), None),
    };
    (expanded(tools, volume, uid, attempt, receivers, device, result).await, warning)
}

/// Records that the device of a PersistentVolume has another file system (`checkForFailedMount`).
fn report_mismatch(tools: &Tools, volume: &Resolved, error: &Error) {
    let Some(uid) = &volume.provided.object_uid else { return };
    if error.is_other_file_system() {
        let name = &volume.desired.spec_name;
        let message = format!("MountVolume failed for volume {name:?} {error}");
        let reason = "FailedMountOnFilesystemMismatch";
        tools.events.persistent_volume(name, uid, EventType::Warning, reason, &message);
    }
}

/// The device may be mounted or attached. The volume of the pod is as it was before.
fn not_staged(failure: Failure) -> Mounted {
    Mounted { device: Some(Err(Certainty::Uncertain)), expansion: None, result: Err(failure) }
}

/// Attaches the disk of a volume, and returns its device. The device of a block volume is looked up for each
/// pod, as in the kubelet.
async fn attach(
    tools: &Tools,
    volume: &Resolved,
    in_tree: &Volume,
    kind: &str,
    stage: bool,
    receivers: ProgressReceivers<'_>,
) -> Result<Option<PathBuf>, Mounted> {
    if !in_tree.plugin().is_disk() || !(stage || in_tree.is_block) {
        return Ok(None);
    }
    let chap = chap(tools, volume, in_tree).await.map_err(|error| {
        Mounted::from(volume.failure(&format!("{kind} initialization"), &error, Certainty::Transient))
    })?;
    (receivers.at)(OperationStep::WaitForAttach);
    let attached = tools.in_tree.attach(in_tree, &chap).await;
    attached.map_err(|error| {
        let failure = volume.failure("WaitForAttach", &error.to_string(), Certainty::Transient);
        if stage { not_staged(failure) } else { failure.into() }
    })
}

/// Reads the CHAP credentials of a volume that uses them (`createSecretMap`).
async fn chap(tools: &Tools, volume: &Resolved, in_tree: &Volume) -> Result<Chap, String> {
    let Some(secret) = in_tree.source.chap_secret() else { return Ok(Chap::default()) };
    if tools.objects.is_none() {
        return Err("cannot get kube client".to_owned());
    }
    let of_pod = || volume.pod.metadata.namespace.clone().unwrap_or_default();
    let namespace = secret.namespace.clone().unwrap_or_else(of_pod);
    let name = SecretName { namespace, name: secret.name.clone() };
    match secrets(tools, Some(&name)).await {
        Ok(secrets) => Ok(Chap(secrets.0)),
        Err(SecretError { name: SecretName { namespace, name }, error }) => {
            Err(format!("couldn't get secret {namespace}/{name} error: {error}"))
        }
    }
}

/// Expands a volume that was mounted, if its PersistentVolume is larger.
async fn expanded(
    tools: &Tools,
    volume: &Resolved,
    uid: &PodUid,
    attempt: Attempt,
    receivers: ProgressReceivers<'_>,
    device: Option<Result<(), Certainty>>,
    result: Result<(), Failure>,
) -> Mounted {
    match result {
        Err(failure) => Mounted { device, expansion: None, result: Err(failure) },
        Ok(()) => {
            let (expansion, result) =
                expand_if_larger(tools, volume, uid, attempt.failed_before, receivers.at).await;
            Mounted { device, expansion, result }
        }
    }
}
