//! Executes operations on volumes (`pkg/volume/util/operationexecutor: operation_generator.go`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use pod_sync_csi::error::{CsiError, Outcome as CsiOutcome};
use pod_sync_csi::mount::{Mounter, Publish, Stage};
use pod_sync_csi::paths::{Root, attachment_name};
use pod_sync_csi::volume::{Secrets, agent_applies_fs_group};
use pod_sync_volume_manager::actual::Outcome;
use pod_sync_volume_manager::desired::Reach;
use pod_sync_volumes::ownership;
use pod_sync_volumes::token::{TokenCache, TokenKey, TokenSource};
use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::{self, Clock};
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use rand::RngExt as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::claims::{self, SecretName};
use crate::objects::VolumeObjects;
use crate::resolve::Resolved;

/// Longest wait for an attachment.
const ATTACH_LIMIT: Duration = Duration::from_secs(600);
/// Wait before the second look at an attachment.
const ATTACH_WAIT: Duration = Duration::from_millis(500);
/// Longest wait between two looks at an attachment.
const ATTACH_WAIT_MAX: Duration = Duration::from_secs(10);
/// Tokens are refreshed up to this much earlier, so that the requests of a node's pods are spread.
const TOKEN_JITTER: Duration = Duration::from_secs(10);
/// Lifetime of a token whose request has none.
const TOKEN_SECONDS: i64 = 3600;
/// Attribute, or secret, with the tokens of the pod's service account.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// The connections and caches that operations use.
pub(crate) struct Tools {
    pub(crate) mounter: Mounter,
    pub(crate) root: Root,
    pub(crate) node: String,
    pub(crate) objects: Option<Arc<dyn VolumeObjects>>,
    pub(crate) tokens: Option<Arc<dyn TokenSource>>,
    pub(crate) token_cache: TokenCache,
    pub(crate) clock: Clock,
}

/// Step of an operation, as its call or wait is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Waits until the volume is attached.
    WaitForAttach,
    /// NodeStageVolume.
    Stage,
    /// NodePublishVolume.
    Publish,
    /// Changes the group of the volume's files.
    Ownership,
    /// NodeUnpublishVolume.
    Unpublish,
    /// NodeUnstageVolume.
    Unstage,
}

impl Step {
    /// Returns the name of the call, or of the work.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WaitForAttach => "WaitForAttach",
            Self::Stage => "NodeStageVolume",
            Self::Publish => "NodePublishVolume",
            Self::Ownership => "fsGroup",
            Self::Unpublish => "NodeUnpublishVolume",
            Self::Unstage => "NodeUnstageVolume",
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
    pub(crate) outcome: Outcome,
}

/// The result of a mount.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// The result for the device; `None` if nothing was done with it.
    pub(crate) device: Option<Result<(), Outcome>>,
    /// The result for the pod's volume.
    pub(crate) result: Result<(), Failure>,
}

impl From<Failure> for Mounted {
    fn from(failure: Failure) -> Self {
        Self { device: None, result: Err(failure) }
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
}

pub(crate) fn outcome(error: &CsiError) -> Outcome {
    match error.outcome() {
        CsiOutcome::Finished => Outcome::Finished,
        CsiOutcome::Uncertain => Outcome::Uncertain,
        CsiOutcome::Transient => Outcome::Transient,
    }
}

impl Resolved {
    /// Returns a failed operation with the kubelet's text, such as `MountVolume.SetUp failed for volume "pv" : …`.
    pub(crate) fn failure(&self, step: &str, error: &str, outcome: Outcome) -> Failure {
        let (kind, reason) = if self.provided.is_block {
            ("MapVolume", "FailedMapVolume")
        } else {
            ("MountVolume", "FailedMount")
        };
        let message = format!("{kind}.{step} failed for volume {:?} : {error}", self.desired.spec_name);
        Failure { reason, message, outcome }
    }

    pub(crate) fn form(&self, root: &Root) -> Form {
        let csi = &self.provided.csi;
        if self.provided.is_block {
            return Form::Block { spec_name: csi.name.clone() };
        }
        let shared = self.desired.reach.is_shared();
        Form::FileSystem { global_mount: root.global_mount(&csi.driver, &csi.handle).ok().filter(|_| shared) }
    }

    fn fs_group(&self) -> Option<i64> {
        pods::spec(&self.pod).security_context.as_ref().and_then(|context| context.fs_group)
    }
}

/// Mounts a volume for a pod: waits for its attachment, stages it if `stage` is set, and publishes it. `released` ends the wait
/// for the attachment.
pub(crate) async fn mount(
    tools: &Tools,
    volume: &Resolved,
    uid: &PodUid,
    stage: bool,
    mounted_before: bool,
    released: &CancellationToken,
    at: &(dyn Fn(Step) + Send + Sync),
) -> Mounted {
    let csi = &volume.provided.csi;
    if let Some(refusal) = volume.rules.refusal(&csi.driver, csi.lifecycle) {
        return volume.failure("NewMounter initialization", &refusal, Outcome::Finished).into();
    }
    let publish_context = match volume.desired.reach {
        Reach::Attachable => {
            at(Step::WaitForAttach);
            match attached(tools, volume, released).await {
                Ok(context) => context,
                Err(error) => return volume.failure("WaitForAttach", &error, Outcome::Transient).into(),
            }
        }
        Reach::DeviceMountable | Reach::PerPod => BTreeMap::new(),
    };
    let mut device = None;
    if stage {
        at(Step::Stage);
        if let Err((error, outcome)) = stage_volume(tools, volume, &publish_context).await {
            let step = if volume.provided.is_block { "SetUpDevice" } else { "MountDevice" };
            let failure = volume.failure(step, &error, outcome);
            // Nothing is certain about the pod's volume that was not certain before.
            let failure = Failure { outcome: Outcome::Transient, ..failure };
            return Mounted { device: Some(Err(outcome)), result: Err(failure) };
        }
        device = Some(Ok(()));
    }
    at(Step::Publish);
    let published = publish_volume(tools, volume, uid, publish_context, mounted_before, at).await;
    let step = if volume.provided.is_block { "MapPodDevice" } else { "SetUp" };
    Mounted { device, result: published.map_err(|(error, outcome)| volume.failure(step, &error, outcome)) }
}

async fn stage_volume(
    tools: &Tools,
    volume: &Resolved,
    publish_context: &BTreeMap<String, String>,
) -> Result<(), (String, Outcome)> {
    let secrets = secrets(tools, volume.provided.stage_secret.as_ref(), "NodeStageSecretRef").await?;
    let args = Stage {
        volume: volume.provided.csi.clone(),
        publish_context: publish_context.clone(),
        secrets,
        fs_group: volume.fs_group(),
        selinux_label: None,
    };
    let staged = match volume.provided.is_block {
        true => tools.mounter.stage_block(&args).await,
        false => tools.mounter.stage(&args).await,
    };
    staged.map(drop).map_err(|error| (error.text(), outcome(&error)))
}

async fn publish_volume(
    tools: &Tools,
    volume: &Resolved,
    uid: &PodUid,
    publish_context: BTreeMap<String, String>,
    mounted_before: bool,
    at: &(dyn Fn(Step) + Send + Sync),
) -> Result<(), (String, Outcome)> {
    let provided = &volume.provided;
    let mut secrets = secrets(tools, provided.publish_secret.as_ref(), "NodePublishSecretRef").await?;
    let mut csi = provided.csi.clone();
    csi.attributes = claims::attributes(&volume.pod, &csi, &volume.rules);
    if !volume.rules.token_requests.is_empty() {
        let tokens = tokens(tools, volume, uid).await.map_err(|e| (e, Outcome::Transient))?;
        let into = if volume.rules.tokens_in_secrets { &mut secrets.0 } else { &mut csi.attributes };
        into.insert(TOKENS.to_owned(), tokens);
    }
    let fs_group = volume.fs_group();
    let args = Publish {
        volume: csi,
        pod: uid.to_string(),
        publish_context,
        secrets,
        fs_group,
        selinux_label: None,
        mounted_before,
    };
    if provided.is_block {
        // After an error the driver may have made the device.
        let uncertain = |error: &CsiError| match outcome(error) {
            Outcome::Transient => Outcome::Transient,
            Outcome::Finished | Outcome::Uncertain => Outcome::Uncertain,
        };
        let published = tools.mounter.publish_block(&args).await;
        return published.map(drop).map_err(|error| (error.text(), uncertain(&error)));
    }
    let published = tools.mounter.publish(&args).await;
    let published = published.map_err(|error| (error.text(), outcome(&error)))?;
    let policy = volume.rules.fs_group_policy;
    let agent_applies = !published.group_applied && agent_applies_fs_group(&provided.csi, fs_group, policy);
    if let Some(group) = fs_group.filter(|_| agent_applies).and_then(|group| u32::try_from(group).ok()) {
        at(Step::Ownership);
        let only_if_root_differs = on_root_mismatch(&volume.pod);
        let change = move || change_group(&published.path, group, only_if_root_differs);
        task::blocking(change).await.map_err(|error| {
            let text = format!("applyFSGroup failed for vol {}: {error}", provided.csi.handle);
            (text, Outcome::Uncertain)
        })?;
    }
    Ok(())
}

fn on_root_mismatch(pod: &Pod) -> bool {
    let context = pods::spec(pod).security_context.as_ref();
    context.and_then(|context| context.fs_group_change_policy.as_deref()) == Some("OnRootMismatch")
}

fn change_group(path: &Path, group: u32, only_if_root_differs: bool) -> std::io::Result<()> {
    if only_if_root_differs && !ownership::root_differs(path, group, false)? {
        return Ok(());
    }
    ownership::set_volume_ownership(path, group, false)
}

async fn secrets(
    tools: &Tools,
    name: Option<&SecretName>,
    field: &str,
) -> Result<Secrets, (String, Outcome)> {
    let (Some(of), Some(objects)) = (name, &tools.objects) else { return Ok(Secrets::default()) };
    match objects.secret(&of.namespace, &of.name).await {
        Ok(data) => Ok(Secrets(data)),
        Err(error) => {
            let text = format!("fetching {field} {}/{} failed: {error}", of.namespace, of.name);
            Err((text, Outcome::Transient))
        }
    }
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

/// Waits until a volume is attached, and returns the metadata of its attachment.
async fn attached(
    tools: &Tools,
    volume: &Resolved,
    released: &CancellationToken,
) -> Result<BTreeMap<String, String>, String> {
    let csi = &volume.provided.csi;
    let name = attachment_name(&csi.handle, &csi.driver, &tools.node);
    let Some(objects) = &tools.objects else { return Err("there is no API server".to_owned()) };
    let limit = clock::deadline_after(Instant::now(), ATTACH_LIMIT);
    let mut wait = Backoff::new(ATTACH_WAIT, 2.0, ATTACH_WAIT_MAX);
    loop {
        let attachment = objects
            .attachment(&name)
            .await
            .map_err(|e| format!("volume {} has GET error for volume attachment {name}: {e}", csi.handle))?;
        if let Some(metadata) = metadata_of(&attachment)? {
            return Ok(metadata);
        }
        if Instant::now() >= limit {
            return Err(format!("volume attachment {name} was not attached in time"));
        }
        tokio::select! {
            () = released.cancelled() => return Err("the pod no longer needs the volume".to_owned()),
            () = tokio::time::sleep(wait.next_wait()) => {}
        }
    }
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
    };
    unmounted.map_err(|error| error.text())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_attachment_is_used_once_it_is_attached_and_not_while_it_is_deleted() {
        let of = |change: serde_json::Value, deleted: bool| {
            let metadata =
                if deleted { json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}) } else { json!({}) };
            let attachment: VolumeAttachment = serde_json::from_value(json!({
                "metadata": metadata, "status": change,
                "spec": {"attacher": "d", "nodeName": "n", "source": {}},
            }))
            .unwrap();
            metadata_of(&attachment)
        };
        assert_eq!(of(json!({"attached": false}), false), Ok(None));
        let attached = json!({"attached": true, "attachmentMetadata": {"device": "sda"}});
        let metadata = BTreeMap::from([("device".to_owned(), "sda".to_owned())]);
        assert_eq!(of(attached.clone(), false), Ok(Some(metadata)));
        assert_eq!(of(attached, true), Err("volume attachment is being deleted".to_owned()));
        let refused = json!({"attached": false, "attachError": {"message": "no such disk"}});
        assert_eq!(of(refused, false), Err("no such disk".to_owned()));
    }

    #[test]
    fn the_group_is_changed_once_with_the_policy_on_root_mismatch() {
        use std::os::unix::fs::MetadataExt as _;
        let context = |policy: &str| {
            let context = json!({"fsGroup": 4711, "fsGroupChangePolicy": policy});
            quintlet_testkit::pods::pod_json(json!({"containers": [], "securityContext": context}))
        };
        assert!(on_root_mismatch(&context("OnRootMismatch")) && !on_root_mismatch(&context("Always")));
        let dir = tempfile::tempdir().unwrap();
        let group_of = |name: &str| std::fs::metadata(dir.path().join(name)).unwrap().gid();
        std::fs::write(dir.path().join("first"), "").unwrap();
        change_group(dir.path(), 4711, true).unwrap();
        assert_eq!((group_of(""), group_of("first")), (4711, 4711));
        std::fs::write(dir.path().join("second"), "").unwrap();
        std::os::unix::fs::chown(dir.path().join("second"), None, Some(0)).unwrap();
        change_group(dir.path(), 4711, true).unwrap();
        assert_eq!(group_of("second"), 0);
        change_group(dir.path(), 4711, false).unwrap();
        assert_eq!(group_of("second"), 4711);
    }
}
