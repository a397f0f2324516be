//! The operator's tool: see ARCHITECTURE.md.
//!
//! Each command is a module: `run` asks the services and prints, `render` is pure. [`up`] supervises the services.

pub mod bundle;
pub mod cli;
pub mod client;
pub mod config;
pub mod error;
pub mod events;
pub mod explain;
pub mod health;
pub mod image;
pub mod logs;
pub mod out;
pub mod pods;
mod process;
pub mod retry;
mod run_as;
pub mod screen;
pub mod streaming;
pub mod text;
pub mod top;
pub mod trace;
pub mod up;
pub mod version;
pub mod watch;

pub use crate::process::main;
