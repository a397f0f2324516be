//! CSI drivers on the node (`pkg/volume/csi`).
//!
//! - [`drivers`]: the registered drivers and their node information, from which the CSINode object is made.
//! - [`client`]: the calls of one driver, with deadlines and errors that say whether the operation may be in
//!   progress.
//! - [`paths`] and [`volume_data`]: the kubelet's directories and files, so that a node can change agents
//!   with volumes mounted.
//! - [`mount`] and `block`: stage, publish, unpublish and unstage as lists of steps. Each step may be the
//!   last one before the process ends: every operation can be repeated from its start, and undone by its
//!   counterpart.
//! - [`reconstruct`]: the volumes that the directories describe, after a restart.
//!
//! This crate has no tasks. Its caller allows one operation per volume at a time. Drivers are called from
//! this crate only.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod block;
pub mod client;
pub mod drivers;
pub mod error;
pub mod mount;
pub mod paths;
pub mod reconstruct;
mod version;
pub mod volume;
pub mod volume_data;

mod removal;

/// Name of the volume plugin.
pub const PLUGIN: &str = "kubernetes.io/csi";
/// Type of CSI drivers in the plugin registration.
pub const PLUGIN_TYPE: &str = "CSIPlugin";
