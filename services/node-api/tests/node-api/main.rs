//! Tests of the node API in this process.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, unreachable_pub)]

mod access;
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
mod exhaustion;
mod fairness;
mod full_node;
mod long_commands;
mod panics;
mod pod_list;
mod profiling;
mod redirects;
mod settings;
mod slow_list;
mod subscribers;
mod summary;
