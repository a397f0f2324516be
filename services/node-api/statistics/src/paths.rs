//! Directories and cgroups that statistics are read from.

use std::path::PathBuf;

/// Directories that statistics are read from.
#[derive(Debug, Clone, Default)]
pub struct StatsPaths {
    /// Root directory of the kubelet, whose file system is that of the node.
    pub root_dir: PathBuf,
    /// Directory of container logs.
    pub pod_logs_dir: PathBuf,
    /// Mount point of cgroupfs.
    pub cgroups: PathBuf,
    /// Cgroup that contains `kubepods`.
    pub cgroup_root: String,
    /// Cgroups of processes that are not those of pods.
    pub system: SystemCgroups,
    /// Huge pages are not available memory (feature gate `HugepageAwareEviction`).
    pub subtracts_huge_pages: bool,
}

/// Cgroups of the configuration, as paths from the root of the hierarchies. Empty: not set.
#[derive(Debug, Clone, Default)]
pub struct SystemCgroups {
    /// `kubeletCgroups`.
    pub kubelet: String,
    /// `--runtime-cgroups`.
    pub runtime: String,
    /// `systemCgroups`.
    pub system: String,
}
