//! Volumes that the directories of pods show, after a restart.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pod_sync_layout::paths;
use quintlet_model::ids::PodUid;

use crate::teardown::SUPPORTED_PLUGINS;

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundVolume {
    /// UID in the path of the pod's directory.
    pub pod: PodUid,
    /// Name of the plugin, such as `kubernetes.io/configmap`.
    pub plugin: String,
    /// Name in the pod.
    pub name: String,
}

/// Returns the direct volumes of all pods that have a directory, sorted. Blocks.
///
/// # Errors
/// A directory cannot be read.
pub fn read(root: &Path) -> io::Result<Vec<FoundVolume>> {
    let mut found = Vec::new();
    for pod_dir in entries(&paths::pods_dir(root))? {
        let Ok(pod) = PodUid::parse(&name(&pod_dir)) else { continue };
        for dir in entries(&pod_dir.join("volumes"))? {
            let plugin = name(&dir);
            if !SUPPORTED_PLUGINS.contains(&plugin.as_str()) {
                continue;
            }
            let plugin = plugin.replace('~', "/");
            let found_volume = |volume: PathBuf| FoundVolume {
                pod: pod.clone(),
                plugin: plugin.clone(),
                name: name(&volume),
            };
            found.extend(entries(&dir)?.into_iter().map(found_volume));
        }
    }
    found.sort();
    Ok(found)
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns the directories in a directory, which need not exist.
fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(e) => return Err(e),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_direct_volumes_are_found_and_links_are_not_followed() {
        let tmp = tempfile::tempdir().unwrap();
        assert_eq!(read(tmp.path()).unwrap(), []);
        for dir in [
            "pods/u2/volumes/kubernetes.io~empty-dir/scratch",
            "pods/u1/volumes/kubernetes.io~configmap/b",
            "pods/u1/volumes/kubernetes.io~configmap/a",
            "pods/u1/volumes/kubernetes.io~csi/driver",
            "pods/u1/volumes/kubernetes.io~secret",
            "pods/u3",
        ] {
            fs::create_dir_all(tmp.path().join(dir)).unwrap();
        }
        std::os::unix::fs::symlink(tmp.path(), tmp.path().join("pods/u4")).unwrap();
        let found = read(tmp.path()).unwrap();
        let brief: Vec<_> =
            found.iter().map(|v| (v.pod.as_str(), v.plugin.as_str(), v.name.as_str())).collect();
        assert_eq!(
            brief,
            [
                ("u1", "kubernetes.io/configmap", "a"),
                ("u1", "kubernetes.io/configmap", "b"),
                ("u2", "kubernetes.io/empty-dir", "scratch"),
            ]
        );
    }
}
