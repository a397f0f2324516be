//! Images of pods: the credentials that a pull presents, the limits on pulls, and the records of what was pulled.
//!
//! [`credentials::Credentials`] finds the credentials for an image: those of the pod's pull secrets, of the node's files and of
//! credential provider plugins, in this order. [`pulls::PullLanes`] bounds pulls per registry and in all.
//! [`pull_records::PullRecords`] keeps the kubelet's files of pulled images and answers who may use one.
//! What is decided about images is in [`pod_sync_decisions`]: `image_access`, `image_gc` and `image_name`.
//!
//! Tasks: `credential provider`, one per plugin that runs. There are no channels; nothing here talks to a runtime.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod credentials;
pub mod pull_records;
pub mod pulls;
