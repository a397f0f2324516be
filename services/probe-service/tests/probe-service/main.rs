//! Tests of probe-service over its socket.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, missing_docs)]

mod process;
mod service;
