//! Devices of device plugins (`pkg/kubelet/cm/devicemanager`).
//!
//! [`Devices`] is the handle. Its tasks are the server of the agent's socket ([`Devices::serve`]), one per
//! registered plugin, which follows the plugin's lists of devices, and [`Devices::expire_resources`]. The
//! workers of pods call [`Devices::admit`] before the sandbox, and [`Devices::prepare_container`] before each
//! container. A call of a plugin has a deadline and runs beside no other call of the same plugin, so that a
//! plugin that hangs delays its own pods only.
//!
//! Plain functions: [`select()`] selects devices, `hints` are their NUMA nodes, [`DeviceInventory`] has the
//! registered resources and who holds their devices, [`checkpoint`] is the kubelet's file, [`DeviceOptions`]
//! is what a container needs to use its devices.

// A value of a pod, a plugin or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod allocations;
pub mod checkpoint;
mod device;
mod error;
mod hints;
mod inventory;
mod manager;
mod metrics;
mod names;
mod options;
mod plugin;
mod registration;
mod requests;
mod select;
mod sockets;

pub use crate::allocations::Allocation;
pub use crate::device::{Device, DeviceId, DeviceIds, NO_NUMA_NODE};
pub use crate::error::DeviceError;
pub use crate::inventory::{DeviceInventory, GRACE, PluginOptions, PluginPhaseView};
pub use crate::manager::{Alignment, DeviceAdmission, DeviceContext, Devices, PluginView};
pub use crate::options::{DeviceFile, DeviceMount, DeviceOptions};
pub use crate::registration::{PLUGIN_TYPE, SOCKET};
pub use crate::requests::{may_need_devices, resource_names};
pub use crate::select::select;
