//! Standard output.

use std::io::Write;
use std::path::PathBuf;

use crate::error::InstallError;

/// Writes text and flushes it.
pub(crate) fn print(out: &mut dyn Write, text: &str) -> Result<(), InstallError> {
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|source| InstallError::File {
        action: "write to",
        path: PathBuf::from("standard output"),
        source,
    })
}
