//! Tests of the built binaries on a real containerd. Each node has a containerd of its own, and several tests
//! run at a time: those that need the machine for themselves are in [`alone`].
#![allow(clippy::disallowed_methods, clippy::large_futures, clippy::print_stdout, clippy::unwrap_used)]

mod alerts;
mod alone;
mod api;
mod change_of_agents;
mod claims;
mod clock;
mod compose;
mod config;
mod cpus;
mod devices;
mod dual_stack;
mod eviction;
mod exits;
mod explain;
mod faults;
mod features;
mod foreign_edits;
mod frames;
mod housekeeping;
mod images;
mod kill;
mod local_volumes;
mod logs;
mod lost_task;
mod manifests;
mod node_api;
mod node_api_direct;
mod node_api_metrics;
mod node_api_pages;
mod node_api_terminal;
mod operator;
mod pressure;
mod probe_instances;
mod races;
mod reboot;
mod refusals;
mod resize;
mod shutdown;
mod skew;
mod sockets;
mod start_stop;
mod subscribers;
mod url;
mod volumes;
