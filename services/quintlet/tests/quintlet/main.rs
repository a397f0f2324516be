//! Tests of the built binary.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod commit;
mod kubelet;
mod names;
mod processes;
