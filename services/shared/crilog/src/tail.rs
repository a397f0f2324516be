//! Finds the last lines of a file.

use std::io::{Read, Seek, SeekFrom};

/// Bytes of one read from the end of a file.
const BLOCK: u64 = 64 << 10;

/// Returns the position of the last `lines` lines of a file. With 0 lines, returns the position of an
/// incomplete last line.
///
/// # Errors
/// The file cannot be read.
pub fn tail_start(file: &mut (impl Read + Seek), lines: u64) -> std::io::Result<u64> {
    let len = file.seek(SeekFrom::End(0))?;
    let mut end = len;
    let mut found = 0_u64;
    let mut block = Vec::new();
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        block.resize(usize::try_from(end.saturating_sub(start)).unwrap_or(0), 0);
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut block)?;
        for (i, _) in block.iter().enumerate().rev().filter(|(_, b)| **b == b'\n') {
            let after = start.saturating_add(i as u64).saturating_add(1);
            // The final newline ends the last line.
            if after < len || lines == 0 {
                found = found.saturating_add(1);
                if found >= lines.max(1) {
                    return Ok(after);
                }
            }
        }
        end = start;
    }
    // There are fewer lines, or the only one is incomplete.
    Ok(0)
}
