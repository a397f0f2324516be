//! emptyDir volumes, which also hold the files of configMap, secret, projected and downwardAPI volumes
//! (`pkg/volume/emptydir`).

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::qos;
use pod_sync_layout::NodeSettings;
use quintlet_kit::failpoint;
use quintlet_model::pod;
use quintlet_model::quantity::Quantity;
use rustix::mount::MountFlags;

use super::mount_table::{self, MountEntry, MountTable};
use super::ownership;

/// Medium of an emptyDir.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Medium {
    Disk,
    /// A tmpfs of at most this many bytes; 0 uses the kernel's default.
    Memory(i64),
    /// A hugetlbfs with this page size, as in the resource name (`2Mi`).
    HugePages(String),
}

/// Returns the medium of a volume.
///
/// # Errors
/// The medium is not supported; with the kubelet's message.
pub(crate) fn medium(
    pod: &Pod,
    name: &str,
    size_limit: Option<Quantity>,
    node: &NodeSettings,
) -> Result<Medium, String> {
    match name {
        "" => Ok(Medium::Disk),
        "Memory" => Ok(Medium::Memory(memory_size(pod, size_limit, node))),
        _ => match name.strip_prefix("HugePages") {
            Some(rest) if rest.is_empty() || rest.starts_with('-') => {
                page_size(pod, name, rest.trim_start_matches('-')).map(Medium::HugePages)
            }
            Some(_) | None => Err(format!("unknown storage medium {name:?}")),
        },
    }
}

/// Returns the size of a tmpfs: the least of the node's allocatable memory, the pod's limit and the volume's
/// `sizeLimit`.
#[must_use]
pub(crate) fn memory_size(pod: &Pod, size_limit: Option<Quantity>, node: &NodeSettings) -> i64 {
    let of_pod = qos::pod_limits(pod).get("memory").copied();
    let of_node = node.allocatable.get("memory").copied();
    let all = [of_node, of_pod, size_limit].into_iter().flatten();
    all.map(|q| q.value()).filter(|v| *v > 0).min().unwrap_or(0)
}

fn page_size(pod: &Pod, medium: &str, requested: &str) -> Result<String, String> {
    let spec = pod::spec(pod);
    let requests = spec.containers.iter().chain(pod::init_containers(pod)).map(qos::container_requests);
    let limits = spec.containers.iter().chain(pod::init_containers(pod)).map(qos::container_limits);
    let sizes: BTreeSet<String> = requests
        .chain(limits)
        .chain([qos::pod_requests(pod)])
        .flatten()
        .filter(|(_, amount)| amount.is_positive())
        .filter_map(|(name, _)| Some(name.strip_prefix("hugepages-")?.to_owned()))
        .collect();
    let none = || {
        format!(
            "medium {medium}: hugePages storage requested, but there is no resource request for huge pages"
        )
    };
    if requested.is_empty() {
        if sizes.len() > 1 {
            return Err(format!(
                "medium: {medium} can't be used if container requests multiple huge page sizes"
            ));
        }
        return sizes.into_iter().next().ok_or_else(none);
    }
    let same = |s: &&String| Quantity::parse(s).ok() == Quantity::parse(requested).ok();
    sizes.iter().find(same).cloned().ok_or_else(none)
}

/// Mode of a volume's directory.
const OPEN_TO_ALL: u32 = 0o777;

/// Returns the mode that the API allows for a directory: permissions and the sticky bit.
pub(crate) fn mode(mode: i32) -> u32 {
    u32::try_from(mode).unwrap_or(0) & 0o1777
}

#[derive(Debug, Clone)]
pub(crate) struct EmptyDir {
    pub(crate) path: PathBuf,
    /// Directory of the marker that exists once the volume is ready. Volumes of files have none: their
    /// content is compared at each sync, so that nothing depends on it. The kubelet has one for them, and
    /// makes it when it takes over.
    pub(crate) marker_dir: Option<PathBuf>,
    pub(crate) medium: Medium,
    /// Mode of the directory, on a disk and in memory. `None`: 0777, and that of the file system in memory.
    pub(crate) mode: Option<u32>,
    /// Group that owns the volume.
    pub(crate) fs_group: Option<u32>,
}

impl EmptyDir {
    fn marker(&self) -> Option<PathBuf> {
        self.marker_dir.as_ref().map(|dir| dir.join("ready"))
    }

    /// Returns whether the volume was set up before and still exists. Its content is then not touched.
    ///
    /// # Errors
    /// The mount table cannot be read.
    pub(crate) fn is_ready(&self, table: &dyn MountTable) -> io::Result<bool> {
        if self.marker().is_some_and(|marker| !marker.exists()) || !self.path.is_dir() {
            return Ok(false);
        }
        match &self.medium {
            Medium::Disk if self.marker_dir.is_some() => Ok(true),
            // The mode is set after the directory was made, and its group may have changed since.
            Medium::Disk => Ok(fs::metadata(&self.path)?.permissions().mode() & OPEN_TO_ALL == OPEN_TO_ALL),
            Medium::Memory(_) => {
                Ok(table.file_system_at(&self.path)?.is_some_and(|fs_type| fs_type == "tmpfs"))
            }
            Medium::HugePages(_) => {
                Ok(table.file_system_at(&self.path)?.is_some_and(|fs_type| fs_type == "hugetlbfs"))
            }
        }
    }

    fn same_page_size(&self, requested: &str, mount: &MountEntry) -> io::Result<()> {
        // The kernel writes `2M` for the API's `2Mi`.
        let mounted = mount.page_size.as_deref().unwrap_or_default();
        let size = |text: &str| Quantity::parse(text).ok();
        if size(&format!("{mounted}i")) == size(requested) {
            return Ok(());
        }
        let pod = self.path.ancestors().nth(3).and_then(Path::file_name).unwrap_or_default();
        Err(io::Error::other(format!(
            "pod {}: mounted dir {} pagesize '{mounted}' and requested medium size '{requested}' differ",
            pod.display(),
            self.path.display()
        )))
    }

    /// Sets the volume up unless it is ready. Returns whether it was created.
    ///
    /// # Errors
    /// A directory or mount cannot be created.
    pub(crate) fn set_up(&self, table: &dyn MountTable) -> io::Result<bool> {
        if self.is_ready(table)? {
            return Ok(false);
        }
        failpoint::file!("volume directory made", || {
            fs::DirBuilder::new().recursive(true).mode(0o777).create(&self.path)
        })?;
        let mounted = mount_table::mount_at(table, &self.path)?;
        if mounted.is_none() {
            // Independent of the umask.
            let mode = self.mode.unwrap_or(OPEN_TO_ALL);
            fs::set_permissions(&self.path, fs::Permissions::from_mode(mode))?;
        }
        match (&self.medium, &mounted) {
            (Medium::Disk, _) => {}
            (Medium::Memory(size), None) => {
                failpoint::file!("volume mounted", || mount_tmpfs(&self.path, *size))?;
            }
            (Medium::HugePages(size), None) => {
                let data = CString::new(format!("pagesize={size}"))?;
                rustix::mount::mount(
                    c"nodev",
                    &self.path,
                    c"hugetlbfs",
                    MountFlags::empty(),
                    data.as_c_str(),
                )?;
            }
            // A crash happened between the mount and the marker.
            (Medium::Memory(_), Some(m)) if m.fs_type == "tmpfs" => {}
            (Medium::HugePages(requested), Some(m)) if m.fs_type == "hugetlbfs" => {
                self.same_page_size(requested, m)?
            }
            (Medium::Memory(_) | Medium::HugePages(_), Some(m)) => {
                return Err(io::Error::other(format!("{} is a mount of {}", self.path.display(), m.fs_type)));
            }
        }
        if let (Some(mode), Medium::Memory(_) | Medium::HugePages(_)) = (self.mode, &self.medium) {
            // The root of the file system, not the directory below it.
            fs::set_permissions(&self.path, fs::Permissions::from_mode(mode))?;
        }
        if let Some(gid) = self.fs_group
            && let Err(e) = ownership::set_volume_ownership(&self.path, gid, false)
        {
            tracing::warn!(path = %self.path.display(), gid, error = %e, "failed to change group of emptyDir");
        }
        if let (Some(dir), Some(marker)) = (&self.marker_dir, self.marker()) {
            fs::DirBuilder::new().recursive(true).mode(0o750).create(dir)?;
            failpoint::file!("volume marked ready", || fs::File::create(marker))?;
        }
        Ok(true)
    }
}

/// Mounts a tmpfs, with `noswap` if the kernel supports it (6.4 and later).
fn mount_tmpfs(path: &Path, size: i64) -> io::Result<()> {
    let size = (size > 0).then(|| format!("size={size}"));
    let mount = |options: Vec<String>| -> io::Result<()> {
        let data = CString::new(options.join(","))?;
        Ok(rustix::mount::mount(c"tmpfs", path, c"tmpfs", MountFlags::empty(), data.as_c_str())?)
    };
    let plain: Vec<String> = size.into_iter().collect();
    let no_swap = plain.iter().cloned().chain(["noswap".to_owned()]).collect();
    match mount(no_swap) {
        // EINVAL: an older kernel. EPERM: a user namespace.
        Err(e) if matches!(e.raw_os_error(), Some(22 | 1)) => mount(plain),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount_table::ProcMountTable;
    use pod_sync_cri_config::subpath::unmount_all;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    fn dir(root: &Path, medium: Medium, fs_group: Option<u32>) -> EmptyDir {
        let marker_dir = Some(root.join("plugins/v"));
        EmptyDir { path: root.join("volumes/v"), marker_dir, medium, mode: None, fs_group }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_disk_empty_dir_is_created_once_and_writable_by_all() {
        let tmp = tempfile::tempdir().unwrap();
        let e = dir(tmp.path(), Medium::Disk, None);
        assert!(e.set_up(&ProcMountTable).unwrap());
        assert_eq!(mode(&e.path), 0o777);
        fs::write(e.path.join("kept"), "").unwrap();
        fs::set_permissions(&e.path, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(!e.set_up(&ProcMountTable).unwrap());
        assert!(e.path.join("kept").exists());
        assert_eq!(mode(&e.path), 0o700, "what a container changed stays");
        let grouped = dir(&tmp.path().join("g"), Medium::Disk, Some(77));
        grouped.set_up(&ProcMountTable).unwrap();
        assert_eq!(mode(&grouped.path), 0o2777);
    }

    #[test]
    fn an_empty_dir_has_its_mode_on_disk_and_in_memory_whatever_the_umask_is() {
        let tmp = tempfile::tempdir().unwrap();
        for (name, medium, gid, wanted, got) in [
            ("a", Medium::Disk, None, 0o750, 0o750),
            ("b", Medium::Disk, None, 0o1777, 0o1777),
            ("c", Medium::Memory(1 << 20), None, 0o750, 0o750),
            ("d", Medium::Disk, None, 0, 0),
            // A group gets its permissions in addition.
            ("e", Medium::Disk, Some(77), 0o700, 0o2770),
            ("f", Medium::Memory(1 << 20), Some(77), 0o700, 0o2770),
        ] {
            let volume =
                EmptyDir { mode: Some(super::mode(wanted)), ..dir(&tmp.path().join(name), medium, gid) };
            assert!(volume.set_up(&ProcMountTable).unwrap());
            assert_eq!(mode(&volume.path), got, "{name}: {wanted:o}");
            fs::set_permissions(&volume.path, fs::Permissions::from_mode(0o711)).unwrap();
            assert!(!volume.set_up(&ProcMountTable).unwrap());
            assert_eq!(mode(&volume.path), 0o711, "what a container changed stays");
            fs::remove_file(volume.marker().unwrap()).unwrap();
            assert!(volume.set_up(&ProcMountTable).unwrap(), "a crash before the marker");
            assert_eq!(mode(&volume.path), got, "{name}: {wanted:o}");
            unmount_all(&volume.path).unwrap();
        }
        assert_eq!([0o7777, -1].map(super::mode), [0o1777, 0], "no set-user-ID bit");
    }

    #[test]
    fn a_volume_of_files_has_no_marker_and_gets_its_mode_after_a_crash() {
        let tmp = tempfile::tempdir().unwrap();
        let files = EmptyDir { marker_dir: None, ..dir(tmp.path(), Medium::Disk, None) };
        let make = |mode| {
            fs::create_dir_all(&files.path).unwrap();
            fs::set_permissions(&files.path, fs::Permissions::from_mode(mode)).unwrap();
        };
        make(0o755);
        assert!(files.set_up(&ProcMountTable).unwrap(), "made, without its mode");
        assert_eq!(mode(&files.path), 0o777);
        make(0o2777);
        assert!(!files.set_up(&ProcMountTable).unwrap(), "a group was set");
        assert_eq!(mode(&files.path), 0o2777);
        assert!(!tmp.path().join("plugins").exists());
    }

    #[test]
    fn a_memory_empty_dir_is_one_tmpfs_of_its_size() {
        let tmp = tempfile::tempdir().unwrap();
        let e = dir(tmp.path(), Medium::Memory(1 << 20), Some(77));
        assert!(e.set_up(&ProcMountTable).unwrap());
        let count = || mount_table::mounts_below(&ProcMountTable, &e.path).unwrap().len();
        assert_eq!(count(), 1);
        assert_eq!(mode(&e.path), 0o3777);
        let total = rustix::fs::statvfs(&e.path).unwrap();
        assert_eq!(total.f_blocks * total.f_frsize, 1 << 20);
        fs::write(e.path.join("kept"), "").unwrap();
        assert!(!e.set_up(&ProcMountTable).unwrap());
        fs::remove_file(e.marker().unwrap()).unwrap();
        assert!(e.set_up(&ProcMountTable).unwrap(), "a crash before the marker");
        assert_eq!(count(), 1);
        assert!(e.path.join("kept").exists());
        unmount_all(&e.path).unwrap();
        assert!(!e.is_ready(&ProcMountTable).unwrap());
    }

    #[test]
    fn a_hugetlbfs_of_another_page_size_is_refused() {
        let e = dir(Path::new("/r/pods/u1"), Medium::HugePages("2Mi".into()), None);
        let mount = |size: &str| MountEntry {
            path: e.path.clone(),
            fs_type: "hugetlbfs".into(),
            page_size: Some(size.into()),
            shared: false,
        };
        assert!(e.same_page_size("2Mi", &mount("2M")).is_ok());
        assert!(e.same_page_size("1Gi", &mount("2M")).unwrap_err().to_string().ends_with(
            "mounted dir /r/pods/u1/volumes/v pagesize '2M' and requested medium size '1Gi' differ"
        ));
    }

    #[test]
    fn the_medium_follows_the_spec() {
        let medium_for = |spec: Value, name: &str, size: Option<&str>| {
            let node = NodeSettings {
                allocatable: [("memory".to_owned(), Quantity::parse("1Gi").unwrap())].into(),
                ..NodeSettings::default()
            };
            medium(&pod_of(spec), name, size.map(|s| Quantity::parse(s).unwrap()), &node)
        };
        let c = |limits: Value| json!({"containers": [{"name": "c", "resources": {"limits": limits.clone(), "requests": limits}}]});
        assert_eq!(medium_for(c(json!({})), "", None), Ok(Medium::Disk));
        assert_eq!(medium_for(c(json!({})), "Memory", None), Ok(Medium::Memory(1 << 30)));
        assert_eq!(medium_for(c(json!({"memory": "64Mi"})), "Memory", None), Ok(Medium::Memory(64 << 20)));
        assert_eq!(
            medium_for(c(json!({"memory": "64Mi"})), "Memory", Some("1Mi")),
            Ok(Medium::Memory(1 << 20))
        );
        assert_eq!(medium_for(c(json!({})), "Memory", Some("0")), Ok(Medium::Memory(1 << 30)));
        let one = c(json!({"hugepages-2Mi": "4Mi"}));
        let two = c(json!({"hugepages-2Mi": "4Mi", "hugepages-1Gi": "1Gi"}));
        assert_eq!(medium_for(one.clone(), "HugePages", None), Ok(Medium::HugePages("2Mi".into())));
        assert_eq!(medium_for(two.clone(), "HugePages-1Gi", None), Ok(Medium::HugePages("1Gi".into())));
        for (spec, name, want) in [
            (
                two,
                "HugePages",
                "medium: HugePages can't be used if container requests multiple huge page sizes",
            ),
            (
                one,
                "HugePages-1Gi",
                "medium HugePages-1Gi: hugePages storage requested, but there is no resource request for huge pages",
            ),
            (
                c(json!({})),
                "HugePages",
                "medium HugePages: hugePages storage requested, but there is no resource request for huge pages",
            ),
            (c(json!({})), "Tape", "unknown storage medium \"Tape\""),
        ] {
            assert_eq!(medium_for(spec, name, None).unwrap_err(), want);
        }
    }
}
