//! Giving a volume to the pod's group (pkg/volume/volume_linux.go).

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt as _, lchown};
use std::path::Path;

const RW: u32 = 0o660;
const RO: u32 = 0o440;
const EXEC: u32 = 0o110;
const SETGID: u32 = 0o2000;

/// Gives everything below `root` to `gid`, children before their directory. Links are given, not followed.
/// A single entry that cannot be changed is logged; a directory that cannot be read is an error.
///
/// # Errors
/// A directory cannot be read.
pub fn give_to_group(root: &Path, gid: u32, read_only: bool) -> io::Result<()> {
    let meta = fs::symlink_metadata(root)?;
    if meta.is_dir() {
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            match give_to_group(&path, gid, read_only) {
                // It went away meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
    }
    if let Err(e) = lchown(root, None, Some(gid)) {
        tracing::info!(path = %root.display(), gid, error = %e, "group change of a volume's file failed");
    }
    if meta.is_symlink() {
        return Ok(());
    }
    let mut mask = if read_only { RO } else { RW };
    if meta.is_dir() {
        mask |= SETGID | EXEC;
    }
    let mode = (meta.permissions().mode() & 0o7777) | mask;
    if let Err(e) = fs::set_permissions(root, fs::Permissions::from_mode(mode)) {
        tracing::info!(path = %root.display(), error = %e, "mode change of a volume's file failed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn files_and_directories_get_the_group_and_its_bits() {
        for (read_only, file, dir) in [(false, 0o660, 0o2775), (true, 0o640, 0o2755)] {
            let tmp = tempfile::tempdir().unwrap();
            let sub = tmp.path().join("d");
            fs::create_dir(&sub).unwrap();
            fs::set_permissions(&sub, fs::Permissions::from_mode(0o755)).unwrap();
            let f = sub.join("f");
            fs::write(&f, "").unwrap();
            fs::set_permissions(&f, fs::Permissions::from_mode(0o600)).unwrap();
            let out = tempfile::NamedTempFile::new().unwrap();
            std::os::unix::fs::symlink(out.path(), sub.join("link")).unwrap();
            give_to_group(tmp.path(), 4321, read_only).unwrap();
            let of = |p: &Path| {
                let m = fs::symlink_metadata(p).unwrap();
                (m.gid(), m.mode() & 0o7777)
            };
            assert_eq!(of(&f), (4321, file));
            assert_eq!(of(&sub), (4321, dir));
            assert_eq!(of(&sub.join("link")).0, 4321);
            assert_ne!(of(out.path()).0, 4321, "a link is not followed");
        }
    }
}
