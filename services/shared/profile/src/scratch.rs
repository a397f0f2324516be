//! The directory of temporary files.
//!
//! pprof keeps a file for samples that do not fit into memory from the first profile on, and opens it by its
//! path. An image without a distribution has no `/tmp`, so `/dev/shm` serves as well.

use std::io;
use std::path::{Path, PathBuf};

/// Directory that every machine and container has.
const SHARED_MEMORY: &str = "/dev/shm";

/// Returns the directory of temporary files of this process, after it has made sure that one can be written.
///
/// # Errors
/// No directory can be written.
pub(crate) fn directory() -> io::Result<PathBuf> {
    if let Err(error) = tempfile::tempfile() {
        tempfile::tempfile_in(SHARED_MEMORY).map_err(|_| error)?;
        // It fails only if the directory was set before.
        let _ = tempfile::env::override_temp_dir(Path::new(SHARED_MEMORY));
    }
    Ok(tempfile::env::temp_dir())
}
