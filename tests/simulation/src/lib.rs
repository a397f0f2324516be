//! The five services' libraries in one process, on temporary sockets, between a fake runtime and a test API server.
//!
//! [`Sim`] starts them, each on a thread with an executor of its own, so that [`Sim::kill`] ends one as SIGKILL would: no
//! task of it takes another step. A [`watch`] looks at the runtime after every change of it, and
//! [`Sim::finish`] fails the test when what must never be was seen. [`pods`] has the manifests, [`seen`] reads pods.
//!
//! Needs root: pod-sync makes cgroups.

pub mod cuts;
mod leftovers;
pub mod pods;
pub mod seen;
pub mod service;
pub mod sim;
pub mod watch;

pub use seen::Seen;
pub use service::Service;
pub use sim::{Options, Sim};
