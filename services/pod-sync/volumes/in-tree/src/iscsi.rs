//! iSCSI volumes as plain data: their names, their records, and what the output of iscsiadm says
//! (`pkg/volume/iscsi`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use k8s_openapi::api::core::v1::{ISCSIPersistentVolumeSource, ISCSIVolumeSource};
use serde::{Deserialize, Serialize};

/// Port of a portal without one.
const PORT: u16 = 3260;
/// Interface of a volume without one, as the API server sets it.
const DEFAULT_INTERFACE: &str = "default";
/// Beginnings of the names of targets.
const TARGETS: [&str; 3] = ["-iqn.", "-eui.", "-naa."];

/// Keys of a Secret with the credentials of a discovery, which are also the names in the record.
pub const DISCOVERY_KEYS: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
/// Keys of a Secret with the credentials of a session, which are also the names in the record.
pub const SESSION_KEYS: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

/// `iscsi` of a PersistentVolume or of a pod's volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IscsiSource {
    /// First portal of the target, `ADDRESS` or `ADDRESS:PORT`.
    pub target_portal: String,
    /// Further portals of the same target.
    pub portals: Vec<String>,
    /// Qualified name of the target.
    pub iqn: String,
    /// Logical unit of the target.
    pub lun: i32,
    /// Interface record of iscsiadm.
    pub interface: String,
    /// Name of this initiator; the volume then has an interface record of its own.
    pub initiator_name: String,
    /// Whether discovery authenticates by CHAP.
    pub chap_discovery: bool,
    /// Whether sessions authenticate by CHAP.
    pub chap_session: bool,
    /// Secret with the credentials; `None` without CHAP.
    pub secret: Option<SecretRef>,
    /// File system; `None` for the default, ext4.
    pub fs_type: Option<String>,
}

/// The Secret with CHAP credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretRef {
    /// `None`: the namespace of the pod.
    pub namespace: Option<String>,
    /// Name of the Secret.
    pub name: String,
}

/// CHAP credentials by their keys.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Chap(pub BTreeMap<String, String>);

impl fmt::Debug for Chap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

impl Chap {
    /// Replaces the credentials in a text, such as the output of iscsiadm.
    #[must_use]
    pub fn redact(&self, text: &str) -> String {
        let secrets = self.0.values().filter(|value| !value.is_empty());
        secrets.fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), "<redacted>"))
    }
}

impl From<&ISCSIVolumeSource> for IscsiSource {
    fn from(source: &ISCSIVolumeSource) -> Self {
        let source = source.clone();
        let secret = source.secret_ref.map(|reference| SecretRef { namespace: None, name: reference.name });
        Self {
            target_portal: source.target_portal,
            portals: source.portals.unwrap_or_default(),
            iqn: source.iqn,
            lun: source.lun,
            interface: interface(source.iscsi_interface),
            initiator_name: source.initiator_name.unwrap_or_default(),
            chap_discovery: source.chap_auth_discovery.unwrap_or(false),
            chap_session: source.chap_auth_session.unwrap_or(false),
            secret: secret.filter(|secret| !secret.name.is_empty()),
            fs_type: source.fs_type,
        }
    }
}

impl From<&ISCSIPersistentVolumeSource> for IscsiSource {
    fn from(source: &ISCSIPersistentVolumeSource) -> Self {
        let source = source.clone();
        let secret = source.secret_ref.map(|reference| SecretRef {
            namespace: reference.namespace.filter(|namespace| !namespace.is_empty()),
            name: reference.name.unwrap_or_default(),
        });
        Self {
            target_portal: source.target_portal,
            portals: source.portals.unwrap_or_default(),
            iqn: source.iqn,
            lun: source.lun,
            interface: interface(source.iscsi_interface),
            initiator_name: source.initiator_name.unwrap_or_default(),
            chap_discovery: source.chap_auth_discovery.unwrap_or(false),
            chap_session: source.chap_auth_session.unwrap_or(false),
            secret: secret.filter(|secret| !secret.name.is_empty()),
            fs_type: source.fs_type,
        }
    }
}

fn interface(name: Option<String>) -> String {
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| DEFAULT_INTERFACE.to_owned())
}

/// Returns a portal with its port (`portalMounter`).
fn with_port(portal: &str) -> String {
    if portal.contains(':') { portal.to_owned() } else { format!("{portal}:{PORT}") }
}

impl IscsiSource {
    /// Returns the disk of a volume (`createISCSIDisk`).
    #[must_use]
    pub fn disk(&self, volume: &str) -> Disk {
        let all = std::iter::once(&self.target_portal).chain(&self.portals);
        let portals: Vec<String> = all.map(|portal| with_port(portal)).collect();
        let iface = match self.initiator_name.is_empty() {
            true => self.interface.clone(),
            false => format!("{}:{volume}", with_port(&self.target_portal)),
        };
        Disk {
            vol_name: volume.to_owned(),
            portals,
            iqn: self.iqn.clone(),
            lun: self.lun.to_string(),
            init_iface: self.interface.clone(),
            iface,
            initiator_name: self.initiator_name.clone(),
            metrics_provider: None,
        }
    }

    /// Returns the unique name of the volume below its plugin (`GetVolumeName`).
    #[must_use]
    pub fn unique_name(&self) -> String {
        format!("{}:{}:{}", self.target_portal, self.iqn, self.lun)
    }
}

/// A disk as the file `iscsi.json` has it, with the names of the kubelet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Disk {
    /// Name of the volume.
    pub vol_name: String,
    /// With ports. The first one is part of the directory's name.
    pub portals: Vec<String>,
    /// Qualified name of the target.
    pub iqn: String,
    /// Logical unit, in decimal.
    pub lun: String,
    /// The interface record that the volume names.
    pub init_iface: String,
    /// The interface record of the sessions.
    pub iface: String,
    /// Name of this initiator; empty for that of the machine.
    pub initiator_name: String,
    /// Always null; a field of the kubelet's file.
    #[serde(skip_deserializing)]
    pub metrics_provider: Option<()>,
}

impl Disk {
    /// Returns the path of the global directory below that of the plugin (`MakeGlobalPDName`).
    #[must_use]
    pub fn directory(&self) -> String {
        let portal = self.portals.first().map(String::as_str).unwrap_or_default();
        format!("iface-{}/{portal}-{}-lun-{}", self.iface, self.iqn, self.lun)
    }

    /// Returns what the path of a global directory says about its disk.
    #[must_use]
    pub fn of_directory(path: &str) -> Option<Self> {
        let (iface, name) = path.split_once('/')?;
        let iface = iface.strip_prefix("iface-")?;
        let (target, lun) = name.rsplit_once("-lun-")?;
        let at = TARGETS.iter().filter_map(|prefix| target.find(prefix)).min()?;
        let (portal, iqn) = target.split_at_checked(at)?;
        lun.parse::<i32>().ok()?;
        Some(Self {
            portals: vec![portal.to_owned()],
            iqn: iqn.strip_prefix('-')?.to_owned(),
            lun: lun.to_owned(),
            init_iface: iface.to_owned(),
            iface: iface.to_owned(),
            ..Self::default()
        })
    }

    /// Returns the unique name of the volume below its plugin, as its directory gives it.
    #[must_use]
    pub fn unique_name(&self) -> String {
        let portal = self.portals.first().map(String::as_str).unwrap_or_default();
        format!("{portal}:{}:{}", self.iqn, self.lun)
    }

    /// Returns whether the interface record was made for this volume.
    #[must_use]
    pub fn has_own_iface(&self) -> bool {
        let portal = self.portals.first().map(String::as_str).unwrap_or_default();
        !self.initiator_name.is_empty() && self.iface == format!("{portal}:{}", self.vol_name)
    }

    /// Returns whether the interface in a global directory was made for its volume.
    #[must_use]
    pub fn names_own_iface(&self) -> bool {
        let portal = self.portals.first().map(String::as_str).unwrap_or_default();
        self.iface.strip_prefix(portal).is_some_and(|volume| volume.starts_with(':'))
    }

    /// Returns whether a link below `/dev/disk/by-path` is that of the disk at a portal.
    #[must_use]
    pub fn is_path(&self, name: &str, portal: &str, transport: &str) -> bool {
        // The links have no brackets.
        let address = portal.replace(['[', ']'], "");
        let wanted = format!("ip-{address}-iscsi-{}-lun-{}", self.iqn, self.lun);
        match transport {
            "tcp" => name == wanted,
            _ => name.starts_with("pci-") && name.ends_with(&format!("-{wanted}")),
        }
    }
}

/// Another volume of the same target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Other {
    /// The portal in the name of its directory.
    pub first_portal: String,
    /// All portals; `None` if the file is below the mount of the volume.
    pub portals: Option<Vec<String>>,
    /// Logical unit, in decimal.
    pub lun: String,
}

/// Returns whether another volume may use the session with a portal. `luns` are those that have a device in
/// the session.
#[must_use]
pub fn is_busy(portal: &str, luns: &BTreeSet<String>, others: &[Other]) -> bool {
    others.iter().any(|other| {
        other.first_portal == portal
            || match &other.portals {
                Some(portals) => portals.iter().any(|mounted| mounted == portal),
                None => luns.contains(&other.lun),
            }
    })
}

/// Returns the transport of an interface record; `None` if the record has none (`extractTransportname`).
#[must_use]
pub fn transport(record: &str) -> Option<&str> {
    let value = record.lines().find_map(|line| line.trim().strip_prefix("iface.transport_name = "))?;
    Some(if value == "<empty>" { "tcp" } else { value })
}

/// Returns the settings of an interface record that a copy gets (`parseIscsiadmShow`).
///
/// # Errors
/// Returns the kubelet's text if a line is not a setting.
pub fn settings(record: &str) -> Result<BTreeMap<String, String>, String> {
    let mut settings = BTreeMap::new();
    for line in record.lines().filter(|line| line.starts_with("iface.") && !line.contains("<empty>")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, "=", value] = words[..] else {
            return Err(format!("error: invalid iface setting: [{}]", words.join(" ")));
        };
        // The name of a record cannot be changed.
        if name != "iface.iscsi_ifacename" {
            settings.insert(name.to_owned(), value.to_owned());
        }
    }
    Ok(settings)
}

/// Arguments of iscsiadm.
pub mod arguments {
    use super::Disk;

    fn of<const N: usize>(words: [&str; N]) -> Vec<String> {
        words.into_iter().map(str::to_owned).collect()
    }

    /// For the record of an interface.
    #[must_use]
    pub fn iface(name: &str, operation: &str) -> Vec<String> {
        of(["-m", "iface", "-I", name, "-o", operation])
    }

    /// Sets a value in the record of an interface.
    #[must_use]
    pub fn set_iface(name: &str, key: &str, value: &str) -> Vec<String> {
        [iface(name, "update"), of(["-n", key, "-v", value])].concat()
    }

    fn discovery_record(disk: &Disk, portal: &str) -> Vec<String> {
        of(["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", &disk.iface])
    }

    /// For the record of a discovery.
    #[must_use]
    pub fn discovery(disk: &Disk, portal: &str, operation: &str) -> Vec<String> {
        [discovery_record(disk, portal), of(["-o", operation])].concat()
    }

    /// Sets a value in the record of a discovery.
    #[must_use]
    pub fn set_discovery(disk: &Disk, portal: &str, key: &str, value: &str) -> Vec<String> {
        [discovery(disk, portal, "update"), of(["-n", key, "-v", value])].concat()
    }

    /// Asks a portal for its targets.
    #[must_use]
    pub fn discover(disk: &Disk, portal: &str) -> Vec<String> {
        [discovery_record(disk, portal), of(["--discover"])].concat()
    }

    fn node_record(disk: &Disk, portal: &str) -> Vec<String> {
        of(["-m", "node", "-p", portal, "-T", &disk.iqn, "-I", &disk.iface])
    }

    /// Sets a value in the record of a target.
    #[must_use]
    pub fn set_node(disk: &Disk, portal: &str, key: &str, value: &str) -> Vec<String> {
        [node_record(disk, portal), of(["-o", "update", "-n", key, "-v", value])].concat()
    }

    /// Logs in to a target.
    #[must_use]
    pub fn login(disk: &Disk, portal: &str) -> Vec<String> {
        [node_record(disk, portal), of(["--login"])].concat()
    }

    /// Logs out of a target.
    #[must_use]
    pub fn logout(disk: &Disk, portal: &str) -> Vec<String> {
        [node_record(disk, portal), of(["--logout"])].concat()
    }

    /// Deletes the record of a target.
    #[must_use]
    pub fn delete_node(disk: &Disk, portal: &str) -> Vec<String> {
        [node_record(disk, portal), of(["-o", "delete"])].concat()
    }
}

#[cfg(test)]
mod tests;
