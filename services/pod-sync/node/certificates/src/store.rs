//! The directory of certificates, in the kubelet's form (client-go `util/certificate: fileStore`).
//!
//! Each certificate is in a file with its key, `PREFIX-YYYY-MM-DD-HH-MM-SS.pem`. The link
//! `PREFIX-current.pem` names the one in use. A new file is on the disk before the link names it, and the
//! link is replaced by a rename: there is no time without a certificate.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use quintlet_kit::{atomic_file, failpoint};

use crate::decide::{CertificateFacts, CertificatePurpose};
use crate::key::{NodeKey, PemError, chain_of, facts_of_pair};

/// Mode of a file with a key.
const KEY_MODE: u32 = 0o600;
/// Mode of the directory, as in the kubelet.
const DIRECTORY_MODE: u32 = 0o755;
/// Largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// A file of the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    #[error("failed to access {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("failed to use {}", path.display())]
    Content { path: PathBuf, source: PemError },
    #[error("expected {} to be a symlink but it is a file", .0.display())]
    NoLink(PathBuf),
}

/// The certificates of one purpose.
#[derive(Debug, Clone)]
pub(crate) struct CertificateStore {
    directory: PathBuf,
    prefix: &'static str,
}

impl CertificateStore {
    pub(crate) fn new(directory: &Path, purpose: CertificatePurpose) -> Self {
        Self { directory: directory.to_owned(), prefix: purpose.file_prefix() }
    }

    /// Returns the path of the link to the certificate in use.
    pub(crate) fn current_path(&self) -> PathBuf {
        self.named("current.pem")
    }

    /// Path of the link before its rename.
    fn updated_path(&self) -> PathBuf {
        self.named("updated.pem")
    }

    /// Path of the key of a request that has no answer yet (`tmpPrivateKeyFile`).
    pub(crate) fn pending_key_path(&self) -> PathBuf {
        self.directory.join(format!("{}.key.tmp", self.prefix))
    }

    fn named(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{}-{name}", self.prefix))
    }

    /// Returns the facts of the certificate in use, or none if there is none.
    pub(crate) fn current(&self) -> Result<Option<CertificateFacts>, StoreError> {
        let path = self.current_path();
        if !exists(&path)? {
            return Ok(None);
        }
        let text = read(&path)?;
        let facts = facts_of_pair(&text, &text);
        facts.map(Some).map_err(|source| StoreError::Content { path, source })
    }

    /// Completes an interrupted change of the link, then returns what [`Self::current`] does. Only for the
    /// task that also calls
    /// [`Self::update`]: between its two steps, a change that is under way looks like an interrupted one.
    pub(crate) fn recover(&self) -> Result<Option<CertificateFacts>, StoreError> {
        let path = self.current_path();
        if !exists(&path)? {
            match link_kind(&self.updated_path())? {
                LinkKind::Absent => {}
                LinkKind::Other => return Err(StoreError::NoLink(self.updated_path())),
                LinkKind::Link => rename(&self.updated_path(), &path)?,
            }
        }
        self.current()
    }

    /// Stores a certificate with its key, and makes it the one in use. Returns its facts.
    pub(crate) fn update(
        &self,
        chain: &str,
        key: &NodeKey,
        now: Timestamp,
    ) -> Result<CertificateFacts, StoreError> {
        let path = self.named(&format!("{}.pem", now.to_zoned(TimeZone::UTC).strftime("%Y-%m-%d-%H-%M-%S")));
        let content = |source| StoreError::Content { path: path.clone(), source };
        let text = format!("{}{}", chain_of(chain).map_err(content)?, key.expose());
        let facts = facts_of_pair(&text, &text).map_err(content)?;
        let (current, updated) = (self.current_path(), self.updated_path());
        for link in [&current, &updated] {
            if link_kind(link)? == LinkKind::Other {
                return Err(StoreError::NoLink(link.clone()));
            }
        }
        self.create_directory()?;
        let file = |path: &Path, source| StoreError::File { path: path.to_owned(), source };
        failpoint::file!("certificate written", || atomic_file::write_durable(
            &path,
            text.as_bytes(),
            KEY_MODE
        ))
        .map_err(|error| file(&path, error))?;
        remove(&updated)?;
        let target = std::path::absolute(&path).map_err(|error| file(&path, error))?;
        failpoint::file!("certificate linked", || symlink(&target, &updated))
            .map_err(|error| file(&updated, error))?;
        rename(&updated, &current)?;
        let synced = std::fs::File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(|error| file(&self.directory, error))?;
        Ok(facts)
    }

    /// Returns the key of a request that an earlier run left without an answer, or a new key, which it
    /// stores.
    pub(crate) fn pending_key(&self) -> Result<NodeKey, StoreError> {
        let path = self.pending_key_path();
        if exists(&path)? {
            match NodeKey::parse(&read(&path)?) {
                Ok(key) => return Ok(key),
                Err(error) => {
                    let error = quintlet_kit::error_chain(&error);
                    tracing::warn!(path = %path.display(), error, "replacing unusable key of a certificate request");
                }
            }
        }
        let key = NodeKey::generate().map_err(|source| StoreError::Content { path: path.clone(), source })?;
        self.create_directory()?;
        let text = key.expose().as_bytes();
        failpoint::file!("certificate key written", || atomic_file::write_durable(&path, text, KEY_MODE))
            .map_err(|source| StoreError::File { path, source })?;
        Ok(key)
    }

    /// Removes the key of a request that has been answered.
    pub(crate) fn drop_pending_key(&self) -> Result<(), StoreError> {
        remove(&self.pending_key_path())
    }

    fn create_directory(&self) -> Result<(), StoreError> {
        let created = std::fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&self.directory);
        created.map_err(|source| StoreError::File { path: self.directory.clone(), source })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkKind {
    Absent,
    Link,
    Other,
}

fn link_kind(path: &Path) -> Result<LinkKind, StoreError> {
    match std::fs::symlink_metadata(path) {
        Ok(seen) if seen.is_symlink() => Ok(LinkKind::Link),
        Ok(_) => Ok(LinkKind::Other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(LinkKind::Absent),
        Err(source) => Err(StoreError::File { path: path.to_owned(), source }),
    }
}

/// Returns whether a file exists, through links.
fn exists(path: &Path) -> Result<bool, StoreError> {
    path.try_exists().map_err(|source| StoreError::File { path: path.to_owned(), source })
}

fn read(path: &Path) -> Result<String, StoreError> {
    use io::Read as _;

    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LARGEST).read_to_string(&mut text));
    read.map(|_| text).map_err(|source| StoreError::File { path: path.to_owned(), source })
}

fn rename(old: &Path, new: &Path) -> Result<(), StoreError> {
    failpoint::file!("certificate in use", || std::fs::rename(old, new))
        .map_err(|source| StoreError::File { path: new.to_owned(), source })
}

fn remove(path: &Path) -> Result<(), StoreError> {
    match failpoint::file!("certificate file removed", || std::fs::remove_file(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(StoreError::File { path: path.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::decide::WantedCertificate;
    use crate::tests::self_signed;

    fn store(directory: &Path) -> CertificateStore {
        CertificateStore::new(&directory.join("pki"), CertificatePurpose::Client)
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_certificate_is_stored_as_a_kubelet_does() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        assert_eq!(store.current().unwrap(), None);
        let now: Timestamp = "2026-03-04T05:06:07Z".parse().unwrap();
        let wanted = WantedCertificate::client("n1");
        for day in 0..2 {
            let key = NodeKey::generate().unwrap();
            let now = now + jiff::SignedDuration::from_hours(24 * day);
            let facts = store.update(&self_signed(&key, &wanted), &key, now).unwrap();
            assert_eq!(store.current().unwrap(), Some(facts));
        }
        let pki = dir.path().join("pki");
        let current = pki.join("kubelet-client-current.pem");
        assert_eq!(std::fs::read_link(&current).unwrap(), pki.join("kubelet-client-2026-03-05-05-06-07.pem"));
        assert!(pki.join("kubelet-client-2026-03-04-05-06-07.pem").exists());
        assert_eq!(mode(&current), 0o600);
        assert_eq!(std::fs::read_dir(&pki).unwrap().count(), 3);
        let other = NodeKey::generate().unwrap();
        let text = self_signed(&other, &wanted);
        let key = NodeKey::generate().unwrap();
        assert!(matches!(store.update(&text, &key, now), Err(StoreError::Content { .. })));
    }

    #[test]
    fn an_interrupted_change_of_the_link_is_completed_and_a_file_in_its_place_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let (wanted, now) = (WantedCertificate::client("n1"), Timestamp::UNIX_EPOCH);
        let first = NodeKey::generate().unwrap();
        let facts = store.update(&self_signed(&first, &wanted), &first, now).unwrap();
        // A kubelet removes the link before the rename.
        std::fs::rename(store.current_path(), store.updated_path()).unwrap();
        assert_eq!(store.current().unwrap(), None, "a read changes nothing");
        assert_eq!(store.recover().unwrap(), Some(facts));
        // A link that was made and not renamed.
        symlink("/nowhere", store.updated_path()).unwrap();
        let second = NodeKey::generate().unwrap();
        let facts = store.update(&self_signed(&second, &wanted), &second, now).unwrap();
        assert_eq!(store.current().unwrap(), Some(facts));
        std::fs::remove_file(store.current_path()).unwrap();
        std::fs::write(store.current_path(), "no link").unwrap();
        assert!(matches!(
            store.update(&self_signed(&second, &wanted), &second, now),
            Err(StoreError::NoLink(_))
        ));
        assert!(store.current().is_err());
    }

    #[test]
    fn the_key_of_a_request_is_kept_until_it_is_dropped_and_an_unusable_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let first = store.pending_key().unwrap();
        assert_eq!(store.pending_key().unwrap().public_key(), first.public_key());
        assert_eq!(mode(&store.pending_key_path()), 0o600);
        std::fs::write(store.pending_key_path(), "torn").unwrap();
        let second = store.pending_key().unwrap();
        assert_ne!(second.public_key(), first.public_key());
        store.drop_pending_key().unwrap();
        store.drop_pending_key().unwrap();
        assert_ne!(store.pending_key().unwrap().public_key(), second.public_key());
    }
}
