//! What admission knows about the node.

use k8s_openapi::api::core::v1::Node;

use quintlet_model::qos::ResourceList;

/// A pressure condition of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PressureCondition {
    /// `MemoryPressure`.
    Memory,
    /// `DiskPressure`.
    Disk,
    /// `PIDPressure`.
    Pid,
}

impl PressureCondition {
    /// Returns the type of the condition in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pid => "PIDPressure",
        }
    }
}

/// The facts about the node that admission uses.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    /// The Node object, or the one to be registered. `None` rejects every pod.
    pub node: Option<&'a Node>,
    /// Allocatable resources, including `pods`.
    pub allocatable: &'a ResourceList,
    /// PressureCondition conditions that are True now.
    pub pressure: &'a [PressureCondition],
    /// `allowedUnsafeSysctls`; a trailing `*` matches any suffix.
    pub allowed_sysctls: &'a [String],
    /// Kernel version (major, minor).
    pub kernel: (u32, u32),
    /// Whether the runtime supports supplementalGroupsPolicy Strict.
    pub strict_supplemental_groups: bool,
    /// AppArmor is enabled in the kernel.
    pub app_armor: bool,
    /// `status.declaredFeatures` of the Node.
    pub declared: &'a [&'a str],
    /// Whether the node is shutting down.
    pub shutting_down: bool,
}
