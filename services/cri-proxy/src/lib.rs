//! cri-proxy: the only process that opens the runtime's socket.
//!
//! A call comes in at a [`serve`] socket for its kind of caller; [`policy`] says whether it may and how; [`forward`] takes
//! it through [`fence`], [`inflight`], [`ended`] and [`lanes`] to the runtime ([`upstream`]) and puts its outcome behind the answer.
//! [`lists`] makes streams of lists and lists of streams. [`repair`] ends what keeps a container from being removed. [`source`] is the one reader of the runtime's events,
//! [`hints`] fans them out. [`logs`] reads containers' log files for the node API. [`budget`] bounds the bytes that calls hold. [`adaptive`], [`facts`], [`fence`],
//! [`lists`], [`outcome`] and [`policy`] decide and do no I/O.
//!
//! Tasks: `listen` per socket, `connection` per caller, `mutation` per mutating call (it outlives its caller),
//! `runtime-connection` per connection to the runtime, `runtime-events`, `health`, `log-reader` per log being read. Stopping: health says NOT_SERVING,
//! nobody new is let in, unary calls in flight get 5 s, then every connection ends.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod adaptive;
pub mod args;
pub mod budget;
pub mod ended;
pub mod facts;
pub mod fence;
pub mod forward;
pub mod hints;
pub mod inflight;
pub mod lanes;
pub mod lists;
pub mod logs;
pub mod metrics;
pub mod outcome;
pub mod policy;
mod process;
pub mod repair;
pub mod reply;
pub mod serve;
pub mod services;
pub mod source;
pub mod upstream;

pub use crate::process::main;
