//! Tests with the driver's process.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
mod mounts;
mod registration;
