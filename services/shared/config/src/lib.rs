//! The configuration of all services: the kubelet's files and flags, and the fields of Quintlet.
//!
//! `yaml` parses text to trees whose values have a line number. `load` merges the files and checks them
//! against the [`table`] of fields and against rules between fields. [`mod@print`] prints the result. `cli`
//! makes the values of the files the defaults of a service's arguments, so that flags take precedence and
//! services only read their arguments.
//!
//! This crate only reads the files that a caller names. It has no state and no tasks.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod arguments;
pub mod checks;
mod cli;
mod config;
pub mod diagnostics;
pub mod json;
pub mod kind;
mod labels;
mod load;
pub mod node;
pub mod print;
mod rules;
mod suggest;
pub mod table;
pub mod tls;
mod unsupported_flags;
mod yaml;

pub use cli::{ConfigArgs, Exit, Loaded, pair, parse, read};
pub use config::Config;
pub use load::{Sources, verbosity_filter};
