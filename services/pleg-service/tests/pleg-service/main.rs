//! Tests of pleg-service in this process, with a fake runtime.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, unreachable_pub)]

#[path = "../common/mod.rs"]
mod common;
mod follow;
mod interleavings;
mod pleg;
