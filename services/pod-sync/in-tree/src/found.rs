//! Volumes that the directories describe, after a restart (`ConstructVolumeSpec`).

use std::fs::{self, FileType};
use std::io;
use std::path::{Path, PathBuf};

use quintlet_model::ids::PodUid;

use crate::paths::Paths;
use crate::volume::Plugin;

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundInPod {
    pub pod: PodUid,
    pub plugin: Plugin,
    /// Name of the directory, which is that of the volume.
    pub name: String,
    pub is_block: bool,
}

/// A device of a `local` volume.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundDevice {
    pub name: String,
    pub is_block: bool,
}

/// Returns the volumes of all pods, and the devices, sorted. Blocks.
///
/// # Errors
/// A directory cannot be read.
pub fn read(root: &Path) -> io::Result<(Vec<FoundInPod>, Vec<FoundDevice>)> {
    let paths = Paths::new(root);
    let (mut volumes, mut devices) = (Vec::new(), Vec::new());
    for dir in entries(&paths.pods(), FileType::is_dir)? {
        let Ok(pod) = PodUid::parse(&name(&dir)) else { continue };
        for plugin in [Plugin::Local, Plugin::Nfs] {
            let found = entries(&paths.volumes(plugin, &dir), FileType::is_dir)?;
            let found = found.iter().map(|path| (plugin, name(path), false));
            volumes.extend(found.map(|of| in_pod(&pod, of)));
        }
        let links = entries(&paths.links(&dir), FileType::is_symlink)?;
        volumes.extend(links.iter().map(|link| in_pod(&pod, (Plugin::Local, name(link), true))));
    }
    for dir in entries(&paths.device_mounts(), FileType::is_dir)? {
        devices.push(FoundDevice { name: name(&dir), is_block: false });
    }
    for dir in entries(&paths.block_volumes(), FileType::is_dir)? {
        let bound = entries(&dir, FileType::is_file)?.into_iter().chain(entries(&dir, |kind| {
            // A bound device.
            !kind.is_file() && !kind.is_dir()
        })?);
        let pods = bound.filter_map(|file| PodUid::parse(&name(&file)).ok());
        volumes.extend(pods.map(|pod| in_pod(&pod, (Plugin::Local, name(&dir), true))));
        devices.push(FoundDevice { name: name(&dir), is_block: true });
    }
    volumes.sort();
    volumes.dedup();
    devices.sort();
    Ok((volumes, devices))
}

fn in_pod(pod: &PodUid, (plugin, name, is_block): (Plugin, String, bool)) -> FoundInPod {
    FoundInPod { pod: pod.clone(), plugin, name, is_block }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the entries of a directory; none if it does not exist.
fn entries(dir: &Path, is_wanted: impl Fn(&FileType) -> bool) -> io::Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = Vec::new();
    for entry in listed {
        let entry = entry?;
        if is_wanted(&entry.file_type()?) {
            found.push(entry.path());
        }
    }
    Ok(found)
}
