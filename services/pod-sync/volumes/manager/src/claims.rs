//! From a volume of a pod to a volume of a plugin: claim, PersistentVolume, CSIDriver
//! (`pkg/kubelet/volumemanager/populator: createVolumeSpec`). Plain functions of the objects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    CSIVolumeSource, Container, Node, NodeSelector, PersistentVolume, PersistentVolumeClaim, Pod,
    Volume as PodVolume,
};
use k8s_openapi::api::storage::v1::{CSIDriver, TokenRequest};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use pod_sync_csi::PLUGIN;
use pod_sync_csi::paths::inline_handle;
use pod_sync_csi::volume::{AccessMode, FsGroupPolicy, PodInfo, Volume};
use pod_sync_csi::volume_data::LifecycleMode;
use pod_sync_direct_volumes::is_direct;
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::desired::{DesiredVolume, Reach};
use quintlet_model::ids::PodUid;
use quintlet_model::quantity::Quantity;
use quintlet_model::{node_selector, pod as pods};

/// Finalizer of a claim that pods use.
const PROTECTION: &str = "kubernetes.io/pvc-protection";
/// Annotation of a PersistentVolume with the group that its pods get.
const GROUP: &str = "pv.beta.kubernetes.io/gid";
/// Annotation of a PersistentVolume with mount options, older than the field.
const MOUNT_OPTIONS: &str = "volume.beta.kubernetes.io/mount-options";

/// Access mode of a volume without a PersistentVolume, in metrics.
const INLINE: &str = "inline";

/// A Secret with credentials for a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SecretName {
    /// Namespace of the Secret, which need not be that of the pod.
    pub namespace: String,
    /// Name of the Secret.
    pub name: String,
}

/// A volume in the terms of its plugin.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    /// A CSI driver mounts the volume.
    Csi(Volume),
    /// The node agent mounts the volume.
    InTree(pod_sync_in_tree::volume::Volume),
}

impl Source {
    /// Returns whether the volume is mounted read-only.
    #[must_use]
    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Self::Csi(csi) => csi.read_only,
            Self::InTree(volume) => volume.is_read_only(),
        }
    }

    /// Returns the name of the driver, if there is one.
    #[must_use]
    pub(crate) fn driver(&self) -> Option<&str> {
        match self {
            Self::Csi(csi) => Some(&csi.driver),
            Self::InTree(_) => None,
        }
    }
}

/// The sizes of a PersistentVolume and its claim, which differ until the volume is expanded.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sizes {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
    /// `spec.capacity` of the PersistentVolume.
    pub capacity: ApiQuantity,
    /// `status.capacity` of the claim, in bytes.
    pub claimed: u64,
}

impl Sizes {
    /// Returns the capacity of the PersistentVolume in bytes.
    #[must_use]
    pub(crate) fn capacity_bytes(&self) -> u64 {
        bytes(Quantity::of(&self.capacity))
    }
}

/// Returns the storage in a list of resources; zero if there is none.
#[must_use]
pub(crate) fn storage(resources: Option<&BTreeMap<String, ApiQuantity>>) -> Quantity {
    resources.and_then(|all| all.get("storage")).map_or_else(Quantity::default, Quantity::of)
}

/// A volume of a pod that operations mount.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Provided {
    /// The volume in the terms of its plugin.
    pub source: Source,
    /// One pod at a time may have the volume (ReadWriteOncePod).
    pub is_for_one_pod: bool,
    /// The access mode that allows most, as metrics name it.
    pub access_mode: &'static str,
    /// The pod gets a block device.
    pub is_block: bool,
    /// Credentials for staging.
    pub stage_secret: Option<SecretName>,
    /// Credentials for publishing.
    pub publish_secret: Option<SecretName>,
    /// Credentials for expansion.
    pub expand_secret: Option<SecretName>,
    /// The sizes of the PersistentVolume and its claim; `None` for a volume that is not expanded on the node.
    pub sizes: Option<Sizes>,
    /// Supplemental group of the pod's containers.
    pub group: Option<i64>,
    /// The nodes that can access the PersistentVolume, if they are limited.
    pub nodes: Option<NodeSelector>,
    /// UID of the PersistentVolume; `None` for a volume without one.
    pub object_uid: Option<String>,
}

/// The settings of a CSIDriver object, or those of a driver without one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DriverRules {
    /// Volumes are attached before they are mounted.
    pub attach_required: bool,
    /// The driver is informed of the pod.
    pub pod_info: bool,
    /// Volumes are published again at each sync of their pods.
    pub republish: bool,
    /// The volumes that the agent applies fsGroup to.
    pub fs_group_policy: FsGroupPolicy,
    /// Tokens of the pod's service account for the driver.
    pub token_requests: Vec<TokenRequest>,
    /// The tokens are passed as secrets, and not in the volume's attributes.
    pub tokens_in_secrets: bool,
    /// Volumes can be mounted with an SELinux label.
    pub selinux_mount: bool,
    /// Interval at which the driver's limit of volumes is read again.
    pub limit_period: Option<Duration>,
    /// Life cycle modes that the driver supports; `None` without an object.
    lifecycle_modes: Option<Vec<String>>,
}

impl DriverRules {
    /// Returns the settings of an object.
    #[must_use]
    pub(crate) fn of(object: Option<&CSIDriver>) -> Self {
        let spec = object.map(|object| object.spec.clone()).unwrap_or_default();
        let modes = spec.volume_lifecycle_modes.filter(|modes| !modes.is_empty());
        Self {
            attach_required: spec.attach_required.unwrap_or(true),
            pod_info: spec.pod_info_on_mount.unwrap_or(false),
            republish: spec.requires_republish.unwrap_or(false),
            fs_group_policy: match spec.fs_group_policy.as_deref() {
                Some("File") => FsGroupPolicy::File,
                Some("None") => FsGroupPolicy::None,
                Some(_) | None => FsGroupPolicy::ReadWriteOnceWithFsType,
            },
            token_requests: spec.token_requests.unwrap_or_default(),
            selinux_mount: spec.se_linux_mount.unwrap_or(false),
            limit_period: spec
                .node_allocatable_update_period_seconds
                .and_then(|seconds| u64::try_from(seconds).ok())
                .filter(|seconds| *seconds > 0)
                .map(Duration::from_secs),
            tokens_in_secrets: spec.service_account_token_in_secrets.unwrap_or(false),
            lifecycle_modes: object.map(|_| modes.unwrap_or_else(|| vec!["Persistent".to_owned()])),
        }
    }

    /// Returns why the driver does not provide volumes of this mode (`supportsVolumeLifecycleMode`).
    #[must_use]
    pub(crate) fn refusal(&self, driver: &str, mode: LifecycleMode) -> Option<String> {
        let name = format!("{mode:?}");
        match &self.lifecycle_modes {
            None if mode == LifecycleMode::Persistent => None,
            None => {
                Some(format!("volume mode {name:?} not supported by driver {driver} (no CSIDriver object)"))
            }
            Some(modes) if modes.contains(&name) => None,
            Some(modes) => {
                let quoted: Vec<String> = modes.iter().map(|mode| format!("{mode:?}")).collect();
                let modes = quoted.join(" ");
                Some(format!(
                    "volume mode {name:?} not supported by driver {driver} (only supports [{modes}])"
                ))
            }
        }
    }
}

/// Names of volumes that containers mount and of those that they use as devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// In `volumeMounts`.
    pub mounts: BTreeSet<String>,
    /// In `volumeDevices`.
    pub devices: BTreeSet<String>,
}

impl Uses {
    /// Returns the volumes that the containers of a pod use.
    #[must_use]
    pub(crate) fn of(pod: &Pod) -> Self {
        let spec = pods::spec(pod);
        let mut uses = Self::default();
        let mut add = |container: &Container| {
            uses.mounts.extend(container.volume_mounts.iter().flatten().map(|mount| mount.name.clone()));
            uses.devices.extend(container.volume_devices.iter().flatten().map(|device| device.name.clone()));
        };
        spec.containers.iter().chain(pods::init_containers(pod)).for_each(&mut add);
        for container in spec.ephemeral_containers.iter().flatten() {
            add(&pod_sync_cri_config::container::container_of_ephemeral(container));
        }
        uses
    }
}

/// Returns the volumes of a pod that this crate provides and that a container uses.
#[must_use]
pub(crate) fn provided(pod: &Pod) -> Vec<&PodVolume> {
    pod_sync_direct_volumes::referenced(pod).into_iter().filter(|volume| !is_direct(volume)).collect()
}

/// The claim of a pod's volume: its name, whether the pod uses it read-only, and whether it must belong to
/// the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimOf {
    /// Name of the claim.
    pub name: String,
    /// Value of `readOnly`.
    pub read_only: bool,
    /// The volume is a generic ephemeral one.
    pub is_ephemeral: bool,
}

/// Returns the claim of a pod's volume, or `None` for an inline volume.
#[must_use]
pub(crate) fn claim_of(pod: &Pod, volume: &PodVolume) -> Option<ClaimOf> {
    if let Some(source) = &volume.persistent_volume_claim {
        let read_only = source.read_only.unwrap_or(false);
        return Some(ClaimOf { name: source.claim_name.clone(), read_only, is_ephemeral: false });
    }
    volume.ephemeral.as_ref()?;
    let pod = pod.metadata.name.as_deref().unwrap_or_default();
    Some(ClaimOf { name: format!("{pod}-{}", volume.name), read_only: false, is_ephemeral: true })
}

/// Returns the name of the PersistentVolume of a claim, if the pod may use it.
///
/// # Errors
/// Returns the kubelet's text.
pub(crate) fn check_claim(
    pod: &Pod,
    used: &ClaimOf,
    claim: &PersistentVolumeClaim,
) -> Result<String, String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let metadata = &claim.metadata;
    if used.is_ephemeral {
        let owners = metadata.owner_references.iter().flatten();
        let mut controllers = owners.filter(|owner| owner.controller == Some(true));
        if !controllers.any(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref()) {
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            let claim = &used.name;
            return Err(format!(
                "PVC {namespace}/{claim} was not created for pod {namespace}/{pod} (pod is not owner)"
            ));
        }
    }
    let failed = |text: &str| Err(of_claim(namespace, &used.name, text));
    let is_protected = metadata.finalizers.iter().flatten().any(|finalizer| finalizer == PROTECTION);
    if metadata.deletion_timestamp.is_some() && !is_protected {
        return failed("PVC is being deleted");
    }
    if claim.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound") {
        return failed("PVC is not bound");
    }
    match claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).filter(|name| !name.is_empty()) {
        Some(name) => Ok(name),
        None => failed("PVC has empty pvc.Spec.VolumeName"),
    }
}

/// Adds the claim to an error.
#[must_use]
pub(crate) fn of_claim(namespace: &str, claim: &str, text: &str) -> String {
    format!("error processing PVC {namespace}/{claim}: {text}")
}

/// Returns the volume of a PersistentVolume, if it is bound to the claim and the pod's containers use it as
/// it is.
///
/// # Errors
/// Returns the kubelet's text.
pub(crate) fn of_persistent_volume(
    pod_volume: &str,
    uses: &Uses,
    read_only: bool,
    claim: &PersistentVolumeClaim,
    object: &PersistentVolume,
) -> Result<Provided, String> {
    let name = object.metadata.name.clone().unwrap_or_default();
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let failed =
        |text: String| of_claim(namespace, claim.metadata.name.as_deref().unwrap_or_default(), &text);
    let spec = object.spec.clone().unwrap_or_default();
    let wanted = claim.metadata.uid.clone().unwrap_or_default();
    match spec.claim_ref.as_ref() {
        None => {
            return Err(failed(format!(
                "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
            )));
        }
        Some(bound) if bound.uid.as_deref() != Some(&*wanted) => {
            let uid = bound.uid.as_deref().unwrap_or_default();
            return Err(failed(format!(
                "found PV object {name} but its pv.Spec.ClaimRef.UID {uid} does not point to claim.UID {wanted}"
            )));
        }
        Some(_) => {}
    }
    let mode = spec.volume_mode.as_deref().unwrap_or("Filesystem");
    if uses.mounts.contains(pod_volume) && mode != "Filesystem" {
        return Err(format!("volume {pod_volume} has volumeMode {mode}, but is specified in volumeMounts"));
    }
    if uses.devices.contains(pod_volume) && mode != "Block" {
        return Err(format!("volume {pod_volume} has volumeMode {mode}, but is specified in volumeDevices"));
    }
    let provided = of_object(object, read_only)?;
    let sizes = Sizes {
        namespace: namespace.to_owned(),
        claim: claim.metadata.name.clone().unwrap_or_default(),
        capacity: spec.capacity.as_ref().and_then(|all| all.get("storage")).cloned().unwrap_or_default(),
        claimed: bytes(storage(claim.status.as_ref().and_then(|status| status.capacity.as_ref()))),
    };
    let can_expand = match &provided.source {
        Source::Csi(_) => true,
        Source::InTree(volume) => volume.plugin() == pod_sync_in_tree::volume::Plugin::Local,
    };
    Ok(Provided { sizes: Some(sizes).filter(|_| can_expand), ..provided })
}

/// Returns the volume of a PersistentVolume without its sizes.
///
/// # Errors
/// Returns the kubelet's text if no plugin provides the volume.
pub(crate) fn of_object(object: &PersistentVolume, read_only: bool) -> Result<Provided, String> {
    let name = object.metadata.name.clone().unwrap_or_default();
    let spec = object.spec.clone().unwrap_or_default();
    let modes: Vec<AccessMode> =
        spec.access_modes.iter().flatten().filter_map(|mode| AccessMode::parse(mode)).collect();
    let is_for_one_pod = modes.contains(&AccessMode::ReadWriteOncePod);
    let access_mode = mode_label(&modes);
    let annotation = |key: &str| object.metadata.annotations.as_ref().and_then(|all| all.get(key));
    let mut mount_options: Vec<String> = spec.mount_options.clone().unwrap_or_default();
    let group = annotation(GROUP).and_then(|group| group.parse().ok());
    let object_uid = object.metadata.uid.clone();
    let nodes = spec.node_affinity.clone().and_then(|affinity| affinity.required);
    let is_block = spec.volume_mode.as_deref() == Some("Block");
    if let Some(source) = pod_sync_in_tree::volume::Source::of_persistent_volume(&spec) {
        // `pkg/volume/util: MountOptionFromSpec`. CSI drivers get the field alone.
        if let Some(options) = annotation(MOUNT_OPTIONS) {
            mount_options = options.split(',').map(|option| option.trim().to_owned()).collect();
        }
        let volume = pod_sync_in_tree::volume::Volume { name, source, is_block, read_only, mount_options };
        return Ok(Provided { is_for_one_pod, access_mode, group, nodes, object_uid, ..in_tree(volume) });
    }
    let Some(source) = spec.csi.clone() else {
        let kind = serde_json::to_value(&spec).ok().and_then(|spec| kind_of(&spec)).unwrap_or_default();
        let text = format!("no volume plugin matched: {kind} of PersistentVolume {name} is not supported");
        return Err(format!("failed to get Plugin from volumeSpec for volume {name:?} err={text}"));
    };
    let secret = |reference: Option<k8s_openapi::api::core::v1::SecretReference>| {
        reference.map(|r| SecretName {
            namespace: r.namespace.unwrap_or_default(),
            name: r.name.unwrap_or_default(),
        })
    };
    Ok(Provided {
        source: Source::Csi(Volume {
            driver: source.driver,
            handle: source.volume_handle,
            name,
            lifecycle: LifecycleMode::Persistent,
            fs_type: source.fs_type.unwrap_or_default(),
            access_modes: modes,
            read_only,
            mount_options,
            attributes: source.volume_attributes.unwrap_or_default(),
            migrated: false,
        }),
        is_for_one_pod,
        access_mode,
        is_block,
        stage_secret: secret(source.node_stage_secret_ref),
        publish_secret: secret(source.node_publish_secret_ref),
        expand_secret: secret(source.node_expand_secret_ref),
        sizes: None,
        group,
        nodes,
        object_uid,
    })
}

/// Returns the access mode that allows most, as metrics name it (`getVolumeAccessMode`).
fn mode_label(modes: &[AccessMode]) -> &'static str {
    let names = [
        (AccessMode::ReadWriteMany, "RWX"),
        (AccessMode::ReadOnlyMany, "ROX"),
        (AccessMode::ReadWriteOnce, "RWO"),
        (AccessMode::ReadWriteOncePod, "RWOP"),
    ];
    names.iter().find(|(mode, _)| modes.contains(mode)).map_or("", |(_, name)| name)
}

/// Returns a volume that the node agent mounts.
#[must_use]
pub(crate) fn in_tree(volume: pod_sync_in_tree::volume::Volume) -> Provided {
    Provided {
        is_block: volume.is_block,
        source: Source::InTree(volume),
        is_for_one_pod: false,
        access_mode: INLINE,
        stage_secret: None,
        publish_secret: None,
        expand_secret: None,
        sizes: None,
        group: None,
        nodes: None,
        object_uid: None,
    }
}

/// Name of the field with the source of a PersistentVolume.
fn kind_of(spec: &serde_json::Value) -> Option<String> {
    const OTHERS: [&str; 9] = [
        "accessModes",
        "capacity",
        "claimRef",
        "mountOptions",
        "nodeAffinity",
        "persistentVolumeReclaimPolicy",
        "storageClassName",
        "volumeAttributesClassName",
        "volumeMode",
    ];
    spec.as_object()?.keys().find(|key| !OTHERS.contains(&key.as_str())).cloned()
}

/// Returns an inline volume of a pod.
#[must_use]
pub(crate) fn of_inline(pod: &Pod, uid: &PodUid, pod_volume: &str, source: &CSIVolumeSource) -> Provided {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let secret = source.node_publish_secret_ref.as_ref();
    Provided {
        source: Source::Csi(Volume {
            driver: source.driver.clone(),
            handle: inline_handle(uid.as_str(), pod_volume),
            name: pod_volume.to_owned(),
            lifecycle: LifecycleMode::Ephemeral,
            fs_type: source.fs_type.clone().unwrap_or_default(),
            access_modes: Vec::new(),
            read_only: source.read_only.unwrap_or(false),
            mount_options: Vec::new(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            migrated: false,
        }),
        is_for_one_pod: false,
        access_mode: INLINE,
        is_block: false,
        stage_secret: None,
        publish_secret: secret.map(|secret| SecretName { namespace, name: secret.name.clone() }),
        expand_secret: None,
        sizes: None,
        group: None,
        nodes: None,
        object_uid: None,
    }
}

/// Returns why a node cannot access a volume (`CheckNodeAffinity`). The selector of a PersistentVolume does
/// not see the node's name.
///
/// # Errors
/// Returns the kubelet's text.
pub(crate) fn check_node(volume: &Provided, node: Option<&Node>, name: &str) -> Result<(), String> {
    let Some(selector) = &volume.nodes else { return Ok(()) };
    let Some(node) = node else { return Err(format!("error retrieving node: node {name:?} not found")) };
    match node_selector::matches(selector, node.metadata.labels.as_ref(), None) {
        true => Ok(()),
        false => Err("no matching NodeSelectorTerms".to_owned()),
    }
}

/// Returns the groups of a pod's volumes that the pod does not have by itself
/// (`GetExtraSupplementalGroupsForPod`), sorted.
#[must_use]
pub(crate) fn extra_groups(pod: &Pod, groups: BTreeSet<i64>) -> Vec<i64> {
    let context = pods::spec(pod).security_context.as_ref();
    let own = context.and_then(|context| context.supplemental_groups.as_deref()).unwrap_or_default();
    groups.into_iter().filter(|group| !own.contains(group)).collect()
}

/// Returns the unique name of a volume: that of its driver and handle, or that of the pod and its inline
/// volume.
#[must_use]
pub(crate) fn unique_name(pod: &PodUid, volume: &Volume) -> VolumeName {
    match volume.lifecycle {
        LifecycleMode::Persistent => shared_name(&volume.driver, &volume.handle),
        LifecycleMode::Ephemeral => VolumeName::of_pod(PLUGIN, pod, &volume.name),
    }
}

/// Returns the unique name of a volume that pods share.
#[must_use]
pub(crate) fn shared_name(driver: &str, handle: &str) -> VolumeName {
    VolumeName::shared(PLUGIN, &format!("{driver}^{handle}"))
}

/// Returns the volume for the desired state.
#[must_use]
pub(crate) fn desired(
    pod: &PodUid,
    provided: &Provided,
    volume: &Volume,
    rules: &DriverRules,
) -> DesiredVolume {
    let reach = match volume.lifecycle {
        LifecycleMode::Persistent if rules.attach_required => Reach::Attachable,
        LifecycleMode::Persistent => Reach::DeviceMountable,
        LifecycleMode::Ephemeral => Reach::PerPod,
    };
    // A volume is not expanded through a pod that only reads it.
    let sizes = provided.sizes.as_ref().filter(|_| !volume.read_only);
    let size = sizes.map(Sizes::capacity_bytes).filter(|bytes| *bytes > 0);
    DesiredVolume { name: unique_name(pod, volume), spec_name: volume.name.clone(), reach, size, label: None }
}

fn bytes(quantity: Quantity) -> u64 {
    u64::try_from(quantity.value()).unwrap_or(0)
}

/// Returns the attributes that a driver receives of a volume, apart from tokens.
#[must_use]
pub(crate) fn attributes(pod: &Pod, volume: &Volume, rules: &DriverRules) -> BTreeMap<String, String> {
    let mut attributes = volume.attributes.clone();
    if rules.pod_info {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let info = PodInfo {
            name: text(&pod.metadata.name),
            namespace: text(&pod.metadata.namespace),
            uid: text(&pod.metadata.uid),
            service_account: text(&pods::spec(pod).service_account_name),
        };
        attributes.extend(info.attributes(volume.lifecycle));
    }
    attributes
}

#[cfg(test)]
mod tests;
