//! Grants, each of which authorizes probe-service to run one command in one container.

use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit as _, Mac as _};
use nix::fcntl::{Flock, FlockArg};
use sha2::Sha256;

use crate::atomic_file;

const KEY_BYTES: usize = 32;
/// Only root reads the key.
const MODE: u32 = 0o600;

fn random_key() -> io::Result<[u8; KEY_BYTES]> {
    let mut bytes = [0_u8; KEY_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
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
        let dir = path.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        std::fs::create_dir_all(dir)?;
        // Held by one process at a time, until the end of this function.
        let _creating = Flock::lock(std::fs::File::open(dir)?, FlockArg::LockExclusive)
            .map_err(|(_, errno)| io::Error::from(errno))?;
        match Self::load(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                tracing::warn!(path = %path.display(), "key of exec grants is incomplete, replacing it");
            }
            loaded => return loaded,
        }
        atomic_file::write_durable(path, &random_key()?, MODE)?;
        Self::load(path)
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
    fn two_processes_end_up_with_one_key() {
        let dir = std::env::temp_dir().join(format!("kit-grant-{}", std::process::id()));
        let path = dir.join("keys/grant.key");
        let (a, b) = (GrantKey::load_or_create(&path).unwrap(), GrantKey::load_or_create(&path).unwrap());
        assert!(b.verify(&a.sign("c", &[], 1), "c", &[], 1));
        std::fs::remove_dir_all(&dir).unwrap();
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
