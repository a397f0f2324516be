//! status-reporter: the one writer of API objects.
//!
//! pod-sync says what each pod's status should be; this service merges it with what the API server has and writes it
//! ([`reporter`], one PATCH per change and no read on the ordinary path). It registers the Node and keeps its status
//! ([`node::keeper`]), renews the lease ([`lease`]), writes events ([`events::recorder`]) and mirror pods ([`mirror`]).
//!
//! What decides is plain functions: [`status`], [`node::setters`], [`events::correlate`], [`lease::next`].
//! Tasks: `status-write` (at most 64), `status-retry`, `node`, `lease`, `events`, `kubeconfig`, one `peer-health` per
//! service, one `report-stream` per caller. All memory can be rebuilt from pod-sync and the API server.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod api;
pub mod args;
pub mod clients;
pub mod convert;
pub mod events;
pub mod gate;
pub mod lease;
pub mod metrics;
pub mod mirror;
pub mod node;
mod process;
pub mod rate;
pub mod reporter;
pub mod run;
pub mod service;
pub mod status;
pub mod update;
pub mod write;

pub use crate::process::main;
