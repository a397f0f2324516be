//! Images of pods: credentials for pulls, limits of pulls, and records of pulled images.
//!
//! - [`credentials::Credentials`] finds the credentials for an image: the pod's pull secrets, files of the
//!   node, and credential provider plugins, in this order.
//! - [`pulls::PullLimits`] limits concurrent pulls per registry and in total.
//! - [`pull_records::PullRecords`] keeps the kubelet's records of pulled images and decides which pods may
//!   use an image.
//!
//! Decisions about images are in [`pod_sync_node_decisions`]: `image_access`, `image_gc` and `image_name`.
//!
//! Tasks: `credential provider`, one per plugin process. There are no channels, and nothing here calls a
//! runtime.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod credentials;
pub mod pull_records;
pub mod pulls;
