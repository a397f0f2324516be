//! The targets. Each module has the inputs, the check, and the same check of a version with a planted bug.

pub mod env_file;
pub mod log_query;
pub mod manifest;
pub mod probe_url;
pub mod pull_secret;
pub mod resolv_conf;
pub mod spdy;
pub mod websocket;

use crate::bytes::TargetInputs;
use crate::fuzz::Check;

/// The inputs and checks of one parser.
#[derive(Debug)]
pub struct Target {
    /// Name of the target and of its corpus.
    pub name: &'static str,
    /// Builds the inputs of the target, which may take seconds.
    pub inputs: fn() -> TargetInputs,
    /// The check of the product.
    pub check: Check,
    /// The same check with a planted bug, which the run must find.
    pub planted: Check,
}
