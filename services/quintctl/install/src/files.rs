//! Results of operations on files.

use std::io;
use std::path::Path;

use crate::error::InstallError;

/// Returns success for the removal of a file that does not exist.
pub(crate) fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) => {
            Ok(())
        }
        done => done,
    }
}

/// Returns the error of an operation on a file. `action` is a verb.
pub(crate) fn failed(action: &'static str, path: &Path, source: io::Error) -> InstallError {
    InstallError::File { action, path: path.to_owned(), source }
}
