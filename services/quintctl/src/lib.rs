//! quintctl is the command line tool for the operator of a node.
//!
//! Each command is a module. Its `run` calls the services and prints; its `render` formats the response and
//! does no I/O. [`up`] supervises the services.

#![allow(missing_docs, reason = "other crates call only `main`, `up_options` and `up::run`")]

pub mod bundle;
pub mod claims;
pub mod cli;
pub mod client;
pub mod config;
pub mod cpus;
pub mod devices;
pub mod error;
pub mod events;
pub mod explain;
pub mod health;
pub mod image;
pub mod list_pods;
pub mod log_level;
pub mod logs;
pub mod out;
mod parse;
pub mod pods;
pub mod pressure;
mod process;
pub mod profile;
mod protos;
pub mod retry;
mod run_as;
pub mod screen;
pub mod streaming;
pub mod top;
pub mod trace;
pub mod up;
pub mod version;
pub(crate) mod view;
pub mod volumes;
pub mod watch;

pub use crate::parse::up_options;
pub use crate::process::main;
