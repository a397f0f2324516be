//! The NUMA nodes of a container or a pod, agreed between the resources that it requests
//! (`pkg/kubelet/cm/topologymanager`): plain functions.
//!
//! Each resource has hints: sets of NUMA nodes that can satisfy the request. [`TopologyPolicy::merge`]
//! intersects a hint of each resource and returns the best intersection, and whether the pod is admitted with
//! it.

// A value of a pod or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod container;
mod hint;
mod merge;
mod options;
mod policy;

pub use crate::container::{ContainerKind, PodLevel, RequestScope};
pub use crate::hint::{Hint, Hints};
pub use crate::options::{TopologyOptionError, TopologyOptions};
pub use crate::policy::{
    Merged, PolicyName, TopologyAffinityError, TopologyPolicy, TopologyScope, UnsupportedMachine,
};
