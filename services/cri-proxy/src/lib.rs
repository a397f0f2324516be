//! cri-proxy: the only process that opens the runtime's socket.
#![allow(missing_docs)]
pub mod adaptive;
pub mod args;
pub mod facts;
pub mod fence;
pub mod forward;
pub mod hints;
pub mod inflight;
pub mod lanes;
pub mod metrics;
pub mod outcome;
pub mod policy;
pub mod reply;
pub mod serve;
pub mod services;
pub mod source;
pub mod upstream;
