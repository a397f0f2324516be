//! Tests of the built quintctl.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, missing_docs)]

mod commands;
mod up;
