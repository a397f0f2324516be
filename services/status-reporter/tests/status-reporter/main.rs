//! Tests of status-reporter with a test API server.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, unreachable_pub)]

mod common;
mod csi_node;
mod node;
mod node_of_others;
mod patch_properties;
mod reporter;
mod traces;
