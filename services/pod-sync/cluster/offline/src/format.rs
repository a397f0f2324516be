//! The form of a file: one line with version, encryption and checksum, then the content.
//!
//! The checksum (SHA-256) and the encryption include the name of the file and the line. So a file that is
//! incomplete, changed or renamed is not used.

use sha2::{Digest as _, Sha256};

use crate::seal::{KeyError, SALT, SealingKey};

const MAGIC: &str = "quintlet-offline";
/// Version of the form. A file of another version is not used.
const VERSION: &str = "1";
const PLAIN: &str = "plain";
const SEALED: &str = "aes-256-gcm";
/// Longest first line, bytes.
const LONGEST_LINE: usize = 256;

/// The reason for which a file is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    /// The file is not complete, was changed, or is none of the cache.
    #[error("the file is incomplete or was changed")]
    Torn,
    /// Another version of Quintlet wrote the file.
    #[error("the file has version {0}, want {VERSION}")]
    Version(String),
    /// A key is configured, and anyone with access to the disk may have written the file.
    #[error("the file is not encrypted, and a key is configured")]
    NotEncrypted,
    /// No key is configured.
    #[error("the file is encrypted, and no key is configured")]
    Encrypted,
    /// Another key encrypted the file.
    #[error("the file is encrypted with another key")]
    OtherKey,
    /// The content is not what this version writes.
    #[error("the content cannot be read: {0}")]
    Content(String),
    /// The content is that of another node.
    #[error("the file belongs to the node {0}")]
    OtherNode(String),
    /// The file is larger than the cache writes.
    #[error("the file has {0} bytes")]
    Large(u64),
    /// The file cannot be read.
    #[error("the file cannot be read: {0}")]
    Read(String),
}

fn checksum(name: &str, line: &str, content: &[u8]) -> String {
    let parts = [name.as_bytes(), b"\n", line.as_bytes(), b"\n", content];
    let hash = parts.iter().fold(Sha256::new(), |hash, part| hash.chain_update(part));
    hex::encode(hash.finalize())
}

fn bound(name: &str, line: &str) -> Vec<u8> {
    format!("{name}\n{line}").into_bytes()
}

fn sealed_line(key: &SealingKey, salt: &[u8; SALT]) -> String {
    format!("{MAGIC} {VERSION} {SEALED} {} {}", key.id(), hex::encode(salt))
}

/// Returns the bytes of the file `name` with this content.
///
/// # Errors
/// The encryption failed.
pub(crate) fn encode(name: &str, content: Vec<u8>, key: Option<&SealingKey>) -> Result<Vec<u8>, KeyError> {
    let (line, content) = match key {
        None => (format!("{MAGIC} {VERSION} {PLAIN}"), content),
        Some(key) => {
            let sealed = key.seal(content, |salt| bound(name, &sealed_line(key, salt)))?;
            (sealed_line(key, &sealed.salt), sealed.bytes)
        }
    };
    let mut bytes = format!("{line} {}\n", checksum(name, &line, &content)).into_bytes();
    bytes.extend_from_slice(&content);
    Ok(bytes)
}

/// Returns the content of the file `name`.
///
/// # Errors
/// See [`Unusable`].
pub(crate) fn decode(name: &str, bytes: &[u8], key: Option<&SealingKey>) -> Result<Vec<u8>, Unusable> {
    let end = bytes.iter().take(LONGEST_LINE).position(|byte| *byte == b'\n').ok_or(Unusable::Torn)?;
    let (line, rest) = bytes.split_at(end);
    let content = rest.get(1..).unwrap_or_default();
    let line = std::str::from_utf8(line).map_err(|_| Unusable::Torn)?;
    let (line, sum) = line.rsplit_once(' ').ok_or(Unusable::Torn)?;
    let words: Vec<&str> = line.split(' ').collect();
    let rest = match words.as_slice() {
        [MAGIC, VERSION, rest @ ..] => rest,
        [MAGIC, version, ..] if version.parse::<u32>().is_ok() => {
            return Err(Unusable::Version((*version).to_owned()));
        }
        _ => return Err(Unusable::Torn),
    };
    if checksum(name, line, content) != sum {
        return Err(Unusable::Torn);
    }
    match (rest, key) {
        ([PLAIN], None) => Ok(content.to_vec()),
        ([PLAIN], Some(_)) => Err(Unusable::NotEncrypted),
        ([SEALED, _, _], None) => Err(Unusable::Encrypted),
        ([SEALED, id, salt], Some(key)) => {
            let mut bytes = [0; SALT];
            hex::decode_to_slice(salt, &mut bytes).map_err(|_| Unusable::Torn)?;
            if *id != key.id() {
                return Err(Unusable::OtherKey);
            }
            key.open(&bytes, content.to_vec(), &bound(name, line)).ok_or(Unusable::Torn)
        }
        _ => Err(Unusable::Torn),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> SealingKey {
        SealingKey::of(&[byte; 32]).unwrap()
    }

    #[test]
    fn a_file_is_used_only_with_its_name_its_version_and_its_key() {
        let plain = encode("pod-a", b"content".to_vec(), None).unwrap();
        let sealed = encode("pod-a", b"content".to_vec(), Some(&key(1))).unwrap();
        let newer = String::from_utf8(plain.clone()).unwrap().replacen(" 1 ", " 2 ", 1).into_bytes();
        let content = || Ok(b"content".to_vec());
        let cases = [
            ("plain", "pod-a", plain.as_slice(), None, content()),
            ("sealed", "pod-a", &sealed, Some(key(1)), content()),
            ("of another pod", "pod-b", &plain, None, Err(Unusable::Torn)),
            ("sealed of another pod", "pod-b", &sealed, Some(key(1)), Err(Unusable::Torn)),
            ("newer", "pod-a", &newer, None, Err(Unusable::Version("2".to_owned()))),
            ("plain with a key", "pod-a", &plain, Some(key(1)), Err(Unusable::NotEncrypted)),
            ("sealed without a key", "pod-a", &sealed, None, Err(Unusable::Encrypted)),
            ("another key", "pod-a", &sealed, Some(key(2)), Err(Unusable::OtherKey)),
            ("foreign", "pod-a", b"{}\n", None, Err(Unusable::Torn)),
            ("empty", "pod-a", b"", None, Err(Unusable::Torn)),
        ];
        for (case, name, bytes, key, want) in cases {
            assert_eq!(decode(name, bytes, key.as_ref()), want, "{case}");
        }
    }

    #[test]
    fn an_encrypted_content_cannot_be_changed_together_with_its_checksum() {
        let key = key(1);
        let mut bytes = encode("n", b"content".to_vec(), Some(&key)).unwrap();
        let end = bytes.iter().position(|byte| *byte == b'\n').unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        let line = std::str::from_utf8(&bytes[..end]).unwrap().rsplit_once(' ').unwrap().0.to_owned();
        let sum = checksum("n", &line, &bytes[end + 1..]);
        let forged = [format!("{line} {sum}\n").as_bytes(), &bytes[end + 1..]].concat();
        assert_eq!(decode("n", &forged, Some(&key)), Err(Unusable::Torn));
    }

    proptest! {
        #[test]
        fn a_file_that_is_cut_or_changed_anywhere_is_not_used(
            content in proptest::collection::vec(any::<u8>(), 0..300),
            is_sealed: bool,
            place: proptest::sample::Index,
            bit in 0_u32..8,
        ) {
            let key = is_sealed.then(|| key(1));
            let bytes = encode("n", content.clone(), key.as_ref()).unwrap();
            prop_assert_eq!(decode("n", &bytes, key.as_ref()), Ok(content));
            let at = place.index(bytes.len());
            prop_assert!(decode("n", &bytes[..at], key.as_ref()).is_err());
            let mut changed = bytes;
            changed[at] ^= 1 << bit;
            prop_assert!(decode("n", &changed, key.as_ref()).is_err());
        }

        #[test]
        fn any_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(decode("n", &bytes, None).is_err());
            prop_assert!(decode("n", &bytes, Some(&key(1))).is_err());
        }
    }
}
