//! Marks a pod's cgroup with its owner in an extended attribute of the directory, which only root can set.

use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

const NAME: &str = "trusted.quintlet.owner";
// Bytes. A longer attribute is not an owner's mark.
const LONGEST: usize = 512;

/// Marks a cgroup, if it exists. A kernel without such attributes leaves it unmarked, and it never counts as
/// an orphan.
pub(super) fn set(dir: &Path, owner: &str) {
    let marked = rustix::fs::setxattr(dir, NAME, owner.as_bytes(), XattrFlags::empty());
    if let Err(e) = marked.or_else(|e| if e == Errno::NOENT { Ok(()) } else { Err(e) }) {
        tracing::debug!(dir = %dir.display(), error = %e, "failed to mark cgroup with its owner");
    }
}

/// Returns whether a cgroup has this owner's mark.
pub(super) fn is(dir: &Path, owner: &str) -> bool {
    let mut value = [0; LONGEST];
    let read = rustix::fs::getxattr(dir, NAME, &mut value[..]);
    !owner.is_empty() && read.is_ok_and(|n| value[..n] == *owner.as_bytes())
}
