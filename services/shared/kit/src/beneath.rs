//! Accesses files beneath a directory that an untrusted process may write to, such as a pod's logs or paths
//! from the runtime.
//!
//! No function follows a symbolic link or leaves the directory, even if the directory changes concurrently:
//! the kernel resolves every path (`openat2` with `RESOLVE_BENEATH`, `RESOLVE_NO_SYMLINKS` and
//! `RESOLVE_NO_MAGICLINKS`). All calls block.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::atomic_file::Owner;

/// Attempts to resolve a path while the kernel reports a concurrent rename (`EAGAIN`).
const ATTEMPTS: usize = 16;

/// An open directory. Its methods take paths relative to it, or absolute paths that begin with the path it
/// was opened by.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    /// Opens a directory whose own path is trusted: links in it are followed.
    ///
    /// # Errors
    /// Fails if the path does not exist or is not a directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Opens a directory beneath this one.
    ///
    /// # Errors
    /// Fails if the path leaves this directory, contains a link, or is not a directory.
    pub fn dir(&self, path: &Path) -> io::Result<Self> {
        let fd = self.resolve(path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
        Ok(Self { fd, path: self.path.join(self.relative(path)?) })
    }

    /// Opens a regular file for reading. A FIFO or a device is refused without waiting for its other end.
    ///
    /// # Errors
    /// Fails if the path leaves this directory or contains a link, or if the file cannot be read or is not
    /// regular.
    pub fn read(&self, path: &Path) -> io::Result<File> {
        regular(self.resolve(path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?)
    }

    /// Opens a regular file for appending, and creates it with `mode` if it does not exist.
    ///
    /// # Errors
    /// Fails if the path leaves this directory or contains a link, or if the file cannot be written or is not
    /// regular.
    pub fn append(&self, path: &Path, mode: u32) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NONBLOCK;
        regular(self.resolve(path, flags, Mode::from_raw_mode(mode))?)
    }

    /// Creates a file for writing.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if the name exists, even as a dangling link. Fails if the path leaves this
    /// directory or contains a link.
    pub fn create_new(&self, path: &Path, mode: u32) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        Ok(self.resolve(path, flags, Mode::from_raw_mode(mode))?.into())
    }

    /// Creates the directory `name` if it does not exist, sets its owner and mode, and opens it. Existing
    /// content is kept.
    ///
    /// # Errors
    /// Fails if the name exists and is not a directory, or if the owner cannot be set.
    pub fn make_dir(&self, name: &Path, owner: Option<Owner>, mode: u32) -> io::Result<Self> {
        let (parent, last) = self.parent(name)?;
        match rustix::fs::mkdirat(&parent, last, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let fd = resolve(parent.as_fd(), Path::new(last), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        if let Some(Owner { uid, gid }) = owner {
            std::os::unix::fs::fchown(&fd, Some(uid), Some(gid))?;
        }
        rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode))?;
        Ok(Self { fd, path: self.path.join(self.relative(name)?) })
    }

    /// Returns the names of the entries of this directory, in no particular order.
    ///
    /// # Errors
    /// Fails if the directory cannot be read.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        self.first_names(usize::MAX)
    }

    /// Returns the names of at most `most` entries of this directory, in no particular order.
    ///
    /// # Errors
    /// Fails if the directory cannot be read.
    pub fn first_names(&self, most: usize) -> io::Result<Vec<OsString>> {
        let fd = self.resolve(Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(fd)? {
            let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
            if names.len() >= most {
                break;
            }
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Returns the path that this directory was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the attributes of a file; those of the link itself if the last component is one.
    ///
    /// # Errors
    /// Fails if the path leaves this directory, contains a link before its last component, or does not exist.
    pub fn stat(&self, path: &Path) -> io::Result<Stat> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Removes a file; the link itself if the last component is one.
    ///
    /// # Errors
    /// Fails if the path leaves this directory, contains a link before its last component, does not exist, or
    /// is a directory.
    pub fn remove_file(&self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?)
    }

    /// Renames a file and replaces an existing file with the new name. A link is renamed or replaced, not
    /// followed.
    ///
    /// # Errors
    /// Fails if a path leaves this directory or contains a link before its last component, or if the file
    /// does not exist.
    pub fn rename(&self, old: &Path, new: &Path) -> io::Result<()> {
        let (from_parent, from_name) = self.parent(old)?;
        let (to_parent, to_name) = self.parent(new)?;
        Ok(rustix::fs::renameat(&from_parent, from_name, &to_parent, to_name)?)
    }

    /// Opens the parent of a path, and returns it with the last component.
    fn parent<'a>(&self, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let name = match path.components().next_back() {
            Some(Component::Normal(name)) => name,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file name")),
        };
        let relative = self.relative(path)?;
        let parent = match relative.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            Some(_) => Path::new("."),
            None => return Err(escape(path)),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        Ok((resolve(self.fd.as_fd(), parent, flags, Mode::empty())?, name))
    }

    fn resolve(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let relative = self.relative(path)?;
        let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        Ok(resolve(self.fd.as_fd(), relative, flags, mode)?)
    }

    /// Returns the path relative to this directory.
    fn relative<'a>(&self, path: &'a Path) -> io::Result<&'a Path> {
        if !path.is_absolute() {
            return Ok(path);
        }
        path.strip_prefix(&self.path).map_err(|_| escape(path))
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens `path` beneath `root` without following any link. The flag `CLOEXEC` is added.
///
/// # Errors
/// Returns `XDEV` if the path leaves the directory, `LOOP` if it contains a link, and other errors as
/// `open(2)`.
pub fn resolve(root: BorrowedFd<'_>, path: &Path, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    open(root, path, flags, mode, resolve)
}

/// Opens `path` beneath `root`, follows links that stay beneath it, and enters no other file system. The flag
/// `CLOEXEC` is added.
///
/// # Errors
/// Returns `XDEV` if the path leaves the directory or its file system, and other errors as `open(2)`.
pub fn follow(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    open(root, path, flags, Mode::empty(), resolve)
}

fn open(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: Mode,
    resolve: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    let mut last = Errno::AGAIN;
    for _ in 0..ATTEMPTS {
        match rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, mode, resolve) {
            Err(e @ (Errno::AGAIN | Errno::INTR)) => last = e,
            other => return other,
        }
    }
    Err(last)
}

fn escape(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{} leaves its directory", path.display()))
}

/// Converts the descriptor of a regular file to a file with blocking I/O.
fn regular(fd: OwnedFd) -> io::Result<File> {
    let file = File::from(fd);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags.difference(OFlags::NONBLOCK))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
    use std::{fs, sync::atomic};

    use super::*;

    struct Places {
        _temp: tempfile::TempDir,
        root: PathBuf,
        outside: PathBuf,
        dir: Dir,
    }

    /// A root with `a/b/file` beneath it, and a directory outside with a file `secret`.
    fn places() -> Places {
        let temp = tempfile::tempdir().unwrap();
        let [root, outside] = ["root", "outside"].map(|n| temp.path().join(n));
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(root.join("a/b/file"), "mine").unwrap();
        fs::write(outside.join("secret"), "host").unwrap();
        fs::write(outside.join("file"), "host").unwrap();
        symlink("b", root.join("a/inward")).unwrap();
        symlink("file", root.join("a/b/link")).unwrap();
        symlink(outside.join("secret"), root.join("a/secret")).unwrap();
        symlink(&outside, root.join("out")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        let dir = Dir::open(&root).unwrap();
        Places { _temp: temp, root, outside, dir }
    }

    const REFUSED: &[&str] = &[
        "a/inward/file",
        "a/b/link",
        "a/secret",
        "out/secret",
        "out/file",
        "magic/etc/hostname",
        "../outside/secret",
        "a/../../outside/secret",
        "/etc/hostname",
    ];

    #[test]
    fn a_file_is_read_beneath_its_directory_and_through_no_link() {
        let p = places();
        for path in [Path::new("a/b/file"), Path::new("./a/../a/b/file"), &p.root.join("a/b/file")] {
            let mut text = String::new();
            p.dir.read(path).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "mine", "{}", path.display());
        }
        for path in REFUSED {
            assert!(p.dir.read(Path::new(path)).is_err(), "{path}");
            assert!(p.dir.append(Path::new(path), 0o600).is_err(), "{path}");
        }
        assert!(p.dir.read(&p.outside.join("secret")).is_err());
        assert!(p.dir.dir(Path::new("out")).is_err());
        let inner = p.dir.dir(Path::new("a/b")).unwrap();
        assert!(inner.read(Path::new("file")).is_ok());
        assert!(inner.read(&p.root.join("a/b/file")).is_ok());
        assert!(inner.read(Path::new("../b/file")).is_err());
        let mut names = inner.names().unwrap();
        names.sort();
        assert_eq!(names, ["file", "link"]);
        assert_eq!(inner.first_names(1).unwrap().len(), 1);
    }

    #[test]
    fn a_file_that_is_not_regular_is_refused_without_blocking() {
        let p = places();
        let fifo = p.root.join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        for path in ["fifo", "a"] {
            let error = p.dir.read(Path::new(path)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
        }
    }

    #[test]
    fn a_new_file_is_created_with_its_mode_and_replaces_nothing() {
        let p = places();
        p.dir.create_new(Path::new("a/new"), 0o640).unwrap().write_all(b"x").unwrap();
        let meta = fs::metadata(p.root.join("a/new")).unwrap();
        assert_eq!((meta.permissions().mode() & 0o777, meta.len()), (0o640, 1));
        symlink(p.outside.join("planted"), p.root.join("a/dangling")).unwrap();
        for path in ["a/new", "a/dangling", "a/secret"] {
            let error = p.dir.create_new(Path::new(path), 0o640).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{path}");
        }
        for path in ["out/new", "magic/tmp/quintlet-new", "../outside/new", "a/inward/new"] {
            assert!(p.dir.create_new(Path::new(path), 0o640).is_err(), "{path}");
        }
        assert_eq!(fs::read_dir(&p.outside).unwrap().count(), 2);
    }

    #[test]
    fn a_directory_gets_its_mode_and_a_link_in_its_place_is_refused() {
        let p = places();
        let dir = p.dir.make_dir(Path::new("a/d"), None, 0o2750).unwrap();
        dir.create_new(Path::new("kept"), 0o600).unwrap();
        p.dir.make_dir(Path::new("a/d"), None, 0o700).unwrap();
        assert_eq!(fs::metadata(p.root.join("a/d")).unwrap().permissions().mode() & 0o7777, 0o700);
        assert!(p.root.join("a/d/kept").exists());
        for name in ["out", "a/b/file", "out/new", "../new", "a/secret"] {
            assert!(p.dir.make_dir(Path::new(name), None, 0o700).is_err(), "{name}");
        }
        assert_eq!(fs::metadata(&p.outside).unwrap().permissions().mode() & 0o111, 0o111);
    }

    #[test]
    fn removal_and_rename_apply_to_a_link_and_never_to_its_target() {
        let p = places();
        assert_eq!(p.dir.stat(Path::new("a/b/file")).unwrap().st_size, 4);
        p.dir.remove_file(Path::new("a/secret")).unwrap();
        assert!(fs::symlink_metadata(p.root.join("a/secret")).is_err());
        for path in ["out/secret", "../outside/secret", "a/..", "", "/"] {
            assert!(p.dir.remove_file(Path::new(path)).is_err(), "{path}");
            assert!(p.dir.stat(Path::new(path)).is_err(), "{path}");
        }
        symlink(p.outside.join("secret"), p.root.join("target")).unwrap();
        p.dir.rename(Path::new("a/b/file"), Path::new("target")).unwrap();
        assert_eq!(fs::read_to_string(p.root.join("target")).unwrap(), "mine");
        assert!(p.dir.rename(Path::new("target"), Path::new("out/secret")).is_err());
        assert!(p.dir.rename(Path::new("out/secret"), Path::new("mine")).is_err());
        assert_eq!(fs::read_to_string(p.outside.join("secret")).unwrap(), "host");
    }

    #[test]
    fn a_directory_that_is_repeatedly_replaced_by_a_link_never_leads_outside() {
        let p = places();
        let outside = fs::metadata(p.outside.join("file")).unwrap().ino();
        fs::rename(p.root.join("a/b"), p.root.join("b")).unwrap();
        let stop = atomic::AtomicBool::new(false);
        /// Stops the thread that swaps, also when the test fails.
        struct Stop<'a>(&'a atomic::AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, atomic::Ordering::Relaxed);
            }
        }
        std::thread::scope(|s| {
            let _stop = Stop(&stop);
            s.spawn(|| {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                while !stop.load(atomic::Ordering::Relaxed) {
                    rustix::fs::renameat_with(CWD, p.root.join("b"), CWD, p.root.join("out"), flags).unwrap();
                }
            });
            let mut opened = 0;
            // On a busy machine the other thread may be preempted with the link in place.
            for attempt in 0..2_000_000 {
                if attempt >= 2_000 && opened > 0 {
                    break;
                }
                if let Ok(file) = p.dir.read(Path::new("b/file")) {
                    assert_ne!(file.metadata().unwrap().ino(), outside, "a file outside was opened");
                    opened += 1;
                }
            }
            assert!(opened > 0, "the file was never opened");
        });
    }
}
