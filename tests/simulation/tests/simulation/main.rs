//! Runs the five services against faults that cannot be provoked in a real runtime.
#![allow(clippy::disallowed_methods, clippy::large_futures, clippy::unwrap_used, missing_docs)]

mod admission;
mod api;
mod begins;
mod checkpoints;
mod claims;
mod cleaning;
mod comebacks;
mod containment;
mod cuts;
mod edges;
mod explain;
mod failures;
mod features;
mod foreign_edits;
mod hangs;
mod hooks;
mod image_access;
mod images;
mod lifecycle;
mod limits;
mod logs;
mod mirrors;
mod node;
mod objects;
mod orphans;
mod pod_fields;
mod probes;
mod random;
mod resize;
mod restarts;
mod shutdown;
mod silence;
mod sources;
mod undecodable;
mod unknown;
