//! The index of an instance: a lock file that its owner holds.
//!
//! The file contains the instance's directory, so that the next instance can find and remove the traces of a
//! killed owner.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::cni::Names;
use crate::record::Record;
use crate::{Error, cleanup, forwarding};

/// Default directory of the lock files.
pub(crate) const DEFAULT_LOCK_DIR: &str = "/run/quintlet-localnode";

/// Number of indices. The index is the third byte of the pods' addresses.
const INDICES: u8 = 200;

/// An index in use. Dropping it frees the index and keeps the file that names its last user.
#[derive(Debug)]
pub(crate) struct Index {
    number: u8,
    file: Flock<File>,
    path: PathBuf,
}

impl Index {
    /// Returns the index as a number, unique on this machine.
    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    /// Returns the names that contain the index.
    pub(crate) fn names(&self) -> Names {
        Names::new(self.number)
    }

    /// Frees the index and removes its file, once no trace of the instance is left.
    pub(crate) fn release(self) {
        if let Some(dir) = self.path.parent() {
            forwarding::give_back(dir, self.number);
        }
        // Removed while locked: a waiter detects that the path no longer leads to the file that it locked.
        let _ = std::fs::remove_file(&self.path);
        // Removed only if empty, by the last instance.
        if let Some(dir) = self.path.parent()
            && std::fs::remove_dir(dir).is_ok()
        {
            cleanup::remove_directory_of_cni_results();
        }
        drop(self.file);
    }

    /// Returns the directory of the instance that used this index last.
    fn user(&mut self) -> Option<PathBuf> {
        let mut text = String::new();
        self.file.rewind().ok()?;
        self.file.read_to_string(&mut text).ok()?;
        (!text.is_empty()).then(|| PathBuf::from(text))
    }

    fn set_user(&mut self, dir: &Path) -> Result<(), Error> {
        let path = self.path.clone();
        let file: &mut File = &mut self.file;
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(dir.as_os_str().as_encoded_bytes()))
            .map_err(Error::file("write", path))
    }

    fn try_lock(lock_dir: &Path, number: u8, create: bool) -> Result<Option<Self>, Error> {
        let path = lock_dir.join(format!("{number}.lock"));
        // An instance that releases the index concurrently removes the file, at most twice; then another one
        // has it.
        for _ in 0..3 {
            let opened = OpenOptions::new().read(true).write(true).create(create).truncate(false).open(&path);
            let file = match opened {
                Ok(file) => file,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound && !create => return Ok(None),
                // The directory is removed with its last lock file.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    make_lock_dir(lock_dir)?;
                    continue;
                }
                Err(e) => return Err(Error::file("open", path)(e)),
            };
            let Ok(file) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { return Ok(None) };
            let locked = file.metadata().map(|m| m.ino()).ok();
            if std::fs::metadata(&path).map(|m| m.ino()).ok() == locked {
                return Ok(Some(Self { number, file, path }));
            }
        }
        Ok(None)
    }
}

/// Locks the index `wanted`, or the first free one that nothing on the machine uses.
///
/// # Errors
/// Fails if all are in use, or if the lock directory cannot be written.
pub(crate) fn take(lock_dir: &Path, dir: &Path, wanted: Option<u8>) -> Result<Index, Error> {
    make_lock_dir(lock_dir)?;
    let numbers: Vec<u8> = wanted.map_or_else(|| (0..INDICES).collect(), |number| vec![number]);
    for number in numbers {
        let Some(mut index) = Index::try_lock(lock_dir, number, true)? else { continue };
        let last = index.user();
        let ours = last.as_deref() == Some(dir);
        // Kept on purpose by another directory, or a bridge without a record: the index is skipped.
        let other = last.is_some_and(|user| user != dir && Record::read(&user).is_some());
        let bridge = Path::new("/sys/class/net").join(index.names().bridge()).exists();
        if other || (bridge && !ours && wanted.is_none()) {
            continue;
        }
        index.set_user(dir)?;
        return Ok(index);
    }
    Err(Error::NoIndex(INDICES))
}

/// Returns the indices without an owner, with the directory of each.
pub(crate) fn abandoned(lock_dir: &Path) -> Vec<(Index, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(lock_dir) else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter_map(|e| e.file_name().to_str()?.strip_suffix(".lock")?.parse().ok())
        .filter_map(|number| Index::try_lock(lock_dir, number, false).ok().flatten())
        .filter_map(|mut index| {
            let user = index.user()?;
            Some((index, user))
        })
        .collect()
}

fn make_lock_dir(lock_dir: &Path) -> Result<(), Error> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(lock_dir)
        .map_err(Error::file("create", lock_dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_instances_never_share_an_index() {
        let locks = tempfile::tempdir().unwrap();
        let first = take(locks.path(), Path::new("/a"), None).unwrap();
        let second = take(locks.path(), Path::new("/b"), None).unwrap();
        assert_ne!(first.number(), second.number());
        assert!(take(locks.path(), Path::new("/c"), Some(first.number())).is_err());
        let number = first.number();
        first.release();
        assert_eq!(take(locks.path(), Path::new("/c"), Some(number)).unwrap().number(), number);
    }

    #[test]
    fn an_abandoned_index_names_its_previous_owner() {
        let locks = tempfile::tempdir().unwrap();
        let held = take(locks.path(), Path::new("/held"), None).unwrap();
        drop(take(locks.path(), Path::new("/gone"), None).unwrap());
        let found = abandoned(locks.path());
        assert_eq!(found.iter().map(|(_, dir)| dir.as_path()).collect::<Vec<_>>(), [Path::new("/gone")]);
        drop(held);
    }
}
