//! Whose a pod's group is, as an attribute of its directory, which only root can set. It goes with the directory.

use std::path::Path;

use rustix::fs::XattrFlags;

const NAME: &str = "trusted.quintlet.owner";
// Longer ones are nobody's.
const LONGEST: usize = 512;

/// Marks a group. A kernel without such attributes leaves it unmarked, and then it is never taken for an orphan.
pub(super) fn set(dir: &Path, owner: &str) {
    if let Err(e) = rustix::fs::setxattr(dir, NAME, owner.as_bytes(), XattrFlags::empty()) {
        tracing::debug!(dir = %dir.display(), error = %e, "a cgroup cannot be marked");
    }
}

/// Whether a group bears this owner's mark.
pub(super) fn is(dir: &Path, owner: &str) -> bool {
    let mut value = [0; LONGEST];
    let read = rustix::fs::getxattr(dir, NAME, &mut value[..]);
    !owner.is_empty() && read.is_ok_and(|n| value[..n] == *owner.as_bytes())
}
