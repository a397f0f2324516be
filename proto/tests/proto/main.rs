//! The contracts of this version beside those of the last release (`baseline.binpb`): services of both run
//! side by side during an upgrade.
#![allow(clippy::unwrap_used, reason = "a test")]

mod contract;
mod neighbours;
mod samples;
mod subscribe;
