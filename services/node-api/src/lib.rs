//! The node's HTTPS API, for the API server, kubectl and scrapers of metrics.
//!
//! node-api is a process without root and without access to the runtime's socket, so that the only network listener is separate from
//! the owner of the runtime. It is a client of cri-proxy (socket `node-api`), of pod-sync (read-only) and of `debug.v1` of all
//! services. Its only state are caches.
//!
//! A request passes [`server`], [`routes`] and [`auth`], and ends in a page. [`auth::authz`] has the table of permissions, [`limits`]
//! the limits of each client, [`connection`] the life cycle of a connection.
//!
//! Tasks: one per listener, per connection and per upgraded connection, and `reload` for files that have changed.

#![allow(missing_docs, reason = "comments are written where the signature does not suffice")]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod answer;
pub mod args;
mod audit;
pub mod auth;
pub mod checkpoint;
pub mod connection;
pub mod container_logs;
pub mod counters;
pub mod digest;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod health;
pub mod host;
pub mod limits;
pub mod log_query;
pub mod long_target;
pub mod metrics;
mod negotiate;
pub mod pod_lookup;
pub mod pods;
mod process;
mod relay;
mod reload;
pub mod remote_command;
pub mod routes;
mod run;
mod run_output;
pub mod runtime_stats;
pub mod server;
pub mod services;
pub mod shared_page;
pub mod state;
pub mod stats;
pub mod streaming;
pub mod system_logs;
pub mod tls;
pub mod uri;
pub mod websocket;
pub mod zpages;

pub use args::NodeApiArgs;
pub use process::main;
pub use run::{NodeApi, StartError};
