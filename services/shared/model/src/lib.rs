//! Types that all services share: ids, the state of a pod in the runtime, probe memory, call outcomes.
//!
//! This crate makes no decisions and does no I/O. Only [`convert`] converts wire types to these types.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod convert;
pub mod cpu_list;
pub mod go_duration;
pub mod hash;
pub mod ids;
pub mod kubernetes;
pub mod labels;
pub mod node_selector;
pub mod outcome;
pub mod pod;
pub mod pod_status;
pub mod probe;
pub mod qos;
pub mod quantity;
pub mod runtime;
pub mod stop_signal;
pub mod sysctl;
pub mod text;
