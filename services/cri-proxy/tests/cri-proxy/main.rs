//! Tests of a complete proxy with a scripted runtime.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod common;
mod configured;
mod forward;
mod hints;
mod lanes;
mod limits;
mod lists;
mod panics;
