//! cri-proxy: the only process that opens the runtime's socket.
//!
//! [`serve`] accepts calls on one socket per kind of caller. [`policy`] decides whether a caller may make a
//! call, and how the call is forwarded. [`forward`] then passes it through `fence` (owner epoch and
//! deadline), `inflight` (identical calls join), `completed_execs` and `lanes` (concurrency limits) to
//! the runtime ([`upstream`]), and adds the call's outcome to the trailers.
//!
//! - [`lists`] converts list responses to streams and back.
//! - `event_reader` reads the runtime's events; [`hints`] distributes them.
//! - `logs` reads log files of containers for node-api.
//! - `orphaned_tasks` kills tasks that keep containerd from removing a container.
//! - [`budget`] bounds the bytes that calls hold.
//!
//! [`adaptive`], `fence`, [`lists`], `outcome`, [`policy`] and `request_info` decide and do no I/O.
//!
//! Tasks: `listen` per socket, `connection` per connection of a caller, `mutation` per mutating call (it
//! outlives the caller's connection), `list` per streamed list, `runtime-connection` per connection to the
//! runtime, `runtime-events`, `health`, `log-reader` per log that is read.
//!
//! Stopping: health reports NOT_SERVING, no connection is accepted, unary calls in flight have 5 s to
//! complete, then all connections are closed.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod adaptive;
mod args;
pub mod budget;
mod completed_execs;
mod event_reader;
mod fence;
pub mod forward;
pub mod hints;
mod inflight;
mod lanes;
pub mod lists;
mod logs;
pub mod metrics;
mod orphaned_tasks;
mod outcome;
pub mod policy;
mod process;
pub mod reply;
mod request_info;
mod runtime_info;
pub mod serve;
mod services;
pub mod upstream;

pub use crate::process::main;
