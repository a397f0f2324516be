//! Identifies the current boot of the machine.

// Blocks: the kernel has the file in memory.
/// Returns the kernel's boot id, or `unknown-boot` if it cannot be read.
#[must_use]
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| "unknown-boot".to_owned(), |s| s.trim().to_owned())
}
