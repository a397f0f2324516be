//! Measurements of services for people: metrics, the use of resources, queues, and CPU profiles with the
//! names of functions.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod flame;
mod metrics;
mod stacks;
mod symbols;
mod usage;

pub use flame::svg;
pub use metrics::{Queue, queues, sums, value};
pub use stacks::{Folded, fold, lines};
pub use symbols::name_functions;
pub use usage::{cpu_seconds, memory};
