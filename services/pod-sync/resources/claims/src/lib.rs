//! Claims of dynamic resource allocation (`pkg/kubelet/cm/dra`).
//!
//! [`Claims`] is the handle. The worker of a pod calls [`Claims::prepare`] before the sandbox,
//! [`Claims::cdi_devices`] for each container, and [`Claims::unprepare`] after the containers have ended.
//! Without a usable checkpoint ([`Claims::lacks_pods`]), the claims of pods that run are recorded again: by
//! [`Claims::prepare`] while a pod runs, by [`Claims::recover`] at its end.
//! Each operation is a task, so that a worker that goes away cannot cut it in half. A claim has one operation
//! at a time. Calls of a driver have a deadline, and one driver does not wait for another one.
//!
//! Each registered plugin has a task that watches its connection, and one that follows the health of its
//! devices. [`Claims::wipe_slices`] removes the ResourceSlices of drivers that stay away.
//!
//! Plain functions: `requests` has the claims that a pod and its containers need, [`ClaimInventory`]
//! decides on the calls, [`checkpoint`] is the kubelet's file, [`PluginList`] selects the plugin of a driver,
//! `health` is the health of devices.

// A value of a pod, a driver or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod checkpoint;
mod claim;
mod driver;
mod error;
mod health;
mod inventory;
mod manager;
mod metrics;
mod monitor;
mod operation;
mod plugins;
mod preparation;
mod registration;
mod requests;
mod shared;
mod status;
mod wipes;

pub use crate::claim::ClaimKey;
pub use crate::error::{ClaimError, FetchError};
pub use crate::inventory::{ClaimInventory, ClaimRecord, ClaimStateView, PreparedDevice};
pub use crate::manager::{ClaimContext, Claims, DriverView, SliceWiper};
pub use crate::plugins::{PluginList, WIPE_DELAY};
pub use crate::registration::PLUGIN_TYPE;
pub use crate::requests::{container_requests, has_claims};
pub use crate::shared::ClaimSource;
