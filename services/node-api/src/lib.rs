//! The node's HTTPS API: what the API server, kubectl and metrics scrapers ask a node for.
//!
//! A process of its own without root and without the runtime's socket, so that the one network
//! listener, TLS and upgrades never share a process with the runtime's owner. It is a client of cri-proxy's `node-api`
//! socket, of pod-sync's read side, and of the others' `debug.v1`; it keeps no state but caches.
//!
//! A request goes [`server`] → [`routes`] → [`auth`] → a page. [`auth::authz`] has the table of rights, [`limits`] what
//! anybody may take, [`life`] how long a connection lives.
//!
//! Tasks: one per listener, connection and upgraded connection; `reload`, which reads files again that have changed.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod answer;
pub mod args;
mod audit;
pub mod auth;
pub mod cgroups;
pub mod checkpoint;
pub mod container_logs;
pub mod counters;
pub mod digest;
pub mod files;
#[doc(hidden)]
pub mod fuzzing;
pub mod health;
pub mod host;
pub mod life;
pub mod limits;
pub mod log_query;
pub mod measured;
pub mod metrics;
mod negotiate;
pub mod node;
pub mod pods;
mod process;
mod relay;
mod reload;
pub mod remote_command;
pub mod routes;
mod run;
pub mod select;
pub mod server;
pub mod state;
pub mod stats;
pub mod streaming;
pub mod tls;
pub mod uri;
pub mod websocket;
pub mod zpages;

pub use args::NodeApiArgs;
pub use process::main;
pub use run::{NodeApi, StartError};
