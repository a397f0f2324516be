//! Mounts the volumes of pods (`pkg/kubelet/volumemanager`).
//!
//! [`VolumeTasks`] has the desired and the actual state of `pod-sync-volume-reconcile`. Pod workers declare
//! their pods and wait ([`VolumeTasks::declare`], [`VolumeTasks::wait`], [`VolumeTasks::unmount`]). After a
//! restart the actual state comes from the directories, and nothing of a pod is unmounted before its worker
//! has declared or released the pod.
//!
//! - Volumes of claims, CSI drivers, nfs, iscsi and fc can hang. One task compares the states, and an
//!   operation runs in a task of its own, at most one per volume, so a driver that hangs delays no other
//!   volume.
//! - Direct volumes (configMap, emptyDir and others) need a few system calls. The pod's worker compares the
//!   states of its own pod and executes the operations in its pass ([`VolumeTasks::set_up`]), by
//!   `pod-sync-direct-volumes`.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod claims;
mod direct;
mod executor;
mod expansion;
mod found;
mod health;
mod health_source;
mod in_tree;
mod limits;
mod metrics;
mod mount_in_tree;
pub mod objects;
mod resolve;
mod selinux;
mod state;
mod tasks;
mod tools;
mod views;
mod work;

pub use direct::Again;
pub use state::StillMounted;
pub use tasks::{MountedFileSystem, NotReady, VolumeTasks, VolumeTasksContext};
pub use views::{VolumeCounts, VolumeState, VolumeView};
pub use work::OperationStep;
