//! Grants, each of which authorizes probe-service to run one command in one container.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

const KEY_BYTES: usize = 32;

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
    /// key.
    ///
    /// # Errors
    /// Fails if the file cannot be read or created, or is too short.
    pub fn load_or_create(path: &Path) -> io::Result<Self> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        if !path.exists() {
            let mut bytes = [0_u8; KEY_BYTES];
            std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
            let temp = path.with_extension(format!("{}", std::process::id()));
            let mut file = std::fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&temp)?;
            file.write_all(&bytes)?;
            // A hard link does not replace a file, so the first process to create the key wins.
            let linked = std::fs::hard_link(&temp, path);
            std::fs::remove_file(&temp)?;
            match linked {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                Ok(()) | Err(_) => {}
            }
        }
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
}
