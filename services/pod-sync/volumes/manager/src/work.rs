//! Executes operations on volumes (`pkg/volume/util/operationexecutor: operation_generator.go`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use pod_sync_csi::error::{Certainty as CsiCertainty, CsiError};
use pod_sync_csi::mount::{Publish, Stage};
use pod_sync_csi::paths::{Root, attachment_name};
use pod_sync_csi::volume::{Secrets, Volume, agent_applies_fs_group};
use pod_sync_direct_volumes::ownership::GroupChange;
use pod_sync_in_tree::volume::Plugin;
use pod_sync_layout::TokenKey;
use pod_sync_volume_reconcile::actual::Certainty;
use pod_sync_volume_reconcile::desired::Reach;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use rand::RngExt as _;

use crate::claims::{self, SecretName, Source};
use crate::expansion::{self, Expanded, NotExpanded};
use crate::in_tree;
use crate::resolve::Resolved;
use crate::tools::{self, SecretError, Tools};

/// Tokens are refreshed up to this much earlier, so that the requests of a node's pods are spread.
const TOKEN_JITTER: Duration = Duration::from_secs(10);
/// Lifetime of a token whose request has none.
const TOKEN_SECONDS: i64 = 3600;
/// gRPC code of a failed attachment on a node without room for another volume.
const RESOURCE_EXHAUSTED: i32 = 8;
/// Attribute, or secret, with the tokens of the pod's service account.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// Step of an operation, as its call or wait is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationStep {
    /// Reads whether the volume is attached, or attaches a disk.
    WaitForAttach,
    /// NodeStageVolume.
    Stage,
    /// NodePublishVolume.
    Publish,
    /// Changes the group of the volume's files.
    Ownership,
    /// NodeExpandVolume, or the enlargement of a file system.
    Expand,
    /// NodeUnpublishVolume.
    Unpublish,
    /// NodeUnstageVolume.
    Unstage,
    /// Mounts the device of a volume without a driver.
    MountDevice,
    /// Mounts a volume without a driver.
    SetUp,
    /// Unmounts a volume without a driver.
    TearDown,
    /// Unmounts the device of a volume without a driver.
    UnmountDevice,
}

impl OperationStep {
    /// Returns the name of the call, or of the work.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WaitForAttach => "WaitForAttach",
            Self::Stage => "NodeStageVolume",
            Self::Publish => "NodePublishVolume",
            Self::Ownership => "fsGroup",
            Self::Expand => "NodeExpandVolume",
            Self::Unpublish => "NodeUnpublishVolume",
            Self::Unstage => "NodeUnstageVolume",
            Self::MountDevice => "MountDevice",
            Self::SetUp => "SetUp",
            Self::TearDown => "TearDown",
            Self::UnmountDevice => "UnmountDevice",
        }
    }
}

/// A failed operation.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    /// Reason of the event.
    pub(crate) reason: &'static str,
    /// Message of the event.
    pub(crate) message: String,
    /// The certainty about the volume, or about its device.
    pub(crate) certainty: Certainty,
}

/// The result of a mount.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// The result for the device; `None` if nothing was done with it.
    pub(crate) device: Option<Result<(), Certainty>>,
    /// The result of the expansion; `None` if none was due.
    pub(crate) expansion: Option<Result<Expanded, NotExpanded>>,
    /// The result for the pod's volume.
    pub(crate) result: Result<(), Failure>,
}

impl From<Failure> for Mounted {
    fn from(failure: Failure) -> Self {
        Self { device: None, expansion: None, result: Err(failure) }
    }
}

/// How a volume is mounted, which is needed to unmount it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Form {
    /// With a file system; the mount point for all pods, if its plugin has one.
    FileSystem {
        /// The directory of the staged volume.
        global_mount: Option<PathBuf>,
    },
    /// The volume is a block device.
    Block {
        /// Name of the PersistentVolume.
        spec_name: String,
    },
    /// The volume has no driver.
    InTree {
        plugin: Plugin,
        is_block: bool,
        /// Name of the device's directory; that of the volume if the volume has no device, and empty if the
        /// device is not known.
        device: String,
    },
}

impl Form {
    /// Returns the steps that unmount a volume and its device.
    pub(crate) fn unmount_steps(&self) -> (OperationStep, OperationStep) {
        match self {
            Self::FileSystem { .. } | Self::Block { .. } => {
                (OperationStep::Unpublish, OperationStep::Unstage)
            }
            Self::InTree { .. } => (OperationStep::TearDown, OperationStep::UnmountDevice),
        }
    }
}

pub(crate) fn certainty(error: &CsiError) -> Certainty {
    match error.certainty() {
        CsiCertainty::Finished => Certainty::Finished,
        CsiCertainty::Uncertain => Certainty::Uncertain,
        CsiCertainty::Transient => Certainty::Transient,
    }
}

impl Resolved {
    /// Returns a failed operation with the kubelet's text, such as
    /// `MountVolume.SetUp failed for volume "pv" : …`.
    pub(crate) fn failure(&self, step: &str, error: &str, certainty: Certainty) -> Failure {
        let (kind, reason) = if self.provided.is_block {
            ("MapVolume", "FailedMapVolume")
        } else {
            ("MountVolume", "FailedMount")
        };
        let message = format!("{kind}.{step} failed for volume {:?} : {error}", self.desired.spec_name);
        Failure { reason, message, certainty }
    }

    /// Returns the messages of the events of a mounted volume: those of a block volume
    /// (`GenerateMapVolumeFunc`).
    pub(crate) fn mapped(&self, tools: &Tools, uid: &PodUid) -> Vec<String> {
        let (name, root) = (&self.desired.spec_name, &tools.root);
        if !self.provided.is_block {
            return Vec::new();
        }
        let paths = match &self.provided.source {
            Source::Csi(_) => root
                .block(name)
                .ok()
                .map(|block| block.devices())
                .zip(root.pod_device(uid.as_str(), name).ok()),
            Source::InTree(volume) => {
                let paths = tools.in_tree.paths();
                let global = paths.block_volume(volume.plugin(), &volume.device_name()).ok();
                global.zip(paths.link(volume.plugin(), uid, name).ok())
            }
        };
        let Some((global, link)) = paths else { return Vec::new() };
        let of_pod = link.parent().unwrap_or(&link);
        let text = |kind: &str, path: &Path| {
            let path = path.display().to_string();
            format!("MapVolume.MapPodDevice succeeded for volume {name:?} {kind} {path:?}")
        };
        vec![text("globalMapPath", &global), text("volumeMapPath", of_pod)]
    }

    pub(crate) fn form(&self, root: &Root) -> Form {
        let csi = match &self.provided.source {
            Source::Csi(csi) => csi,
            Source::InTree(volume) => {
                let (plugin, device) = (volume.plugin(), volume.device_name());
                return Form::InTree { plugin, is_block: volume.is_block, device };
            }
        };
        if self.provided.is_block {
            return Form::Block { spec_name: csi.name.clone() };
        }
        let shared = self.desired.reach.is_shared();
        Form::FileSystem { global_mount: root.global_mount(&csi.driver, &csi.handle).ok().filter(|_| shared) }
    }

    pub(crate) fn fs_group(&self) -> Option<i64> {
        pods::spec(&self.pod).security_context.as_ref().and_then(|context| context.fs_group)
    }
}

/// Returns why the node cannot access a volume. This proves nothing about an earlier mount.
pub(crate) fn check_node(tools: &Tools, volume: &Resolved) -> Result<(), Failure> {
    let node = tools.nodes.borrow().clone();
    claims::check_node(&volume.provided, node.as_deref(), &tools.node).map_err(|error| {
        let failure = volume.failure("NodeAffinity check", &error, Certainty::Transient);
        Failure { reason: "FailedMount", ..failure }
    })
}

/// State of a volume before a mount.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    /// The device is to be mounted first.
    pub(crate) stage: bool,
    /// The pod may use the mount: an error must not remove it.
    pub(crate) mounted_before: bool,
    /// The driver has refused an expansion of the volume.
    pub(crate) failed_before: bool,
}

/// Receivers of the progress of an operation.
#[derive(Clone, Copy)]
pub(crate) struct ProgressReceivers<'a> {
    /// Gets each step when it begins.
    pub(crate) at: &'a (dyn Fn(OperationStep) + Send + Sync),
    /// Gets messages about a change of the files' group that takes long.
    pub(crate) slow: &'a (dyn Fn(String) + Send + Sync),
}

/// Mounts a volume for a pod: checks its attachment, stages it if necessary, and publishes it.
pub(crate) async fn mount(
    tools: &Tools,
    volume: &Resolved,
    csi: &Volume,
    uid: &PodUid,
    attempt: Attempt,
    receivers: ProgressReceivers<'_>,
) -> Mounted {
    let at = receivers.at;
    let publish_context = match volume.desired.reach {
        Reach::Attachable => {
            at(OperationStep::WaitForAttach);
            match attached(tools, csi).await {
                Ok(context) => context,
                Err(error) => return volume.failure("WaitForAttach", &error, Certainty::Transient).into(),
            }
        }
        Reach::DeviceMountable | Reach::PerPod | Reach::Direct => BTreeMap::new(),
    };
    let mut device = None;
    if attempt.stage {
        at(OperationStep::Stage);
        if let Err((error, certainty)) = stage_volume(tools, volume, csi, &publish_context).await {
            let step = if volume.provided.is_block { "SetUpDevice" } else { "MountDevice" };
            let failure = volume.failure(step, &error, certainty);
            // Nothing is certain about the pod's volume that was not certain before.
            let failure = Failure { certainty: Certainty::Transient, ..failure };
            return Mounted { device: Some(Err(certainty)), expansion: None, result: Err(failure) };
        }
        device = Some(Ok(()));
    }
    at(OperationStep::Publish);
    let published =
        publish_volume(tools, volume, csi, uid, publish_context, attempt.mounted_before, receivers).await;
    if let Err((error, certainty)) = published {
        let step = if volume.provided.is_block { "MapPodDevice" } else { "SetUp" };
        return Mounted { device, expansion: None, result: Err(volume.failure(step, &error, certainty)) };
    }
    let (expansion, result) = expand_if_larger(tools, volume, uid, attempt.failed_before, at).await;
    Mounted { device, expansion, result }
}

/// Expands a volume that was mounted for a pod, if its PersistentVolume is larger. Returns the result for the
/// pod's volume, too.
pub(crate) async fn expand_if_larger(
    tools: &Tools,
    volume: &Resolved,
    uid: &PodUid,
    failed_before: bool,
    at: &(dyn Fn(OperationStep) + Send + Sync),
) -> (Option<Result<Expanded, NotExpanded>>, Result<(), Failure>) {
    let sizes = volume.provided.sizes.as_ref();
    let Some(sizes) = sizes.filter(|sizes| sizes.claimed < sizes.capacity_bytes()) else {
        return (None, Ok(()));
    };
    at(OperationStep::Expand);
    let expanded = expansion::expand(tools, volume, sizes, uid, true, failed_before).await;
    // The mount is there, and the pod must not use it before it has its size.
    let result = expanded.as_ref().map(drop).map_err(|failure| {
        let step = if volume.provided.is_block { "MarkVolumeAsMounted" } else { "Setup" };
        let failure = volume.failure(step, &failure.text, Certainty::Uncertain);
        let message = failure.message.replacen(" failed", " failed while expanding volume", 1);
        Failure { message, ..failure }
    });
    (Some(expanded), result)
}

async fn stage_volume(
    tools: &Tools,
    volume: &Resolved,
    csi: &Volume,
    publish_context: &BTreeMap<String, String>,
) -> Result<(), (String, Certainty)> {
    let secrets = secrets(tools, volume.provided.stage_secret.as_ref(), "NodeStageSecretRef").await?;
    let args = Stage {
        volume: csi.clone(),
        publish_context: publish_context.clone(),
        secrets,
        fs_group: volume.fs_group(),
        selinux_label: volume.desired.label.clone(),
    };
    let staged = match volume.provided.is_block {
        true => tools.mounter.stage_block(&args).await,
        false => tools.mounter.stage(&args).await,
    };
    staged.map(drop).map_err(|error| (error.text(), certainty(&error)))
}

async fn publish_volume(
    tools: &Tools,
    volume: &Resolved,
    csi: &Volume,
    uid: &PodUid,
    publish_context: BTreeMap<String, String>,
    mounted_before: bool,
    receivers: ProgressReceivers<'_>,
) -> Result<(), (String, Certainty)> {
    let provided = &volume.provided;
    let mut secrets = secrets(tools, provided.publish_secret.as_ref(), "NodePublishSecretRef").await?;
    let mut called = csi.clone();
    called.attributes = claims::attributes(&volume.pod, csi, &volume.rules);
    if !volume.rules.token_requests.is_empty() {
        let tokens = tokens(tools, volume, uid).await.map_err(|e| (e, Certainty::Transient))?;
        let into = if volume.rules.tokens_in_secrets { &mut secrets.0 } else { &mut called.attributes };
        into.insert(TOKENS.to_owned(), tokens);
    }
    let fs_group = volume.fs_group();
    let args = Publish {
        volume: called,
        pod: uid.to_string(),
        publish_context,
        secrets,
        fs_group,
        selinux_label: volume.desired.label.clone(),
        mounted_before,
        refusal: volume.rules.refusal(&csi.driver, csi.lifecycle),
    };
    if provided.is_block {
        // After an error the driver may have made the device.
        let uncertain = |error: &CsiError| match certainty(error) {
            Certainty::Transient => Certainty::Transient,
            Certainty::Finished | Certainty::Uncertain => Certainty::Uncertain,
        };
        let published = tools.mounter.publish_block(&args).await;
        return published.map(drop).map_err(|error| (error.text(), uncertain(&error)));
    }
    let published = tools.mounter.publish(&args).await;
    let published = published.map_err(|error| (error.text(), certainty(&error)))?;
    let policy = volume.rules.fs_group_policy;
    let agent_applies = !published.group_applied && agent_applies_fs_group(csi, fs_group, policy);
    if let Some(group) = fs_group.filter(|_| agent_applies).and_then(|group| u32::try_from(group).ok()) {
        (receivers.at)(OperationStep::Ownership);
        let only_if_root_differs = on_root_mismatch(&volume.pod);
        let change = GroupChange { root: published.path, group, only_if_root_differs, pod: uid.to_string() };
        change.run(receivers.slow).await.map_err(|error| {
            let text = format!("applyFSGroup failed for vol {}: {error}", csi.handle);
            (text, Certainty::Uncertain)
        })?;
    }
    Ok(())
}

pub(crate) fn on_root_mismatch(pod: &Pod) -> bool {
    let context = pods::spec(pod).security_context.as_ref();
    context.and_then(|context| context.fs_group_change_policy.as_deref()) == Some("OnRootMismatch")
}

async fn secrets(
    tools: &Tools,
    name: Option<&SecretName>,
    field: &str,
) -> Result<Secrets, (String, Certainty)> {
    tools::secrets(tools, name).await.map_err(|failed| {
        let SecretError { name: secret, error } = failed;
        let text = format!("fetching {field} {}/{} failed: {error}", secret.namespace, secret.name);
        (text, Certainty::Transient)
    })
}

/// Returns the tokens that a driver asks for, as a JSON map by audience (`podServiceAccountTokenAttrs`).
async fn tokens(tools: &Tools, volume: &Resolved, uid: &PodUid) -> Result<String, String> {
    let spec = pods::spec(&volume.pod);
    let metadata = &volume.pod.metadata;
    let mut tokens = serde_json::Map::new();
    for request in &volume.rules.token_requests {
        let key = TokenKey {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            service_account: spec.service_account_name.clone().unwrap_or_else(|| "default".to_owned()),
            audiences: Some(request.audience.clone()).filter(|a| !a.is_empty()).into_iter().collect(),
            expiration_seconds: request.expiration_seconds.unwrap_or(TOKEN_SECONDS),
            pod_name: metadata.name.clone().unwrap_or_default(),
            pod_uid: uid.to_string(),
        };
        let jitter = TOKEN_JITTER.mul_f64(rand::rng().random::<f64>());
        let token = tools.token_cache.get(&key, tools.tokens.as_deref(), tools.clock.wall(), jitter).await;
        let token = token.map_err(|e| e.to_string())?;
        let expires = token.expires.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let token = serde_json::json!({"token": token.token, "expirationTimestamp": expires});
        tokens.insert(request.audience.clone(), token);
    }
    Ok(serde_json::Value::Object(tokens).to_string())
}

/// Returns whether attaching failed because the node has no room for another volume
/// (`VerifyExhaustedResource`).
pub(crate) async fn is_over_limit(tools: &Tools, volume: &Resolved) -> bool {
    let (Some(objects), Some(_)) = (&tools.objects, volume.rules.limit_period) else { return false };
    let Source::Csi(csi) = &volume.provided.source else { return false };
    let attachment = objects.attachment(&attachment_name(&csi.handle, &csi.driver, &tools.node)).await;
    let status = attachment.ok().and_then(|attachment| attachment.status);
    let code = status.and_then(|status| status.attach_error).and_then(|error| error.error_code);
    code == Some(RESOURCE_EXHAUSTED)
}

/// Reads once whether a volume is attached, and returns the metadata of its attachment (`WaitForAttach`).
async fn attached(tools: &Tools, csi: &Volume) -> Result<BTreeMap<String, String>, String> {
    let (name, handle) = (attachment_name(&csi.handle, &csi.driver, &tools.node), &csi.handle);
    let Some(objects) = &tools.objects else { return Err("there is no API server".to_owned()) };
    let attachment = objects.attachment(&name).await;
    let attachment =
        attachment.map_err(|e| format!("volume {handle} has GET error for volume attachment {name}: {e}"))?;
    let metadata = metadata_of(&attachment)?;
    metadata.ok_or_else(|| format!("volume {handle} is not attached for volume attachment {name}"))
}

/// Returns the metadata of an attachment, or `None` before the volume is attached (`verifyAttachmentStatus`).
///
/// # Errors
/// Fails if the attachment is being deleted, or if attaching failed.
fn metadata_of(attachment: &VolumeAttachment) -> Result<Option<BTreeMap<String, String>>, String> {
    if attachment.metadata.deletion_timestamp.is_some() {
        return Err("volume attachment is being deleted".to_owned());
    }
    let Some(status) = &attachment.status else { return Ok(None) };
    if status.attached {
        return Ok(Some(status.attachment_metadata.clone().unwrap_or_default()));
    }
    match &status.attach_error {
        Some(error) => Err(error.message.clone().unwrap_or_default()),
        None => Ok(None),
    }
}

/// Unmounts a pod's volume.
///
/// # Errors
/// Returns the text of the error. The volume then counts as mounted.
pub(crate) async fn unmount(tools: &Tools, form: &Form, pod: &PodUid, spec_name: &str) -> Result<(), String> {
    let unmounted = match form {
        Form::FileSystem { .. } => tools.mounter.unpublish(pod.as_str(), spec_name).await,
        Form::Block { spec_name } => tools.mounter.unpublish_block(pod.as_str(), spec_name).await,
        Form::InTree { plugin, is_block, device } => {
            return in_tree::unmount(&tools.in_tree, (*plugin, *is_block, device), pod, spec_name).await;
        }
    };
    unmounted.map_err(|error| error.text())
}

/// Unmounts the device of a volume.
///
/// # Errors
/// Returns the text of the error. The device then counts as mounted.
pub(crate) async fn unmount_device(tools: &Tools, form: &Form) -> Result<(), String> {
    let unmounted = match form {
        Form::FileSystem { global_mount: Some(path) } => tools.mounter.unstage(path).await,
        Form::FileSystem { global_mount: None } => Ok(()),
        Form::Block { spec_name } => tools.mounter.unstage_block(spec_name).await,
        Form::InTree { plugin, is_block, device } => {
            return in_tree::unmount_device(&tools.in_tree, (*plugin, *is_block, device)).await;
        }
    };
    unmounted.map_err(|error| error.text())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_attachment_is_used_once_it_is_attached_and_not_while_it_is_deleted() {
        let attachment = |change: serde_json::Value, deleted: bool| {
            let metadata =
                if deleted { json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}) } else { json!({}) };
            let attachment: VolumeAttachment = serde_json::from_value(json!({
                "metadata": metadata, "status": change,
                "spec": {"attacher": "d", "nodeName": "n", "source": {}},
            }))
            .unwrap();
            metadata_of(&attachment)
        };
        assert_eq!(attachment(json!({"attached": false}), false), Ok(None));
        let attached = json!({"attached": true, "attachmentMetadata": {"device": "sda"}});
        let metadata = BTreeMap::from([("device".to_owned(), "sda".to_owned())]);
        assert_eq!(attachment(attached.clone(), false), Ok(Some(metadata)));
        assert_eq!(attachment(attached, true), Err("volume attachment is being deleted".to_owned()));
        let refused = json!({"attached": false, "attachError": {"message": "no such disk"}});
        assert_eq!(attachment(refused, false), Err("no such disk".to_owned()));
    }

    #[test]
    fn the_policy_on_root_mismatch_is_that_of_the_pod() {
        let context = |policy: &str| {
            let context = json!({"fsGroup": 4711, "fsGroupChangePolicy": policy});
            quintlet_testkit::pods::pod_json(json!({"containers": [], "securityContext": context}))
        };
        assert!(on_root_mismatch(&context("OnRootMismatch")) && !on_root_mismatch(&context("Always")));
    }
}
