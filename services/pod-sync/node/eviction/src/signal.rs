//! Signals, the resources behind them, and the conditions of the node that they set.

use std::fmt;

use pod_sync_node_decisions::admission::PressureCondition;

/// The quantity that a threshold limits (`pkg/kubelet/eviction/api: Signal`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Signal {
    /// Memory of the node without its working set.
    MemoryAvailable,
    /// Memory limit of the cgroup of all pods without its working set.
    AllocatableMemoryAvailable,
    /// Free bytes of the file system of the root directory.
    NodeFsAvailable,
    /// Free inodes of the file system of the root directory.
    NodeFsInodesFree,
    /// Free bytes of the file system of images.
    ImageFsAvailable,
    /// Free inodes of the file system of images.
    ImageFsInodesFree,
    /// Free bytes of the file system of writable layers.
    ContainerFsAvailable,
    /// Free inodes of the file system of writable layers.
    ContainerFsInodesFree,
    /// Process IDs that are not in use.
    PidAvailable,
}

/// A resource that is reclaimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// Memory, in bytes.
    Memory,
    /// Bytes on disk.
    EphemeralStorage,
    /// Inodes on disk.
    Inodes,
    /// Process IDs.
    Pids,
}

impl Signal {
    /// All signals. Those of memory come first, since memory is reclaimed first.
    pub const ALL: [Self; 9] = [
        Self::MemoryAvailable,
        Self::AllocatableMemoryAvailable,
        Self::NodeFsAvailable,
        Self::NodeFsInodesFree,
        Self::ImageFsAvailable,
        Self::ImageFsInodesFree,
        Self::ContainerFsAvailable,
        Self::ContainerFsInodesFree,
        Self::PidAvailable,
    ];

    /// Returns the name as in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory.available",
            Self::AllocatableMemoryAvailable => "allocatableMemory.available",
            Self::NodeFsAvailable => "nodefs.available",
            Self::NodeFsInodesFree => "nodefs.inodesFree",
            Self::ImageFsAvailable => "imagefs.available",
            Self::ImageFsInodesFree => "imagefs.inodesFree",
            Self::ContainerFsAvailable => "containerfs.available",
            Self::ContainerFsInodesFree => "containerfs.inodesFree",
            Self::PidAvailable => "pid.available",
        }
    }

    /// Returns the signal with this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|signal| signal.as_str() == name)
    }

    /// Returns the resource that is reclaimed when a threshold of the signal is crossed.
    #[must_use]
    pub fn resource(self) -> Resource {
        match self {
            Self::MemoryAvailable | Self::AllocatableMemoryAvailable => Resource::Memory,
            Self::NodeFsAvailable | Self::ImageFsAvailable | Self::ContainerFsAvailable => {
                Resource::EphemeralStorage
            }
            Self::NodeFsInodesFree | Self::ImageFsInodesFree | Self::ContainerFsInodesFree => {
                Resource::Inodes
            }
            Self::PidAvailable => Resource::Pids,
        }
    }

    /// Returns whether the signal is measured on a file system.
    #[must_use]
    pub fn is_of_disk(self) -> bool {
        match self.resource() {
            Resource::EphemeralStorage | Resource::Inodes => true,
            Resource::Memory | Resource::Pids => false,
        }
    }

    /// Returns the condition of the node when a threshold of the signal is crossed.
    #[must_use]
    pub fn condition(self) -> PressureCondition {
        match self.resource() {
            Resource::Memory => PressureCondition::Memory,
            Resource::EphemeralStorage | Resource::Inodes => PressureCondition::Disk,
            Resource::Pids => PressureCondition::Pid,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Resource {
    /// Returns the name as in messages and requests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::EphemeralStorage => "ephemeral-storage",
            Self::Inodes => "inodes",
            Self::Pids => "pids",
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
