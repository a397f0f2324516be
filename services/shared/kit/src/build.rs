//! The source commit that the process was built from.

use std::sync::OnceLock;

static COMMIT: OnceLock<&str> = OnceLock::new();

/// Sets the commit. Call it once, before [`commit`]. The program passes it in, since a commit compiled into this library would
/// cause a rebuild of all crates with each commit.
pub fn set_commit(commit: &'static str) {
    // Later calls have no effect.
    let _set_before = COMMIT.set(commit);
}

/// Returns the commit, or `unknown`.
#[must_use]
pub fn commit() -> &'static str {
    COMMIT.get().copied().or(option_env!("QUINTLET_COMMIT")).unwrap_or("unknown")
}
