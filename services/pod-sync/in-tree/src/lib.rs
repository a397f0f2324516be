//! Volumes that the node agent mounts without a driver: `local` and `hostPath` PersistentVolumes, and `nfs` (`pkg/volume/local`,
//! `pkg/volume/hostpath`, `pkg/volume/nfs`).
//!
//! - [`volume`]: what a PersistentVolume or a pod's volume describes.
//! - [`mount`] and [`block`]: the operations. The directories are those of the kubelet ([`paths`]), so that a node can change
//!   agents with volumes mounted. Every operation can be repeated from its start, and undone by its counterpart.
//! - [`commands`]: mount(8) and the tools of file systems, which tests replace.
//! - [`found`]: the volumes that the directories describe, after a restart.
//! - [`translation`]: PersistentVolumes of types that are CSI drivers by now, translated as by the kubelet.
//!
//! This crate has no tasks. Its caller allows one operation per volume at a time.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![allow(missing_docs, reason = "comments are written where the signature does not suffice")]

pub mod block;
pub mod commands;
pub mod error;
pub mod found;
pub mod mount;
pub mod paths;
pub mod translation;
pub mod volume;

mod references;
mod removal;

#[cfg(test)]
mod tests;
