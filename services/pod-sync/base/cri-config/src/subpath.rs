//! Opens and mounts paths in volumes that containers may change at any time, without following a link out of
//! the volume (`pkg/volume/util/subpath`).

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use quintlet_kit::{beneath, failpoint};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

/// Size of a variable file from which on it is not read.
const MAX_FILE: u64 = 1 << 20;

fn escape(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{} leaves its volume", path.display()))
}

/// Opens the volume itself, whose path the node agent controls.
fn open_volume(volume: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, volume, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Opens `sub` in `volume` as a path descriptor. Links are resolved first and rejected if they leave the
/// volume. The resolved path is then opened without following links, so a link that appears in between is an
/// error.
///
/// # Errors
/// The path leaves the volume, changed meanwhile, or cannot be opened.
pub fn open_beneath(volume: &Path, sub: &Path) -> io::Result<OwnedFd> {
    open_resolved(volume, sub, || {})
}

/// Tests change the path in `between`, which runs after the resolution and before the open.
fn open_resolved(volume: &Path, sub: &Path, between: impl FnOnce()) -> io::Result<OwnedFd> {
    let real_volume = fs::canonicalize(volume)?;
    let real = fs::canonicalize(volume.join(sub))?;
    let inside = real.strip_prefix(&real_volume).map_err(|_| escape(sub))?.to_owned();
    between();
    let root = open_volume(&real_volume)?;
    if inside.as_os_str().is_empty() {
        return Ok(root);
    }
    Ok(beneath::resolve(root.as_fd(), &inside, OFlags::PATH, Mode::empty())?)
}

/// Reads a file in a volume. Links are followed within the volume, and other file systems are not entered: a
/// link of a container must not lead to a server that does not answer.
///
/// # Errors
/// It leaves the volume, is not a regular file, or has 1 MiB or more.
pub fn read_beneath(volume: &Path, sub: &str) -> io::Result<Vec<u8>> {
    use io::Read as _;
    let fd =
        beneath::follow(open_volume(volume)?.as_fd(), Path::new(sub), OFlags::PATH).map_err(|e| match e {
            Errno::XDEV => escape(Path::new(sub)),
            e => e.into(),
        })?;
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let meta = fs::metadata(&link)?;
    if !meta.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut bytes = Vec::new();
    if fs::File::open(&link)?.take(MAX_FILE).read_to_end(&mut bytes)? as u64 >= MAX_FILE {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "1 MiB or more"));
    }
    Ok(bytes)
}

/// Creates the missing directories of `sub` with `mode`, whatever the umask. Links are followed only within
/// the volume, and not among the new directories.
///
/// # Errors
/// The path leaves the volume, or a directory cannot be created.
pub fn make_dirs(volume: &Path, sub: &Path, mode: u32) -> io::Result<()> {
    let parts: Vec<_> = sub.components().collect();
    let mut existing = PathBuf::new();
    let mut count = 0_usize;
    for part in &parts {
        let next = existing.join(part);
        // A dangling link counts as existing; opening it below fails.
        if fs::symlink_metadata(volume.join(&next)).is_err() {
            break;
        }
        existing = next;
        count = count.saturating_add(1);
    }
    let mut dir = open_beneath(volume, &existing)?;
    for part in parts.iter().skip(count) {
        let mode = Mode::from_raw_mode(mode & 0o7777);
        match rustix::fs::mkdirat(&dir, part.as_os_str(), mode) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        dir = rustix::fs::openat(&dir, part.as_os_str(), flags, Mode::empty())?;
        rustix::fs::fchmod(&dir, mode)?;
    }
    Ok(())
}

/// Returns where subpath `index` of a container's mounts is bound:
/// `volume-subpaths/<volume>/<container>/<index>`.
#[must_use]
pub fn target(pod_dir: &Path, volume: &str, container: &str, index: usize) -> PathBuf {
    pod_dir.join("volume-subpaths").join(volume).join(container).join(index.to_string())
}

/// Bind-mounts `sub` of `volume` at `target` and returns `target`, which keeps referring to the file that was
/// checked.
///
/// Repeating it changes nothing while both are the same file. Otherwise the old mount is unmounted first.
///
/// # Errors
/// The path leaves the volume, or the mount fails.
pub fn bind(volume: &Path, sub: &Path, target: &Path) -> io::Result<()> {
    let fd = open_beneath(volume, sub)?;
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let source = fs::metadata(&link)?;
    match fs::symlink_metadata(target) {
        Ok(there) if (there.dev(), there.ino()) == (source.dev(), source.ino()) => return Ok(()),
        Ok(_) => unmount_all(target)?,
        Err(e) if is_corrupted(&e) => detach_all(target)?,
        // Nothing is there, or creating it below fails with the same error.
        Err(_) => {}
    }
    if let Some(parent) = target.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o750).create(parent)?;
    }
    if source.is_dir() {
        if fs::symlink_metadata(target).is_ok_and(|t| !t.is_dir()) {
            fs::remove_file(target)?;
        }
        fs::DirBuilder::new().recursive(true).mode(0o750).create(target)?;
    } else {
        if fs::symlink_metadata(target).is_ok_and(|t| t.is_dir()) {
            fs::remove_dir(target)?;
        }
        fs::OpenOptions::new().create(true).append(true).mode(0o640).open(target)?;
    }
    failpoint::file!("sub path bound", || rustix::mount::mount_bind(&link, target))?;
    Ok(())
}

/// Returns whether a mount has lost its server: a stale NFS handle, or the end of a FUSE process
/// (`k8s.io/mount-utils: IsCorruptedMnt`).
fn is_corrupted(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| matches!(errno, Errno::NOTCONN | Errno::STALE | Errno::IO | Errno::HOSTDOWN))
}

/// Unmounts everything that is mounted on a path. It is not an error if nothing is.
///
/// # Errors
/// A mount is busy.
pub fn unmount_all(path: &Path) -> io::Result<()> {
    unmount_with(path, UnmountFlags::NOFOLLOW)
}

/// Does not wait for the server of the mount, which containers may still use.
fn detach_all(path: &Path) -> io::Result<()> {
    unmount_with(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
}

fn unmount_with(path: &Path, flags: UnmountFlags) -> io::Result<()> {
    loop {
        match rustix::mount::unmount(path, flags) {
            Ok(()) => {}
            // EINVAL: not a mount point.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    struct Places {
        _dir: tempfile::TempDir,
        volume: PathBuf,
        outside: PathBuf,
        pod: PathBuf,
    }

    fn places() -> Places {
        let dir = tempfile::tempdir().unwrap();
        let [volume, outside, pod] = ["volume", "outside", "pod"].map(|n| dir.path().join(n));
        for p in [&volume, &outside, &pod] {
            fs::create_dir(p).unwrap();
        }
        fs::write(outside.join("secret"), "host").unwrap();
        fs::create_dir_all(volume.join("a/b")).unwrap();
        fs::write(volume.join("a/file"), "mine").unwrap();
        Places { _dir: dir, volume, outside, pod }
    }

    #[test]
    fn a_link_may_point_within_the_volume_only() {
        let p = places();
        symlink("a", p.volume.join("in")).unwrap();
        symlink(p.volume.join("a"), p.volume.join("absolute-in")).unwrap();
        symlink(&p.outside, p.volume.join("absolute-out")).unwrap();
        symlink("../outside", p.volume.join("relative-out")).unwrap();
        symlink("a/../../outside", p.volume.join("around")).unwrap();
        symlink("/proc/self/root", p.volume.join("magic")).unwrap();
        for (sub, fine) in [
            ("a/b", true),
            ("in/file", true),
            ("absolute-in/b", true),
            ("", true),
            ("absolute-out", false),
            ("absolute-out/secret", false),
            ("relative-out/secret", false),
            ("around", false),
            ("magic", false),
            ("missing", false),
        ] {
            assert_eq!(open_beneath(&p.volume, Path::new(sub)).is_ok(), fine, "{sub}");
        }
        assert_eq!(read_beneath(&p.volume, "in/file").unwrap(), b"mine");
        symlink("magic/self", p.volume.join("chain")).unwrap();
        for sub in ["relative-out/secret", "absolute-out/secret", "around/secret", "../outside/secret"] {
            let error = read_beneath(&p.volume, sub).unwrap_err();
            assert_eq!(error.to_string(), format!("{sub} leaves its volume"));
        }
        for sub in ["magic/etc/passwd", "chain", "missing", "/etc/passwd"] {
            assert!(read_beneath(&p.volume, sub).is_err(), "{sub}");
        }
        assert!(read_beneath(&p.volume, "a").is_err());
    }

    #[test]
    fn a_directory_swapped_for_a_link_after_the_check_is_refused() {
        let p = places();
        let swap = || {
            fs::rename(p.volume.join("a"), p.volume.join("moved")).unwrap();
            symlink(&p.outside, p.volume.join("a")).unwrap();
        };
        fs::create_dir(p.outside.join("b")).unwrap();
        assert!(open_resolved(&p.volume, Path::new("a/b"), swap).is_err());
    }

    #[test]
    fn a_volume_that_flips_under_the_open_never_leads_outside() {
        let p = places();
        fs::create_dir(p.outside.join("b")).unwrap();
        symlink(&p.outside, p.volume.join("link")).unwrap();
        let outside = fs::metadata(p.outside.join("b")).unwrap().ino();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    rustix::fs::renameat_with(CWD, p.volume.join("a"), CWD, p.volume.join("link"), flags)
                        .unwrap();
                }
            });
            for _ in 0..2000 {
                if let Ok(fd) = open_beneath(&p.volume, Path::new("a/b")) {
                    assert_ne!(rustix::fs::fstat(&fd).unwrap().st_ino, outside);
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[test]
    fn missing_directories_are_created_with_the_mode_of_the_volume() {
        let p = places();
        symlink("a", p.volume.join("in")).unwrap();
        symlink(&p.outside, p.volume.join("out")).unwrap();
        symlink("nowhere", p.volume.join("dangling")).unwrap();
        make_dirs(&p.volume, Path::new("in/new/deep"), 0o2777).unwrap();
        let mode = fs::metadata(p.volume.join("a/new/deep")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o2777);
        assert!(make_dirs(&p.volume, Path::new("out/new"), 0o755).is_err());
        assert!(make_dirs(&p.volume, Path::new("dangling/new"), 0o755).is_err());
        assert!(!p.outside.join("new").exists());
    }

    #[test]
    fn a_bind_mount_is_created_once_and_repeated_if_its_source_changes() {
        let p = places();
        let at = target(&p.pod, "v", "c", 0);
        bind(&p.volume, Path::new("a/file"), &at).unwrap();
        bind(&p.volume, Path::new("a/file"), &at).unwrap();
        assert_eq!(fs::read_to_string(&at).unwrap(), "mine");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert_eq!(mounts.matches(at.to_str().unwrap()).count(), 1);
        fs::remove_file(p.volume.join("a/file")).unwrap();
        fs::write(p.volume.join("a/file"), "new").unwrap();
        bind(&p.volume, Path::new("a/file"), &at).unwrap();
        assert_eq!(fs::read_to_string(&at).unwrap(), "new");
        bind(&p.volume, Path::new("a"), &at).unwrap();
        assert!(at.join("b").is_dir());
        unmount_all(&at).unwrap();
        assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    }

    #[test]
    fn a_mount_whose_server_has_ended_is_replaced() {
        let p = places();
        for (index, sub) in [(0, "a"), (1, "a/file")] {
            let at = target(&p.pod, "v", "c", index);
            fs::create_dir_all(&at).unwrap();
            // A FUSE file system without a process that serves it.
            let fuse = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
            let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
            let options = std::ffi::CString::new(options).unwrap();
            rustix::mount::mount("none", &at, "fuse", rustix::mount::MountFlags::empty(), options.as_c_str())
                .unwrap();
            drop(fuse);
            let error = fs::symlink_metadata(&at).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(Errno::NOTCONN), "{error}");
            bind(&p.volume, Path::new(sub), &at).unwrap();
            let (bound, source) = (fs::metadata(&at).unwrap(), fs::metadata(p.volume.join(sub)).unwrap());
            assert_eq!((bound.dev(), bound.ino()), (source.dev(), source.ino()), "{sub}");
            unmount_all(&at).unwrap();
        }
    }

    #[test]
    fn a_lost_server_is_known_by_its_error() {
        for (errno, corrupted) in [
            (Errno::STALE, true),
            (Errno::NOTCONN, true),
            (Errno::IO, true),
            (Errno::HOSTDOWN, true),
            (Errno::NOENT, false),
            (Errno::LOOP, false),
        ] {
            assert_eq!(is_corrupted(&errno.into()), corrupted, "{errno:?}");
        }
        let p = places();
        let at = target(&p.pod, "v", "c", 0);
        bind(&p.volume, Path::new("a"), &at).unwrap();
        detach_all(&at).unwrap();
        detach_all(&at).unwrap();
        assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    }
}
