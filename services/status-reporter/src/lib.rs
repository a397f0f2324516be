//! status-reporter writes the API objects of a node. It is their only writer.
//!
//! pod-sync reports the status of each pod. This service merges it with the object in the API server and
//! writes it ([`reporter`], one PATCH per change and no read on the ordinary path). It registers the Node and
//! keeps its status ([`node::keeper`]) and its CSINode ([`node::csi_node`]), renews the lease ([`lease`]),
//! writes events ([`events::recorder`]) and mirror pods (`mirror`).
//!
//! Decisions are pure functions: [`status`], [`node::setters`], [`node::csi_node::next_step`],
//! [`events::correlate`], [`lease::next`]. Tasks: `status-write` (at most 64), `status-retry`, `node`,
//! `csi-node`, `lease`, `events`, `kubeconfig`, one `peer-health` per service, one `report-stream` and one
//! `node-volumes-stream` per caller. All state can be rebuilt from pod-sync and the API server.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod api;
mod args;
pub mod clients;
mod convert;
pub mod events;
mod gate;
pub mod lease;
pub mod metrics;
mod mirror;
pub mod node;
mod process;
pub mod reporter;
pub mod run;
mod service;
pub mod status;
pub mod update;
mod write;

pub use crate::process::main;
