//! The files and directories that an installation creates.

use std::path::Path;

/// The drop-in that makes kubelet.service run Quintlet. systemd reads it after that of kubeadm.
pub(crate) const DROP_IN: &str = "/etc/systemd/system/kubelet.service.d/zz-quintlet.conf";

/// The unit of a node beside a kubelet.
pub(crate) const BESIDE_UNIT: &str = "/etc/systemd/system/quintlet-beside.service";
/// File name of [`BESIDE_UNIT`], by which systemctl knows it.
pub(crate) const BESIDE_NAME: &str = "quintlet-beside.service";

/// Directories of a node beside a kubelet. Parents precede their children.
pub(crate) const BESIDE_DIRECTORIES: [&str; 3] =
    ["/var/lib/quintlet-beside", "/var/lib/quintlet-beside/root", "/var/lib/quintlet-beside/manifests"];

/// Directory of the sockets beside a kubelet.
pub(crate) const BESIDE_RUN_DIR: &str = "/run/quintlet-beside";

/// Returns whether a path is one that an installation may remove.
pub(crate) fn is_own_file(path: &Path) -> bool {
    [DROP_IN, BESIDE_UNIT].iter().any(|own| path == Path::new(own))
}
