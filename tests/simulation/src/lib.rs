//! Runs the five services as libraries in one process, on temporary sockets, between a fake runtime and a
//! test API server.
//!
//! [`Sim`] starts each service on a thread with its own runtime, so that [`Sim::kill`] ends it like SIGKILL:
//! none of its tasks is polled again. A [`watch`] checks invariants after every change of the runtime, and
//! [`Sim::finish`] fails the test if one was violated, or if a service sent a request to the API server that
//! docs/helm.md does not have. [`rules`] checks more for tests that use it. [`pods`] has the manifests,
//! `seen` reads pods.
//!
//! Needs root: pod-sync creates cgroups.

pub mod cuts;
pub mod death;
mod leftovers;
mod permissions;
pub mod pods;
pub mod rules;
mod seen;
mod service;
mod sim;
pub mod watch;

pub use seen::{EventSeen, Seen};
pub use service::{NODE, Service};
pub use sim::{LONG, Options, Sim};
