//! The node's HTTPS API, for the API server, kubectl and scrapers of metrics.
//!
//! node-api is a process without root and without access to the runtime's socket, so that the only network
//! listener is separate from the owner of the runtime. It is a client of cri-proxy (socket `node-api`), of
//! pod-sync (read-only) and of `debug.v1` of all services. Its only state are caches.
//!
//! A request passes `server`, `routes` and [`node_api_access`], and ends in a page. `connection` has
//! the life cycle of a connection. Statistics are the crate [`node_api_statistics`], streams the crate
//! [`node_api_streams`].
//!
//! Tasks: one per listener, per connection and per upgraded connection, and `reload` for files that have
//! changed. `subscribers` is the port that passes streams of `quintlet.subscribe.v1` on over TCP.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod allocated_pods;
mod args;
mod audit;
mod checkpoint;
mod connection;
mod container_logs;
pub mod counters;
mod debug_flags;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod health;
mod log_query;
mod long_target;
mod metrics;
mod negotiate;
pub mod pods;
mod process;
mod profiling;
mod routes;
mod run;
mod server;
mod shared_page;
mod state;
mod subscribers;
mod system_logs;
mod trace;
mod zpages;

pub use args::NodeApiArgs;
pub use process::main;
pub use run::{NodeApi, StartError};
