//! The devices of a node agent with a plugin on a real socket.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod agent;
mod calls;
mod registration;
mod restarts;
