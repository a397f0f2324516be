//! The claims of a node agent with a driver on a real socket.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod agent;
mod calls;
mod health;
mod metrics;
mod registration;
mod restarts;
