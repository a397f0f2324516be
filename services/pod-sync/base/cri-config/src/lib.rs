//! Builds the CRI configuration of a pod's sandbox and containers: the content of RunPodSandbox and
//! CreateContainer requests.
//!
//! The crate has no tasks and no channels. Its functions are pure, with three exceptions:
//! [`env::EnvObjects::fetch`] asks an [`ObjectSource`](pod_sync_layout::ObjectSource); [`subpath`] and
//! [`mounts::make_mounts`] prepare files below the pod's directory; and [`dns::read_resolv_conf`] reads the
//! node's file. The messages of [`error::ConfigError`] are the kubelet's, since they become the message of a
//! container that waits with reason `CreateContainerConfigError`.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod container;
pub mod dns;
pub mod env;
pub mod env_file;
pub mod env_files;
pub mod error;
pub mod expand;
pub mod fields;
mod go_json;
mod hostname;
mod hosts;
pub mod mounts;
pub mod resources;
pub mod sandbox;
pub mod security;
mod services;
pub mod subpath;
