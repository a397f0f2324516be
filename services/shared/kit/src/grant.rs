//! Grants, each of which authorizes probe-service to run one command in one container.

use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit as _, Mac as _};
use nix::fcntl::{Flock, FlockArg};
use sha2::Sha256;

use crate::atomic_file;

const KEY_BYTES: usize = 32;
/// Only root reads the key, and locks its creation.
const MODE: u32 = 0o600;

fn random_key() -> io::Result<[u8; KEY_BYTES]> {
    let mut bytes = [0_u8; KEY_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Locks a file that only root can open, so that no other user can block its holders. The directory of the
/// key may be readable by all users.
fn lock(path: &Path) -> io::Result<Flock<std::fs::File>> {
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).mode(MODE).open(path)?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| io::Error::from(errno))
}

/// The key with which pod-sync signs grants and cri-proxy verifies them.
#[derive(Clone)]
pub struct GrantKey(Arc<[u8; KEY_BYTES]>);

impl std::fmt::Debug for GrantKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GrantKey(..)")
    }
}

impl GrantKey {
    /// Returns a key with the given bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Arc::new(bytes))
    }

    /// Reads the key at `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is too short.
    pub fn load(path: &Path) -> io::Result<Self> {
        let mut bytes = [0_u8; KEY_BYTES];
        std::fs::File::open(path)?.read_exact(&mut bytes)?;
        Ok(Self::from_bytes(bytes))
    }

    /// Reads the key at `path`, or creates it. If several processes create it at once, they all use the same
    /// key. A file that is too short is replaced: the loss of power may have left it so, and no process has
    /// its key.
    ///
    /// # Errors
    /// Fails if the file cannot be read or created.
    pub fn load_or_create(path: &Path) -> io::Result<Self> {
        if let Some(loaded) = Self::usable(path) {
            return loaded;
        }
        let dir = path.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        std::fs::create_dir_all(dir)?;
        // One process at a time holds the lock, until the end of this function.
        let _creating = lock(&path.with_extension("lock"))?;
        if let Some(loaded) = Self::usable(path) {
            return loaded;
        }
        if path.exists() {
            tracing::warn!(path = %path.display(), "key of exec grants is incomplete, replacing it");
        }
        atomic_file::write_durable(path, &random_key()?, MODE)?;
        Self::load(path)
    }

    /// Reads the key at `path`. Returns `None` if the file does not exist or is too short.
    fn usable(path: &Path) -> Option<io::Result<Self>> {
        match Self::load(path) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => None,
            loaded => Some(loaded),
        }
    }

    fn mac(&self, container_id: &str, command: &[String], timeout_seconds: u32) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(self.0.as_slice()).expect("HMAC takes a key of any length");
        let mut field = |bytes: &[u8]| {
            mac.update(&(bytes.len() as u64).to_be_bytes());
            mac.update(bytes);
        };
        field(container_id.as_bytes());
        field(&timeout_seconds.to_be_bytes());
        for part in command {
            field(part.as_bytes());
        }
        mac
    }

    /// Returns the grant for a command in a container.
    #[must_use]
    pub fn sign(&self, container_id: &str, command: &[String], timeout_seconds: u32) -> Vec<u8> {
        self.mac(container_id, command, timeout_seconds).finalize().into_bytes().to_vec()
    }

    /// Returns whether `grant` is the grant for exactly this container, command and timeout.
    #[must_use]
    pub fn verify(&self, grant: &[u8], container_id: &str, command: &[String], timeout_seconds: u32) -> bool {
        self.mac(container_id, command, timeout_seconds).verify_slice(grant).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    fn argv(parts: &[&str]) -> Vec<String> {
        parts.iter().map(|p| (*p).to_owned()).collect()
    }

    #[test]
    fn a_grant_allows_exactly_the_signed_request() {
        let key = GrantKey::from_bytes([7; 32]);
        let grant = key.sign("c1", &argv(&["sh", "-c", "true"]), 1);
        assert!(key.verify(&grant, "c1", &argv(&["sh", "-c", "true"]), 1));
        for (id, command, timeout) in [
            ("c2", vec!["sh", "-c", "true"], 1),
            ("c1", vec!["sh", "-c", "false"], 1),
            ("c1", vec!["sh", "-c", "true"], 2),
            ("c1", vec!["sh", "-ctrue"], 1),
            ("c1", vec!["sh", "-c", "true", ""], 1),
            ("c1s", vec!["h", "-c", "true"], 1),
        ] {
            assert!(!key.verify(&grant, id, &argv(&command), timeout), "{id} {command:?} {timeout}");
        }
        assert!(!key.verify(&grant[..31], "c1", &argv(&["sh", "-c", "true"]), 1));
        assert!(!GrantKey::from_bytes([8; 32]).verify(&grant, "c1", &argv(&["sh", "-c", "true"]), 1));
    }

    #[test]
    fn threads_that_create_the_key_at_once_end_up_with_one_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys/grant.key");
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || GrantKey::load_or_create(&path).unwrap().sign("c", &[], 1))
            })
            .collect();
        let grants: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(grants.iter().all(|grant| *grant == grants[0]));
    }

    /// Returns a grant of the key at `path`, unless that takes long.
    fn grant_soon(path: &Path) -> Vec<u8> {
        let (path, (sent, received)) = (path.to_owned(), std::sync::mpsc::channel());
        // A thread that waits for a lock ends with the process.
        let _thread =
            std::thread::spawn(move || sent.send(GrantKey::load_or_create(&path).unwrap().sign("c", &[], 1)));
        received.recv_timeout(Duration::from_secs(10)).expect("the key does not wait for a lock")
    }

    #[test]
    fn the_key_is_created_and_read_while_another_user_has_a_lock_on_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let theirs = std::fs::File::open(dir.path()).unwrap();
        let _held = Flock::lock(theirs, FlockArg::LockExclusive).unwrap();
        let path = dir.path().join("grant.key");
        let created = grant_soon(&path);
        let locked = dir.path().join("grant.lock");
        assert_eq!(std::fs::metadata(&locked).unwrap().permissions().mode() & 0o777, MODE);
        // A key that exists is read without the lock.
        let _creating = lock(&locked).unwrap();
        assert_eq!(grant_soon(&path), created);
    }

    #[test]
    fn a_key_that_was_not_written_completely_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("grant.key");
        for length in [0, KEY_BYTES - 1] {
            std::fs::write(&path, vec![7; length]).unwrap();
            let key = GrantKey::load_or_create(&path).unwrap();
            assert!(GrantKey::load(&path).unwrap().verify(&key.sign("c", &[], 1), "c", &[], 1));
        }
    }
}
