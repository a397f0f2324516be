//! The kubelet's PodResources API (`pkg/kubelet/apis/podresources`): agents of the node ask for the devices,
//! claims, exclusive CPUs and memory of containers.
//!
//! [`PodResourcesApi`] serves at [`socket`]. It reads pods, devices and claims as they are, and keeps
//! nothing. Answers are made one at a time, `answers` has their content. [`ExclusiveResources`] is the view
//! of the CPU and memory managers.
//!
//! Limits: calls per second for all clients, connections, calls per connection, and bytes of an answer. A
//! client that does not read keeps its own answers, and delays no other client.

// A value of a pod, a plugin or a client must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod answers;
mod exclusive;
mod metrics;
mod server;
mod service;
#[cfg(test)]
#[path = "tests/pods.rs"]
mod test_pods;

pub use crate::answers::HeldResources;
pub use crate::exclusive::{ExclusiveResources, MemoryBlock};
pub use crate::server::{listen, socket};
pub use crate::service::{PodResourcesApi, PodSource};
