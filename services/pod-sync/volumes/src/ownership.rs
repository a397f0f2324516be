//! Sets the group of a volume to the pod's fsGroup (`pkg/volume: VolumeOwnership.ChangePermissions`).

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use quintlet_kit::tree::{self, Entry, Visitor};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat};

const RW: u32 = 0o660;
const RO: u32 = 0o440;
const EXEC: u32 = 0o110;
const SETGID: u32 = 0o2000;

/// Changes the group of all files below `root` to `gid`, children before their directory. Links themselves are changed, and
/// other mounts are skipped. Entries that cannot be changed are logged.
///
/// # Errors
/// A directory cannot be read.
pub fn set_volume_ownership(root: &Path, gid: u32, read_only: bool) -> io::Result<()> {
    let mut give = Give { gid, mask: if read_only { RO } else { RW }, root };
    let stat = rustix::fs::statat(CWD, root, AtFlags::SYMLINK_NOFOLLOW)?;
    if tree::is_dir(&stat) {
        return tree::walk(tree::open_root(root)?, &mut give);
    }
    let name = std::ffi::CString::new(std::os::unix::ffi::OsStrExt::as_bytes(root.as_os_str()))?;
    give.entry(Entry { dir: CWD, name: &name, stat: &stat }).map(|_| ())
}

/// Returns whether the root directory of a volume does not have the group and mode that [`set_volume_ownership`] gives it, for
/// `fsGroupChangePolicy: OnRootMismatch` (`requiresPermissionChange`).
///
/// # Errors
/// The directory cannot be read.
pub fn root_differs(root: &Path, gid: u32, read_only: bool) -> io::Result<bool> {
    let stat = rustix::fs::statat(CWD, root, AtFlags::SYMLINK_NOFOLLOW)?;
    let wanted = if read_only { RO } else { RW } | SETGID | EXEC;
    Ok(stat.st_gid != gid || stat.st_mode & wanted != wanted)
}

struct Give<'a> {
    gid: u32,
    mask: u32,
    root: &'a Path,
}

impl Give<'_> {
    fn log(&self, given: rustix::io::Result<()>) {
        match given {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => {
                let (volume, gid) = (self.root.display(), self.gid);
                tracing::info!(%volume, gid, %error, "failed to change group of volume file");
            }
        }
    }

    fn mode(&self, stat: &Stat, more: u32) -> Mode {
        Mode::from_raw_mode((stat.st_mode & 0o7777) | self.mask | more)
    }

    fn file(&self, entry: Entry<'_>) -> rustix::io::Result<()> {
        let group = Some(Gid::from_raw(self.gid));
        rustix::fs::chownat(entry.dir, entry.name, None, group, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(entry.stat.st_mode) == FileType::Symlink {
            return Ok(());
        }
        // chmod(2) of a name would follow a link that appears meanwhile; that of a descriptor does not.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(entry.dir, entry.name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Ok(());
        }
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        rustix::fs::chmod(path, self.mode(&stat, 0))
    }

    fn directory(&self, dir: BorrowedFd<'_>) -> rustix::io::Result<()> {
        rustix::fs::fchown(dir, None, Some(Gid::from_raw(self.gid)))?;
        let stat = rustix::fs::fstat(dir)?;
        rustix::fs::fchmod(dir, self.mode(&stat, SETGID | EXEC))
    }
}

impl Visitor for Give<'_> {
    fn entry(&mut self, entry: Entry<'_>) -> io::Result<bool> {
        if !entry.is_dir() {
            self.log(self.file(entry));
        }
        Ok(true)
    }

    fn leave(&mut self, dir: BorrowedFd<'_>) -> io::Result<()> {
        self.log(self.directory(dir));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

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
            set_volume_ownership(tmp.path(), 4321, read_only).unwrap();
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

    #[test]
    fn ownership_of_a_tree_deeper_than_any_path_is_changed_on_a_small_stack() {
        // On tmpfs, since disks are slow with this many directories.
        let tmp = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut at = tree::open_root(tmp.path()).unwrap();
        for _ in 0..5000 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
            at = rustix::fs::openat(&at, "d", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        }
        std::thread::scope(|s| {
            let small = std::thread::Builder::new().stack_size(256 << 10);
            let give = || set_volume_ownership(tmp.path(), 4321, false);
            small.spawn_scoped(s, give).unwrap().join().unwrap().unwrap();
        });
        let deepest = rustix::fs::fstat(&at).unwrap();
        assert_eq!((deepest.st_gid, deepest.st_mode & 0o7777), (4321, 0o2770));
        tree::remove(&tmp.path().join("d")).unwrap();
    }
}
