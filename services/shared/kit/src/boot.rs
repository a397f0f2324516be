//! Which boot of the machine this is.

/// The kernel's boot id; a fixed text where it cannot be read.
#[must_use]
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| "unknown-boot".to_owned(), |s| s.trim().to_owned())
}
