//! What the process was built from, and which programs its binary has.

use std::sync::OnceLock;

static COMMIT: OnceLock<&str> = OnceLock::new();
static PROGRAMS: OnceLock<&[&str]> = OnceLock::new();

/// Sets the names that the binary can be run by, if it has several programs. Call it once.
pub fn set_programs(names: &'static [&'static str]) {
    // Later calls have no effect.
    let _set_before = PROGRAMS.set(names);
}

/// Returns whether the binary of this process runs a program if it is run by the program's name.
#[must_use]
pub fn has_program(name: &str) -> bool {
    PROGRAMS.get().is_some_and(|names| names.contains(&name))
}

/// Sets the commit. Call it once, before [`commit`]. The program passes it in, since a commit compiled into
/// this library would cause a rebuild of all crates with each commit.
pub fn set_commit(commit: &'static str) {
    // Later calls have no effect.
    let _set_before = COMMIT.set(commit);
}

/// Returns the commit, or `unknown`.
#[must_use]
pub fn commit() -> &'static str {
    COMMIT.get().copied().or(option_env!("QUINTLET_COMMIT")).unwrap_or("unknown")
}
