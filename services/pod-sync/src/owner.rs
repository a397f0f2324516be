//! One owner of a root directory: a lock, and an epoch that grows with every owner.

use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

/// Why the root directory cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// Another pod-sync holds it.
    #[error("{path}: another pod-sync owns this root directory")]
    Held {
        /// The lock file.
        path: PathBuf,
    },
    /// The lock file cannot be used.
    #[error("{path}: lock file cannot be used")]
    Io {
        /// The lock file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// Holds the root directory until dropped, or until the process is gone.
#[derive(Debug)]
pub struct Owner {
    epoch: u64,
    _lock: Flock<std::fs::File>,
}

impl Owner {
    /// Takes `root` and raises its epoch.
    ///
    /// # Errors
    /// Somebody else holds it, or the lock file cannot be read or written.
    pub fn take(root: &Path) -> Result<Self, OwnerError> {
        let path = root.join("quintlet-owner");
        let io = |source| OwnerError::Io { path: path.clone(), source };
        std::fs::create_dir_all(root).map_err(io)?;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io)?;
        let mut lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            if errno == nix::errno::Errno::EWOULDBLOCK {
                OwnerError::Held { path: path.clone() }
            } else {
                io(errno.into())
            }
        })?;
        let mut text = String::new();
        lock.read_to_string(&mut text).map_err(io)?;
        // A torn number must not become a lower epoch: the clock is ahead of any count of restarts.
        let last =
            text.trim().parse::<u64>().unwrap_or_else(|_| if text.is_empty() { 0 } else { recovered() });
        let epoch = last + 1;
        lock.rewind().map_err(io)?;
        lock.set_len(0).map_err(io)?;
        lock.write_all(epoch.to_string().as_bytes()).map_err(io)?;
        lock.sync_data().map_err(io)?;
        Ok(Self { epoch, _lock: lock })
    }

    /// The epoch of this owner; every later one is larger.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

fn recovered() -> u64 {
    u64::try_from(quintlet_kit::clock::Clock::system().wall().as_second()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_has_one_owner_and_a_growing_epoch() {
        let dir = tempfile::tempdir().unwrap();
        let first = Owner::take(dir.path()).unwrap();
        assert!(matches!(Owner::take(dir.path()), Err(OwnerError::Held { .. })));
        let epoch = first.epoch();
        drop(first);
        let second = Owner::take(dir.path()).unwrap();
        assert!(second.epoch() > epoch);
        drop(second);
        std::fs::write(dir.path().join("quintlet-owner"), "\u{0}\u{0}").unwrap();
        assert!(Owner::take(dir.path()).unwrap().epoch() > epoch + 1);
    }
}
