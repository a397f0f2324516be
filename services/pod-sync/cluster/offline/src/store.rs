//! The directory of the cache: its files, and the limits of their size.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use quintlet_kit::{atomic_file, failpoint};

use crate::format::{Unusable, decode, encode};
use crate::kept::{Content, is_pod_file};
use crate::seal::SealingKey;

/// Largest file, bytes. A pod may refer to several Secrets of 1 MiB.
pub(crate) const LARGEST_FILE: u64 = 8 << 20;
/// Largest size of all files, bytes.
pub(crate) const LARGEST: u64 = 64 << 20;

/// The directory could not be made.
#[derive(Debug, thiserror::Error)]
#[error("failed to create {}", path.display())]
pub struct DirectoryError {
    path: PathBuf,
    source: io::Error,
}

/// A file was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error("the file would have {size} bytes, more than {limit}")]
    Large { size: u64, limit: u64 },
    #[error("the file cannot be encrypted")]
    Key(#[from] crate::seal::KeyError),
    #[error("the file cannot be written")]
    Write(#[from] io::Error),
}

/// Numbers for the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreCounts {
    /// Size of all files.
    pub(crate) bytes: u64,
    /// Files that the limits leave out.
    pub(crate) left_out: usize,
    /// Files that were not usable at the start and were not written since.
    pub(crate) unusable: usize,
}

/// The files of the cache. All calls block.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    key: Option<SealingKey>,
    sizes: BTreeMap<String, u64>,
    /// Files of pods that were not usable at the start.
    unusable: BTreeSet<String>,
    /// Files that the limits leave out.
    left_out: BTreeSet<String>,
}

fn absent(removed: io::Result<()>) -> io::Result<bool> {
    match removed {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

impl Store {
    /// Opens the directory, which only root may enter, and reads its files.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub(crate) fn open(
        dir: &Path,
        node: &str,
        key: Option<SealingKey>,
    ) -> Result<(Self, Vec<Content>), DirectoryError> {
        let error = |source| DirectoryError { path: dir.to_owned(), source };
        std::fs::create_dir_all(dir).map_err(error)?;
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).map_err(error)?;
        // The directory itself outlives the loss of power.
        if let Some(above) = dir.parent() {
            std::fs::File::open(above).and_then(|above| above.sync_all()).map_err(error)?;
        }
        let mut store = Self {
            dir: dir.to_owned(),
            key,
            sizes: BTreeMap::new(),
            unusable: BTreeSet::new(),
            left_out: BTreeSet::new(),
        };
        let mut contents = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(error)?.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with('.') {
                // The temporary file of a write that was interrupted.
                let _ = std::fs::remove_file(entry.path());
                continue;
            }
            match store.read(&name, node) {
                Ok((content, size)) => {
                    store.sizes.insert(name, size);
                    contents.push(content);
                }
                Err(reason) => {
                    let path = entry.path();
                    tracing::warn!(path = %path.display(), %reason, "file of the offline cache ignored");
                    store.unusable.insert(name);
                }
            }
        }
        Ok((store, contents))
    }

    fn read(&self, name: &str, node: &str) -> Result<(Content, u64), Unusable> {
        let path = self.dir.join(name);
        let failed = |e: io::Error| Unusable::Read(e.to_string());
        // A link or a device is none of the cache.
        let found = std::fs::symlink_metadata(&path).map_err(failed)?;
        if !found.is_file() {
            return Err(Unusable::Torn);
        }
        // The encryption adds less than this.
        if found.len() > LARGEST_FILE.saturating_add(1024) {
            return Err(Unusable::Large(found.len()));
        }
        let bytes = std::fs::read(&path).map_err(failed)?;
        let content = decode(name, &bytes, self.key.as_ref())?;
        let content: Content = serde_json::from_slice(&content).map_err(|e| {
            // The text of the error may have parts of a Secret.
            Unusable::Content(format!("{:?} in line {} column {}", e.classify(), e.line(), e.column()))
        })?;
        if content.node != node {
            return Err(Unusable::OtherNode(content.node));
        }
        Ok((content, found.len()))
    }

    /// Writes a file and syncs it. A file that is too large is removed.
    ///
    /// # Errors
    /// The file is too large, or cannot be written.
    pub(crate) fn write(&mut self, name: &str, content: Vec<u8>) -> Result<(), WriteError> {
        let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
        let of_others = self.bytes().saturating_sub(self.sizes.get(name).copied().unwrap_or_default());
        let too_large = [(size, LARGEST_FILE), (size.saturating_add(of_others), LARGEST)];
        if let Some((_, limit)) = too_large.into_iter().find(|(size, limit)| size > limit) {
            self.delete_file(name)?;
            self.left_out.insert(name.to_owned());
            return Err(WriteError::Large { size, limit });
        }
        let bytes = encode(name, content, self.key.as_ref())?;
        let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let path = self.dir.join(name);
        failpoint::file!("offline cache written", || atomic_file::write_durable(&path, &bytes, 0o600))?;
        self.sizes.insert(name.to_owned(), size);
        self.unusable.remove(name);
        self.left_out.remove(name);
        Ok(())
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(crate) fn delete_file(&mut self, name: &str) -> io::Result<()> {
        if absent(std::fs::remove_file(self.dir.join(name)))? {
            std::fs::File::open(&self.dir)?.sync_all()?;
        }
        self.sizes.remove(name);
        self.unusable.remove(name);
        self.left_out.remove(name);
        Ok(())
    }

    /// Returns whether the limits leave a file out.
    pub(crate) fn is_left_out(&self, name: &str) -> bool {
        self.left_out.contains(name)
    }

    /// Returns the files of pods that were not usable at the start and were not written since.
    pub(crate) fn unusable(&self) -> Vec<String> {
        self.unusable.iter().filter(|name| is_pod_file(name)).cloned().collect()
    }

    // The size of all files.
    fn bytes(&self) -> u64 {
        self.sizes.values().fold(0, |sum: u64, size| sum.saturating_add(*size))
    }

    pub(crate) fn counts(&self) -> StoreCounts {
        let (left_out, unusable) = (self.left_out.len(), self.unusable.len());
        StoreCounts { bytes: self.bytes(), left_out, unusable }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use jiff::Timestamp;
    use k8s_openapi::api::core::v1::Node;

    use super::*;
    use crate::kept::Kept;

    /// Returns the content of the Node's file of this node.
    fn content(node: &str) -> Vec<u8> {
        let mut kept = Kept::of(node, Vec::new());
        kept.set_node(&Node::default());
        kept.take_due(Timestamp::UNIX_EPOCH).pop().unwrap().1.unwrap()
    }

    fn open(dir: &Path, node: &str, key: Option<u8>) -> (Store, usize) {
        let key = key.map(|byte| SealingKey::of(&[byte; 32]).unwrap());
        let (store, contents) = Store::open(dir, node, key).unwrap();
        (store, contents.len())
    }

    #[test]
    fn a_file_is_only_for_root_and_only_for_its_node_and_its_key() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("cache");
        let (mut store, _) = open(&dir, "n1", None);
        store.write("node", content("n1")).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&dir.join("node"))), (0o700, 0o600));
        assert_eq!(open(&dir, "n1", None).1, 1);
        assert_eq!(open(&dir, "n2", None).1, 0, "the node was renamed");
        assert_eq!(open(&dir, "n1", Some(1)).1, 0, "a key was configured since");
        let (mut store, _) = open(&dir, "n1", Some(1));
        store.write("node", content("n1")).unwrap();
        assert_eq!(open(&dir, "n1", Some(1)).1, 1);
        let (store, read) = open(&dir, "n1", Some(2));
        assert_eq!((read, store.counts().unusable), (0, 1), "another key");
        assert!(dir.join("node").exists(), "the file is kept");
    }

    #[test]
    fn temporary_files_are_removed_and_foreign_ones_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".node.Xy12aB", "notes", "pod-a"] {
            std::fs::write(dir.path().join(name), "x\n").unwrap();
        }
        std::os::unix::fs::symlink("/dev/zero", dir.path().join("pod-b")).unwrap();
        let (mut store, read) = open(dir.path(), "n1", None);
        assert_eq!((read, store.unusable()), (0, vec!["pod-a".to_owned(), "pod-b".to_owned()]));
        assert!(!dir.path().join(".node.Xy12aB").exists() && dir.path().join("notes").exists());
        for name in store.unusable() {
            store.delete_file(&name).unwrap();
        }
        store.delete_file("pod-a").unwrap();
        assert_eq!(store.unusable(), [""; 0]);
    }

    #[test]
    fn a_file_over_a_limit_is_left_out_and_its_earlier_content_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = open(dir.path(), "n1", None);
        let half = usize::try_from(LARGEST_FILE).unwrap();
        store.write("pod-a", vec![b' '; 10]).unwrap();
        assert!(matches!(
            store.write("pod-a", vec![b' '; half + 1]),
            Err(WriteError::Large { limit: LARGEST_FILE, .. })
        ));
        assert!(store.is_left_out("pod-a") && !dir.path().join("pod-a").exists());
        store.sizes.insert("pod-b".to_owned(), LARGEST - 5);
        assert!(matches!(store.write("pod-a", vec![b' '; 6]), Err(WriteError::Large { limit: LARGEST, .. })));
        store.delete_file("pod-b").unwrap();
        store.write("pod-a", vec![b' '; 6]).unwrap();
        assert!(!store.is_left_out("pod-a"));
    }
}
