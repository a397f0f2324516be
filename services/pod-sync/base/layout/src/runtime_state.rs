//! The state of the container runtime.

use std::collections::BTreeMap;

/// State of the container runtime, as its last Status had it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeState {
    /// Name of the runtime, which is the scheme of container IDs in statuses. Empty until the first answer.
    pub name: String,
    /// `runtimeVersion` of the last answer, for the Node object.
    pub version: String,
    /// Reason why the runtime cannot run pods.
    pub not_ready: Option<String>,
    /// Reason why the runtime cannot run pods that need the pod network.
    pub network_not_ready: Option<String>,
    /// Features of each runtime handler.
    pub handlers: BTreeMap<String, HandlerFeatures>,
    /// Whether the runtime supports `supplementalGroupsPolicy`; `None` if it does not report features.
    pub supplemental_groups_policy: Option<bool>,
    /// The runtime applies the `bindMountOptions` of containers.
    pub mount_options: bool,
}

impl RuntimeState {
    /// Returns whether the runtime can run pods, with and without the pod network.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.is_known() && self.not_ready.is_none() && self.network_not_ready.is_none()
    }

    /// Returns whether the runtime has answered once.
    #[must_use]
    pub fn is_known(&self) -> bool {
        !self.name.is_empty()
    }
}

/// Features of a runtime handler, from the CRI's Status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HandlerFeatures {
    /// `recursiveReadOnlyMounts`.
    pub recursive_read_only_mounts: bool,
    /// `userNamespaces`: containers of the handler can have a user namespace of their own.
    pub user_namespaces: bool,
    /// `supplementalGroupsPolicy: Strict`.
    pub supplemental_groups_policy: bool,
    /// `bindMountOptions`.
    pub mount_options: bool,
}
