//! Tests with the driver's process.
#![allow(clippy::unwrap_used)]

mod common;
mod mounts;
mod registration;
