//! What pod-sync decides: plain functions of a snapshot.
//!
//! Nothing here is async, does I/O or reads a clock: wall time is a [`jiff::Timestamp`] argument, boottime a
//! [`std::time::Duration`] since boot. A worker's pass is
//!
//! 1. [`status::generate`] from spec, last status, inspection, probe results and waiting reasons;
//! 2. [`sync::gate`]: a terminal phase ends it, a missing network holds it up; [`sync::cgroup_plan`];
//! 3. [`actions::compute_pod_actions`], with [`sync::restarts_all`] of that status;
//! 4. the driver acts: kills ([`grace::container_grace`]), sandbox, ephemeral, init and regular containers; each start is
//!    asked of [`backoff`] first and numbered by [`sync::next_attempt`]; what fails becomes a waiting reason
//!    ([`waiting::StartFailure::with_message`]);
//! 5. [`waiting::explain`] says in words what was decided, [`waiting::from_status`] what the pod waits for.
//!
//! Which pass it is, [`worker::PodSyncStatuses::step`] says. Termination: [`grace::effective_grace`] for the pod, [`grace::termination_plan`] for its containers, `generate` with
//! `is_terminal`, [`status::terminate`] last; [`status::with_kill_override`] for what the agent itself ends. Sources go
//! through [`merge::SourceStore`], new pods through [`admission::admit`]; [`preempt::pods_to_preempt`] makes room for critical ones.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod actions;
pub mod active;
pub mod admission;
pub mod backoff;
pub mod conditions;
pub mod container_status;
pub mod containment;
pub mod gc;
pub mod grace;
pub mod image_access;
pub mod image_gc;
pub mod image_name;
pub mod merge;
pub mod phase;
#[cfg(test)]
mod pod_fields_tests;
pub mod preempt;
pub mod probes;
pub mod qos;
pub mod reconcile;
pub mod resize;
pub mod restart;
pub mod restart_all;
pub mod sandbox;
pub mod shutdown;
#[cfg(test)]
mod simulation_tests;
pub mod status;
pub mod sync;
pub mod unsupported;
pub mod waiting;
pub mod worker;

use quintlet_model::quantity;
