//! Sets the group of a volume to the pod's fsGroup (`pkg/volume: VolumeOwnership.ChangePermissions`).

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quintlet_kit::task;
use quintlet_kit::tree::{self, DirEntry, Visitor};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat};

const RW: u32 = 0o660;
const RO: u32 = 0o440;
const EXEC: u32 = 0o110;
const SETGID: u32 = 0o2000;

/// Reason of the events about a change that takes long (`VolumePermissionChangeInProgress`).
pub const IN_PROGRESS: &str = "VolumePermissionChangeInProgress";
/// Time after which a change is reported for the first time.
const FIRST_REPORT: Duration = Duration::from_secs(30);
/// Interval between the reports after the first one.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The group that the files of a pod's volume get.
#[derive(Debug, Clone)]
pub struct GroupChange {
    /// Root directory of the volume.
    pub root: PathBuf,
    /// Group ID.
    pub group: u32,
    /// The files are changed only if the group or mode of the root directory differs
    /// (`fsGroupChangePolicy: OnRootMismatch`).
    pub only_if_root_differs: bool,
    /// UID of the pod. Reports name the directory from there on.
    pub pod: String,
}

impl GroupChange {
    /// Changes the group of all files as [`set_volume_ownership`] does. `report` gets the kubelet's message
    /// after 30 seconds, and then the number of files each minute.
    ///
    /// # Errors
    /// A directory cannot be read.
    ///
    /// Cancellation safety: if the future is dropped, the change continues.
    pub async fn run(&self, report: &(dyn Fn(String) + Send + Sync)) -> io::Result<()> {
        let files = Arc::new(AtomicU64::new(0));
        let (change, counter) = (self.clone(), Arc::clone(&files));
        let change = task::blocking(move || {
            if change.only_if_root_differs && !root_differs(&change.root, change.group, false)? {
                return Ok(());
            }
            change_all(&change.root, change.group, false, &counter)
        });
        reported(change, &self.reported_dir(), &files, report).await
    }

    fn reported_dir(&self) -> String {
        let dir = self.root.display().to_string();
        match dir.find(&self.pod) {
            Some(at) => dir.get(at..).unwrap_or_default().to_owned(),
            None => dir,
        }
    }
}

/// Waits for `change`, and reports that it takes long.
async fn reported<T>(
    change: impl Future<Output = T>,
    dir: &str,
    files: &AtomicU64,
    report: &(dyn Fn(String) + Send + Sync),
) -> T {
    tokio::pin!(change);
    let mut wait = FIRST_REPORT;
    loop {
        // The change keeps its state if the other arm is first.
        tokio::select! {
            done = &mut change => return done,
            () = tokio::time::sleep(wait) => {}
        }
        report(match wait {
            FIRST_REPORT => format!(
                "Setting volume ownership for {dir} is taking longer than expected, consider using OnRootMismatch - \
                 https://kubernetes.io/docs/tasks/configure-pod-container/security-context/\
                 #configure-volume-permission-and-ownership-change-policy-for-pods"
            ),
            _ => {
                let count = files.load(Ordering::Relaxed);
                format!("Setting volume ownership for {dir}, processed {count} files.")
            }
        });
        wait = REPORT_INTERVAL;
    }
}

/// Changes the group of all files below `root` to `gid`, children before their directory. Links themselves
/// are changed, and other mounts are skipped. Entries that cannot be changed are logged.
///
/// # Errors
/// A directory cannot be read.
pub fn set_volume_ownership(root: &Path, gid: u32, read_only: bool) -> io::Result<()> {
    change_all(root, gid, read_only, &AtomicU64::new(0))
}

fn change_all(root: &Path, gid: u32, read_only: bool, files: &AtomicU64) -> io::Result<()> {
    let mut give = Give { gid, mask: if read_only { RO } else { RW }, root, files };
    let stat = rustix::fs::statat(CWD, root, AtFlags::SYMLINK_NOFOLLOW)?;
    if tree::is_dir(&stat) {
        return tree::walk(tree::open_root(root)?, &mut give);
    }
    let name = std::ffi::CString::new(std::os::unix::ffi::OsStrExt::as_bytes(root.as_os_str()))?;
    give.entry(DirEntry { dir: CWD, name: &name, stat: &stat }).map(|_| ())
}

/// Returns whether the root directory of a volume does not have the group and mode that
/// [`set_volume_ownership`] gives it, for `fsGroupChangePolicy: OnRootMismatch` (`requiresPermissionChange`).
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
    /// Files and directories that were changed.
    files: &'a AtomicU64,
}

impl Give<'_> {
    fn log(&self, given: rustix::io::Result<()>) {
        self.files.fetch_add(1, Ordering::Relaxed);
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

    fn file(&self, entry: DirEntry<'_>) -> rustix::io::Result<()> {
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
    fn entry(&mut self, entry: DirEntry<'_>) -> io::Result<bool> {
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
            let group_and_mode = |p: &Path| {
                let m = fs::symlink_metadata(p).unwrap();
                (m.gid(), m.mode() & 0o7777)
            };
            assert_eq!(group_and_mode(&f), (4321, file));
            assert_eq!(group_and_mode(&sub), (4321, dir));
            assert_eq!(group_and_mode(&sub.join("link")).0, 4321);
            assert_ne!(group_and_mode(out.path()).0, 4321, "a link is not followed");
        }
    }

    #[test]
    fn a_volume_that_became_a_link_is_changed_without_following_it() {
        let tmp = tempfile::tempdir().unwrap();
        let [outside, root] = ["outside", "root"].map(|name| tmp.path().join(name));
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("f"), "").unwrap();
        std::os::unix::fs::symlink(&outside, &root).unwrap();
        set_volume_ownership(&root, 4321, false).unwrap();
        assert_eq!(fs::symlink_metadata(&root).unwrap().gid(), 4321);
        for path in [outside.join("f"), outside] {
            let attributes = fs::metadata(&path).unwrap();
            assert_ne!(attributes.gid(), 4321, "{}", path.display());
            assert_eq!(attributes.mode() & 0o2000, 0, "{}", path.display());
        }
        assert!(root_differs(&root, 4321, false).unwrap(), "the mode is that of the link");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_that_takes_long_is_reported_after_half_a_minute_and_then_each_minute() {
        let slow = "Setting volume ownership for u1/volumes/v is taking longer than expected, consider using OnRootMismatch - \
            https://kubernetes.io/docs/tasks/configure-pod-container/security-context/\
            #configure-volume-permission-and-ownership-change-policy-for-pods";
        // Seconds that the change takes; when it is reported.
        for (seconds, at) in [(29, vec![]), (31, vec![30]), (89, vec![30]), (151, vec![30, 90, 150])] {
            let began = tokio::time::Instant::now();
            let files = AtomicU64::new(0);
            let reports = parking_lot::Mutex::new(Vec::new());
            let report = |text: String| {
                files.fetch_add(1, Ordering::Relaxed);
                reports.lock().push((began.elapsed().as_secs(), text));
            };
            let change = tokio::time::sleep(Duration::from_secs(seconds));
            reported(change, "u1/volumes/v", &files, &report).await;
            assert_eq!(began.elapsed(), Duration::from_secs(seconds));
            let text = |number: usize| match number {
                0 => slow.to_owned(),
                _ => format!("Setting volume ownership for u1/volumes/v, processed {number} files."),
            };
            let expected: Vec<_> = at.into_iter().enumerate().map(|(n, at)| (at, text(n))).collect();
            assert_eq!(reports.into_inner(), expected, "{seconds}");
        }
        let dir = |root: &str| {
            let (root, pod) = (PathBuf::from(root), "u1".to_owned());
            GroupChange { root, group: 1, only_if_root_differs: false, pod }.reported_dir()
        };
        assert_eq!(dir("/var/lib/kubelet/pods/u1/volumes/v"), "u1/volumes/v");
        assert_eq!(dir("/other"), "/other");
    }

    #[tokio::test]
    async fn the_files_of_a_change_are_counted_and_the_policy_on_root_mismatch_changes_them_once() {
        let tmp = tempfile::tempdir().unwrap();
        let group_of = |name: &str| fs::metadata(tmp.path().join(name)).unwrap().gid();
        let change = |only_if_root_differs| {
            let (root, pod) = (tmp.path().to_owned(), "u1".to_owned());
            GroupChange { root, group: 4711, only_if_root_differs, pod }
        };
        fs::write(tmp.path().join("first"), "").unwrap();
        change(true).run(&|_| {}).await.unwrap();
        assert_eq!((group_of(""), group_of("first")), (4711, 4711));
        fs::write(tmp.path().join("second"), "").unwrap();
        std::os::unix::fs::chown(tmp.path().join("second"), None, Some(0)).unwrap();
        change(true).run(&|_| {}).await.unwrap();
        assert_eq!(group_of("second"), 0);
        change(false).run(&|_| {}).await.unwrap();
        assert_eq!(group_of("second"), 4711);
        let files = AtomicU64::new(0);
        change_all(tmp.path(), 4711, false, &files).unwrap();
        assert_eq!(files.into_inner(), 3, "two files and the directory");
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
