//! What pod-sync decides: plain functions of a snapshot.
//!
//! Nothing here is async, does I/O or reads a clock: wall time is a [`jiff::Timestamp`] argument, boottime a
//! [`std::time::Duration`] since boot. A worker's pass is
//!
//! 1. [`status::generate`] from spec, last status, inspection, probe results and waiting reasons;
//! 2. a terminal phase ends it; else [`actions::compute_actions`] with `restart_all` from that status;
//! 3. the driver acts: kills ([`grace`]), sandbox, init, ephemeral and regular containers, each start asked of
//!    [`backoff`];
//! 4. [`waiting::explain`] says in words what was decided and what the pod waits for.
//!
//! Termination: [`grace::effective`] for the pod, [`grace::termination_plan`] for its containers, `generate` with
//! `is_terminal`, [`status::terminate`] last. Sources go through [`merge::SourceStore`], then [`admission::admit`].

pub mod actions;
pub mod admission;
pub mod backoff;
pub mod conditions;
pub mod container_status;
pub mod grace;
pub mod merge;
pub mod phase;
pub mod probes;
pub mod qos;
pub mod quantity;
pub mod restart;
pub mod status;
#[cfg(test)]
pub(crate) mod testing;
pub mod waiting;
