//! Compares a simulated node with recordings of a kubelet.
#![allow(clippy::large_futures, clippy::panic, clippy::unwrap_used)]

mod differences;
mod history_differences;
mod same_calls;
mod same_histories;
