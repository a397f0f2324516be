//! Tests of the built quintctl.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod commands;
mod up;
