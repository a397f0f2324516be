//! Mounts the volumes of claims, CSI drivers, nfs, iscsi and fc (`pkg/kubelet/volumemanager`).
//!
//! [`VolumeTasks`] has the desired and the actual state of `pod-sync-volume-manager`, and one task that compares them. An
//! operation runs in a task of its own, at most one per volume, so a driver that hangs delays no other volume. Pod workers
//! declare their pods and wait ([`VolumeTasks::declare`], [`VolumeTasks::wait`], [`VolumeTasks::unmount`]). After a restart the
//! actual state comes from the directories, and nothing of a pod is unmounted before its worker has declared or released the pod.
//!
//! Other volumes need no operation that could hang; `pod-sync-volumes` sets them up.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![allow(missing_docs, reason = "comments are written where the signature does not suffice")]

pub mod claims;
mod expansion;
mod found;
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

pub use tasks::{Inputs, MountPoint, NotReady, StillMounted, VolumeTasks};
pub use views::{VolumeCounts, VolumeState, VolumeView};
pub use work::Step;
