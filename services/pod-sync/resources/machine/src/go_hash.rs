//! The checksum of the kubelet's state files.

use std::fmt;

/// The 32-bit FNV-1a hash of the text that is written to it. The kubelet hashes what Go prints for the data of a state file
/// (`pkg/kubelet/checkpointmanager/checksum`).
#[derive(Debug, Clone, Copy)]
pub struct GoHash(u32);

impl GoHash {
    /// Returns the hash of what a function writes.
    ///
    /// # Errors
    /// The function failed. The hash itself never does.
    pub fn of(write: impl FnOnce(&mut Self) -> fmt::Result) -> Result<u64, fmt::Error> {
        let mut hash = Self(0x811c_9dc5);
        write(&mut hash)?;
        Ok(u64::from(hash.0))
    }

    /// Writes the items of a Go slice or map, which spaces separate.
    ///
    /// # Errors
    /// `write` failed.
    pub fn separated<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T) -> fmt::Result,
    ) -> fmt::Result {
        for (number, item) in items.into_iter().enumerate() {
            if number > 0 {
                fmt::Write::write_char(self, ' ')?;
            }
            write(self, item)?;
        }
        Ok(())
    }
}

impl fmt::Write for GoHash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 = text.bytes().fold(self.0, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        Ok(())
    }
}
