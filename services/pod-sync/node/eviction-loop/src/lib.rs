//! Carries out evictions (`pkg/kubelet/eviction: managerImpl`).
//!
//! [`run`] is a future that the caller spawns. Every ten seconds it measures the node and its pods through
//! [`NodeControl`], asks [`EvictionManager`](pod_sync_eviction::manager::EvictionManager) what to do,
//! reclaims and evicts, and publishes the conditions of the node on a `watch` channel. [`measure`] reads
//! cgroups, file systems and `/proc`. [`kernel_log`] reports processes that the kernel killed.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod kernel_log;
pub mod measure;
pub mod memory_alarm;
mod metrics;
mod run;

pub use crate::metrics::EvictionMetrics;
pub use crate::run::{LastRound, NodeControl, Published, Scope, run};
