//! Pods with extreme values in every field.
#![allow(clippy::disallowed_methods, clippy::large_futures, clippy::print_stdout, clippy::unwrap_used)]

mod churn;
mod decoding;
mod node;
mod repeated;
mod simulation;
