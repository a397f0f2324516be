//! Recorded CRI requests and histories of a kubelet for given pods, and their comparison with those of
//! Quintlet.
//!
//! A recording is made by hand (`src/bin/record.rs`, see README.md): a real kubelet and a real API server,
//! with the fake runtime in place of containerd. A fixture has the pod as that API server returned it, the
//! objects that it refers to, and the facts: the requests as JSON (`wire`, `schema`), without values that
//! differ between runs ([`facts`]). A [`history`] is recorded in the same way: a scenario, and the statuses,
//! events and driver calls. A [`node`] is what a kubelet leaves behind.

pub mod cluster;
pub mod compare;
pub mod facts;
pub mod fixture;
pub mod history;
pub mod kubelet;
pub mod node;
pub mod registrar;
pub mod runtime;
mod schema;
pub mod settled;
pub mod waiting;
mod wire;
