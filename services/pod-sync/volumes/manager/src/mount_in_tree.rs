//! Mounts volumes without a driver: `local` and `hostPath` PersistentVolumes, nfs, iscsi and fc.

use std::path::PathBuf;

use pod_sync_clients::EventType;
use pod_sync_in_tree::error::Error;
use pod_sync_in_tree::iscsi::Chap;
use pod_sync_in_tree::mount::Group;
use pod_sync_in_tree::volume::Volume;
use pod_sync_volume_reconcile::actual::Outcome;
use quintlet_model::ids::PodUid;
use tokio_util::sync::CancellationToken;

use crate::claims::SecretName;
use crate::resolve::Resolved;
use crate::tools::{SecretError, Tools, secrets};
use crate::work::{Attempt, Failure, Mounted, Step, Tell, expand_if_larger, on_root_mismatch};

/// Reason of the event that a pod shares a volume whose files have another group (`WarnAlreadyMountedVolume`).
pub(crate) const ALREADY_MOUNTED: &str = "AlreadyMountedVolume";

/// Mounts a volume for a pod, and its device first if the attempt says so. Returns a warning for the pod, too. `released` is
/// cancelled when the pod is released.
pub(crate) async fn mount(
    tools: &Tools,
    volume: &Resolved,
    of: &Volume,
    uid: &PodUid,
    attempt: Attempt,
    tell: Tell<'_>,
    released: &CancellationToken,
) -> (Mounted, Option<String>) {
    let (mounter, at) = (&tools.in_tree, tell.at);
    let failed = |step: &str, error: Error, outcome| {
        report_mismatch(tools, volume, &error);
        volume.failure(step, &error.to_string(), outcome)
    };
    at(Step::SetUp);
    let checked = match of.is_block {
        true => mounter.check_block(of).await,
        false => mounter.check(of).await,
    };
    let kind = if of.is_block { "NewBlockVolumeMapper" } else { "NewMounter" };
    if let Err(error) = checked {
        let failure = failed(&format!("{kind} initialization"), error, Outcome::Transient);
        return (failure.into(), None);
    }
    if !of.is_block
        && let Err(error) = mounter.check_options(of)
    {
        return (failed("MountOptionSupport check", error, Outcome::Transient).into(), None);
    }
    let stage = attempt.stage;
    let (device, attached) = match attach(tools, volume, of, kind, stage, tell).await {
        Ok(attached) => (stage.then_some(Ok(())), attached),
        Err(mounted) => return (mounted, None),
    };
    if of.is_block {
        at(Step::SetUp);
        let mapped = mounter.map(of, attached.as_deref(), uid).await;
        let result = mapped.map_err(|error| failed("MapBlockVolume", error, Outcome::Uncertain));
        return (expanded(tools, volume, uid, attempt, tell, device, result).await, None);
    }
    if stage {
        at(Step::MountDevice);
        if let Err(error) = mounter.stage(of, attached.as_deref(), volume.desired.label.as_deref()).await {
            return (not_staged(failed("MountDevice", error, Outcome::Transient)), None);
        }
        at(Step::SetUp);
    }
    let group = Group {
        id: volume.fs_group().and_then(|group| u32::try_from(group).ok()),
        only_if_root_differs: on_root_mismatch(&volume.pod),
        report: tell.slow,
    };
    let (result, warning) = match mounter.publish(of, uid, group, released).await {
        Ok(warning) => (Ok(()), warning),
        Err(error) => (Err(failed("SetUp", error, Outcome::Uncertain)), None),
    };
    (expanded(tools, volume, uid, attempt, tell, device, result).await, warning)
}

// Records that the device of a PersistentVolume has another file system (`checkForFailedMount`).
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
    Mounted { device: Some(Err(Outcome::Uncertain)), expansion: None, result: Err(failure) }
}

/// Attaches the disk of a volume, and returns its device. The device of a block volume is looked up for each pod, as in the
/// kubelet.
async fn attach(
    tools: &Tools,
    volume: &Resolved,
    of: &Volume,
    kind: &str,
    stage: bool,
    tell: Tell<'_>,
) -> Result<Option<PathBuf>, Mounted> {
    if !of.plugin().is_disk() || !(stage || of.is_block) {
        return Ok(None);
    }
    let chap = chap(tools, volume, of).await.map_err(|error| {
        Mounted::from(volume.failure(&format!("{kind} initialization"), &error, Outcome::Transient))
    })?;
    (tell.at)(Step::WaitForAttach);
    let attached = tools.in_tree.attach(of, &chap).await;
    attached.map_err(|error| {
        let failure = volume.failure("WaitForAttach", &error.to_string(), Outcome::Transient);
        if stage { not_staged(failure) } else { failure.into() }
    })
}

/// Reads the CHAP credentials of a volume that uses them (`createSecretMap`).
async fn chap(tools: &Tools, volume: &Resolved, of: &Volume) -> Result<Chap, String> {
    let Some(secret) = of.source.chap_secret() else { return Ok(Chap::default()) };
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
    tell: Tell<'_>,
    device: Option<Result<(), Outcome>>,
    result: Result<(), Failure>,
) -> Mounted {
    match result {
        Err(failure) => Mounted { device, expansion: None, result: Err(failure) },
        Ok(()) => {
            let (expansion, result) =
                expand_if_larger(tools, volume, uid, attempt.failed_before, tell.at).await;
            Mounted { device, expansion, result }
        }
    }
}
