//! quintctl is the command line tool for the operator of a node.
//!
//! Each command is a module. Its `run` calls the services and prints; its `render` formats the response and
//! does no I/O. [`up`] supervises the services.

mod bundle;
mod claims;
mod cli;
mod client;
mod config;
mod cpus;
mod devices;
mod error;
mod events;
mod explain;
mod health;
mod image;
mod list_pods;
mod log_level;
mod logs;
mod out;
mod parse;
mod pods;
mod pressure;
mod process;
mod profile;
mod protos;
mod retry;
mod run_as;
mod screen;
mod streaming;
mod top;
mod trace;
pub mod up;
mod version;
mod view;
mod volumes;
mod watch;

pub use crate::error::{EXIT_UNAVAILABLE, EXIT_USAGE};
pub use crate::parse::up_options;
pub use crate::process::main;
