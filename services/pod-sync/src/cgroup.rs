//! Cgroups of pods.

use std::path::Path;

/// The unified hierarchy is mounted at `root`.
#[must_use]
pub fn is_v2(root: &Path) -> bool {
    root.join("cgroup.controllers").exists()
}

/// Whether memory groups have a swap limit: this process's own group, or one below the root, tells.
#[must_use]
pub fn has_swap_controller() -> bool {
    std::fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|t| t.lines().find_map(|l| l.strip_prefix("0::").map(str::to_owned)))
        .is_some_and(|own| {
            Path::new("/sys/fs/cgroup").join(own.trim_start_matches('/')).join("memory.swap.max").exists()
        })
}
