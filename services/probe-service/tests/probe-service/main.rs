//! Tests of probe-service over its socket.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod process;
mod service;
