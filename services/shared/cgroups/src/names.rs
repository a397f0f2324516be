//! Names of cgroups, per driver (`pkg/kubelet/cm: CgroupName`).

use std::path::PathBuf;

use quintlet_model::ids::PodUid;
use quintlet_model::qos::QosClass;

/// The cgroup of all pods.
pub(super) const KUBEPODS: &str = "kubepods";
pub(super) const BURSTABLE: &str = "burstable";
pub(super) const BESTEFFORT: &str = "besteffort";

/// The component that creates cgroups (`cgroupDriver`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CgroupDriver {
    /// The node agent and the OCI runtime create directories.
    #[default]
    Cgroupfs,
    /// systemd creates slices and scopes.
    Systemd,
}

pub(super) fn qos_cgroup(class: QosClass) -> Option<&'static str> {
    match class {
        // Guaranteed pods are directly below kubepods.
        QosClass::Guaranteed => None,
        QosClass::Burstable => Some(BURSTABLE),
        QosClass::BestEffort => Some(BESTEFFORT),
    }
}

/// Returns the components of a cgroup below `root` (`--cgroup-root`).
pub(super) fn below_root(root: &str, parts: &[&str]) -> Vec<String> {
    root.split('/').filter(|c| !c.is_empty()).chain(parts.iter().copied()).map(str::to_owned).collect()
}

pub(super) fn components(root: &str, class: QosClass, uid: &str) -> Vec<String> {
    let pod = format!("pod{uid}");
    let parts = [Some(KUBEPODS), qos_cgroup(class), Some(&pod)];
    below_root(root, &parts.into_iter().flatten().collect::<Vec<_>>())
}

/// Returns a pod's cgroup as the driver names it: the CRI's `cgroup_parent`. `root` is `--cgroup-root`.
#[must_use]
pub fn parent_name(driver: CgroupDriver, root: &str, class: QosClass, uid: &PodUid) -> String {
    format!("/{}", path(driver, &components(root, class, uid.as_str())).display())
}

/// Returns the path of a cgroup below the mount point of a hierarchy.
pub(super) fn path(driver: CgroupDriver, parts: &[String]) -> PathBuf {
    match driver {
        CgroupDriver::Cgroupfs => parts.iter().collect(),
        CgroupDriver::Systemd => {
            let slices = (1..=parts.len()).map(|n| slice(&parts[..n]));
            slices.collect()
        }
    }
}

/// Returns the slice of a cgroup: its escaped components joined by dashes.
pub(super) fn slice(parts: &[String]) -> String {
    let escaped: Vec<String> = parts.iter().map(|p| p.replace('-', "_")).collect();
    format!("{}.slice", escaped.join("-"))
}

/// Returns the components of a cgroup of the configuration
/// (`pkg/kubelet/cm: ParseSystemdToCgroupName, ParseCgroupfsToCgroupName`).
pub(super) fn parse(driver: CgroupDriver, name: &str) -> Vec<String> {
    match driver {
        CgroupDriver::Cgroupfs => below_root(name, &[]),
        CgroupDriver::Systemd => {
            let last = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
            let last = last.strip_suffix(".slice").unwrap_or(last);
            last.split('-').map(|part| part.replace('_', "-")).collect()
        }
    }
}

/// Returns the UID in the directory name of a pod's cgroup.
pub(super) fn uid_of(driver: CgroupDriver, name: &str) -> Option<PodUid> {
    let last = match driver {
        CgroupDriver::Cgroupfs => name.to_owned(),
        CgroupDriver::Systemd => name.strip_suffix(".slice")?.rsplit('-').next()?.replace('_', "-"),
    };
    PodUid::parse(last.strip_prefix("pod")?).ok()
}
