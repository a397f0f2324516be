//! Validates volumes and their sources.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    AzureDiskVolumeSource, DownwardAPIVolumeFile, FCVolumeSource, ISCSIVolumeSource, KeyToPath,
    LocalObjectReference, PodSpec, ProjectedVolumeSource, QuobyteVolumeSource, StorageOSVolumeSource, Volume,
};

use super::errors::Errors;
use super::field_ref::field_ref;
use super::security::id;
use super::{names, resources};

const FIELDS_OF_FILES: [&str; 5] =
    ["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];
const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];
const MAX_ISCSI: usize = 64;

/// Valid volumes, by name.
pub(super) type Volumes<'a> = BTreeMap<&'a str, &'a Volume>;

/// `ValidateVolumes`
pub(super) fn all<'a>(spec: &'a PodSpec, errors: &mut Errors) -> Volumes<'a> {
    let mut volumes = Volumes::new();
    for (i, volume) in spec.volumes.iter().flatten().enumerate() {
        let path = format!("spec.volumes[{i}]");
        let before = errors.len();
        api_references(volume, &path, errors);
        source(volume, &path, errors);
        let name = volume.name.as_str();
        match name {
            "" => errors.required(format_args!("{path}.name"), ""),
            name => errors.format(format_args!("{path}.name"), name, names::dns_label(name)),
        }
        if volumes.contains_key(name) {
            errors.duplicate(format_args!("{path}.name"), name);
        }
        if errors.len() == before {
            volumes.insert(name, volume);
        }
    }
    volumes
}

// A kubelet rejects a static pod with a reference to an object that only the API server has.
fn api_references(volume: &Volume, path: &str, errors: &mut Errors) {
    for (is_set, field, what) in [
        (volume.persistent_volume_claim.is_some(), "persistentVolumeClaim", "persistentvolumeclaims"),
        (volume.ephemeral.is_some(), "ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
        (volume.csi.is_some(), "csi", "csidrivers (via CSI volumes)"),
        (volume.glusterfs.is_some(), "glusterfs", "endpoints (via glusterFS volumes)"),
        (volume.azure_file.is_some(), "azureFile", "secrets (via azureFile volumes)"),
    ] {
        if is_set {
            errors
                .plain(format_args!("{path}.{field}"), format_args!("static pods may not reference {what}"));
        }
    }
    for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
        for (is_set, what) in [
            (source.service_account_token.is_some(), "serviceaccounts (via projected volumes)"),
            (source.cluster_trust_bundle.is_some(), "clustertrustbundles"),
            (source.pod_certificate.is_some(), "podcertificates"),
        ] {
            if is_set {
                errors.plain(
                    format_args!("{path}.projected"),
                    format_args!("static pods may not reference {what}"),
                );
            }
        }
    }
}

/// Returns the sources, in the order in which upstream checks them.
fn sources(v: &Volume) -> Vec<&'static str> {
    [
        ("emptyDir", v.empty_dir.is_some()),
        ("hostPath", v.host_path.is_some()),
        ("gitRepo", v.git_repo.is_some()),
        ("gcePersistentDisk", v.gce_persistent_disk.is_some()),
        ("awsElasticBlockStore", v.aws_elastic_block_store.is_some()),
        ("secret", v.secret.is_some()),
        ("nfs", v.nfs.is_some()),
        ("iscsi", v.iscsi.is_some()),
        ("glusterfs", v.glusterfs.is_some()),
        ("flocker", v.flocker.is_some()),
        ("persistentVolumeClaim", v.persistent_volume_claim.is_some()),
        ("rbd", v.rbd.is_some()),
        ("cinder", v.cinder.is_some()),
        ("cephfs", v.cephfs.is_some()),
        ("quobyte", v.quobyte.is_some()),
        ("downwardAPI", v.downward_api.is_some()),
        ("fc", v.fc.is_some()),
        ("flexVolume", v.flex_volume.is_some()),
        ("configMap", v.config_map.is_some()),
        ("azureFile", v.azure_file.is_some()),
        ("vsphereVolume", v.vsphere_volume.is_some()),
        ("photonPersistentDisk", v.photon_persistent_disk.is_some()),
        ("portworxVolume", v.portworx_volume.is_some()),
        ("azureDisk", v.azure_disk.is_some()),
        ("storageos", v.storageos.is_some()),
        ("projected", v.projected.is_some()),
        ("scaleIO", v.scale_io.is_some()),
        ("csi", v.csi.is_some()),
        ("ephemeral", v.ephemeral.is_some()),
        ("image", v.image.is_some()),
    ]
    .into_iter()
    .filter_map(|(name, is_set)| is_set.then_some(name))
    .collect()
}

/// Returns whether a volume has no source.
#[must_use]
pub(crate) fn has_no_source(volume: &Volume) -> bool {
    sources(volume).is_empty()
}

// validateVolumeSource. If several sources are set, the first is checked.
fn source(v: &Volume, path: &str, errors: &mut Errors) {
    let set = sources(v);
    let Some((first, others)) = set.split_first() else {
        return errors.required(path, "must specify a volume type");
    };
    for other in others {
        errors.forbidden(format_args!("{path}.{other}"), "may not specify more than 1 volume type");
    }
    let path = format!("{path}.{first}");
    match *first {
        "emptyDir" | "hostPath" | "gitRepo" | "secret" | "configMap" | "downwardAPI" | "projected" => {
            local(v, &path, errors);
        }
        "iscsi" => {
            if let Some(source) = v.iscsi.as_ref() {
                iscsi(source, &v.name, &path, errors);
            }
        }
        _ => remote(v, &path, errors),
    }
}

fn required(fields: &[(&str, Option<&str>)], path: &str, errors: &mut Errors) {
    for (field, value) in fields {
        if value.unwrap_or_default().is_empty() {
            errors.required(format_args!("{path}.{field}"), "");
        }
    }
}

fn mode(mode: Option<i32>, field: &str, path: &str, errors: &mut Errors) {
    if let Some(mode) = mode.filter(|m| !(0..=0o777).contains(m)) {
        errors.invalid(format_args!("{path}.{field}"), mode, names::MODE);
    }
}

fn local(v: &Volume, path: &str, errors: &mut Errors) {
    if let Some(mode) = v.empty_dir.as_ref().and_then(|s| s.mode).filter(|m| !(0..=0o1777).contains(m)) {
        let detail = "must be a number between 0 and 01777 (octal), both inclusive";
        errors.invalid(format_args!("{path}.mode"), mode, detail);
    }
    if let Some(limit) = v.empty_dir.as_ref().and_then(|s| s.size_limit.as_ref()) {
        let path = format!("{path}.sizeLimit");
        if resources::parse(limit, &path, errors).is_some_and(resources::is_negative) {
            errors.forbidden(path, "SizeLimit field must be a valid resource quantity");
        }
    } else if v.empty_dir.is_some() {
    } else if let Some(source) = v.host_path.as_ref() {
        if source.path.is_empty() {
            return errors.required(format_args!("{path}.path"), "");
        }
        errors.format(format_args!("{path}.path"), &source.path, names::path_without_backsteps(&source.path));
        errors.word_if_set(format_args!("{path}.type"), source.type_.as_deref(), &HOST_PATH_TYPES);
    } else if let Some(source) = v.git_repo.as_ref() {
        required(&[("repository", Some(&source.repository))], path, errors);
        let directory = source.directory.as_deref().unwrap_or_default();
        errors.format(format_args!("{path}.directory"), directory, names::descending_path(directory));
    } else if let Some(source) = v.secret.as_ref() {
        required(&[("secretName", source.secret_name.as_deref())], path, errors);
        mode(source.default_mode, "defaultMode", path, errors);
        id(source.default_user, format_args!("{path}.defaultUser"), errors);
        items(source.items.as_deref(), path, errors);
    } else if let Some(source) = v.downward_api.as_ref() {
        mode(source.default_mode, "defaultMode", path, errors);
        id(source.default_user, format_args!("{path}.defaultUser"), errors);
        for file in source.items.iter().flatten() {
            downward_file(file, path, errors);
        }
    } else if let Some(source) = v.config_map.as_ref() {
        required(&[("name", Some(&source.name))], path, errors);
        mode(source.default_mode, "defaultMode", path, errors);
        id(source.default_user, format_args!("{path}.defaultUser"), errors);
        items(source.items.as_deref(), path, errors);
    } else if let Some(source) = v.projected.as_ref() {
        projected(source, path, errors);
    }
}

fn items(items: Option<&[KeyToPath]>, path: &str, errors: &mut Errors) {
    for (i, item) in items.unwrap_or_default().iter().enumerate() {
        let path = format!("{path}.items[{i}]");
        required(&[("key", Some(&item.key)), ("path", Some(&item.path))], &path, errors);
        errors.format(format_args!("{path}.path"), &item.path, names::unreserved_path(&item.path));
        mode(item.mode, "mode", &path, errors);
        id(item.user, format_args!("{path}.user"), errors);
    }
}

// validateDownwardAPIVolumeFile. As upstream, the path does not identify the file.
fn downward_file(file: &DownwardAPIVolumeFile, path: &str, errors: &mut Errors) {
    required(&[("path", Some(&file.path))], path, errors);
    errors.format(format_args!("{path}.path"), &file.path, names::unreserved_path(&file.path));
    if let Some(field) = file.field_ref.as_ref() {
        field_ref(field, &FIELDS_OF_FILES, &format!("{path}.fieldRef"), errors);
        if file.resource_field_ref.is_some() {
            let detail = "fieldRef and resourceFieldRef can not be specified simultaneously";
            errors.invalid(path, "resource", detail);
        }
    } else if let Some(resource) = file.resource_field_ref.as_ref() {
        resources::field_ref(resource, true, &format!("{path}.resourceFieldRef"), errors);
    } else {
        errors.required(path, "one of fieldRef and resourceFieldRef is required");
    }
    mode(file.mode, "mode", path, errors);
    id(file.user, format_args!("{path}.user"), errors);
}

// validateProjectedVolumeSource
fn projected(source: &ProjectedVolumeSource, path: &str, errors: &mut Errors) {
    mode(source.default_mode, "defaultMode", path, errors);
    id(source.default_user, format_args!("{path}.defaultUser"), errors);
    let mut paths = BTreeSet::new();
    for (i, source) in source.sources.iter().flatten().enumerate() {
        let at = format!("{path}.sources[{i}]");
        let secret = source.secret.as_ref().map(|s| ("secret", &s.name, s.items.as_deref()));
        let config_map = source.config_map.as_ref().map(|s| ("configMap", &s.name, s.items.as_deref()));
        for (field, name, keys) in [secret, config_map].into_iter().flatten() {
            let at = format!("{at}.{field}");
            required(&[("name", Some(name))], &at, errors);
            items(keys, &at, errors);
            for item in keys.unwrap_or_default().iter().filter(|item| !item.path.is_empty()) {
                if !paths.insert(item.path.as_str()) {
                    errors.invalid(path, name.as_str(), "conflicting duplicate paths");
                }
            }
        }
        for file in source.downward_api.iter().flat_map(|d| d.items.iter().flatten()) {
            downward_file(file, &format!("{at}.downwardAPI"), errors);
            if !file.path.is_empty() && !paths.insert(file.path.as_str()) {
                errors.invalid(path, file.path.as_str(), "conflicting duplicate paths");
            }
        }
        for (field, user) in [
            ("serviceAccountToken", source.service_account_token.as_ref().and_then(|s| s.user)),
            ("clusterTrustBundle", source.cluster_trust_bundle.as_ref().and_then(|s| s.user)),
            ("podCertificate", source.pod_certificate.as_ref().and_then(|s| s.user)),
        ] {
            id(user, format_args!("{at}.{field}.user"), errors);
        }
        let kinds = [
            source.secret.is_some(),
            source.config_map.is_some(),
            source.downward_api.is_some(),
            source.service_account_token.is_some(),
            source.cluster_trust_bundle.is_some(),
            source.pod_certificate.is_some(),
        ];
        if kinds.iter().filter(|is_set| **is_set).count() > 1 {
            errors.forbidden(at, "may not specify more than 1 volume type per source");
        }
    }
}

fn lun(lun: i32, path: &str, errors: &mut Errors) {
    if !(0..=255).contains(&lun) {
        errors.invalid(format_args!("{path}.lun"), lun, "must be between 0 and 255, inclusive");
    }
}

// validateISCSIVolumeSource
fn iscsi(source: &ISCSIVolumeSource, name: &str, path: &str, errors: &mut Errors) {
    required(&[("targetPortal", Some(&source.target_portal)), ("iqn", Some(&source.iqn))], path, errors);
    let is_name = |text: &str| ["iqn", "eui", "naa"].iter().any(|prefix| text.starts_with(prefix));
    let named = [("iqn", Some(source.iqn.as_str())), ("initiatorname", source.initiator_name.as_deref())];
    for (field, value) in named {
        let Some(value) = value.filter(|v| !(field == "iqn" && v.is_empty())) else { continue };
        if !is_name(value) {
            let detail = "must be valid format starting with iqn, eui, or naa";
            errors.invalid(format_args!("{path}.{field}"), value, detail);
        } else if !is_iscsi_name(value) {
            errors.invalid(format_args!("{path}.{field}"), value, "must be valid format");
        }
    }
    lun(source.lun, path, errors);
    let is_chap = [source.chap_auth_discovery, source.chap_auth_session].contains(&Some(true));
    if is_chap && source.secret_ref.is_none() {
        errors.required(format_args!("{path}.secretRef"), "");
    }
    let together = name.len().saturating_add(1).saturating_add(source.target_portal.len());
    if source.initiator_name.is_some() && together > MAX_ISCSI {
        let path = path.strip_suffix(".iscsi").unwrap_or(path);
        let detail = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.";
        errors.invalid(format_args!("{path}.name"), name, detail);
    }
}

// iqn.YYYY-MM.reverse.domain[:anything], eui. with 16 hexadecimal digits, naa. with 16 or 32.
fn is_iscsi_name(text: &str) -> bool {
    let Some((kind, rest)) = text.split_once('.') else { return false };
    let is_hex = rest.bytes().all(|b| b.is_ascii_hexdigit());
    match kind {
        "eui" => rest.len() == 16 && is_hex,
        "naa" => [16, 32].contains(&rest.len()) && is_hex,
        "iqn" => {
            let Some((date, domain)) = rest.split_once('.') else { return false };
            let is_date = date.len() == 7
                && date.bytes().enumerate().all(|(i, b)| if i == 4 { b == b'-' } else { b.is_ascii_digit() });
            let domain = domain.split_once(':').map_or(domain, |(domain, _)| domain);
            is_date && domain.starts_with(|c: char| c.is_ascii_alphanumeric())
        }
        _ => false,
    }
}

fn secret_ref(secret: Option<&LocalObjectReference>, path: &str, errors: &mut Errors) {
    if secret.is_some_and(|s| s.name.is_empty()) {
        errors.required(format_args!("{path}.secretRef.name"), "");
    }
}

fn partition(partition: Option<i32>, path: &str, errors: &mut Errors) {
    if let Some(number) = partition.filter(|p| !(0..=255).contains(p)) {
        let detail = "must be between 0 and 255, inclusive";
        errors.invalid(format_args!("{path}.partition"), number, detail);
    }
}

// Network volumes. None is supported; each is rejected as upstream does.
fn remote(v: &Volume, path: &str, errors: &mut Errors) {
    if let Some(s) = v.gce_persistent_disk.as_ref() {
        required(&[("pdName", Some(&s.pd_name))], path, errors);
        partition(s.partition, path, errors);
    } else if let Some(s) = v.aws_elastic_block_store.as_ref() {
        required(&[("volumeID", Some(&s.volume_id))], path, errors);
        partition(s.partition, path, errors);
    } else if let Some(s) = v.nfs.as_ref() {
        required(&[("server", Some(&s.server)), ("path", Some(&s.path))], path, errors);
        if !s.path.starts_with('/') {
            errors.invalid(format_args!("{path}.path"), s.path.as_str(), "must be an absolute path");
        }
    } else if let Some(s) = v.flocker.as_ref() {
        let name = s.dataset_name.as_deref().unwrap_or_default();
        match (name, s.dataset_uuid.as_deref().unwrap_or_default()) {
            ("", "") => errors.required(path, "one of datasetName and datasetUUID is required"),
            (_, "") | ("", _) => {}
            _ => {
                let detail = "datasetName and datasetUUID can not be specified simultaneously";
                errors.invalid(path, "resource", detail);
            }
        }
        if name.contains('/') {
            errors.invalid(format_args!("{path}.datasetName"), name, "must not contain '/'");
        }
    } else if let Some(s) = v.rbd.as_ref() {
        if s.monitors.is_empty() {
            errors.required(format_args!("{path}.monitors"), "");
        }
        required(&[("image", Some(&s.image))], path, errors);
    } else if let Some(s) = v.cinder.as_ref() {
        required(&[("volumeID", Some(&s.volume_id))], path, errors);
        secret_ref(s.secret_ref.as_ref(), path, errors);
    } else if let Some(s) = v.cephfs.as_ref() {
        if s.monitors.is_empty() {
            errors.required(format_args!("{path}.monitors"), "");
        }
    } else if let Some(s) = v.quobyte.as_ref() {
        quobyte(s, path, errors);
    } else if let Some(s) = v.fc.as_ref() {
        fibre_channel(s, path, errors);
    } else if let Some(s) = v.flex_volume.as_ref() {
        required(&[("driver", Some(&s.driver))], path, errors);
        for key in s.options.iter().flat_map(BTreeMap::keys) {
            let namespace = key.split_once('/').map_or(key.as_str(), |(namespace, _)| namespace);
            let domain = format!(".{}", namespace.to_lowercase());
            if domain.ends_with(".kubernetes.io") || domain.ends_with(".k8s.io") {
                let detail = "kubernetes.io and k8s.io namespaces are reserved";
                errors.invalid(format_args!("{path}.options[{key}]"), key.as_str(), detail);
            }
        }
    } else if let Some(s) = v.vsphere_volume.as_ref() {
        required(&[("volumePath", Some(&s.volume_path))], path, errors);
    } else if let Some(s) = v.photon_persistent_disk.as_ref() {
        required(&[("pdID", Some(&s.pd_id))], path, errors);
    } else if let Some(s) = v.portworx_volume.as_ref() {
        required(&[("volumeID", Some(&s.volume_id))], path, errors);
    } else if let Some(s) = v.azure_disk.as_ref() {
        azure_disk(s, path, errors);
    } else if let Some(s) = v.storageos.as_ref() {
        storage_os(s, path, errors);
    } else if let Some(s) = v.scale_io.as_ref() {
        required(
            &[
                ("gateway", Some(&s.gateway)),
                ("system", Some(&s.system)),
                ("volumeName", s.volume_name.as_deref()),
            ],
            path,
            errors,
        );
    } else if let Some(s) = v.image.as_ref() {
        required(&[("reference", s.reference.as_deref())], path, errors);
        errors.word(
            format_args!("{path}.pullPolicy"),
            s.pull_policy.as_deref(),
            &["Always", "IfNotPresent", "Never"],
        );
    }
}

fn quobyte(s: &QuobyteVolumeSource, path: &str, errors: &mut Errors) {
    let detail = "must be a host:port pair or multiple pairs separated by commas";
    if s.registry.is_empty() {
        errors.required(format_args!("{path}.registry"), detail);
    } else if s.tenant.as_ref().is_some_and(|t| t.len() >= 65) {
        errors.required(
            format_args!("{path}.tenant"),
            "must be a UUID and may not exceed a length of 64 characters",
        );
    } else if !s.registry.split(',').all(is_host_and_port) {
        errors.invalid(format_args!("{path}.registry"), s.registry.as_str(), detail);
    }
    required(&[("volume", Some(&s.volume))], path, errors);
}

fn is_host_and_port(pair: &str) -> bool {
    let Some((host, _port)) = pair.rsplit_once(':') else { return false };
    match host.strip_prefix('[') {
        Some(address) => address.strip_suffix(']').is_some_and(|a| !a.contains(['[', ']'])),
        None => !host.contains([':', '[', ']']),
    }
}

fn fibre_channel(s: &FCVolumeSource, path: &str, errors: &mut Errors) {
    let (names, ids) = (s.target_wwns.as_deref().unwrap_or_default(), s.wwids.as_deref().unwrap_or_default());
    match (names.is_empty(), ids.is_empty()) {
        (true, true) => errors.required(
            format_args!("{path}.targetWWNs"),
            "must specify either targetWWNs or wwids, but not both",
        ),
        (false, false) => {
            let detail = "targetWWNs and wwids can not be specified simultaneously";
            errors.invalid(format_args!("{path}.targetWWNs"), names.len(), detail);
        }
        _ => {}
    }
    match s.lun {
        _ if names.is_empty() => {}
        None => errors.required(format_args!("{path}.lun"), "lun is required if targetWWNs is specified"),
        Some(number) => lun(number, path, errors),
    }
}

fn azure_disk(s: &AzureDiskVolumeSource, path: &str, errors: &mut Errors) {
    required(&[("diskName", Some(&s.disk_name)), ("diskURI", Some(&s.disk_uri))], path, errors);
    errors.word_if_set(
        format_args!("{path}.cachingMode"),
        s.caching_mode.as_deref(),
        &["None", "ReadOnly", "ReadWrite"],
    );
    let kind = s.kind.as_deref().unwrap_or("Shared");
    errors.word_if_set(format_args!("{path}.kind"), Some(kind), &["Dedicated", "Managed", "Shared"]);
    let (prefix, example) = if kind == "Managed" {
        (
            "/subscriptions/",
            "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}",
        )
    } else {
        ("https://", "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd")
    };
    if !s.disk_uri.starts_with(prefix) {
        errors.unsupported(format_args!("{path}.diskURI"), &s.disk_uri, &[example]);
    }
}

fn storage_os(s: &StorageOSVolumeSource, path: &str, errors: &mut Errors) {
    required(&[("volumeName", s.volume_name.as_deref())], path, errors);
    for (field, value) in [("volumeName", &s.volume_name), ("volumeNamespace", &s.volume_namespace)] {
        if let Some(value) = value.as_deref().filter(|v| !v.is_empty()) {
            errors.format(format_args!("{path}.{field}"), value, names::dns_label(value));
        }
    }
    secret_ref(s.secret_ref.as_ref(), path, errors);
}
