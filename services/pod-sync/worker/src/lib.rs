//! The workers of pods (`pkg/kubelet: podWorkers, SyncPod, SyncTerminatingPod, SyncTerminatedPod`).
//!
//! - [`Worker`] syncs and terminates one pod, as a task of its own. It ensures images, creates sandboxes and
//!   containers, runs hooks, and reports the status.
//! - [`PodWorkers`] holds the state machine of all workers, which is decided in
//!   [`pod_sync_decisions::worker`].
//! - `mirror` reconciles the mirror pod of a static pod, as a task of its own.
//! - [`context`] has what the workers and the other tasks of pod-sync share, grouped by purpose.
//!
//! A worker is woken and then reads the newest state; there are no queues of work. The pod manager of
//! pod-sync makes workers.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod context;
mod image;
mod mirror;
mod pod_workers;
mod probe_rates;
mod static_pod_gate;
mod worker;

pub use crate::pod_workers::{KillTimeout, NextWork, PodWorkers};
pub use crate::probe_rates::ProbeRates;
pub use crate::static_pod_gate::StaticPodGate;
pub use crate::worker::{Halt, Worker, possible_users, stop_all_containers};
