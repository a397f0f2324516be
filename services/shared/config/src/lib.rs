//! The configuration of all services: the kubelet's file and flags, and what is Quintlet's own.
//!
//! Bytes become trees whose values know their line ([`yaml`]), files are merged and checked against one [`table`] of
//! fields ([`load`]), rules between fields follow ([`mod@print`] shows the result). [`cli`] gives a service's command
//! line the values of the files as its defaults, so that flags win and nothing else has to know of files.
//!
//! This crate reads files when it is told to and has no state and no tasks.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod cli;
pub mod duration;
mod foreign;
pub mod json;
pub mod kind;
pub mod labels;
pub mod load;
pub mod migration;
pub mod mistakes;
pub mod node;
pub mod print;
mod rules;
mod suggest;
pub mod table;
pub mod tls;
pub mod yaml;

pub use cli::{ConfigArgs, Loaded, pair, parse};
pub use load::{Config, Sources};
pub use table::Service;
