//! Volumes that the node agent mounts without a driver: `local` and `hostPath` PersistentVolumes, `nfs`,
//! `iscsi` and `fc` (`pkg/volume/local`, `pkg/volume/hostpath`, `pkg/volume/nfs`, `pkg/volume/iscsi`,
//! `pkg/volume/fc`).
//!
//! - [`volume`]: what a PersistentVolume or a pod's volume describes.
//! - [`mount`] and [`block`]: the operations. The directories are those of the kubelet (`paths`), so that a
//!   node can change agents with volumes mounted. Every operation can be repeated from its start, and undone
//!   by its counterpart.
//! - `disks`: iSCSI and Fibre Channel disks, whose names and records are in [`iscsi`] and [`fc`], and their
//!   devices in [`host`].
//! - `resize`: file systems of `local` volumes, enlarged to the size of their devices.
//! - [`commands`]: mount(8) and the tools of file systems, which tests replace.
//! - [`found`]: the volumes that the directories describe, after a restart.
//! - [`translation`]: PersistentVolumes of types that are CSI drivers by now, translated as by the kubelet.
//!
//! This crate has no tasks. Its caller allows one operation per volume at a time.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod block;
pub mod commands;
mod disks;
pub mod error;
pub mod fc;
pub mod found;
pub mod host;
pub mod iscsi;
pub mod mount;
mod paths;
mod resize;
pub mod translation;
pub mod volume;

mod disk_directory;
mod removal;
mod targets;

#[cfg(test)]
mod tests;
