//! Streams to pods: `/exec`, `/attach`, `/portForward`, and the output of `/run`.
//!
//! Tasks: one per upgraded connection, and one for its connection to the runtime.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod relay;
mod remote_command;
mod run_output;
mod streaming;
mod websocket;

pub use remote_command::Action;
pub use streaming::{StreamServer, run, stream};
