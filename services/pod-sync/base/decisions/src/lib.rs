//! The decisions of pod-sync: pure functions of a snapshot.
//!
//! No function here is async, does I/O or reads a clock. Wall time is a [`jiff::Timestamp`] argument.
//! CLOCK_BOOTTIME is a [`std::time::Duration`] since boot. One sync of a pod worker (`pkg/kubelet: SyncPod`)
//! uses them in this order:
//!
//! 1. [`status::generate`] builds the status from the spec, the previous status, runtime state, probe results
//!    and waiting reasons.
//! 2. [`sync::gate`] ends the sync of a pod in a terminal phase, and delays one whose network is not ready.
//!    [`sync::cgroup_plan`] plans the pod's cgroup.
//! 3. [`actions::compute_pod_actions`] computes the actions. [`sync::restarts_all`] reads one of its inputs
//!    from the status.
//! 4. The worker kills containers ([`grace::container_grace`]), creates the sandbox and starts ephemeral,
//!    init and regular containers. [`starts::due_starts`] and [`backoff`] delay a start,
//!    [`sync::next_attempt`] numbers it. A failed start becomes a waiting reason
//!    ([`waiting::StartFailure::with_message`]).
//! 5. [`waiting::explain`] describes the actions, [`waiting::from_status`] what the pod waits for.
//!
//! [`worker::PodSyncStatuses::step`] decides what a worker does next. Termination uses
//! [`grace::effective_grace`] for the pod, [`grace::termination_plan`] for its containers, `generate` with
//! `is_terminal`, and [`status::terminate`] at the end. [`status::with_kill_override`] is for pods that the
//! node agent itself ends. [`merge::SourceStore`] merges snapshots of sources. Decisions about the node, its
//! images and its room for pods are in the crate `pod-sync-node-decisions`.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod actions;
pub mod active;
pub mod backoff;
pub mod conditions;
pub mod container_status;
pub mod containment;
pub mod device_status;
pub mod finish;
pub mod grace;
pub mod merge;
mod phase;
#[cfg(test)]
mod pod_fields_tests;
pub mod probe_period;
pub mod probes;
pub mod reconcile;
pub mod resize;
pub mod restart;
mod restart_all;
pub mod sandbox;
#[cfg(test)]
mod simulation_tests;
pub mod starts;
pub mod status;
pub mod storage_health;
pub mod sync;
pub mod unknown_calls;
pub mod unsupported;
pub mod volume_health;
pub mod waiting;
pub mod worker;

use quintlet_model::quantity;

pub use quintlet_model::qos;
