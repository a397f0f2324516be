//! Decides which volumes to attach, mount, expand, unmount and detach (`pkg/kubelet/volumemanager`).
//!
//! - [`desired::Desired`]: the volumes of the pods that should run.
//! - [`actual::Actual`]: what is attached and mounted, certainly or possibly. Operations report their results
//!   to it, and [`reconstruct`] fills it from disk after a restart.
//! - [`operations::Operations`]: what is in flight, and the back-off of what failed.
//! - [`reconcile::reconcile`]: compares the two states, and returns the operations to start. It removes
//!   before it adds. [`reconcile::reconcile_direct`] does the same for the volumes of one pod that the pod's
//!   worker sets up.
//! - [`wait`]: whether the volumes of a pod are mounted or unmounted, and the kubelet's texts of why not.
//!
//! This crate has no I/O, no tasks and no clock.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod actual;
pub mod desired;
pub mod operations;
pub mod reconcile;
pub mod reconstruct;
pub mod wait;

#[cfg(test)]
mod properties;

use std::fmt;
use std::sync::Arc;

/// Unique name of a volume: `<plugin>/<name of the plugin>` if the plugin attaches volumes or mounts devices,
/// else `<plugin>/<pod UID>-<name>`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeName(Arc<str>);

impl VolumeName {
    /// Returns the name of a volume that all pods of the node share, such as a PersistentVolume of a CSI
    /// driver (`GetUniqueVolumeName`).
    #[must_use]
    pub fn shared(plugin: &str, name: &str) -> Self {
        Self(format!("{plugin}/{name}").into())
    }

    /// Returns the name of a volume that belongs to one pod (`GetUniqueVolumeNameFromSpecWithPod`).
    #[must_use]
    pub fn of_pod(plugin: &str, pod: &quintlet_model::ids::PodUid, name: &str) -> Self {
        Self(format!("{plugin}/{pod}-{name}").into())
    }

    /// Returns the plugin in a name of [`VolumeName::of_pod`].
    #[must_use]
    pub fn plugin_of_pod(&self) -> &str {
        self.0.rsplit_once('/').map_or(&self.0, |(plugin, _)| plugin)
    }

    /// Returns the name as a string.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
