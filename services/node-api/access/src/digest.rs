//! SHA-256 digests: keys of caches, and the content of files that are watched for changes.

use std::path::PathBuf;

use sha2::{Digest as _, Sha256};

/// A SHA-256 digest.
pub(crate) type Digest = [u8; 32];

/// Returns the digest of a list of byte strings. Each is hashed with its length, so that lists with the same
/// concatenation differ.
pub(crate) fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Digest {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Returns the digest of the contents of files. A file that cannot be read counts as empty.
///
/// Modification times and sizes do not suffice: two versions of a file may have the same within a tick of the
/// clock.
pub(crate) fn of_files(files: &[PathBuf]) -> Digest {
    let contents: Vec<Vec<u8>> = files.iter().map(|f| std::fs::read(f).unwrap_or_default()).collect();
    of_parts(contents.iter().map(Vec::as_slice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_with_the_same_concatenation_have_different_digests() {
        assert_ne!(of_parts([b"ab".as_slice(), b"c"]), of_parts([b"a".as_slice(), b"bc"]));
    }
}
