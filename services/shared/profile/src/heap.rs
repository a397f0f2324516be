//! The allocations of this process that are in use, if its allocator records them.

use crate::cpu::ProfileError;

/// Returns jemalloc's profile of the heap as text (`heap_v2`, for `jeprof`).
///
/// # Errors
/// The build or the start of this process has no heap profile; the text of the error says which. Another
/// profile is being taken, or the file cannot be written.
pub fn profile() -> Result<Vec<u8>, ProfileError> {
    #[cfg(feature = "heap-profile")]
    return dumped();
    #[cfg(not(feature = "heap-profile"))]
    Err(ProfileError::NoHeapProfile(
        "this build has no heap profile: build with the feature heap-profile, as make profile-heap does",
    ))
}

#[cfg(feature = "heap-profile")]
fn dumped() -> Result<Vec<u8>, ProfileError> {
    use std::os::unix::ffi::OsStrExt as _;

    use crate::cpu::Turn;
    use crate::scratch;

    let _turn = Turn::take()?;
    let file = |source| ProfileError::File { action: "create a temporary file for the heap profile", source };
    let dump = tempfile::NamedTempFile::new_in(scratch::directory().map_err(file)?).map_err(file)?;
    // jemalloc takes a text that lives for ever. It has 40 bytes, once per profile.
    let text = [dump.path().as_os_str().as_bytes(), b"\0"].concat().leak();
    tikv_jemalloc_ctl::raw::write_str(b"prof.dump\0", text).map_err(|_| {
        ProfileError::NoHeapProfile(
            "the heap profile is off: start the service with _RJEM_MALLOC_CONF=prof:true",
        )
    })?;
    std::fs::read(dump.path())
        .map_err(|source| ProfileError::File { action: "read the heap profile", source })
}
