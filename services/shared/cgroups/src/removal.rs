//! Kills the processes of a cgroup and removes it.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::FAR;
use quintlet_kit::tree::{self, DirEntry, Visitor};
use rustix::fs::{AtFlags, Mode, OFlags};

use crate::error::CgroupError;

/// Attempts to kill, as many as in the kubelet. A process that forks faster than this is killed by the next
/// attempt.
const KILL_ROUNDS: u32 = 5;
const KILL_PAUSE: Duration = Duration::from_millis(20);
// A cgroup is busy for a moment after its last process exits: waits of 10 ms, doubled, about 600 ms in all.
const REMOVE_ATTEMPTS: u32 = 6;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// PIDs of a cgroup and its descendants. A pod may nest cgroups as deep as the kernel allows.
struct Processes(BTreeSet<i32>);

impl Visitor for Processes {
    fn entry(&mut self, _: DirEntry<'_>) -> io::Result<bool> {
        Ok(true)
    }

    fn leave(&mut self, group: BorrowedFd<'_>) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(group, c"cgroup.procs", flags, Mode::empty()) else {
            return Ok(());
        };
        let mut text = String::new();
        // A cgroup that is removed meanwhile has no processes.
        let _ = File::from(file).read_to_string(&mut text);
        // A process outside this PID namespace is listed as 0 and cannot be killed.
        self.0.extend(text.lines().filter_map(|l| l.parse::<i32>().ok()).filter(|p| *p > 1));
        Ok(())
    }
}

fn pids(dir: &Path) -> BTreeSet<i32> {
    let mut processes = Processes(BTreeSet::new());
    if let Ok(root) = tree::open_root(dir) {
        // A cgroup that cannot be read fails as busy when it is removed.
        let _ = tree::walk(root, &mut processes);
    }
    processes.0
}

pub(super) fn kill_all(group: &str, dirs: &[PathBuf]) -> Result<(), CgroupError> {
    let mut left = BTreeSet::new();
    for _ in 0..KILL_ROUNDS {
        left.clear();
        dirs.iter().for_each(|d| left.extend(pids(d)));
        if left.is_empty() {
            return Ok(());
        }
        for pid in &left {
            // A process that has exited needs no kill.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        std::thread::sleep(KILL_PAUSE);
    }
    left.clear();
    dirs.iter().for_each(|d| left.extend(pids(d)));
    if left.is_empty() {
        return Ok(());
    }
    Err(CgroupError::Kill { group: group.to_owned(), left: left.into_iter().collect() })
}

/// Removes cgroups, the deepest ones first.
struct Remove;

impl Visitor for Remove {
    const AFTER: bool = true;

    fn entry(&mut self, _: DirEntry<'_>) -> io::Result<bool> {
        Ok(true)
    }

    fn after(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        patiently(|| Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?))
    }
}

/// Removes a cgroup and its descendants.
///
/// # Errors
/// A cgroup stays busy.
pub(super) fn remove_dirs(dir: &Path) -> io::Result<()> {
    match tree::open_root(dir) {
        Ok(root) => tree::walk(root, &mut Remove)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    }
    patiently(|| std::fs::remove_dir(dir))
}

fn patiently(remove: impl Fn() -> io::Result<()>) -> io::Result<()> {
    let mut backoff = Backoff::new(REMOVE_PAUSE, 2.0, FAR);
    for _ in 1..REMOVE_ATTEMPTS {
        match remove() {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) => std::thread::sleep(backoff.next_wait()),
        }
    }
    match remove() {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_nested_deeper_than_any_path_are_read_and_removed() {
        // On tmpfs, since disks are slow with this many directories.
        let temp = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let root = temp.path().join("pod");
        std::fs::create_dir(&root).unwrap();
        let mut at = tree::open_root(&root).unwrap();
        let levels = 5000;
        for level in 0..levels {
            rustix::fs::mkdirat(&at, "nested", Mode::RWXU).unwrap();
            at = rustix::fs::openat(&at, "nested", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .unwrap();
            if level + 1 == levels {
                let file = OFlags::CREATE | OFlags::WRONLY;
                let file = rustix::fs::openat(&at, "cgroup.procs", file, Mode::RUSR).unwrap();
                rustix::io::write(&file, b"0\n7\n").unwrap();
            }
        }
        std::thread::scope(|s| {
            let small = std::thread::Builder::new().stack_size(256 << 10);
            let work = || {
                assert_eq!(pids(&root), [7].into());
                // A regular file, which a cgroup file system would not have, keeps its directory.
                assert!(remove_dirs(&root).is_err());
                rustix::fs::unlinkat(&at, "cgroup.procs", AtFlags::empty()).unwrap();
                remove_dirs(&root).unwrap();
                remove_dirs(&root).unwrap();
            };
            small.spawn_scoped(s, work).unwrap().join().unwrap();
        });
        assert!(!root.exists());
    }
}
