//! Ownership of the root directory: a lock, and an epoch that grows with every owner.
//!
//! The lock is on `quintlet-owner`. The epoch is in `quintlet-owner-epoch`, which is replaced atomically, so
//! that a kill at any time leaves the old number or the new one.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use quintlet_kit::atomic_file;
use quintlet_kit::clock::Clock;

/// The root directory cannot be owned.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// Another process has the lock of the directory.
    #[error("{path}: another pod-sync owns this root directory")]
    Held {
        /// The file that is locked.
        path: PathBuf,
    },
    /// The file of the owner cannot be read, written or locked.
    #[error("failed to access {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
}

/// Owns the root directory until it is dropped or the process ends.
#[derive(Debug)]
pub struct Owner {
    epoch: u64,
    lock: Flock<std::fs::File>,
}

impl Owner {
    /// Locks `root` and increments its epoch.
    ///
    /// If the number cannot be read, the epoch starts at the seconds of the wall clock: cri-proxy refuses an
    /// epoch that is lower than one that it has seen, and no sequence of restarts comes near that number.
    pub fn take(root: &Path, clock: &Clock) -> Result<Self, OwnerError> {
        let path = root.join("quintlet-owner");
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| OwnerError::Io { path, source }
        };
        std::fs::create_dir_all(root).map_err(io(root))?;
        let number = root.join("quintlet-owner-epoch");
        let had_owner = path.exists() || number.exists();
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io(&path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            if errno == nix::errno::Errno::EWOULDBLOCK {
                OwnerError::Held { path: path.clone() }
            } else {
                io(&path)(errno.into())
            }
        })?;
        // Earlier releases wrote the epoch into the lock file.
        let (now, earlier) = (read(&number).map_err(io(&number))?, read(&path).map_err(io(&path))?);
        let last = now.max(earlier);
        if last.is_none() && had_owner {
            tracing::warn!(path = %number.display(), "owner epoch is unusable, starting a new one");
        }
        let epoch = last.unwrap_or_else(|| first_epoch(clock)).saturating_add(1);
        atomic_file::write_durable(&number, epoch.to_string().as_bytes(), 0o600).map_err(io(&number))?;
        Ok(Self { epoch, lock })
    }

    /// Replaces the text of the lock file, which other agents on this machine read while it is locked. The
    /// text needs no sync: without the lock it has no meaning.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn publish(&self, text: &str) -> std::io::Result<()> {
        self.lock.set_len(0)?;
        self.lock.write_all_at(text.as_bytes(), 0)
    }

    /// Returns the epoch of this owner. Every later owner has a larger one.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

/// Returns the number in a file, or `None` if the file is missing, empty or damaged.
fn read(path: &Path) -> std::io::Result<Option<u64>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(std::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn first_epoch(clock: &Clock) -> u64 {
    u64::try_from(clock.wall().as_second()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn clock() -> Clock {
        Clock::fixed(jiff::Timestamp::from_second(NOW.cast_signed()).unwrap(), Duration::ZERO)
    }

    fn next(root: &Path) -> u64 {
        Owner::take(root, &clock()).unwrap().epoch()
    }

    #[test]
    fn a_root_directory_has_one_owner_and_an_increasing_epoch() {
        let dir = tempfile::tempdir().unwrap();
        let first = Owner::take(dir.path(), &clock()).unwrap();
        assert!(matches!(Owner::take(dir.path(), &clock()), Err(OwnerError::Held { .. })));
        let epoch = first.epoch();
        drop(first);
        assert_eq!(next(dir.path()), epoch + 1);
        assert_eq!(next(dir.path()), epoch + 2);
    }

    #[test]
    fn the_text_of_the_lock_replaces_the_one_before_and_is_no_epoch() {
        let dir = tempfile::tempdir().unwrap();
        let owner = Owner::take(dir.path(), &clock()).unwrap();
        for text in ["a longer text\n", "n1\nhttps://a\n"] {
            owner.publish(text).unwrap();
            assert_eq!(std::fs::read_to_string(dir.path().join("quintlet-owner")).unwrap(), text);
        }
        let epoch = owner.epoch();
        drop(owner);
        assert_eq!(next(dir.path()), epoch + 1);
    }

    #[test]
    fn the_epoch_of_an_earlier_release_is_continued() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("quintlet-owner"), "41").unwrap();
        assert_eq!((next(dir.path()), next(dir.path())), (42, 43));
    }

    #[test]
    fn an_epoch_that_was_lost_is_followed_by_a_larger_one() {
        for damage in [&b""[..], b"\0\0", b"\xff", b"4x", b"-1"] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("quintlet-owner"), "41").unwrap();
            assert_eq!(next(dir.path()), 42);
            for name in ["quintlet-owner", "quintlet-owner-epoch"] {
                std::fs::write(dir.path().join(name), damage).unwrap();
            }
            assert_eq!(next(dir.path()), NOW + 1, "{damage:?}");
            assert_eq!(next(dir.path()), NOW + 2, "{damage:?}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(next(dir.path()), NOW + 1, "cri-proxy may have seen owners of an earlier root directory");
    }

    #[test]
    fn a_lost_epoch_is_logged_only_where_no_file_continues_it() {
        // The contents of the lock file and of the epoch's file; `None`: there is no file.
        let cases = [
            (None, None, false),
            (None, Some("41"), false),
            (Some("41"), None, false),
            (Some("41"), Some(""), false),
            (Some("n1\nhttps://a\n"), Some("41"), false),
            (Some(""), Some(""), true),
            (Some("n1\nhttps://a\n"), None, true),
            (None, Some("4x"), true),
        ];
        for (lock, epoch, is_logged) in cases {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in [("quintlet-owner", lock), ("quintlet-owner-epoch", epoch)] {
                if let Some(text) = text {
                    std::fs::write(dir.path().join(name), text).unwrap();
                }
            }
            let lines = quintlet_testkit::logs::Lines::default();
            let log = quintlet_testkit::logs::capture("test", tracing::Level::INFO, &lines);
            let taken = tracing::dispatcher::with_default(&log, || next(dir.path()));
            assert_eq!(taken, if lock.is_none() && epoch.is_none() || is_logged { NOW + 1 } else { 42 });
            assert_eq!(lines.all().len(), usize::from(is_logged), "{lock:?} {epoch:?} {:?}", lines.all());
        }
    }

    #[test]
    fn a_kill_at_any_moment_leaves_the_old_epoch_or_the_new_one() {
        use quintlet_kit::failpoint::{Failpoint, Observer, observe};

        struct Killer(usize, std::sync::atomic::AtomicUsize);
        impl Observer for Killer {
            fn reached(&self, _: Failpoint) {
                if self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == self.0 {
                    std::panic::resume_unwind(Box::new(()));
                }
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let mut last = next(dir.path());
        for at in 0..2 {
            let root = dir.path().to_owned();
            let killed = std::thread::spawn(move || {
                observe(std::sync::Arc::new(Killer(at, 0.into())));
                Owner::take(&root, &clock()).unwrap().epoch()
            });
            assert!(killed.join().is_err(), "the owner is killed at step {at}");
            let epoch = next(dir.path());
            assert!((last + 1..=last + 2).contains(&epoch), "{epoch} after {last}");
            last = epoch;
        }
    }
}
