//! PersistentVolumes, and volumes of pods, of in-tree types whose plugins became CSI drivers
//! (`k8s.io/csi-translation-lib`). Plain functions.
//!
//! | type | driver |
//! |---|---|
//! | `awsElasticBlockStore` | `ebs.csi.aws.com` |
//! | `azureDisk` | `disk.csi.azure.com` |
//! | `azureFile` | `file.csi.azure.com` |
//! | `cinder` | `cinder.csi.openstack.org` |
//! | `gcePersistentDisk` | `pd.csi.storage.gke.io` |
//! | `portworxVolume` | `pxd.portworx.com` |
//! | `vsphereVolume` | `csi.vsphere.vmware.com` |

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    AWSElasticBlockStoreVolumeSource, AzureDiskVolumeSource, AzureFilePersistentVolumeSource,
    CSIPersistentVolumeSource, GCEPersistentDiskVolumeSource, NodeSelectorRequirement, NodeSelectorTerm,
    PersistentVolume, PersistentVolumeSpec, SecretReference, Volume as PodVolume,
    VsphereVirtualDiskVolumeSource,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

const AWS: &str = "ebs.csi.aws.com";
const AZURE_DISK: &str = "disk.csi.azure.com";
const AZURE_FILE: &str = "file.csi.azure.com";
const CINDER: &str = "cinder.csi.openstack.org";
const GCE: &str = "pd.csi.storage.gke.io";
const PORTWORX: &str = "pxd.portworx.com";
const VSPHERE: &str = "csi.vsphere.vmware.com";

const ZONE: &str = "topology.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
const OLD_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
const OLD_REGION: &str = "failure-domain.beta.kubernetes.io/region";
/// Separates the zones in a label.
const ZONES: &str = "__";

/// Translates a PersistentVolume of an in-tree type that became a CSI driver. Returns others unchanged.
///
/// # Errors
/// Returns the kubelet's text if a field of the volume is invalid.
pub fn to_csi(mut object: PersistentVolume) -> Result<PersistentVolume, String> {
    let Some(source) = csi_source(&mut object).map_err(failed)? else {
        return Ok(object);
    };
    let spec = object.spec.get_or_insert_default();
    spec.aws_elastic_block_store = None;
    spec.azure_disk = None;
    spec.azure_file = None;
    spec.cinder = None;
    spec.gce_persistent_disk = None;
    spec.portworx_volume = None;
    spec.vsphere_volume = None;
    spec.csi = Some(source);
    Ok(object)
}

fn failed(error: String) -> String {
    format!("failed to translate in-tree pv to CSI: {error}")
}

/// Returns the PersistentVolume that a volume of a pod in `namespace` stands for, or `None` if its type did
/// not become a CSI driver (`TranslateInTreeInlineVolumeToCSI`). Its name is that of the volume in paths and
/// events.
///
/// # Errors
/// Returns the kubelet's text if a field of the volume is invalid.
pub fn of_pod(volume: &PodVolume, namespace: &str) -> Result<Option<PersistentVolume>, String> {
    let translated = csi_source_of_pod(volume, namespace).map_err(failed)?;
    Ok(translated.map(|(name, access_mode, source)| PersistentVolume {
        metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
        spec: Some(PersistentVolumeSpec {
            access_modes: Some(vec![access_mode.to_owned()]),
            csi: Some(source),
            volume_mode: Some("Filesystem".to_owned()),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }))
}

/// The name of a volume, its access mode, and its source.
type OfPod = (String, &'static str, CSIPersistentVolumeSource);

fn csi_source_of_pod(volume: &PodVolume, namespace: &str) -> Result<Option<OfPod>, String> {
    const ONE_NODE: &str = "ReadWriteOnce";
    let one_node_or_readers = |read_only: Option<bool>| match read_only {
        Some(true) => "ReadOnlyMany",
        Some(false) | None => ONE_NODE,
    };
    let named = |source: CSIPersistentVolumeSource, access_mode| {
        let name = format!("{}-{}", source.driver, source.volume_handle);
        Ok(Some((name, access_mode, source)))
    };
    if let Some(source) = &volume.aws_elastic_block_store {
        return named(aws(source)?, ONE_NODE);
    }
    if let Some(source) = &volume.gce_persistent_disk {
        let access_mode = one_node_or_readers(source.read_only);
        let name = format!("{GCE}-{}", source.pd_name);
        return Ok(Some((name, access_mode, gce(&PersistentVolume::default(), source)?)));
    }
    if let Some(source) = &volume.cinder {
        let fs_type = source.fs_type.clone();
        return named(csi(CINDER, source.volume_id.clone(), fs_type, source.read_only), ONE_NODE);
    }
    if let Some(source) = &volume.azure_disk {
        return Ok(Some((source.disk_uri.clone(), ONE_NODE, azure_disk(source)?)));
    }
    if let Some(source) = &volume.azure_file {
        let namespace = if namespace.is_empty() { "default" } else { namespace };
        let of_share = AzureShare {
            group: "",
            secret: &source.secret_name,
            share: &source.share_name,
            volume: &volume.name,
            namespace,
            read_only: source.read_only,
        };
        let source = of_share.to_csi();
        return Ok(Some((source.volume_handle.clone(), "ReadWriteMany", source)));
    }
    if let Some(source) = &volume.vsphere_volume {
        return named(vsphere(source), ONE_NODE);
    }
    if let Some(source) = &volume.portworx_volume {
        let access_mode = one_node_or_readers(source.read_only);
        return named(csi(PORTWORX, source.volume_id.clone(), source.fs_type.clone(), None), access_mode);
    }
    Ok(None)
}

fn csi_source(object: &mut PersistentVolume) -> Result<Option<CSIPersistentVolumeSource>, String> {
    let Some(spec) = object.spec.clone() else { return Ok(None) };
    if let Some(source) = &spec.aws_elastic_block_store {
        translate_topology(object, "topology.ebs.csi.aws.com/zone");
        return aws(source).map(Some);
    }
    if let Some(source) = &spec.gce_persistent_disk {
        let source = gce(object, source)?;
        translate_topology(object, "topology.gke.io/zone");
        let modes = object.spec.get_or_insert_default().access_modes.take();
        object.spec.get_or_insert_default().access_modes = modes.map(|modes| gce_access_modes(&modes));
        return Ok(Some(source));
    }
    if let Some(source) = &spec.cinder {
        translate_topology(object, "topology.cinder.csi.openstack.org/zone");
        let fs_type = source.fs_type.clone();
        return Ok(Some(csi(CINDER, source.volume_id.clone(), fs_type, source.read_only)));
    }
    if let Some(source) = &spec.azure_disk {
        return azure_disk(source).map(Some);
    }
    if let Some(source) = &spec.azure_file {
        return azure_file(object, &spec, source).map(Some);
    }
    if let Some(source) = &spec.vsphere_volume {
        translate_vsphere_topology(object);
        return Ok(Some(vsphere(source)));
    }
    if let Some(source) = &spec.portworx_volume {
        let annotation =
            |key: &str| object.metadata.annotations.as_ref().and_then(|all| all.get(key)).cloned();
        let name = annotation("openstorage.io/auth-secret-name");
        let namespace = annotation("openstorage.io/auth-secret-namespace");
        let secret = name
            .zip(namespace)
            .map(|(name, namespace)| SecretReference { name: Some(name), namespace: Some(namespace) });
        return Ok(Some(CSIPersistentVolumeSource {
            controller_expand_secret_ref: secret.clone(),
            controller_publish_secret_ref: secret.clone(),
            node_expand_secret_ref: secret.clone(),
            node_publish_secret_ref: secret.clone(),
            node_stage_secret_ref: secret,
            ..csi(PORTWORX, source.volume_id.clone(), source.fs_type.clone(), None)
        }));
    }
    Ok(None)
}

fn csi(
    driver: &str,
    handle: String,
    fs_type: Option<String>,
    read_only: Option<bool>,
) -> CSIPersistentVolumeSource {
    CSIPersistentVolumeSource {
        driver: driver.to_owned(),
        volume_handle: handle,
        fs_type,
        read_only,
        ..CSIPersistentVolumeSource::default()
    }
}

fn attributes<const N: usize>(pairs: [(&str, String); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn aws(source: &AWSElasticBlockStoreVolumeSource) -> Result<CSIPersistentVolumeSource, String> {
    let handle = aws_volume_id(&source.volume_id)
        .map_err(|e| format!("failed to translate Kubernetes ID to EBS Volume ID {e}"))?;
    let partition = source.partition.unwrap_or(0).to_string();
    Ok(CSIPersistentVolumeSource {
        volume_attributes: Some(attributes([("partition", partition)])),
        ..csi(AWS, handle, source.fs_type.clone(), source.read_only)
    })
}

/// Returns the ID of an EBS volume: `vol-1` of `aws://zone/vol-1`, `aws:///vol-1` and `vol-1`.
fn aws_volume_id(id: &str) -> Result<String, String> {
    let Some(rest) = id.strip_prefix("aws://") else { return Ok(id.to_owned()) };
    let volume = rest.split_once('/').map_or("", |(_, path)| path).trim_matches('/');
    if volume.starts_with("vol-") && !volume.contains('/') {
        Ok(volume.to_owned())
    } else {
        Err(format!("Invalid format for AWS volume ({id})"))
    }
}

fn gce(
    object: &PersistentVolume,
    source: &GCEPersistentDiskVolumeSource,
) -> Result<CSIPersistentVolumeSource, String> {
    let labels = object.metadata.labels.as_ref();
    let label = |key: &str| labels.and_then(|labels| labels.get(key)).filter(|value| !value.is_empty());
    let zones = label(OLD_ZONE).or_else(|| label(ZONE));
    let zones: Vec<&str> = zones.map(|zones| zones.split(ZONES).collect()).unwrap_or_default();
    let place = match zones.as_slice() {
        [] => "zones/UNSPECIFIED".to_owned(),
        [zone] => format!("zones/{zone}"),
        zones => {
            let region = gce_region(zones).map_err(|e| format!("failed to get region from zones: {e}"))?;
            format!("regions/{region}")
        }
    };
    let handle = format!("projects/UNSPECIFIED/{place}/disks/{}", source.pd_name);
    let partition = source.partition.filter(|partition| *partition != 0);
    let partition = partition.map(|partition| partition.to_string()).unwrap_or_default();
    Ok(CSIPersistentVolumeSource {
        volume_attributes: Some(attributes([("partition", partition)])),
        ..csi(GCE, handle, source.fs_type.clone(), source.read_only)
    })
}

fn gce_region(zones: &[&str]) -> Result<String, String> {
    let mut regions = BTreeSet::new();
    for zone in zones {
        let [locale, region, _] = zone.split('-').collect::<Vec<_>>()[..] else {
            return Err(format!(
                "zone in unexpected format, expected: {{locale}}-{{region}}-{{zone}}, got: {zone}"
            ));
        };
        regions.insert(format!("{locale}-{region}"));
    }
    let mut regions = regions.into_iter();
    match (regions.next(), regions.next()) {
        (Some(region), None) => Ok(region),
        _ => Err(format!("multiple or no regions gotten from zones, got: [{}]", zones.join(" "))),
    }
}

/// Returns the access modes that the driver accepts. The in-tree plugin attached every disk to one node
/// (`backwardCompatibleAccessModes`).
fn gce_access_modes(modes: &[String]) -> Vec<String> {
    let is_read_only = !modes.is_empty() && modes.iter().all(|mode| mode == "ReadOnlyMany");
    vec![if is_read_only { "ReadOnlyMany" } else { "ReadWriteOnce" }.to_owned()]
}

fn azure_disk(source: &AzureDiskVolumeSource) -> Result<CSIPersistentVolumeSource, String> {
    if let Some(kind) = source.kind.as_ref().filter(|kind| !kind.eq_ignore_ascii_case("Managed")) {
        return Err(format!("kind({kind}) is not supported in csi migration"));
    }
    let mut all = attributes([("kind", "Managed".to_owned())]);
    all.extend(source.caching_mode.clone().map(|mode| ("cachingmode".to_owned(), mode)));
    all.extend(source.fs_type.clone().map(|fs_type| ("fstype".to_owned(), fs_type)));
    Ok(CSIPersistentVolumeSource {
        volume_attributes: Some(all),
        ..csi(AZURE_DISK, source.disk_uri.clone(), source.fs_type.clone(), source.read_only)
    })
}

fn azure_file(
    object: &PersistentVolume,
    spec: &PersistentVolumeSpec,
    source: &AzureFilePersistentVolumeSource,
) -> Result<CSIPersistentVolumeSource, String> {
    let annotation = "kubernetes.io/azure-file-resource-group";
    let group = object.metadata.annotations.as_ref().and_then(|all| all.get(annotation));
    let of_claim = || spec.claim_ref.as_ref().and_then(|claim| claim.namespace.clone());
    let namespace = source.secret_namespace.clone().or_else(of_claim).filter(|name| !name.is_empty());
    let namespace =
        namespace.ok_or("could not find a secret namespace in PersistentVolumeSource or ClaimRef")?;
    let of_share = AzureShare {
        group: group.map_or("", String::as_str),
        secret: &source.secret_name,
        share: &source.share_name,
        volume: object.metadata.name.as_deref().unwrap_or_default(),
        namespace: &namespace,
        read_only: source.read_only,
    };
    Ok(of_share.to_csi())
}

/// A share of Azure Files.
struct AzureShare<'a> {
    /// The resource group; empty for that of the node.
    group: &'a str,
    secret: &'a str,
    share: &'a str,
    /// Name of the PersistentVolume, or of the volume in its pod.
    volume: &'a str,
    /// Namespace of the Secret.
    namespace: &'a str,
    read_only: Option<bool>,
}

impl AzureShare<'_> {
    fn to_csi(&self) -> CSIPersistentVolumeSource {
        let Self { group, secret, share, volume, namespace, read_only } = *self;
        let account = storage_account(secret).unwrap_or(secret);
        let handle = format!("{group}#{account}#{share}#{volume}#{namespace}");
        let secret = SecretReference { name: Some(secret.to_owned()), namespace: Some(namespace.to_owned()) };
        CSIPersistentVolumeSource {
            node_stage_secret_ref: Some(secret),
            volume_attributes: Some(attributes([("sharename", share.to_owned())])),
            ..csi(AZURE_FILE, handle, None, read_only)
        }
    }
}

/// Returns the storage account in the name of a Secret, `azure-storage-account-<account>-secret`.
fn storage_account(secret: &str) -> Option<&str> {
    let (_, rest) = secret.split_once("azure-storage-account-")?;
    rest.rsplit_once("-secret").map(|(account, _)| account).filter(|account| !account.is_empty())
}

fn vsphere(source: &VsphereVirtualDiskVolumeSource) -> CSIPersistentVolumeSource {
    let policy = source.storage_policy_name.clone().filter(|policy| !policy.is_empty());
    CSIPersistentVolumeSource {
        volume_attributes: Some(
            policy.map(|policy| ("storagepolicyname".to_owned(), policy)).into_iter().collect(),
        ),
        ..csi(VSPHERE, source.volume_path.clone(), source.fs_type.clone(), None)
    }
}

/// Returns the terms of the node affinity, which is created if it does not exist.
fn terms(object: &mut PersistentVolume) -> &mut Vec<NodeSelectorTerm> {
    let affinity = object.spec.get_or_insert_default().node_affinity.get_or_insert_default();
    &mut affinity.required.get_or_insert_default().node_selector_terms
}

fn requirements(object: &PersistentVolume) -> impl Iterator<Item = &NodeSelectorRequirement> {
    let affinity = object.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let terms = affinity.and_then(|affinity| affinity.required.as_ref());
    let terms = terms.into_iter().flat_map(|required| &required.node_selector_terms);
    terms.flat_map(|term| term.match_expressions.iter().flatten())
}

fn has_key(object: &PersistentVolume, key: &str) -> bool {
    requirements(object).any(|requirement| requirement.key == key)
}

/// Returns the keys for zone and region that a volume uses (`getTopologyLabel`).
fn topology_keys(object: &PersistentVolume) -> (&'static str, &'static str) {
    let has_label =
        |key: &str| object.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(key));
    let (now, old) = ((ZONE, REGION), (OLD_ZONE, OLD_REGION));
    if has_key(object, ZONE) {
        now
    } else if has_key(object, OLD_ZONE) || !has_label(ZONE) && has_label(OLD_ZONE) {
        old
    } else {
        now
    }
}

/// Returns whether a requirement with the key has a value.
fn has_values(object: &PersistentVolume, key: &str) -> bool {
    requirements(object).any(|r| r.key == key && r.values.as_ref().is_some_and(|values| !values.is_empty()))
}

fn replace_key(object: &mut PersistentVolume, old: &str, new: &str) {
    for term in terms(object) {
        for requirement in term.match_expressions.iter_mut().flatten().filter(|r| r.key == old) {
            requirement.key = new.to_owned();
        }
    }
}

/// Adds a requirement to each term. Does nothing without a value.
fn add_requirement(object: &mut PersistentVolume, key: &str, values: &str) {
    let values: BTreeSet<&str> =
        values.split(ZONES).map(str::trim).filter(|value| !value.is_empty()).collect();
    if values.is_empty() {
        return;
    }
    let values: Vec<String> = values.into_iter().map(str::to_owned).collect();
    let terms = terms(object);
    if terms.is_empty() {
        terms.push(NodeSelectorTerm::default());
    }
    for term in terms {
        term.match_expressions.get_or_insert_default().push(NodeSelectorRequirement {
            key: key.to_owned(),
            operator: "In".to_owned(),
            values: Some(values.clone()),
        });
    }
}

/// Replaces a key in the node affinity, or adds a requirement from the label with that key.
fn translate_key(object: &mut PersistentVolume, old: &str, new: &str) {
    if has_values(object, old) {
        replace_key(object, old, new);
    } else if let Some(label) = object.metadata.labels.as_ref().and_then(|labels| labels.get(old)).cloned() {
        add_requirement(object, new, &label);
    }
}

/// Replaces the zone by the driver's topology key (`translateTopologyFromInTreeToCSI`).
fn translate_topology(object: &mut PersistentVolume, key: &str) {
    let (zone, region) = topology_keys(object);
    translate_key(object, zone, key);
    if region == OLD_REGION && has_values(object, OLD_REGION) {
        replace_key(object, OLD_REGION, REGION);
    }
}

fn translate_vsphere_topology(object: &mut PersistentVolume) {
    let (zone, region) = topology_keys(object);
    translate_key(object, zone, "topology.csi.vmware.com/zone");
    translate_key(object, region, "topology.csi.vmware.com/region");
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn translated(volume: Value) -> Result<Value, String> {
        let object = serde_json::from_value(volume).unwrap();
        to_csi(object).map(|object| serde_json::to_value(object.spec).unwrap())
    }

    #[test]
    fn each_type_becomes_its_driver_with_the_kubelets_handle_and_attributes() {
        for (source, metadata, expected) in [
            (
                json!({"awsElasticBlockStore": {"volumeID": "aws://us-east-1a/vol-1", "fsType": "xfs", "partition": 2}}),
                json!({}),
                json!({"driver": AWS, "volumeHandle": "vol-1", "fsType": "xfs", "volumeAttributes": {"partition": "2"}}),
            ),
            (
                json!({"awsElasticBlockStore": {"volumeID": "vol-2", "readOnly": true}}),
                json!({}),
                json!({"driver": AWS, "volumeHandle": "vol-2", "readOnly": true, "volumeAttributes": {"partition": "0"}}),
            ),
            (
                json!({"gcePersistentDisk": {"pdName": "d", "fsType": "ext4"}}),
                json!({}),
                json!({"driver": GCE, "volumeHandle": "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d", "fsType": "ext4",
                    "volumeAttributes": {"partition": ""}}),
            ),
            (
                json!({"gcePersistentDisk": {"pdName": "d", "partition": 1}}),
                json!({"labels": {ZONE: "us-east1-a__us-east1-b"}}),
                json!({"driver": GCE, "volumeHandle": "projects/UNSPECIFIED/regions/us-east1/disks/d",
                    "volumeAttributes": {"partition": "1"}}),
            ),
            (
                json!({"cinder": {"volumeID": "c", "fsType": "ext4"}}),
                json!({}),
                json!({"driver": CINDER, "volumeHandle": "c", "fsType": "ext4"}),
            ),
            (
                json!({"azureDisk": {"diskName": "d", "diskURI": "/u", "cachingMode": "None", "fsType": "ext4"}}),
                json!({}),
                json!({"driver": AZURE_DISK, "volumeHandle": "/u", "fsType": "ext4",
                    "volumeAttributes": {"kind": "Managed", "cachingmode": "None", "fstype": "ext4"}}),
            ),
            (
                json!({"azureFile": {"secretName": "azure-storage-account-acc-secret", "shareName": "s"}}),
                json!({"annotations": {"kubernetes.io/azure-file-resource-group": "rg"}}),
                json!({"driver": AZURE_FILE, "volumeHandle": "rg#acc#s#pv-1#ns", "volumeAttributes": {"sharename": "s"},
                    "nodeStageSecretRef": {"name": "azure-storage-account-acc-secret", "namespace": "ns"}}),
            ),
            (
                json!({"vsphereVolume": {"volumePath": "[ds] a/b.vmdk", "fsType": "ext4", "storagePolicyName": "gold"}}),
                json!({}),
                json!({"driver": VSPHERE, "volumeHandle": "[ds] a/b.vmdk", "fsType": "ext4",
                    "volumeAttributes": {"storagepolicyname": "gold"}}),
            ),
            (
                json!({"portworxVolume": {"volumeID": "p", "fsType": "xfs"}}),
                json!({}),
                json!({"driver": PORTWORX, "volumeHandle": "p", "fsType": "xfs"}),
            ),
        ] {
            let mut spec = json!({"claimRef": {"namespace": "ns"}});
            spec.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
            let mut metadata = metadata;
            metadata["name"] = json!("pv-1");
            let spec = translated(json!({"metadata": metadata, "spec": spec})).unwrap();
            assert_eq!(spec["csi"], expected, "{source}");
            assert!(source.as_object().unwrap().keys().all(|key| spec.get(key).is_none()), "{spec}");
        }
    }

    #[test]
    fn a_volume_of_a_pod_has_the_name_handle_and_access_mode_that_the_kubelet_gives_it() {
        for (source, name, access_mode, expected) in [
            (
                json!({"awsElasticBlockStore": {"volumeID": "aws://z/vol-1", "fsType": "xfs", "readOnly": true}}),
                "ebs.csi.aws.com-vol-1",
                "ReadWriteOnce",
                json!({"driver": AWS, "volumeHandle": "vol-1", "fsType": "xfs", "readOnly": true,
                    "volumeAttributes": {"partition": "0"}}),
            ),
            (
                json!({"gcePersistentDisk": {"pdName": "d", "partition": 3, "readOnly": true}}),
                "pd.csi.storage.gke.io-d",
                "ReadOnlyMany",
                json!({"driver": GCE, "volumeHandle": "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d",
                    "readOnly": true, "volumeAttributes": {"partition": "3"}}),
            ),
            (
                json!({"gcePersistentDisk": {"pdName": "d"}}),
                "pd.csi.storage.gke.io-d",
                "ReadWriteOnce",
                json!({"driver": GCE, "volumeHandle": "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d",
                    "volumeAttributes": {"partition": ""}}),
            ),
            (
                json!({"cinder": {"volumeID": "c", "fsType": "ext4"}}),
                "cinder.csi.openstack.org-c",
                "ReadWriteOnce",
                json!({"driver": CINDER, "volumeHandle": "c", "fsType": "ext4"}),
            ),
            (
                json!({"azureDisk": {"diskName": "d", "diskURI": "/subscriptions/u", "kind": "managed"}}),
                "/subscriptions/u",
                "ReadWriteOnce",
                json!({"driver": AZURE_DISK, "volumeHandle": "/subscriptions/u", "volumeAttributes": {"kind": "Managed"}}),
            ),
            (
                json!({"azureFile": {"secretName": "azure-storage-account-acc-secret", "shareName": "s"}}),
                "#acc#s#v#ns",
                "ReadWriteMany",
                json!({"driver": AZURE_FILE, "volumeHandle": "#acc#s#v#ns", "volumeAttributes": {"sharename": "s"},
                    "nodeStageSecretRef": {"name": "azure-storage-account-acc-secret", "namespace": "ns"}}),
            ),
            (
                json!({"vsphereVolume": {"volumePath": "[ds] a.vmdk", "storagePolicyName": "gold"}}),
                "csi.vsphere.vmware.com-[ds] a.vmdk",
                "ReadWriteOnce",
                json!({"driver": VSPHERE, "volumeHandle": "[ds] a.vmdk", "volumeAttributes": {"storagepolicyname": "gold"}}),
            ),
            (
                json!({"portworxVolume": {"volumeID": "p", "readOnly": true}}),
                "pxd.portworx.com-p",
                "ReadOnlyMany",
                json!({"driver": PORTWORX, "volumeHandle": "p"}),
            ),
        ] {
            let mut volume = source.clone();
            volume["name"] = json!("v");
            let object = of_pod(&serde_json::from_value(volume).unwrap(), "ns").unwrap().unwrap();
            assert_eq!(object.metadata.name.as_deref(), Some(name), "{source}");
            let spec = serde_json::to_value(object.spec).unwrap();
            assert_eq!(
                spec,
                json!({"accessModes": [access_mode], "volumeMode": "Filesystem", "csi": expected}),
                "{source}"
            );
        }
    }

    #[test]
    fn a_volume_of_a_pod_with_an_invalid_field_has_the_kubelets_text_and_other_types_stay() {
        let translated = |source: Value| {
            let mut volume = source;
            volume["name"] = json!("v");
            of_pod(&serde_json::from_value(volume).unwrap(), "ns")
        };
        for (source, expected) in [
            (
                json!({"awsElasticBlockStore": {"volumeID": "aws://z/disk"}}),
                "failed to translate Kubernetes ID to EBS Volume ID Invalid format for AWS volume (aws://z/disk)",
            ),
            (
                json!({"azureDisk": {"diskName": "d", "diskURI": "u", "kind": "Dedicated"}}),
                "kind(Dedicated) is not supported in csi migration",
            ),
        ] {
            assert_eq!(
                translated(source).unwrap_err(),
                format!("failed to translate in-tree pv to CSI: {expected}")
            );
        }
        assert_eq!(translated(json!({"nfs": {"path": "/p", "server": "s"}})).unwrap(), None);
        assert_eq!(translated(json!({"rbd": {"image": "i", "monitors": []}})).unwrap(), None);
    }

    #[test]
    fn the_zone_of_a_volume_becomes_the_drivers_topology() {
        let affinity = |key: &str, values: Value| json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "In", "values": values}]}]}});
        let ebs = "topology.ebs.csi.aws.com/zone";
        for (metadata, before, after) in [
            (json!({}), affinity(ZONE, json!(["a"])), affinity(ebs, json!(["a"]))),
            (json!({}), affinity(OLD_ZONE, json!(["a"])), affinity(ebs, json!(["a"]))),
            (json!({"labels": {ZONE: "b__a"}}), Value::Null, affinity(ebs, json!(["a", "b"]))),
            (json!({"labels": {OLD_ZONE: "a"}}), Value::Null, affinity(ebs, json!(["a"]))),
            (
                json!({}),
                affinity("kubernetes.io/hostname", json!(["n"])),
                affinity("kubernetes.io/hostname", json!(["n"])),
            ),
            (json!({}), Value::Null, Value::Null),
        ] {
            let mut spec = json!({"awsElasticBlockStore": {"volumeID": "vol-1"}});
            if !before.is_null() {
                spec["nodeAffinity"] = before.clone();
            }
            let spec = translated(json!({"metadata": metadata, "spec": spec})).unwrap();
            assert_eq!(spec["nodeAffinity"], after, "{metadata} {before}");
        }
    }

    #[test]
    fn an_invalid_volume_has_the_kubelets_text_and_other_types_stay() {
        for (source, expected) in [
            (
                json!({"awsElasticBlockStore": {"volumeID": "aws://z/disk"}}),
                "failed to translate Kubernetes ID to EBS Volume ID Invalid format for AWS volume (aws://z/disk)",
            ),
            (
                json!({"azureDisk": {"diskName": "d", "diskURI": "u", "kind": "Shared"}}),
                "kind(Shared) is not supported in csi migration",
            ),
            (
                json!({"azureFile": {"secretName": "s", "shareName": "s"}}),
                "could not find a secret namespace in PersistentVolumeSource or ClaimRef",
            ),
        ] {
            let error = translated(json!({"metadata": {"name": "pv-1"}, "spec": source})).unwrap_err();
            assert_eq!(error, format!("failed to translate in-tree pv to CSI: {expected}"));
        }
        let nfs = json!({"nfs": {"path": "/p", "server": "s"}});
        assert_eq!(translated(json!({"metadata": {}, "spec": nfs})).unwrap(), nfs);
    }

    #[test]
    fn a_disk_of_gce_has_one_access_mode() {
        for (modes, expected) in [
            (&["ReadWriteOnce"][..], "ReadWriteOnce"),
            (&["ReadWriteMany"], "ReadWriteOnce"),
            (&["ReadOnlyMany"], "ReadOnlyMany"),
            (&["ReadOnlyMany", "ReadWriteOnce"], "ReadWriteOnce"),
        ] {
            let modes: Vec<String> = modes.iter().map(|mode| (*mode).to_owned()).collect();
            assert_eq!(gce_access_modes(&modes), [expected], "{modes:?}");
        }
    }
}
