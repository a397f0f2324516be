//! pod-sync: see ARCHITECTURE.md.

pub mod decide;
pub mod build;
pub mod cgroup;
pub mod volumes;
