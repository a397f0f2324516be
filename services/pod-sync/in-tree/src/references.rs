//! Mounts of a directory (`k8s.io/mount-utils: SearchMountPoints`).

use std::io;
use std::path::{Path, PathBuf};

/// A line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Numbers of the device, such as `8:0`.
    pub(crate) device: String,
    /// The directory of the file system that is mounted.
    pub(crate) root: PathBuf,
    pub(crate) path: PathBuf,
}

/// Returns the mounts of this mount namespace, oldest first. Blocks.
pub(crate) fn mounts() -> io::Result<Vec<Mount>> {
    let table = procfs::process::Process::myself().and_then(|p| p.mountinfo()).map_err(io::Error::other)?;
    let mount = |entry: procfs::process::MountInfo| Mount {
        device: entry.majmin,
        root: PathBuf::from(entry.root),
        path: entry.mount_point,
    };
    Ok(table.0.into_iter().map(mount).collect())
}

/// Returns whether something is mounted at a path.
pub(crate) fn is_mount_point(mounts: &[Mount], path: &Path) -> bool {
    mounts.iter().any(|mount| mount.path == path)
}

/// Returns the mounts below `pods` of the directory `path`, and of directories below it, sorted.
pub(crate) fn in_pods(mounts: &[Mount], path: &Path, pods: &Path) -> Vec<String> {
    // The mount that the directory is on. A later mount hides an earlier one.
    let above = mounts.iter().enumerate().filter(|(_, mount)| path.starts_with(&mount.path));
    let on = above.max_by_key(|(at, mount)| (mount.path.components().count(), *at)).map(|(_, mount)| mount);
    let Some((on, below)) = on.and_then(|on| Some((on, path.strip_prefix(&on.path).ok()?))) else {
        return Vec::new();
    };
    let source = if below.as_os_str().is_empty() { on.root.clone() } else { on.root.join(below) };
    let refers = |mount: &&Mount| {
        mount.device == on.device && mount.root.starts_with(&source) && mount.path.starts_with(pods)
    };
    let mut found: Vec<String> =
        mounts.iter().filter(refers).map(|mount| mount.path.display().to_string()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_a_directory_in_pods_are_found_by_device_and_path_in_the_file_system() {
        let mount = |device: &str, root: &str, path: &str| Mount {
            device: device.to_owned(),
            root: PathBuf::from(root),
            path: PathBuf::from(path),
        };
        let mounts = [
            mount("8:1", "/", "/"),
            mount("8:2", "/", "/mnt"),
            mount("8:2", "/disks/a", "/r/pods/u1/volumes/m"),
            mount("8:2", "/disks/a/sub", "/r/pods/u2/volume-subpaths/m"),
            mount("8:2", "/disks/ab", "/r/pods/u3/volumes/m"),
            mount("8:1", "/disks/a", "/r/pods/u4/volumes/m"),
            mount("8:2", "/disks/a", "/elsewhere"),
        ];
        let of = |path: &str| in_pods(&mounts, Path::new(path), Path::new("/r/pods"));
        assert_eq!(of("/mnt/disks/a"), ["/r/pods/u1/volumes/m", "/r/pods/u2/volume-subpaths/m"]);
        assert_eq!(of("/mnt/disks/ab"), ["/r/pods/u3/volumes/m"]);
        assert_eq!(of("/disks/a"), ["/r/pods/u4/volumes/m"]);
        assert_eq!(of("/other"), Vec::<String>::new());
    }
}
