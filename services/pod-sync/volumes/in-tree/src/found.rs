//! Volumes that the directories describe, after a restart (`ConstructVolumeSpec`).

use std::collections::BTreeMap;
use std::fs::{self, FileType};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use quintlet_kit::mount_table::{self, Mount};
use quintlet_model::ids::PodUid;

use crate::disk_directory::{is_own_file, read_disk_of};
use crate::host::name_of;
use crate::paths::Paths;
use crate::volume::Plugin;

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundInPod {
    /// UID in the path of the pod's directory.
    pub pod: PodUid,
    /// Plugin in the path.
    pub plugin: Plugin,
    /// Name of the directory, which is that of the volume.
    pub name: String,
    /// Whether the pod has a block device instead of a file system.
    pub is_block: bool,
    /// Name of the device's directory ([`crate::volume::Volume::device_name`]); `None` if the volume has no
    /// device, or if the device is not known because nothing is mounted.
    pub device: Option<String>,
}

/// A device of a volume.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundDevice {
    /// Plugin in the path.
    pub plugin: Plugin,
    /// Name of the device's directory ([`crate::volume::Volume::device_name`]).
    pub name: String,
    /// Whether the device is mapped, instead of mounted.
    pub is_block: bool,
    /// SELinux label that a disk is mounted with (`GetSELinuxMountContext`).
    pub label: Option<String>,
}

/// Returns the volumes of all pods, and the devices, sorted. Blocks.
///
/// # Errors
/// A directory cannot be read.
pub fn read(root: &Path) -> io::Result<(Vec<FoundInPod>, Vec<FoundDevice>)> {
    let paths = Paths::new(root);
    let mounts = mount_table::read()?;
    let mut devices = devices(&paths, &mounts)?;
    let mut bound = bound_devices(&paths, &devices)?;
    let mut volumes = Vec::new();
    for dir in entries(&paths.pods(), FileType::is_dir)? {
        let Ok(pod) = PodUid::parse(&name_of(&dir)) else { continue };
        volumes.extend(mounted_volumes(&paths, &mounts, &pod, &dir)?);
        for plugin in [Plugin::Local, Plugin::Iscsi, Plugin::Fc] {
            let bound = bound.remove(&(plugin, pod.clone())).unwrap_or_default();
            volumes.extend(block_volumes(&paths, plugin, &pod, &dir, bound)?);
        }
    }
    // Devices of pods without a directory.
    for ((plugin, pod), bound) in bound {
        volumes.extend(bound.into_iter().map(|(_, device)| unlinked(&paths, &pod, plugin, device)));
    }
    volumes.sort();
    devices.sort();
    Ok((volumes, devices))
}

/// Devices that are bound for a pod, each with the numbers of the device file.
type BoundDevices<'a> = Vec<(u64, &'a str)>;

/// Returns the global directories of all plugins.
fn devices(paths: &Paths, mounts: &[Mount]) -> io::Result<Vec<FoundDevice>> {
    let mut devices = Vec::new();
    for (root, is_block) in [(paths.device_mounts(), false), (paths.block_volumes(Plugin::Local), true)] {
        for dir in entries(&root, FileType::is_dir)? {
            devices.push(FoundDevice { plugin: Plugin::Local, name: name_of(&dir), is_block, label: None });
        }
    }
    for plugin in [Plugin::Iscsi, Plugin::Fc] {
        for is_block in [false, true] {
            let root = paths.disks(plugin, is_block);
            for name in disks(&root, plugin)? {
                let label = label_at(mounts, &root.join(&name));
                devices.push(FoundDevice { plugin, name, is_block, label });
            }
        }
    }
    Ok(devices)
}

/// Returns the block devices that are bound for pods.
fn bound_devices<'a>(
    paths: &Paths,
    devices: &'a [FoundDevice],
) -> io::Result<BTreeMap<(Plugin, PodUid), BoundDevices<'a>>> {
    let mut bound: BTreeMap<(Plugin, PodUid), BoundDevices<'a>> = BTreeMap::new();
    for FoundDevice { plugin, name, .. } in devices.iter().filter(|device| device.is_block) {
        let Ok(dir) = paths.block_volume(*plugin, name) else { continue };
        for file in entries(&dir, |kind| !kind.is_dir())? {
            let pod = PodUid::parse(&name_of(&file)).ok().filter(|_| !is_own_file(&file));
            let Some(pod) = pod else { continue };
            let numbers = fs::metadata(&file).map_or(0, |metadata| metadata.rdev());
            bound.entry((*plugin, pod)).or_default().push((numbers, name));
        }
    }
    Ok(bound)
}

/// Returns the volumes of a pod with a file system. `dir` is the directory of the pod.
fn mounted_volumes(paths: &Paths, mounts: &[Mount], pod: &PodUid, dir: &Path) -> io::Result<Vec<FoundInPod>> {
    let mut volumes = Vec::new();
    for plugin in [Plugin::Local, Plugin::Nfs, Plugin::Iscsi, Plugin::Fc] {
        for path in entries(&paths.volumes(plugin, dir), FileType::is_dir)? {
            let device = match plugin {
                Plugin::Local => Some(name_of(&path)),
                Plugin::Iscsi | Plugin::Fc => device_at(mounts, &path, &paths.disks(plugin, false)),
                Plugin::Nfs | Plugin::HostPath => None,
            };
            volumes.push(FoundInPod {
                pod: pod.clone(),
                plugin,
                name: name_of(&path),
                is_block: false,
                device,
            });
        }
    }
    Ok(volumes)
}

/// Returns the block volumes of a pod: the links in its directory `dir`, and the devices that are `bound` for
/// it. An earlier process may have bound a device and not linked it.
fn block_volumes(
    paths: &Paths,
    plugin: Plugin,
    pod: &PodUid,
    dir: &Path,
    mut bound: BoundDevices<'_>,
) -> io::Result<Vec<FoundInPod>> {
    let mut volumes = Vec::new();
    for link in entries(&paths.links(plugin, dir), FileType::is_symlink)? {
        let name = name_of(&link);
        let numbers = fs::metadata(&link).ok().map(|metadata| metadata.rdev());
        let is_of_link = |(bound_numbers, device): &(u64, &str)| match plugin {
            Plugin::Local => name == *device,
            Plugin::HostPath | Plugin::Nfs | Plugin::Iscsi | Plugin::Fc => numbers == Some(*bound_numbers),
        };
        let at = bound.iter().position(is_of_link);
        let device = at.map(|at| bound.remove(at).1.to_owned());
        let device = device.or_else(|| (plugin == Plugin::Local).then(|| name.clone()));
        volumes.push(FoundInPod { pod: pod.clone(), plugin, name, is_block: true, device });
    }
    volumes.extend(bound.into_iter().map(|(_, device)| unlinked(paths, pod, plugin, device)));
    Ok(volumes)
}

/// Returns the volume of a device that is bound for a pod and not linked.
fn unlinked(paths: &Paths, pod: &PodUid, plugin: Plugin, device: &str) -> FoundInPod {
    let of_disk = match plugin {
        Plugin::Iscsi => paths.disk(plugin, true, device).ok().and_then(|dir| read_disk_of(&dir)),
        Plugin::Local | Plugin::HostPath | Plugin::Nfs | Plugin::Fc => None,
    };
    let name = of_disk.map(|disk| disk.vol_name).filter(|name| !name.is_empty());
    // The link is absent, so that any name of a file does.
    let name = name.unwrap_or_else(|| device.replace('/', "-"));
    FoundInPod { pod: pod.clone(), plugin, name, is_block: true, device: Some(device.to_owned()) }
}

/// Returns the names of the global directories of a plugin.
fn disks(root: &Path, plugin: Plugin) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for dir in entries(root, FileType::is_dir)? {
        let entry = name_of(&dir);
        match plugin {
            Plugin::Iscsi if entry.starts_with("iface-") => {
                let names = entries(&dir, FileType::is_dir)?;
                found.extend(names.iter().map(|disk| format!("{entry}/{}", name_of(disk))));
            }
            Plugin::Fc if entry != "volumeDevices" => found.push(entry),
            Plugin::Iscsi | Plugin::Fc | Plugin::Local | Plugin::HostPath | Plugin::Nfs => {}
        }
    }
    Ok(found)
}

/// Returns the name of the global directory whose mount a pod's volume is.
fn device_at(mounts: &[Mount], path: &Path, disks: &Path) -> Option<String> {
    let of_pod = mounts.iter().rev().find(|mount| mount.path == path)?;
    let is_it = |mount: &&Mount| mount.device == of_pod.device && mount.root == of_pod.root;
    let mut names = mounts.iter().filter(is_it).filter_map(|mount| mount.path.strip_prefix(disks).ok());
    names.next().map(|name| name.display().to_string())
}

/// Returns the SELinux label that a file system is mounted with.
fn label_at(mounts: &[Mount], path: &Path) -> Option<String> {
    let mount = mounts.iter().rev().find(|mount| mount.path == path)?;
    mount.option("context").map(str::to_owned)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_of_a_disk_is_that_of_its_newest_mount() {
        let mount = |path: &str, options: &str| Mount {
            device: "8:1".to_owned(),
            root: PathBuf::from("/"),
            path: PathBuf::from(path),
            fs_type: "ext4".to_owned(),
            options: options.to_owned(),
            is_shared: false,
        };
        let mounts = [
            mount("/g", "rw,context=a:b:c:s0"),
            mount("/g", "rw,context=\"a:b:c:s0:c1,c2\""),
            mount("/none", "rw,seclabel"),
        ];
        assert_eq!(label_at(&mounts, Path::new("/g")).as_deref(), Some("a:b:c:s0:c1,c2"));
        assert_eq!(label_at(&mounts, Path::new("/none")), None);
        assert_eq!(label_at(&mounts, Path::new("/absent")), None);
    }
}
