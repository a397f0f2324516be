//! Limits and numbers of the lists that quintctl reads.

/// Largest number of names in one item of a reply. The item has the number of all.
pub(crate) const MOST_NAMES: usize = 64;

/// Returns a number of items for a reply.
pub(crate) fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
