//! The five services against faults that a real runtime does not have on demand.
#![allow(clippy::disallowed_methods, clippy::large_futures, clippy::unwrap_used, missing_docs)]

mod api;
mod edges;
mod explain;
mod failpoints;
mod failures;
mod foreign;
mod hangs;
mod lifecycle;
mod random;
mod restarts;
mod unknown;
