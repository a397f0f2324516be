//! Removes and walks directory trees that a pod created, with any depth, names and links.
//!
//! No function recurses, and at most [`OPEN`] directories of a tree are open at once. Directories are opened
//! by name relative to their parent, so paths may be of any length. No link is followed and no mount is
//! crossed, even if the tree changes concurrently. All calls block.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Largest number of directories of one tree that are open at the same time.
pub const OPEN: usize = 32;
/// Deepest directory that a walk enters. A level takes 24 bytes of memory.
const DEEPEST: usize = 1 << 20;
/// Number of times that a directory is read again because entries were added while it was emptied.
const PASSES: u32 = 16;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a directory that is on the same mount as its parent.
///
/// # Errors
/// Returns `CrossesDevices` if it is on another mount. Before Linux 5.6, a bind mount of the same file system
/// is not detected.
pub fn open_within(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    match rustix::fs::openat2(parent, name, DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV) {
        Err(Errno::NOSYS) => {}
        Err(Errno::XDEV) => return Err(other_mount(name)),
        opened => return Ok(opened?),
    }
    let dir = rustix::fs::openat(parent, name, DIRECTORY, Mode::empty())?;
    let same = rustix::fs::fstat(&dir)?.st_dev == rustix::fs::fstat(parent)?.st_dev;
    if same { Ok(dir) } else { Err(other_mount(name)) }
}

fn other_mount(name: &CStr) -> io::Error {
    let text = format!("{} is on another mount", name.to_string_lossy());
    io::Error::new(io::ErrorKind::CrossesDevices, text)
}

fn is_dots(name: &CStr) -> bool {
    name == c"." || name == c".."
}

/// Removes a file, a link or a directory with its content. Succeeds if the path does not exist. Links in the
/// parent's path are followed: only trusted users may be able to change it.
///
/// # Errors
/// Fails as [`remove_at`] does.
pub fn remove(path: &Path) -> io::Result<()> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not a file name");
    let name = CString::new(path.file_name().ok_or_else(invalid)?.as_bytes())?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::openat(CWD, parent, flags, Mode::empty()) {
        Ok(parent) => remove_at(parent.as_fd(), &name),
        Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// A directory that is being emptied.
struct Level {
    dir: Dir,
    /// Name of the directory in its parent.
    name: CString,
    passes: u32,
    /// Directories of deeper levels were moved into this one since it was last read from its start.
    refilled: bool,
}

impl Level {
    fn open(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<Self>> {
        match open_within(parent, name) {
            Ok(fd) => {
                Ok(Some(Self { dir: Dir::new(fd)?, name: name.to_owned(), passes: 0, refilled: false }))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Removes the entry `name` of `parent`: a file, a link, or a directory with its content. Succeeds if it does
/// not exist.
///
/// A directory deeper than [`OPEN`] levels is moved to the top of the tree and emptied there. An interrupted
/// call leaves a smaller tree, which the next call removes.
///
/// # Errors
/// Returns `CrossesDevices` if a directory is on another mount, which is left unchanged, and other errors as
/// `unlinkat(2)`.
pub fn remove_at(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    if !is_directory_after_unlink(parent, name)? {
        return Ok(());
    }
    let mut levels: Vec<Level> = Level::open(parent, name)?.into_iter().collect();
    let mut moved = 0_u64;
    loop {
        let depth = levels.len();
        let Some(level) = levels.last_mut() else { return Ok(()) };
        let entry = match level.dir.read() {
            Some(entry) => entry?,
            None => {
                let Some(done) = levels.pop() else { return Ok(()) };
                if let Some(again) = remove_empty(parent, levels.last(), done)? {
                    levels.push(again);
                }
                continue;
            }
        };
        let name = entry.file_name();
        if is_dots(name) || !is_directory_after_unlink(level.dir.fd()?, name)? {
            continue;
        }
        if depth < OPEN {
            let below = Level::open(level.dir.fd()?, name)?;
            levels.extend(below);
            continue;
        }
        if let (Some(top), Some(level)) = (levels.first(), levels.last()) {
            move_to_top(top, level.dir.fd()?, name, &mut moved)?;
        }
        if let Some(top) = levels.first_mut() {
            top.refilled = true;
        }
    }
}

/// Unlinks the entry unless it is a directory. Returns whether it is a directory.
fn is_directory_after_unlink(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(false),
        Err(Errno::ISDIR) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Removes a directory that was read to its end. Returns the directory if it must be read again.
fn remove_empty(parent: BorrowedFd<'_>, above: Option<&Level>, mut done: Level) -> io::Result<Option<Level>> {
    let above = match above {
        Some(level) => level.dir.fd()?,
        None => parent,
    };
    match rustix::fs::unlinkat(above, done.name.as_c_str(), AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(None),
        Err(Errno::NOTEMPTY | Errno::EXIST) if done.refilled || done.passes < PASSES => {
            if !std::mem::take(&mut done.refilled) {
                done.passes = done.passes.saturating_add(1);
            }
            done.dir.rewind();
            Ok(Some(done))
        }
        Err(e) => Err(e.into()),
    }
}

/// Moves a directory to the first level under an unused name.
fn move_to_top(top: &Level, parent: BorrowedFd<'_>, name: &CStr, moved: &mut u64) -> io::Result<()> {
    loop {
        *moved = moved.saturating_add(1);
        let free = format!(".quintlet-removed-{moved}");
        match rustix::fs::renameat_with(parent, name, top.dir.fd()?, free.as_str(), RenameFlags::NOREPLACE) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::EXIST) => {}
            // The directory is a mount point.
            Err(Errno::BUSY | Errno::XDEV) => return Err(other_mount(name)),
            Err(e) => return Err(e.into()),
        }
    }
}

/// An entry of a directory, as a walk visits it.
#[derive(Debug, Clone, Copy)]
pub struct DirEntry<'a> {
    /// The directory with the entry.
    pub dir: BorrowedFd<'a>,
    /// Name of the entry.
    pub name: &'a CStr,
    /// Attributes of the entry; for a link, those of the link itself.
    pub stat: &'a Stat,
}

impl DirEntry<'_> {
    /// Returns whether the entry is a directory.
    #[must_use]
    pub fn is_dir(&self) -> bool {
        is_dir(self.stat)
    }
}

/// Returns whether the attributes are those of a directory.
#[must_use]
pub fn is_dir(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// The callbacks of a walk.
pub trait Visitor {
    /// Whether [`Visitor::after`] is called. The walk then stores the name of each directory on its path.
    const AFTER: bool = false;

    /// Visits an entry, a directory before its content. Returns whether to enter a directory.
    ///
    /// # Errors
    /// An error ends the walk.
    fn entry(&mut self, entry: DirEntry<'_>) -> io::Result<bool>;

    /// Visits a directory after its content, the root last.
    ///
    /// # Errors
    /// An error ends the walk.
    fn leave(&mut self, dir: BorrowedFd<'_>) -> io::Result<()> {
        let _ = dir;
        Ok(())
    }

    /// Visits a directory other than the root after [`Visitor::leave`], with its parent. The directory may be
    /// removed.
    ///
    /// # Errors
    /// An error ends the walk.
    fn after(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        let _ = (parent, name);
        Ok(())
    }
}

/// A directory on the path of a walk.
struct Frame {
    /// `None` while the directory is closed. It is opened again from the directory below it.
    dir: Option<Dir>,
    device: u64,
    inode: u64,
    /// Offset at which reading continues.
    next: i64,
    /// Stored only if [`Visitor::AFTER`] is set.
    name: Option<CString>,
}

impl Frame {
    fn of(fd: OwnedFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Self { dir: Some(Dir::new(fd)?), device: stat.st_dev, inode: stat.st_ino, next: 0, name: None })
    }

    /// Opens the directory again as the parent of `child`.
    fn reopen(&mut self, child: &Dir) -> io::Result<()> {
        if self.dir.is_some() {
            return Ok(());
        }
        let fd = rustix::fs::openat(child.fd()?, c"..", DIRECTORY, Mode::empty())?;
        let stat = rustix::fs::fstat(&fd)?;
        if (stat.st_dev, stat.st_ino) != (self.device, self.inode) {
            return Err(io::Error::other("a directory was moved while its tree was walked"));
        }
        let mut dir = Dir::new(fd)?;
        dir.seek(self.next)?;
        self.dir = Some(dir);
        Ok(())
    }
}

/// Walks the tree below the directory `root`. Entries that disappear are skipped. A directory on another
/// mount is visited but not entered.
///
/// # Errors
/// Fails if the visitor fails, a directory cannot be read, or a directory deeper than [`OPEN`] levels is
/// moved elsewhere.
pub fn walk<V: Visitor>(root: OwnedFd, visitor: &mut V) -> io::Result<()> {
    let mut frames = vec![Frame::of(root)?];
    while let Some(frame) = frames.last_mut() {
        let Some(dir) = &mut frame.dir else {
            return Err(io::Error::other("a directory of the walk is not open"));
        };
        match dir.read() {
            Some(Ok(entry)) => {
                frame.next = entry.offset();
                if is_dots(entry.file_name()) {
                    continue;
                }
                let Some(below) = visit(dir.fd()?, entry.file_name(), visitor)? else { continue };
                if frames.len() >= DEEPEST {
                    return Err(io::Error::other("directories are nested too deep"));
                }
                let name = V::AFTER.then(|| entry.file_name().to_owned());
                frames.push(Frame { name, ..Frame::of(below)? });
                let closes = frames.len().checked_sub(OPEN).and_then(|at| at.checked_sub(1));
                if let Some(frame) = closes.and_then(|at| frames.get_mut(at)) {
                    frame.dir = None;
                }
            }
            // The directory was removed while it was read.
            None | Some(Err(Errno::NOENT)) => {
                visitor.leave(dir.fd()?)?;
                let Some(done) = frames.pop() else { return Ok(()) };
                if let (Some(above), Some(dir)) = (frames.last_mut(), &done.dir) {
                    above.reopen(dir)?;
                    if let (Some(parent), Some(name)) = (&above.dir, &done.name) {
                        visitor.after(parent.fd()?, name)?;
                    }
                }
            }
            Some(Err(e)) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Visits an entry, and opens it if the visitor enters it.
fn visit(dir: BorrowedFd<'_>, name: &CStr, visitor: &mut impl Visitor) -> io::Result<Option<OwnedFd>> {
    let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let enter = visitor.entry(DirEntry { dir, name, stat: &stat })?;
    if !enter || !is_dir(&stat) {
        return Ok(None);
    }
    match open_within(dir, name) {
        Ok(fd) => Ok(Some(fd)),
        Err(e) => match Errno::from_io_error(&e) {
            // The directory was removed or replaced.
            Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            _ if e.kind() == io::ErrorKind::CrossesDevices => Ok(None),
            _ => Err(e),
        },
    }
}

/// Opens the directory at the root of a walk. The path is trusted except for its last component, which must
/// not be a link.
///
/// # Errors
/// Fails if the path does not exist, is a link, or is not a directory.
pub fn open_root(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use rustix::mount::{MountFlags, UnmountFlags};

    use super::*;

    /// Makes `levels` directories inside one another, each with a file beside the next, and longer than any
    /// path.
    fn deep(root: &Path, levels: usize) {
        let mut at = open_root(root).unwrap();
        for _ in 0..levels {
            rustix::fs::mkdirat(&at, "deep", Mode::RWXU).unwrap();
            let flags = OFlags::CREATE | OFlags::WRONLY;
            rustix::fs::openat(&at, "file", flags, Mode::RUSR).unwrap();
            at = rustix::fs::openat(&at, "deep", DIRECTORY, Mode::empty()).unwrap();
        }
    }

    /// A directory for a deep tree, removed by rm: the recursion of `TempDir` would overflow the stack after
    /// a failure.
    struct DeepDir(PathBuf);

    impl DeepDir {
        fn new() -> Self {
            // In memory: a disk takes a minute for so many directories.
            let temp = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
            Self(temp.unwrap().keep())
        }
    }

    impl Drop for DeepDir {
        fn drop(&mut self) {
            let removed = std::process::Command::new("rm").arg("-rf").arg(&self.0).status();
            assert!(removed.is_ok_and(|status| status.success()), "{} is left behind", self.0.display());
        }
    }

    /// Runs `work` on a thread with a stack that a recursion would not fit into.
    fn on_a_small_stack(work: impl FnOnce() + Send) {
        std::thread::scope(|s| {
            let thread = std::thread::Builder::new().name("small stack".to_owned()).stack_size(256 << 10);
            if let Err(panic) = thread.spawn_scoped(s, work).unwrap().join() {
                std::panic::resume_unwind(panic);
            }
        });
    }

    #[derive(Default)]
    struct Count {
        files: usize,
        dirs: usize,
        left: usize,
        most_open: usize,
    }

    impl Visitor for Count {
        fn entry(&mut self, entry: DirEntry<'_>) -> io::Result<bool> {
            if entry.is_dir() {
                self.dirs += 1
            } else {
                self.files += 1
            }
            if self.dirs.is_multiple_of(1000) {
                self.most_open = self.most_open.max(fs::read_dir("/proc/self/fd").unwrap().count());
            }
            Ok(true)
        }

        fn leave(&mut self, _: BorrowedFd<'_>) -> io::Result<()> {
            self.left += 1;
            Ok(())
        }
    }

    fn counted(root: &Path) -> Count {
        let mut count = Count::default();
        walk(open_root(root).unwrap(), &mut count).unwrap();
        count
    }

    #[test]
    fn a_tree_of_20_000_levels_is_walked_and_removed_with_few_open_directories() {
        let temp = DeepDir::new();
        let root = temp.0.join("root");
        fs::create_dir(&root).unwrap();
        deep(&root, 20_000);
        on_a_small_stack(|| {
            let count = counted(&root);
            assert_eq!((count.files, count.dirs, count.left), (20_000, 20_000, 20_001));
            assert!(count.most_open < OPEN + 64, "{} descriptors", count.most_open);
            remove(&root).unwrap();
        });
        assert!(!root.exists());
        remove(&root).unwrap();
    }

    #[test]
    fn a_wide_tree_with_deep_branches_is_walked_once_each() {
        let temp = tempfile::tempdir().unwrap();
        for branch in 0..20 {
            let dir = temp.path().join(format!("branch-{branch}"));
            fs::create_dir(&dir).unwrap();
            deep(&dir, 3 * OPEN);
        }
        let count = counted(temp.path());
        assert_eq!((count.files, count.dirs), (20 * 3 * OPEN, 20 * (3 * OPEN + 1)));
        for branch in 0..20 {
            remove(&temp.path().join(format!("branch-{branch}"))).unwrap();
        }
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
    }

    /// A mount that is gone with the test, also when it fails.
    struct Mounted(PathBuf);

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
        }
    }

    #[test]
    fn nothing_on_another_mount_is_visited_or_removed() {
        for kind in ["tmpfs", "bind mount of the same file system"] {
            let temp = tempfile::tempdir().unwrap();
            let [root, outside] = ["root", "outside"].map(|n| temp.path().join(n));
            let place = root.join("a/mounted");
            fs::create_dir_all(&place).unwrap();
            fs::create_dir(&outside).unwrap();
            if kind == "tmpfs" {
                rustix::mount::mount("tmpfs", &place, "tmpfs", MountFlags::empty(), None).unwrap();
            } else {
                rustix::mount::mount_bind(&outside, &place).unwrap();
            }
            let mounted = Mounted(place.clone());
            fs::write(place.join("precious"), "x").unwrap();
            let count = counted(&root);
            assert_eq!((count.files, count.dirs), (0, 2), "{kind}: what is on the mount was visited");
            let error = remove(&root).unwrap_err();
            assert!(place.join("precious").exists(), "{kind}: a file on the mount was removed");
            assert_eq!(error.kind(), io::ErrorKind::CrossesDevices, "{kind}: {error}");
            drop(mounted);
            remove(&root).unwrap();
            assert!(!root.exists(), "{kind}");
        }
    }

    #[test]
    fn links_are_removed_and_visited_and_not_followed() {
        let temp = tempfile::tempdir().unwrap();
        let [root, outside] = ["root", "outside"].map(|n| temp.path().join(n));
        fs::create_dir(&root).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("precious"), "x").unwrap();
        symlink(&outside, root.join("to-dir")).unwrap();
        symlink(outside.join("precious"), root.join("to-file")).unwrap();
        assert_eq!((counted(&root).files, counted(&root).dirs), (2, 0));
        assert!(open_root(&root.join("to-dir")).is_err());
        remove(&root.join("to-dir")).unwrap();
        remove(&root).unwrap();
        assert!(outside.join("precious").exists() && !root.exists());
    }

    #[test]
    fn a_directory_that_is_refilled_forever_is_an_error_and_not_a_loop() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().join("root");
        fs::create_dir(&root).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = fs::write(root.join("again"), "");
                }
            });
            // Either outcome is fine: what matters is that it ends.
            let _ = remove(&root);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        remove(&root).unwrap();
    }
}
