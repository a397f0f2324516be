//! The checkpoint on disk.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::atomic_file;

use crate::checkpoint::{CHECKPOINT, decode};
use crate::claim::ClaimKey;
use crate::inventory::ClaimRecord;

/// Mode of the checkpoint.
const MODE: u32 = 0o600;

/// The checkpoint file, and what was written to it last.
#[derive(Debug)]
pub(crate) struct CheckpointFile {
    path: PathBuf,
    written: Vec<u8>,
}

impl CheckpointFile {
    /// Reads the checkpoint in `dir`. One that cannot be used is renamed for inspection: the workers of pods that run prepare their
    /// claims again, which records them. Blocks.
    pub(crate) fn open(dir: &Path) -> (Self, BTreeMap<ClaimKey, ClaimRecord>) {
        let path = dir.join(CHECKPOINT);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::error!(path = %path.display(), %error, "failed to read claim checkpoint");
                }
                return (Self { path, written: Vec::new() }, BTreeMap::new());
            }
        };
        match decode(&bytes) {
            Ok(records) => (Self { path, written: bytes }, records),
            Err(error) => {
                let aside = path.with_extension("corrupt");
                let moved = std::fs::rename(&path, &aside).is_ok();
                let error = quintlet_kit::error_chain(&error);
                tracing::error!(path = %path.display(), error, moved, "claim checkpoint is unusable, starting an empty one");
                (Self { path, written: Vec::new() }, BTreeMap::new())
            }
        }
    }

    /// Writes the content, unless the file has it already. Blocks.
    ///
    /// # Errors
    /// The file cannot be replaced.
    pub(crate) fn write(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        if bytes == self.written {
            return Ok(());
        }
        atomic_file::write_durable(&self.path, &bytes, MODE)?;
        self.written = bytes;
        Ok(())
    }
}
