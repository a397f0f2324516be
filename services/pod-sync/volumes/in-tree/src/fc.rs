//! Fibre Channel volumes as plain data (`pkg/volume/fc`).

use k8s_openapi::api::core::v1::FCVolumeSource;

/// `fc` of a PersistentVolume or of a pod's volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FcSource {
    /// World wide names of the target's ports.
    pub target_wwns: Vec<String>,
    /// Logical unit of the target; `None` with `wwids`.
    pub lun: Option<i32>,
    /// World wide identifiers of the disk.
    pub wwids: Vec<String>,
    /// File system; `None` for the default, ext4.
    pub fs_type: Option<String>,
}

impl From<&FCVolumeSource> for FcSource {
    fn from(source: &FCVolumeSource) -> Self {
        Self {
            target_wwns: source.target_wwns.clone().unwrap_or_default(),
            lun: source.lun,
            wwids: source.wwids.clone().unwrap_or_default(),
            fs_type: source.fs_type.clone(),
        }
    }
}

/// How a disk is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disk {
    /// By the ports of its target, in `/dev/disk/by-path`.
    Ports {
        /// World wide names of the target's ports.
        wwns: Vec<String>,
        /// Logical unit of the target.
        lun: i32,
    },
    /// By its identifiers, in `/dev/disk/by-id`.
    Identifiers(Vec<String>),
}

impl FcSource {
    /// Returns the disk; `None` if the source names none (`getWwnsLunWwids`).
    #[must_use]
    pub fn disk(&self) -> Option<Disk> {
        match self.lun {
            Some(lun) if !self.target_wwns.is_empty() => {
                Some(Disk::Ports { wwns: self.target_wwns.clone(), lun })
            }
            // A link has underscores instead of spaces.
            _ if !self.wwids.is_empty() => {
                Some(Disk::Identifiers(self.wwids.iter().map(|wwid| wwid.replace(' ', "_")).collect()))
            }
            _ => None,
        }
    }

    /// Returns the unique name of the volume below its plugin (`GetVolumeName`).
    #[must_use]
    pub fn unique_name(&self) -> String {
        match self.lun {
            Some(lun) if !self.target_wwns.is_empty() => format!("[{}]:{lun}", self.target_wwns.join(" ")),
            _ => format!("[{}]", self.wwids.join(" ")),
        }
    }
}

impl Disk {
    /// Returns the name of the global directory (`makePDNameInternal`).
    #[must_use]
    pub fn directory(&self) -> String {
        match self {
            Self::Ports { wwns, lun } => format!("{}-lun-{lun}", wwns.join("-")),
            Self::Identifiers(wwids) => wwids.join("-"),
        }
    }

    /// Returns the disk of a global directory (`parsePDName`).
    #[must_use]
    pub fn of_directory(name: &str) -> Option<Self> {
        let parts = |text: &str| text.split('-').map(str::to_owned).collect::<Vec<_>>();
        match name.rsplit_once("-lun-") {
            Some((wwns, lun)) => Some(Self::Ports { wwns: parts(wwns), lun: lun.parse().ok()? }),
            None if name.is_empty() || name.starts_with("lun-") => None,
            None => Some(Self::Identifiers(parts(name))),
        }
    }

    /// Returns the unique name of the volume below its plugin, as its directory gives it.
    #[must_use]
    pub fn unique_name(&self) -> String {
        match self {
            Self::Ports { wwns, lun } => format!("[{}]:{lun}", wwns.join(" ")),
            Self::Identifiers(wwids) => format!("[{}]", wwids.join(" ")),
        }
    }

    /// Returns the directory of links below `/dev/disk` that has the disk.
    #[must_use]
    pub fn links(&self) -> &'static str {
        match self {
            Self::Ports { .. } => "by-path",
            Self::Identifiers(_) => "by-id",
        }
    }

    /// Returns whether a link is one of the disk (`findDisk`, `findDiskWWIDs`).
    #[must_use]
    pub fn is_link(&self, name: &str) -> bool {
        match self {
            Self::Ports { wwns, lun } => wwns.iter().any(|wwn| {
                let wanted = format!("fc-0x{wwn}-lun-{lun}");
                name == wanted || name.starts_with("pci-") && name.ends_with(&format!("-{wanted}"))
            }),
            Self::Identifiers(wwids) => {
                name.strip_prefix("scsi-").is_some_and(|linked| wwids.iter().any(|wwid| wwid == linked))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(wwns: &[&str], lun: i32) -> Disk {
        Disk::Ports { wwns: wwns.iter().map(|wwn| (*wwn).to_owned()).collect(), lun }
    }

    fn identifiers(wwids: &[&str]) -> Disk {
        Disk::Identifiers(wwids.iter().map(|wwid| (*wwid).to_owned()).collect())
    }

    #[test]
    fn the_directory_of_a_disk_describes_the_disk() {
        for (disk, directory, name) in [
            (ports(&["50060e801049cfd1"], 0), "50060e801049cfd1-lun-0", "[50060e801049cfd1]:0"),
            (ports(&["5a", "5b"], 12), "5a-5b-lun-12", "[5a 5b]:12"),
            (identifiers(&["3600508b4"]), "3600508b4", "[3600508b4]"),
            (identifiers(&["36a", "36b"]), "36a-36b", "[36a 36b]"),
        ] {
            assert_eq!((disk.directory().as_str(), disk.unique_name().as_str()), (directory, name));
            assert_eq!(Disk::of_directory(directory), Some(disk));
        }
        assert_eq!(Disk::of_directory("lun-0"), None);
        assert_eq!(Disk::of_directory("5a-lun-x"), None);
        assert_eq!(Disk::of_directory(""), None);
    }

    #[test]
    fn a_source_names_a_disk_by_ports_or_identifiers() {
        let source = |wwns: &[&str], lun, wwids: &[&str]| {
            let owned = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
            FcSource { target_wwns: owned(wwns), lun, wwids: owned(wwids), fs_type: None }
        };
        assert_eq!(source(&["5a"], Some(3), &["36"]).disk(), Some(ports(&["5a"], 3)));
        assert_eq!(source(&["5a"], None, &["A VENDOR 36"]).disk(), Some(identifiers(&["A_VENDOR_36"])));
        assert_eq!(source(&["5a"], None, &["A VENDOR 36"]).unique_name(), "[A VENDOR 36]");
        assert_eq!(source(&["5a"], None, &[]).disk(), None);
    }

    #[test]
    fn a_link_is_that_of_the_whole_disk() {
        let disk = ports(&["5a", "5b"], 1);
        for (name, expected) in [
            ("fc-0x5a-lun-1", true),
            ("pci-0000:41:00.0-fc-0x5b-lun-1", true),
            ("pci-0000:41:00.0-fc-0x5b-lun-1-part1", false),
            ("pci-0000:41:00.0-fc-0x5b-lun-12", false),
            ("pci-0000:41:00.0-fc-0x5c-lun-1", false),
            ("usb-fc-0x5a-lun-1", false),
        ] {
            assert_eq!(disk.is_link(name), expected, "{name}");
        }
        let disk = identifiers(&["36a"]);
        assert!(disk.is_link("scsi-36a") && !disk.is_link("scsi-36a-part1") && !disk.is_link("wwn-36a"));
    }
}
