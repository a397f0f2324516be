//! Exclusive CPUs of containers (`pkg/kubelet/cm/cpumanager`): plain functions.
//!
//! With the policy `static`, a container of a Guaranteed pod whose CPU request is a whole number gets CPUs
//! that no other container may use. All other containers share the rest. [`CpuManager`] has the assignments:
//! [`CpuManager::hints`] returns the NUMA nodes that can satisfy a request, [`CpuManager::allocate`] takes
//! the CPUs, [`CpuManager::updates`] compares what containers have with what they should have. [`checkpoint`]
//! is the kubelet's state file. [`StaticPolicy`] selects CPUs exactly as the kubelet does, so that either
//! continues with the file of the other.

// A value of a pod or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod accumulator;
mod assignments;
pub mod checkpoint;
mod distribute;
mod error;
mod hints;
mod manager;
mod options;
mod policy;
mod requests;
mod take;
#[cfg(test)]
mod test_machines;

pub use crate::assignments::CpuAssignments;
pub use crate::error::{AllocateError, EmptyPodPool, InvalidCpuState, PolicyError};
pub use crate::manager::{ContainerCpus, CpuManager, CpuUpdate, RunningContainer};
pub use crate::options::{CpuGates, CpuOptionError, CpuOptions};
pub use crate::policy::{ReservedCpus, StaticPolicy};
pub use crate::requests::{CpuRequest, PodCpuRequests, requests};
