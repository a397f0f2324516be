//! The targets. Each module has its inputs, its check, and the same check of a version with a bug planted in it.

pub mod env_file;
pub mod log_query;
pub mod manifest;
pub mod probe_url;
pub mod pull_secret;
pub mod resolv_conf;
pub mod spdy;
pub mod websocket;

use crate::bytes::Inputs;
use crate::fuzz::Check;

/// A target.
#[derive(Debug)]
pub struct Target {
    /// What it is fed with.
    pub inputs: fn() -> Inputs,
    /// What checks the product.
    pub check: Check,
    /// The same check of the product with a bug, which is to be found.
    pub planted: Check,
}
