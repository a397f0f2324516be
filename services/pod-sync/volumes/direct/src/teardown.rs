//! Unmounts and removes the volumes of a pod, and never deletes files through a mount
//! (`pkg/kubelet: cleanupOrphanedPodDirs`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::{failpoint, tree};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::error::TearDownError;
use super::mount_table::MountTable;

/// Volume plugins whose directories hold only files of this node agent and of the pod.
pub(crate) const SUPPORTED_PLUGINS: [&str; 5] = [
    "kubernetes.io~empty-dir",
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~projected",
    "kubernetes.io~downward-api",
];

fn failed<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> TearDownError + 'a {
    move |source| TearDownError { what, path: path.display().to_string(), source }
}

/// Mounts below a directory, relative to it and newest first.
struct Mounts<'a> {
    root: &'a Path,
    below: Vec<PathBuf>,
}

impl<'a> Mounts<'a> {
    fn none(root: &'a Path) -> Self {
        Self { root, below: Vec::new() }
    }

    fn read(root: &'a Path, table: &dyn MountTable) -> Result<Self, TearDownError> {
        // Nothing can be mounted below a directory that does not exist.
        let real = match root.canonicalize() {
            Ok(real) => real,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::none(root)),
            Err(e) => return Err(failed("cannot read", root)(e)),
        };
        let all = table.entries().map_err(failed("cannot read the mounts below", root))?.into_iter().rev();
        let relative = |path: PathBuf| {
            path.strip_prefix(&real).or_else(|_| path.strip_prefix(root)).ok().map(Path::to_owned)
        };
        Ok(Self { root, below: all.filter_map(|m| relative(m.path)).collect() })
    }

    fn within(&self, dir: &Path) -> impl Iterator<Item = PathBuf> {
        self.below.iter().filter(move |m| m.starts_with(dir)).map(|m| self.root.join(m))
    }
}

fn volumes_of(plugin: &str) -> PathBuf {
    Path::new("volumes").join(plugin)
}

/// Unmounts and removes the subpaths of a pod. May be repeated.
///
/// # Errors
/// A mount is busy or a file cannot be removed.
pub(crate) fn tear_down_subpaths(pod_dir: &Path, table: &dyn MountTable) -> Result<(), TearDownError> {
    let dir = pod_dir.join(SUBPATHS);
    let known = || {
        unmount_leaves(&dir, SUBPATH_DEPTH, table)?;
        remove_skeleton(&dir, SUBPATH_DEPTH).map_err(|_| NeedsTable)
    };
    if known().is_ok() {
        return Ok(());
    }
    unmount(&Mounts::read(pod_dir, table)?, Path::new(SUBPATHS))?;
    remove_skeleton(&dir, SUBPATH_DEPTH)
}

/// Unmounts and removes a volume of a pod. A volume of a plugin without directories has nothing to remove.
/// May be repeated.
///
/// # Errors
/// The mount is busy or a file cannot be removed. Nothing is deleted below a mount.
pub(crate) fn tear_down_volume(
    pod_dir: &Path,
    plugin: &str,
    name: &str,
    table: &dyn MountTable,
) -> Result<(), TearDownError> {
    let plugin = plugin.replace('/', "~");
    if !SUPPORTED_PLUGINS.contains(&plugin.as_str()) {
        return Ok(());
    }
    let marker = match plugin == SUPPORTED_PLUGINS[0] {
        true => name.to_owned(),
        false => format!("wrapped_{name}"),
    };
    let volumes = volumes_of(&plugin);
    let (volume, marker) = (volumes.join(name), Path::new("plugins").join(SUPPORTED_PLUGINS[0]).join(marker));
    // The marker is removed first: a partly deleted volume must not look ready.
    let remove = |mounts: &Mounts<'_>| {
        remove_tree(mounts, &marker)?;
        remove_tree(mounts, &volume)
    };
    let known = || {
        // Nothing may be mounted above the volume.
        if table.is_mount_point(&pod_dir.join(&volumes)) != Some(false) {
            return Err(NeedsTable);
        }
        unmount_stack(&pod_dir.join(&volume), table)?;
        remove(&Mounts::none(pod_dir)).map_err(|_| NeedsTable)
    };
    if known().is_ok() {
        return Ok(());
    }
    let mut mounts = Mounts::read(pod_dir, table)?;
    if unmount(&mounts, &volume)? {
        mounts = Mounts::read(pod_dir, table)?;
    }
    remove(&mounts)
}

/// Unmounts and removes the volumes of a pod, subpaths first. May be repeated.
///
/// The mount table is read only if the places where this agent mounts do not explain everything: another
/// mount is busy, or was made by a container within a volume.
///
/// # Errors
/// A mount is busy or a file cannot be removed. Nothing is deleted below a mount.
pub(crate) fn tear_down_pod(pod_dir: &Path, table: &dyn MountTable) -> Result<(), TearDownError> {
    let without_table = || {
        unmount_known(pod_dir, table)?;
        remove_volumes(&Mounts::none(pod_dir)).map_err(|_| NeedsTable)
    };
    if without_table().is_ok() {
        return Ok(());
    }
    let mut mounts = Mounts::read(pod_dir, table)?;
    let mut unmounted = unmount(&mounts, Path::new(SUBPATHS))?;
    for plugin in SUPPORTED_PLUGINS {
        unmounted |= unmount(&mounts, &volumes_of(plugin))?;
    }
    if unmounted {
        mounts = Mounts::read(pod_dir, table)?;
    }
    remove_volumes(&mounts)
}

fn remove_volumes(mounts: &Mounts<'_>) -> Result<(), TearDownError> {
    remove_skeleton(&mounts.root.join(SUBPATHS), SUBPATH_DEPTH)?;
    for plugin in SUPPORTED_PLUGINS {
        // The marker is removed first: a partly deleted volume must not look ready.
        remove_tree(mounts, &Path::new("plugins").join(plugin))?;
        remove_tree(mounts, &volumes_of(plugin))?;
    }
    Ok(())
}

/// The mount table has to be read.
struct NeedsTable;

/// Most mounts on top of each other that are unmounted without the mount table.
const STACKED: u32 = 8;

/// Unmounts what is mounted where this agent mounts subpaths and volumes.
fn unmount_known(pod_dir: &Path, table: &dyn MountTable) -> Result<(), NeedsTable> {
    unmount_leaves(&pod_dir.join(SUBPATHS), SUBPATH_DEPTH, table)?;
    for plugin in SUPPORTED_PLUGINS {
        unmount_leaves(&pod_dir.join(volumes_of(plugin)), 1, table)?;
    }
    Ok(())
}

/// Unmounts the entries `levels` below `dir`. Nothing may be mounted above them.
fn unmount_leaves(dir: &Path, levels: u32, table: &dyn MountTable) -> Result<(), NeedsTable> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(_) => return Err(NeedsTable),
    };
    if table.is_mount_point(dir) != Some(false) {
        return Err(NeedsTable);
    }
    for entry in entries {
        let entry = entry.map_err(|_| NeedsTable)?;
        let path = entry.path();
        match levels.checked_sub(1) {
            Some(below) if below > 0 => {
                if entry.file_type().map_err(|_| NeedsTable)?.is_dir() {
                    unmount_leaves(&path, below, table)?;
                }
            }
            _ => unmount_stack(&path, table)?,
        }
    }
    Ok(())
}

fn unmount_stack(path: &Path, table: &dyn MountTable) -> Result<(), NeedsTable> {
    for _ in 0..STACKED {
        if table.is_mount_point(path).ok_or(NeedsTable)? {
            let unmount = || rustix::mount::unmount(path, UnmountFlags::NOFOLLOW);
            failpoint::file!("volume unmounted", unmount).map_err(|_| NeedsTable)?;
        } else {
            return Ok(());
        }
    }
    Err(NeedsTable)
}

/// Returns whether there was a mount.
fn unmount(mounts: &Mounts<'_>, dir: &Path) -> Result<bool, TearDownError> {
    let mut any = false;
    for path in mounts.within(dir) {
        any = true;
        match failpoint::file!("volume unmounted", || rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW)) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(e) => return Err(failed("cannot unmount", &path)(e.into())),
        }
    }
    Ok(any)
}

/// Removes a tree without crossing a mount. A mount below it, even one that appears meanwhile, is an error.
fn remove_tree(mounts: &Mounts<'_>, dir: &Path) -> Result<(), TearDownError> {
    if let Some(mount) = mounts.within(dir).next() {
        return Err(failed("refusing to remove below the mount", &mount)(io::ErrorKind::ResourceBusy.into()));
    }
    let dir = mounts.root.join(dir);
    failpoint::file!("tree removed", || tree::remove(&dir)).map_err(failed("cannot remove", &dir))
}

/// Directory of the mount points of subpaths in a pod's directory.
const SUBPATHS: &str = "volume-subpaths";
/// Depth of a mount point below [`SUBPATHS`]: volume, container, index.
const SUBPATH_DEPTH: u32 = 3;

/// Removes a tree of mount points: empty directories, and the empty files on which files were bind-mounted. A
/// tree with more levels than expected is an error.
fn remove_skeleton(dir: &Path, levels: u32) -> Result<(), TearDownError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("cannot read", dir)(e)),
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let kind = entry.file_type().map_err(failed("cannot read", &path))?;
        if kind.is_dir() {
            let Some(below) = levels.checked_sub(1) else {
                return Err(failed("cannot remove", &path)(io::ErrorKind::DirectoryNotEmpty.into()));
            };
            remove_skeleton(&path, below)?;
        } else if entry.metadata().is_ok_and(|m| m.len() == 0) {
            fs::remove_file(&path).map_err(failed("cannot remove", &path))?;
        } else {
            return Err(failed("cannot remove", &path)(io::ErrorKind::DirectoryNotEmpty.into()));
        }
    }
    failpoint::file!("mount point removed", || fs::remove_dir(dir)).map_err(failed("cannot remove", dir))
}

/// Reason why the directory of an orphaned pod was not removed. Messages begin like the kubelet's log lines.
#[derive(Debug, thiserror::Error)]
pub enum OrphanError {
    /// A mount may remain. Retried later without an event.
    #[error("orphaned pod {uid:?} found, but volumes are still mounted at {path}")]
    Mounted {
        /// UID of the pod.
        uid: String,
        /// Path of a volume that may be mounted.
        path: PathBuf,
    },
    /// A volume directory has content of an unknown plugin, which must not be deleted.
    #[error("orphaned pod {uid:?} found, but failed to rmdir() volume at path {path}: {source}")]
    Volume {
        /// UID of the pod.
        uid: String,
        /// Path of the volume's directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The directory could not be removed.
    #[error(
        "orphaned pod {uid:?} found, but error occurred when trying to remove the pod directory: {source}"
    )]
    Rest {
        /// UID of the pod.
        uid: String,
        /// The error of the removal.
        source: TearDownError,
    },
}

fn uid_of(pod_dir: &Path) -> String {
    pod_dir.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Removes the directory of a pod that neither the pod manager nor the runtime has, after its volumes were
/// torn down.
///
/// # Errors
/// The directory stays, for the returned reason.
pub(crate) fn remove_orphaned_pod_dir(pod_dir: &Path, table: &dyn MountTable) -> Result<(), OrphanError> {
    let rest = |source| OrphanError::Rest { uid: uid_of(pod_dir), source };
    if has_no_volumes(pod_dir, table) && remove_tree(&Mounts::none(pod_dir), Path::new("")).is_ok() {
        return Ok(());
    }
    let mounts = remove_orphaned_volumes(pod_dir, table)?;
    remove_tree(&mounts, Path::new("")).map_err(rest)
}

/// Removes the remaining volumes of an orphaned pod. Content of unknown plugins is never deleted; their
/// directories are removed only if they are empty.
///
/// # Errors
/// A volume stays, for the returned reason.
pub(crate) fn tear_down_orphaned_volumes(pod_dir: &Path, table: &dyn MountTable) -> Result<(), OrphanError> {
    if has_no_volumes(pod_dir, table) {
        return Ok(());
    }
    remove_orphaned_volumes(pod_dir, table).map(|_mounts| ())
}

/// Removes empty directories of volumes. Returns whether no volume is left and the kernel reports mount
/// points, so that a mount elsewhere in the directory is not crossed either.
fn has_no_volumes(pod_dir: &Path, table: &dyn MountTable) -> bool {
    let is_absent =
        |path: &Path| fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    let no_volumes =
        || remove_volume_dirs(&pod_dir.join("volumes")).is_ok() && is_absent(&pod_dir.join(SUBPATHS));
    is_absent(pod_dir) || (table.is_mount_point(pod_dir) == Some(false) && no_volumes())
}

/// Removes the volumes of an orphaned pod if nothing is mounted in its directory. Returns the mounts: none.
fn remove_orphaned_volumes<'a>(pod_dir: &'a Path, table: &dyn MountTable) -> Result<Mounts<'a>, OrphanError> {
    let uid = || uid_of(pod_dir);
    let rest = |source| OrphanError::Rest { uid: uid(), source };
    let mounts = Mounts::read(pod_dir, table).map_err(rest)?;
    if let Some(path) = mounts.within(Path::new("")).next() {
        return Err(OrphanError::Mounted { uid: uid(), path });
    }
    remove_skeleton(&pod_dir.join(SUBPATHS), SUBPATH_DEPTH).map_err(rest)?;
    let volume = |(path, source)| OrphanError::Volume { uid: uid(), path, source };
    remove_volume_dirs(&pod_dir.join("volumes")).map_err(volume)?;
    Ok(mounts)
}

fn remove_volume_dirs(volumes: &Path) -> Result<(), (PathBuf, io::Error)> {
    let list = |dir: &Path| -> Result<Vec<PathBuf>, (PathBuf, io::Error)> {
        match fs::read_dir(dir) {
            Ok(entries) => Ok(entries.flatten().map(|e| e.path()).collect()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err((dir.to_owned(), e)),
        }
    };
    let remove = |dir: &Path| match fs::remove_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err((dir.to_owned(), e)),
        Ok(()) | Err(_) => Ok(()),
    };
    for plugin in list(volumes)? {
        for volume in list(&plugin)? {
            if plugin.ends_with("kubernetes.io~csi") {
                remove(&volume.join("mount"))?;
                let _ = fs::remove_file(volume.join("vol_data.json"));
            }
            remove(&volume)?;
        }
        remove(&plugin)?;
    }
    remove(volumes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount_table::{MountEntry, ProcMountTable};
    use pod_sync_cri_config::subpath;

    struct FixedMountTable(Vec<PathBuf>);

    impl MountTable for FixedMountTable {
        fn entries(&self) -> io::Result<Vec<MountEntry>> {
            let entry = |path: &PathBuf| MountEntry {
                path: path.clone(),
                fs_type: "x".into(),
                page_size: None,
                shared: false,
            };
            Ok(self.0.iter().map(entry).collect())
        }
    }

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "x").unwrap();
    }

    #[test]
    fn mounts_come_off_before_anything_is_deleted() {
        let tmp = tempfile::tempdir().unwrap();
        let pod = tmp.path().join("u1");
        let volume = pod.join("volumes/kubernetes.io~empty-dir/v");
        touch(&volume.join("deep/f"));
        touch(&pod.join("plugins/kubernetes.io~empty-dir/v/ready"));
        let source = tmp.path().join("host");
        touch(&source.join("precious"));
        let at = subpath::target(&pod, "v", "c", 0);
        subpath::bind(&source, Path::new(""), &at).unwrap();
        let file = subpath::target(&pod, "v", "c", 1);
        subpath::bind(&source, Path::new("precious"), &file).unwrap();
        tear_down_pod(&pod, &ProcMountTable).unwrap();
        tear_down_pod(&pod, &ProcMountTable).unwrap();
        assert!(source.join("precious").exists());
        let plugins = fs::read_dir(pod.join("volumes")).into_iter().flatten().flatten();
        assert_eq!(plugins.flat_map(|p| fs::read_dir(p.path())).flatten().count(), 0);
        assert!(!pod.join("volume-subpaths").exists());
        assert!(!pod.join("plugins/kubernetes.io~empty-dir").exists());
        remove_orphaned_pod_dir(&pod, &ProcMountTable).unwrap();
        assert!(!pod.exists());
    }

    #[test]
    fn a_volume_of_20_000_nested_directories_is_torn_down_on_the_stack_of_a_blocking_thread() {
        // On tmpfs, since disks are slow with this many directories.
        let tmp = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let pod = tmp.path().join("u1");
        let volume = pod.join("volumes/kubernetes.io~empty-dir/v");
        fs::create_dir_all(&volume).unwrap();
        let mut at = tree::open_root(&volume).unwrap();
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::RWXU).unwrap();
            let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
            at = rustix::fs::openat(&at, "d", flags, rustix::fs::Mode::empty()).unwrap();
        }
        drop(at);
        // The stack of tokio's threads has 2 MiB.
        std::thread::scope(|s| {
            let thread = std::thread::Builder::new().stack_size(2 << 20);
            let work = || tear_down_pod(&pod, &ProcMountTable).map_err(|e| e.to_string());
            thread.spawn_scoped(s, work).unwrap().join().unwrap().unwrap();
        });
        assert!(!volume.exists());
        remove_orphaned_pod_dir(&pod, &ProcMountTable).unwrap();
        assert!(!pod.exists());
    }

    #[test]
    fn a_skeleton_deeper_than_its_layout_stays() {
        let tmp = tempfile::tempdir().unwrap();
        let skeleton = tmp.path().join("volume-subpaths");
        fs::create_dir_all(skeleton.join("v/c/0")).unwrap();
        remove_skeleton(&skeleton, SUBPATH_DEPTH).unwrap();
        fs::create_dir_all(skeleton.join("v/c/0/d")).unwrap();
        assert!(remove_skeleton(&skeleton, SUBPATH_DEPTH).is_err());
        assert!(skeleton.join("v/c/0/d").exists());
    }

    #[test]
    fn nothing_is_deleted_below_a_mount() {
        let tmp = tempfile::tempdir().unwrap();
        let pod = tmp.path().join("u1");
        let inner = pod.join("volumes/kubernetes.io~empty-dir/v/inner");
        touch(&inner.join("f"));
        let fixed_table = FixedMountTable(vec![inner.clone()]);
        assert!(remove_tree(&Mounts::read(&pod, &fixed_table).unwrap(), Path::new("volumes")).is_err());
        assert!(inner.join("f").exists());
        assert!(matches!(
            remove_orphaned_pod_dir(&pod, &FixedMountTable(vec![inner])),
            Err(OrphanError::Mounted { .. })
        ));
    }

    #[test]
    fn a_mount_the_table_missed_is_not_crossed() {
        let tmp = tempfile::tempdir().unwrap();
        let pod = tmp.path().join("u1");
        let (other, bound) = (pod.join("x/other"), pod.join("x/bound"));
        fs::create_dir_all(&other).unwrap();
        fs::create_dir_all(&bound).unwrap();
        let data: Option<&std::ffi::CStr> = None;
        rustix::mount::mount(c"tmpfs", &other, c"tmpfs", rustix::mount::MountFlags::empty(), data).unwrap();
        fs::write(other.join("f"), "").unwrap();
        let source = tmp.path().join("source");
        touch(&source.join("f"));
        rustix::mount::mount_bind(&source, &bound).unwrap();
        let missed = Mounts { root: &pod, below: Vec::new() };
        for mount in [&other, &bound] {
            let dir = mount.strip_prefix(&pod).unwrap();
            let refused = remove_tree(&missed, dir).unwrap_err();
            assert_eq!(refused.source.kind(), io::ErrorKind::CrossesDevices, "{refused}");
        }
        assert!(remove_tree(&missed, Path::new("x")).is_err());
        assert!(other.join("f").exists() && source.join("f").exists());
        for mount in [other, bound] {
            subpath::unmount_all(&mount).unwrap();
        }
    }

    struct Counted(std::sync::atomic::AtomicUsize);

    impl MountTable for Counted {
        fn entries(&self) -> io::Result<Vec<MountEntry>> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            ProcMountTable.entries()
        }

        fn is_mount_point(&self, path: &Path) -> Option<bool> {
            ProcMountTable.is_mount_point(path)
        }
    }

    #[test]
    fn the_mount_table_is_read_only_for_mounts_that_this_agent_did_not_make() {
        let tmp = tempfile::tempdir().unwrap();
        let pod = tmp.path().join("u1");
        let source = tmp.path().join("host");
        touch(&source.join("precious"));
        let table = Counted(0.into());
        let reads = || table.0.swap(0, std::sync::atomic::Ordering::Relaxed);
        let make = || {
            for plugin in SUPPORTED_PLUGINS {
                touch(&pod.join("volumes").join(plugin).join("v/f"));
            }
            subpath::bind(&source, Path::new(""), &subpath::target(&pod, "v", "c", 0)).unwrap();
            subpath::bind(&source, Path::new("precious"), &subpath::target(&pod, "v", "c", 1)).unwrap();
            let secret = pod.join("volumes/kubernetes.io~secret/v");
            for _ in 0..2 {
                rustix::mount::mount_bind(&source, &secret).unwrap();
            }
        };
        make();
        tear_down_pod(&pod, &table).unwrap();
        tear_down_orphaned_volumes(&pod, &table).unwrap();
        remove_orphaned_pod_dir(&pod, &table).unwrap();
        tear_down_pod(&pod, &table).unwrap();
        assert_eq!((reads(), pod.exists(), source.join("precious").exists()), (0, false, true));
        make();
        let inner = pod.join("volumes/kubernetes.io~empty-dir/v/made/by/a/container");
        fs::create_dir_all(&inner).unwrap();
        rustix::mount::mount_bind(&source, &inner).unwrap();
        tear_down_pod(&pod, &table).unwrap();
        assert!(reads() > 0 && source.join("precious").exists() && !inner.exists());
        let foreign = pod.join("volumes/kubernetes.io~csi/v/mount");
        fs::create_dir_all(&foreign).unwrap();
        rustix::mount::mount_bind(&source, &foreign).unwrap();
        let refused = remove_orphaned_pod_dir(&pod, &table).unwrap_err();
        assert!(matches!(refused, OrphanError::Mounted { .. }), "{refused}");
        let refused = tear_down_orphaned_volumes(&pod, &table).unwrap_err();
        assert!(matches!(refused, OrphanError::Mounted { .. }), "{refused}");
        assert!(foreign.join("precious").exists());
        subpath::unmount_all(&foreign).unwrap();
        remove_orphaned_pod_dir(&pod, &table).unwrap();
        assert!(!pod.exists() && source.join("precious").exists());
    }

    #[test]
    fn content_of_an_unknown_volume_keeps_the_directory() {
        let tmp = tempfile::tempdir().unwrap();
        let pod = tmp.path().join("u1");
        let nfs = pod.join("volumes/kubernetes.io~nfs/data");
        touch(&nfs.join("precious"));
        let got = remove_orphaned_pod_dir(&pod, &ProcMountTable).unwrap_err().to_string();
        assert!(got.starts_with("orphaned pod \"u1\" found, but failed to rmdir() volume at path"), "{got}");
        assert!(nfs.join("precious").exists());
        fs::remove_file(nfs.join("precious")).unwrap();
        touch(&pod.join("etc-hosts"));
        remove_orphaned_pod_dir(&pod, &ProcMountTable).unwrap();
        assert!(!pod.exists());
    }

    #[test]
    fn a_link_is_removed_and_not_followed() {
        let tmp = tempfile::tempdir().unwrap();
        let outside = tmp.path().join("outside");
        touch(&outside.join("f"));
        let dir = tmp.path().join("d");
        fs::create_dir(&dir).unwrap();
        std::os::unix::fs::symlink(&outside, dir.join("link")).unwrap();
        remove_tree(&Mounts::read(tmp.path(), &ProcMountTable).unwrap(), Path::new("d")).unwrap();
        assert!(outside.join("f").exists() && !dir.exists());
    }
}
