//! Mounts that refer to a staged volume (`k8s.io/mount-utils: SearchMountPoints`).

use std::io;
use std::path::{Path, PathBuf};

/// Returns the mounts below `pods` of the file system, or of a part of it, that is mounted at `path`, sorted. Blocks.
pub(crate) fn in_pods(path: &Path, pods: &Path) -> io::Result<Vec<String>> {
    let table = procfs::process::Process::myself().and_then(|p| p.mountinfo()).map_err(io::Error::other)?;
    let mounts: Vec<Mount> = table
        .0
        .into_iter()
        .map(|mount| Mount { device: mount.majmin, root: PathBuf::from(mount.root), path: mount.mount_point })
        .collect();
    Ok(of(&mounts, path, pods))
}

struct Mount {
    device: String,
    /// The directory of the file system that is mounted.
    root: PathBuf,
    path: PathBuf,
}

fn of(mounts: &[Mount], path: &Path, pods: &Path) -> Vec<String> {
    // A later mount hides an earlier one.
    let Some(staged) = mounts.iter().rev().find(|mount| mount.path == path) else { return Vec::new() };
    let refers = |mount: &&Mount| {
        mount.device == staged.device && mount.root.starts_with(&staged.root) && mount.path.starts_with(pods)
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
    fn only_mounts_of_the_staged_part_below_the_pods_count() {
        let mount = |device: &str, root: &str, path: &str| Mount {
            device: device.to_owned(),
            root: PathBuf::from(root),
            path: PathBuf::from(path),
        };
        let mounts = [
            mount("8:1", "/", "/"),
            mount("8:1", "/store/v", "/r/plugins/g"),
            mount("8:1", "/store/v", "/r/pods/u1/volumes/m"),
            mount("8:1", "/store/v/sub", "/r/pods/u2/volume-subpaths/m"),
            mount("8:1", "/store/other", "/r/pods/u3/volumes/m"),
            mount("8:2", "/store/v", "/r/pods/u4/volumes/m"),
            mount("8:1", "/store/v", "/elsewhere"),
        ];
        let of = |path: &str| of(&mounts, Path::new(path), Path::new("/r/pods"));
        assert_eq!(of("/r/plugins/g"), ["/r/pods/u1/volumes/m", "/r/pods/u2/volume-subpaths/m"]);
        assert_eq!(of("/r/plugins/not-mounted"), Vec::<String>::new());
    }
}
