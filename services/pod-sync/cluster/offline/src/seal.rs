//! Encrypts the content of files with a key that is not on the disk in the clear.
//!
//! Each file is encrypted by AES-256-GCM with a key of its own, which HKDF-SHA256 derives from the secret and
//! from a random salt of 256 bits. So the fixed nonce is used once per key.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::rand::{SecureRandom as _, SystemRandom};

/// Length of a salt, bytes.
pub(crate) const SALT: usize = 32;
/// Length of the name of a key, bytes.
const ID: usize = 8;
/// Shortest secret, bytes.
const SHORTEST: usize = 32;
/// Longest secret, bytes.
const LONGEST: usize = 4096;

const CONTENT: &[u8] = b"quintlet offline cache 1 content";
const NAME: &[u8] = b"quintlet offline cache 1 name of the key";

/// The secret from which the keys of files are derived. It is never printed.
#[derive(Clone)]
pub struct SealingKey {
    secret: Vec<u8>,
    id: [u8; ID],
}

impl std::fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SealingKey").field("id", &hex::encode(self.id)).finish_non_exhaustive()
    }
}

/// The secret is not usable as a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The secret is too short to guess, or too long for a credential.
    #[error("the key has {0} bytes, want {SHORTEST} to {LONGEST} random bytes")]
    Length(usize),
    /// The cryptographic library or the random numbers of the kernel failed.
    #[error("the key cannot be used")]
    Failed,
}

/// A content that was encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sealed {
    pub(crate) salt: [u8; SALT],
    pub(crate) bytes: Vec<u8>,
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl SealingKey {
    /// Returns the key of a secret.
    ///
    /// # Errors
    /// The secret has less than 32 bytes, or more than 4096.
    pub fn of(secret: &[u8]) -> Result<Self, KeyError> {
        if !(SHORTEST..=LONGEST).contains(&secret.len()) {
            return Err(KeyError::Length(secret.len()));
        }
        let mut id = [0; ID];
        let prk = Salt::new(HKDF_SHA256, &[]).extract(secret);
        let filled = prk.expand(&[NAME], Length(ID)).and_then(|okm| okm.fill(&mut id));
        filled.map_err(|_| KeyError::Failed)?;
        Ok(Self { secret: secret.to_vec(), id })
    }

    /// Returns the name of the key, which says nothing about the secret.
    pub(crate) fn id(&self) -> String {
        hex::encode(self.id)
    }

    fn cipher(&self, salt: &[u8; SALT]) -> Result<LessSafeKey, KeyError> {
        let prk = Salt::new(HKDF_SHA256, salt).extract(&self.secret);
        let okm = prk.expand(&[CONTENT], &AES_256_GCM).map_err(|_| KeyError::Failed)?;
        Ok(LessSafeKey::new(UnboundKey::from(okm)))
    }

    /// Encrypts a content. `bound` has to be the same at the decryption; it makes it from the salt.
    ///
    /// # Errors
    /// The kernel gives no random numbers, or the content is too large.
    pub(crate) fn seal(
        &self,
        content: Vec<u8>,
        bound: impl FnOnce(&[u8; SALT]) -> Vec<u8>,
    ) -> Result<Sealed, KeyError> {
        let mut salt = [0; SALT];
        SystemRandom::new().fill(&mut salt).map_err(|_| KeyError::Failed)?;
        let cipher = self.cipher(&salt)?;
        let (bound, mut bytes) = (bound(&salt), content);
        let nonce = Nonce::assume_unique_for_key([0; NONCE_LEN]);
        cipher.seal_in_place_append_tag(nonce, Aad::from(bound), &mut bytes).map_err(|_| KeyError::Failed)?;
        Ok(Sealed { salt, bytes })
    }

    /// Decrypts a content; none if it, its salt or what it is bound to was changed, or the key is another
    /// one.
    pub(crate) fn open(&self, salt: &[u8; SALT], mut bytes: Vec<u8>, bound: &[u8]) -> Option<Vec<u8>> {
        let nonce = Nonce::assume_unique_for_key([0; NONCE_LEN]);
        let cipher = self.cipher(salt).ok()?;
        let length = cipher.open_in_place(nonce, Aad::from(bound), &mut bytes).ok()?.len();
        bytes.truncate(length);
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_is_decrypted_only_with_its_key_its_salt_and_what_it_is_bound_to() {
        let key = SealingKey::of(&[7; 32]).unwrap();
        let sealed = key.seal(b"secret".to_vec(), |_| b"name".to_vec()).unwrap();
        assert!(!sealed.bytes.windows(6).any(|part| part == b"secret"));
        let open = |key: &SealingKey, salt, bound: &[u8]| key.open(salt, sealed.bytes.clone(), bound);
        assert_eq!(open(&key, &sealed.salt, b"name").as_deref(), Some(b"secret".as_slice()));
        assert_eq!(open(&key, &sealed.salt, b"other"), None);
        assert_eq!(open(&key, &[0; SALT], b"name"), None);
        assert_eq!(open(&SealingKey::of(&[8; 32]).unwrap(), &sealed.salt, b"name"), None);
    }

    #[test]
    fn two_encryptions_of_one_content_differ_and_the_key_is_not_printed() {
        let key = SealingKey::of(&[7; 40]).unwrap();
        let [one, two] = [1, 2].map(|_| key.seal(vec![1; 20], |_| Vec::new()).unwrap());
        assert_ne!(one, two);
        assert!(!format!("{key:?}").contains("7, 7"), "{key:?}");
    }

    #[test]
    fn a_secret_that_is_too_short_or_too_long_is_no_key() {
        for length in [0, 31, 4097] {
            assert_eq!(SealingKey::of(&vec![1; length]).unwrap_err(), KeyError::Length(length));
        }
    }
}
