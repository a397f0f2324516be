//! Certificates as PEM.

use pem::{EncodeConfig, LineEnding, Pem};

/// Returns the contents of all blocks. Headers, and text between the blocks, are ignored.
///
/// # Errors
/// A block is malformed.
pub(crate) fn contents(text: &str) -> Result<Vec<Vec<u8>>, pem::PemError> {
    Ok(pem::parse_many(text)?.into_iter().map(Pem::into_contents).collect())
}

/// Returns a block without headers.
#[must_use]
pub(crate) fn block(label: &str, content: Vec<u8>) -> String {
    let config = EncodeConfig::new().set_line_ending(LineEnding::LF);
    pem::encode_config(&Pem::new(label, content), config)
}

/// Returns certificates one after the other.
#[must_use]
pub(crate) fn certificates(contents: impl IntoIterator<Item = Vec<u8>>) -> String {
    contents.into_iter().map(|content| block("CERTIFICATE", content)).collect()
}
