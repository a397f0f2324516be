//! From a volume of a pod to a volume of a driver: claim, PersistentVolume, CSIDriver
//! (`pkg/kubelet/volumemanager/populator: createVolumeSpec`). Plain functions of the objects.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    CSIVolumeSource, Container, PersistentVolume, PersistentVolumeClaim, Pod, Volume as PodVolume,
};
use k8s_openapi::api::storage::v1::{CSIDriver, TokenRequest};
use pod_sync_csi::PLUGIN;
use pod_sync_csi::paths::inline_handle;
use pod_sync_csi::volume::{AccessMode, FsGroupPolicy, PodInfo, Volume};
use pod_sync_csi::volume_data::LifecycleMode;
use pod_sync_volume_manager::VolumeName;
use pod_sync_volume_manager::desired::{DesiredVolume, Reach};
use pod_sync_volumes::is_of_driver;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

/// Finalizer of a claim that pods use.
const PROTECTION: &str = "kubernetes.io/pvc-protection";
/// Annotation of a PersistentVolume with the group that its pods get.
const GROUP: &str = "pv.beta.kubernetes.io/gid";
/// Annotation of a PersistentVolume with mount options, older than the field.
const MOUNT_OPTIONS: &str = "volume.beta.kubernetes.io/mount-options";

/// A Secret with credentials for a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretName {
    pub namespace: String,
    pub name: String,
}

/// A volume of a pod that a driver provides.
#[derive(Debug, Clone, PartialEq)]
pub struct Provided {
    /// The volume in the terms of the driver.
    pub csi: Volume,
    /// The pod gets a block device.
    pub is_block: bool,
    /// Credentials for staging.
    pub stage_secret: Option<SecretName>,
    /// Credentials for publishing.
    pub publish_secret: Option<SecretName>,
    /// Supplemental group of the pod's containers.
    pub group: Option<i64>,
}

/// The settings of a CSIDriver object, or those of a driver without one.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverRules {
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
    /// Life cycle modes that the driver supports; `None` without an object.
    lifecycle_modes: Option<Vec<String>>,
}

impl DriverRules {
    /// Returns the settings of an object.
    #[must_use]
    pub fn of(object: Option<&CSIDriver>) -> Self {
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
            tokens_in_secrets: spec.service_account_token_in_secrets.unwrap_or(false),
            lifecycle_modes: object.map(|_| modes.unwrap_or_else(|| vec!["Persistent".to_owned()])),
        }
    }

    /// Returns why the driver does not provide volumes of this mode (`supportsVolumeLifecycleMode`).
    #[must_use]
    pub fn refusal(&self, driver: &str, mode: LifecycleMode) -> Option<String> {
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
pub struct Uses {
    /// In `volumeMounts`.
    pub mounts: BTreeSet<String>,
    /// In `volumeDevices`.
    pub devices: BTreeSet<String>,
}

impl Uses {
    /// Returns the volumes that the containers of a pod use.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
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
pub fn provided(pod: &Pod) -> Vec<&PodVolume> {
    pod_sync_volumes::referenced(pod).into_iter().filter(|volume| is_of_driver(volume)).collect()
}

/// The claim of a pod's volume: its name, whether the pod uses it read-only, and whether it must belong to the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimOf {
    /// Name of the claim.
    pub name: String,
    /// Value of `readOnly`.
    pub read_only: bool,
    /// The volume is a generic ephemeral one.
    pub is_ephemeral: bool,
}

/// Returns the claim of a pod's volume, or `None` for an inline volume.
#[must_use]
pub fn claim_of(pod: &Pod, volume: &PodVolume) -> Option<ClaimOf> {
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
pub fn check_claim(pod: &Pod, of: &ClaimOf, claim: &PersistentVolumeClaim) -> Result<String, String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let metadata = &claim.metadata;
    if of.is_ephemeral {
        let owners = metadata.owner_references.iter().flatten();
        let mut controllers = owners.filter(|owner| owner.controller == Some(true));
        if !controllers.any(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref()) {
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            let claim = &of.name;
            return Err(format!(
                "PVC {namespace}/{claim} was not created for pod {namespace}/{pod} (pod is not owner)"
            ));
        }
    }
    let failed = |text: &str| Err(of_claim(namespace, &of.name, text));
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
pub fn of_claim(namespace: &str, claim: &str, text: &str) -> String {
    format!("error processing PVC {namespace}/{claim}: {text}")
}

/// Returns the volume of a PersistentVolume, if it is bound to the claim and the pod's containers use it as it is.
///
/// # Errors
/// Returns the kubelet's text.
pub fn of_persistent_volume(
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
    let Some(source) = spec.csi.clone() else {
        let kind = serde_json::to_value(&spec).ok().and_then(|spec| kind_of(&spec)).unwrap_or_default();
        let text = format!("no volume plugin matched: {kind} of PersistentVolume {name} is not supported");
        return Err(format!("failed to get Plugin from volumeSpec for volume {name:?} err={text}"));
    };
    let modes = spec.access_modes.iter().flatten().filter_map(|mode| AccessMode::parse(mode)).collect();
    let secret = |reference: Option<k8s_openapi::api::core::v1::SecretReference>| {
        reference.map(|r| SecretName {
            namespace: r.namespace.unwrap_or_default(),
            name: r.name.unwrap_or_default(),
        })
    };
    let annotation = |key: &str| object.metadata.annotations.as_ref().and_then(|all| all.get(key));
    let mut mount_options: Vec<String> = spec.mount_options.clone().unwrap_or_default();
    if let Some(options) = annotation(MOUNT_OPTIONS) {
        mount_options = options.split(',').map(|option| option.trim().to_owned()).collect();
    }
    Ok(Provided {
        csi: Volume {
            driver: source.driver,
            handle: source.volume_handle,
            name,
            lifecycle: LifecycleMode::Persistent,
            fs_type: source.fs_type.unwrap_or_default(),
            access_modes: modes,
            read_only,
            mount_options,
            attributes: source.volume_attributes.unwrap_or_default(),
        },
        is_block: mode == "Block",
        stage_secret: secret(source.node_stage_secret_ref),
        publish_secret: secret(source.node_publish_secret_ref),
        group: annotation(GROUP).and_then(|group| group.parse().ok()),
    })
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
pub fn of_inline(pod: &Pod, uid: &PodUid, pod_volume: &str, source: &CSIVolumeSource) -> Provided {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let secret = source.node_publish_secret_ref.as_ref();
    Provided {
        csi: Volume {
            driver: source.driver.clone(),
            handle: inline_handle(uid.as_str(), pod_volume),
            name: pod_volume.to_owned(),
            lifecycle: LifecycleMode::Ephemeral,
            fs_type: source.fs_type.clone().unwrap_or_default(),
            access_modes: Vec::new(),
            read_only: source.read_only.unwrap_or(false),
            mount_options: Vec::new(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
        },
        is_block: false,
        stage_secret: None,
        publish_secret: secret.map(|secret| SecretName { namespace, name: secret.name.clone() }),
        group: None,
    }
}

/// Returns the unique name of a volume: that of its driver and handle, or that of the pod and its inline volume.
#[must_use]
pub fn unique_name(pod: &PodUid, volume: &Volume) -> VolumeName {
    match volume.lifecycle {
        LifecycleMode::Persistent => shared_name(&volume.driver, &volume.handle),
        LifecycleMode::Ephemeral => VolumeName::of_pod(PLUGIN, pod, &volume.name),
    }
}

/// Returns the unique name of a volume that pods share.
#[must_use]
pub fn shared_name(driver: &str, handle: &str) -> VolumeName {
    VolumeName::shared(PLUGIN, &format!("{driver}^{handle}"))
}

/// Returns the volume for the desired state.
#[must_use]
pub fn desired(pod: &PodUid, volume: &Volume, rules: &DriverRules) -> DesiredVolume {
    let reach = match volume.lifecycle {
        LifecycleMode::Persistent if rules.attach_required => Reach::Attachable,
        LifecycleMode::Persistent => Reach::DeviceMountable,
        LifecycleMode::Ephemeral => Reach::PerPod,
    };
    DesiredVolume { name: unique_name(pod, volume), spec_name: volume.name.clone(), reach, size: None }
}

/// Returns the attributes that a driver receives of a volume, apart from tokens.
#[must_use]
pub fn attributes(pod: &Pod, volume: &Volume, rules: &DriverRules) -> BTreeMap<String, String> {
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
mod tests {
    use quintlet_testkit::pods::pod_json;
    use serde_json::{Value, json};

    use super::*;

    fn claim(change: Value) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": {"name": "data", "namespace": "default", "uid": "claim-1"},
            "spec": {"volumeName": "pv-1"}, "status": {"phase": "Bound"},
        });
        merge(&mut claim, change);
        serde_json::from_value(claim).unwrap()
    }

    fn volume(change: Value) -> PersistentVolume {
        let mut volume = json!({
            "metadata": {"name": "pv-1"},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
                "claimRef": {"namespace": "default", "name": "data", "uid": "claim-1"},
                "csi": {"driver": "d", "volumeHandle": "h", "fsType": "ext4", "readOnly": true,
                    "nodeStageSecretRef": {"namespace": "ns", "name": "s"}},
            },
        });
        merge(&mut volume, change);
        serde_json::from_value(volume).unwrap()
    }

    fn merge(into: &mut Value, change: Value) {
        match (into, change) {
            (Value::Object(into), Value::Object(change)) => {
                for (key, value) in change {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, change) => *into = change,
        }
    }

    fn pod() -> Pod {
        let mut pod = pod_json(json!({"containers": [{"name": "c"}]}));
        pod.metadata.namespace = Some("default".to_owned());
        pod.metadata.name = Some("web".to_owned());
        pod.metadata.uid = Some("u1".to_owned());
        pod
    }

    fn uses(mounts: &[&str], devices: &[&str]) -> Uses {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Uses { mounts: names(mounts), devices: names(devices) }
    }

    #[test]
    fn a_claim_that_cannot_be_used_has_the_kubelets_text() {
        let named = ClaimOf { name: "data".to_owned(), read_only: false, is_ephemeral: false };
        let ephemeral = ClaimOf { name: "web-data".to_owned(), is_ephemeral: true, ..named.clone() };
        let owner = |uid: &str, controller: bool| {
            json!({"metadata": {"ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": controller},
            ]}})
        };
        let deleted = "2026-01-01T00:00:00Z";
        for (of, change, expected) in [
            (&named, json!({}), Ok("pv-1")),
            (
                &named,
                json!({"status": {"phase": "Pending"}}),
                Err("error processing PVC default/data: PVC is not bound"),
            ),
            (
                &named,
                json!({"status": {"phase": "Lost"}}),
                Err("error processing PVC default/data: PVC is not bound"),
            ),
            (
                &named,
                json!({"spec": {"volumeName": ""}}),
                Err("error processing PVC default/data: PVC has empty pvc.Spec.VolumeName"),
            ),
            (
                &named,
                json!({"metadata": {"deletionTimestamp": deleted}}),
                Err("error processing PVC default/data: PVC is being deleted"),
            ),
            (
                &named,
                json!({"metadata": {"deletionTimestamp": deleted, "finalizers": [PROTECTION]}}),
                Ok("pv-1"),
            ),
            (&ephemeral, owner("u1", true), Ok("pv-1")),
            (
                &ephemeral,
                owner("u2", true),
                Err("PVC default/web-data was not created for pod default/web (pod is not owner)"),
            ),
            (
                &ephemeral,
                owner("u1", false),
                Err("PVC default/web-data was not created for pod default/web (pod is not owner)"),
            ),
        ] {
            let got = check_claim(&pod(), of, &claim(change.clone()));
            assert_eq!(got, expected.map(str::to_owned).map_err(str::to_owned), "{change}");
        }
    }

    #[test]
    fn a_volume_that_is_not_the_claims_has_the_kubelets_text() {
        let prefix = "error processing PVC default/data: found PV object pv-1 but";
        for (change, uses, expected) in [
            (
                json!({"spec": {"claimRef": null}}),
                uses(&["v"], &[]),
                format!("{prefix} it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"),
            ),
            (
                json!({"spec": {"claimRef": {"uid": "other"}}}),
                uses(&["v"], &[]),
                format!("{prefix} its pv.Spec.ClaimRef.UID other does not point to claim.UID claim-1"),
            ),
            (
                json!({"spec": {"volumeMode": "Block"}}),
                uses(&["v"], &[]),
                "volume v has volumeMode Block, but is specified in volumeMounts".to_owned(),
            ),
            (
                json!({}),
                uses(&[], &["v"]),
                "volume v has volumeMode Filesystem, but is specified in volumeDevices".to_owned(),
            ),
            (
                json!({"spec": {"csi": null, "nfs": {"server": "s", "path": "/"}}}),
                uses(&["v"], &[]),
                "failed to get Plugin from volumeSpec for volume \"pv-1\" err=no volume plugin matched: \
                 nfs of PersistentVolume pv-1 is not supported"
                    .to_owned(),
            ),
        ] {
            let got = of_persistent_volume("v", &uses, false, &claim(json!({})), &volume(change));
            assert_eq!(got.unwrap_err(), expected);
        }
    }

    #[test]
    fn the_claim_decides_whether_a_volume_is_read_only_and_options_come_from_field_or_annotation() {
        let of_pod = |source: Value| {
            let mut volume = json!({"name": "v"});
            volume["persistentVolumeClaim"] = source;
            claim_of(&pod(), &serde_json::from_value(volume).unwrap()).unwrap()
        };
        assert!(of_pod(json!({"claimName": "data", "readOnly": true})).read_only);
        assert!(!of_pod(json!({"claimName": "data"})).read_only);
        let of = |read_only, change| {
            of_persistent_volume("v", &uses(&["v"], &[]), read_only, &claim(json!({})), &volume(change))
                .unwrap()
        };
        let plain = of(false, json!({"spec": {"mountOptions": ["noatime"]}}));
        assert!(!plain.csi.read_only && !plain.is_block);
        assert_eq!(plain.csi.mount_options, ["noatime"]);
        assert_eq!(plain.stage_secret, Some(SecretName { namespace: "ns".into(), name: "s".into() }));
        assert!(of(true, json!({})).csi.read_only);
        let annotations = json!({MOUNT_OPTIONS: "ro, nodev", GROUP: "1234"});
        let annotated = of(false, json!({"metadata": {"annotations": annotations}}));
        assert_eq!(annotated.csi.mount_options, ["ro", "nodev"]);
        assert_eq!(annotated.group, Some(1234));
    }

    #[test]
    fn an_inline_volume_has_the_fields_of_its_pod() {
        let source: CSIVolumeSource = serde_json::from_value(json!({
            "driver": "d", "fsType": "xfs", "readOnly": true, "volumeAttributes": {"size": "1"},
            "nodePublishSecretRef": {"name": "s"},
        }))
        .unwrap();
        let uid = PodUid::parse("u1").unwrap();
        let provided = of_inline(&pod(), &uid, "v", &source);
        assert_eq!(
            provided.publish_secret,
            Some(SecretName { namespace: "default".into(), name: "s".into() })
        );
        let csi = provided.csi;
        assert_eq!((&*csi.driver, &*csi.fs_type, csi.read_only, &*csi.name), ("d", "xfs", true, "v"));
        assert_eq!(csi.attributes["size"], "1");
        assert_eq!(csi.handle, inline_handle("u1", "v"));
    }

    #[test]
    fn a_driver_provides_only_the_life_cycle_modes_of_its_object() {
        use LifecycleMode::{Ephemeral, Persistent};
        let rules = |modes: Option<&[&str]>| {
            let object = modes.map(|modes| {
                let driver = json!({"metadata": {"name": "d"}, "spec": {"volumeLifecycleModes": modes}});
                serde_json::from_value::<CSIDriver>(driver).unwrap()
            });
            DriverRules::of(object.as_ref())
        };
        let no_object = "volume mode \"Ephemeral\" not supported by driver d (no CSIDriver object)";
        let only = |mode: &str, other: &str| {
            format!("volume mode {mode:?} not supported by driver d (only supports [{other:?}])")
        };
        for (modes, mode, expected) in [
            (None, Persistent, None),
            (None, Ephemeral, Some(no_object.to_owned())),
            (Some(&[][..]), Persistent, None),
            (Some(&[]), Ephemeral, Some(only("Ephemeral", "Persistent"))),
            (Some(&["Ephemeral"]), Ephemeral, None),
            (Some(&["Ephemeral"]), Persistent, Some(only("Persistent", "Ephemeral"))),
        ] {
            assert_eq!(rules(modes).refusal("d", mode), expected, "{modes:?} {mode:?}");
        }
    }

    #[test]
    fn volumes_of_a_claim_are_attached_unless_the_driver_says_otherwise_and_inline_ones_belong_to_the_pod() {
        let uid = PodUid::parse("u1").unwrap();
        let object: CSIDriver =
            serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"attachRequired": false}}))
                .unwrap();
        let persistent =
            of_persistent_volume("v", &uses(&["v"], &[]), false, &claim(json!({})), &volume(json!({})))
                .unwrap();
        let attached = desired(&uid, &persistent.csi, &DriverRules::of(None));
        assert_eq!((attached.reach, attached.name.as_str()), (Reach::Attachable, "kubernetes.io/csi/d^h"));
        assert_eq!(
            desired(&uid, &persistent.csi, &DriverRules::of(Some(&object))).reach,
            Reach::DeviceMountable
        );
        let source = CSIVolumeSource { driver: "d".to_owned(), ..CSIVolumeSource::default() };
        let inline = of_inline(&pod(), &uid, "v", &source);
        let inline = desired(&uid, &inline.csi, &DriverRules::of(None));
        assert_eq!((inline.reach, inline.name.as_str()), (Reach::PerPod, "kubernetes.io/csi/u1-v"));
    }
}
