//! Registration of node plugins: CSI drivers, device plugins, DRA drivers.
//!
//! [`PluginManager`] is one task. It compares the sockets below the registration directory with the
//! registered plugins, and deregisters before it registers ([`plan()`] decides). It reads the directory after
//! each change and every `manager::RESCAN`. Each registration and deregistration runs in a task of its own,
//! at most one per socket; a failed one is retried with a back-off. A [`PluginHandler`] per plugin type does
//! what the type needs. Stopping the manager deregisters nothing: plugins stay usable while the agent
//! restarts.
//!
//! [`call`] has the gRPC channel, deadline and error type that callers of plugins share.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod call;
mod handler;
mod manager;
mod plan;
mod register;
mod scan;

pub use handler::{HandlerError, Plugin, PluginHandler};
pub use manager::{PluginManager, PluginState};
pub use plan::plan;
