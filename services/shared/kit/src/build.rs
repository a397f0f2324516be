//! Which source this process was built from.

use std::sync::OnceLock;

static COMMIT: OnceLock<&str> = OnceLock::new();

/// Sets the commit, once and before anything asks for it. Only a program knows it: were it a part of this library, each commit
/// would build everything anew.
pub fn set_commit(commit: &'static str) {
    // The first one stays.
    let _set_before = COMMIT.set(commit);
}

/// Returns the commit, or `unknown`.
#[must_use]
pub fn commit() -> &'static str {
    COMMIT.get().copied().or(option_env!("QUINTLET_COMMIT")).unwrap_or("unknown")
}
