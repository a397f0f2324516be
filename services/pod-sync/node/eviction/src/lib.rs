//! Decides when the node is under pressure, what is reclaimed, and which pods are evicted
//! (`pkg/kubelet/eviction`).
//!
//! - [`thresholds`]: the configured thresholds, checked and completed.
//! - [`contradictions`]: thresholds that contradict each other, or the capacity of what they limit.
//! - `pressure::Pressure`: which thresholds are crossed, for how long, and the conditions of the node that
//!   follow. Which pods the node takes under these conditions is decided in
//!   `pod_sync_node_decisions::admission`.
//! - [`layout`]: which file systems are shared, what can be reclaimed on each, and which files of pods are on
//!   it.
//! - [`rank`]: the order in which pods are evicted for a signal.
//! - [`limits`]: pods above their own limits of local storage.
//! - `message`: the kubelet's texts and annotations of an eviction.
//! - [`manager`]: one round of these decisions.
//! - [`report`]: signals, thresholds and the next pod, for the operator.
//!
//! This crate has no I/O, no tasks and no clock. Times are those of `CLOCK_BOOTTIME`, so a step of the wall
//! clock evicts no pod.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod contradictions;
pub mod layout;
pub mod limits;
pub mod manager;
mod message;
mod pressure;
pub mod rank;
pub mod report;
pub mod thresholds;
pub mod usage;

mod signal;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod support;

pub use pod_sync_node_decisions::admission::PressureCondition;

pub use crate::signal::{Resource, Signal};

/// Reason of the event and of the status of an evicted pod.
pub const EVICTED: &str = "Evicted";
/// Reason of the event of the node when reclaiming begins.
pub const THRESHOLD_MET: &str = "EvictionThresholdMet";
