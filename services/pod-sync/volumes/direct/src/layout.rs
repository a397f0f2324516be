//! The kubelet's root directory (`pkg/kubelet: setupDataDirs`).

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::mount::MountPropagationFlags;

use super::mount_table::MountTable;

/// Creates the root directory and its subdirectories with the kubelet's modes.
///
/// # Errors
/// A directory cannot be created.
pub fn prepare_root(root: &Path) -> Result<(), DirectoryError> {
    for (name, mode) in [
        ("", 0o750),
        ("pods", 0o750),
        ("plugins", 0o750),
        ("plugins_registry", 0o750),
        ("pod-resources", 0o750),
        ("checkpoints", 0o700),
    ] {
        let dir = root.join(name);
        let created = fs::DirBuilder::new().recursive(true).mode(mode).create(&dir);
        created
            .and_then(|()| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)))
            .map_err(|source| DirectoryError { dir, source })?;
    }
    Ok(())
}

/// A directory of the node cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("failed to create the directory {}", dir.display())]
pub struct DirectoryError {
    dir: PathBuf,
    source: io::Error,
}

/// Makes the root directory a shared mount, which `Bidirectional` mount propagation requires. A directory on
/// a shared mount is left alone; any other is bind-mounted on itself. Returns whether a mount was created,
/// which remains after the process ends.
///
/// # Errors
/// The mount table cannot be read, or the mount fails.
pub fn share_root(root: &Path, table: &dyn MountTable) -> io::Result<bool> {
    let real = fs::canonicalize(root)?;
    let entries = table.entries()?;
    let under = entries
        .iter()
        .enumerate()
        .filter(|(_, e)| real.starts_with(&e.path))
        .max_by_key(|(i, e)| (e.path.components().count(), *i));
    if under.is_some_and(|(_, e)| e.shared) {
        return Ok(false);
    }
    let bound = under.is_some_and(|(_, e)| e.path == real);
    if !bound {
        // Recursive, since pods may already have mounts below it.
        rustix::mount::mount_bind_recursive(&real, &real)?;
    }
    rustix::mount::mount_change(&real, MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
    Ok(!bound)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount_table::ProcMountTable;
    use pod_sync_cri_config::subpath::unmount_all;

    #[test]
    fn a_file_in_the_place_of_a_directory_is_named() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("plugins");
        fs::write(&file, "").unwrap();
        let error = prepare_root(root.path()).unwrap_err();
        assert_eq!(error.to_string(), format!("failed to create the directory {}", file.display()));
    }

    #[test]
    fn the_root_is_shared_once() {
        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path().join("root");
        prepare_root(&root).unwrap();
        prepare_root(&root).unwrap();
        assert_eq!(fs::metadata(root.join("checkpoints")).unwrap().permissions().mode() & 0o777, 0o700);
        // A private mount for the test, whatever the propagation of the machine's root.
        rustix::mount::mount_bind(tmp.path(), tmp.path()).unwrap();
        rustix::mount::mount_change(tmp.path(), MountPropagationFlags::PRIVATE).unwrap();
        let first = share_root(&root, &ProcMountTable);
        let second = share_root(&root, &ProcMountTable);
        let count = crate::mount_table::mounts_below(&ProcMountTable, &root).unwrap().len();
        unmount_all(&root).unwrap();
        unmount_all(tmp.path()).unwrap();
        assert!(first.unwrap());
        assert!(!second.unwrap());
        assert_eq!(count, 1);
    }
}
