//! The words all services share: ids, what the runtime says of a pod, probe memory, call outcomes.
//!
//! This crate decides nothing and does no I/O. Wire types become these types in [`convert`] and nowhere else.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod convert;
pub mod hash;
pub mod ids;
pub mod labels;
pub mod outcome;
pub mod pod;
pub mod pod_status;
pub mod probe;
pub mod quantity;
pub mod runtime;
