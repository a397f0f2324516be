//! CPUs, memory and NUMA nodes of the pods of a node: the kubelet's CPU, memory and topology manager as one
//! (`pkg/kubelet/cm: containerManagerImpl`).
//!
//! [`Placement`] is the handle. The worker of a pod calls [`Placement::admit`] before the sandbox,
//! [`Placement::container`] for the configuration of a container, and [`Placement::release`] after its
//! containers have ended. The one task is [`Placement::reconcile`], which gives running containers the CPUs
//! that they share now.
//!
//! [`NodePlacement`] has the assignments, and decides: it is a plain function of them, of the requests of a
//! pod and of the hints of its devices. `start` makes it from the configuration, the machine and the
//! kubelet's state files.

// A value of a pod or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod admission;
mod args;
mod counts;
mod files;
mod manager;
mod metrics;
mod reconcile;
mod start;
#[cfg(test)]
mod tests;

pub use crate::admission::{NodePlacement, PlacementError, PodRequests};
pub use crate::args::{CpuPolicyName, MemoryPolicyName, PlacementArgs, PlacementSettings, ReservedAmounts};
pub use crate::counts::AdmissionCounts;
pub use crate::files::StartError;
pub use crate::manager::{AdmissionFailure, Placement, PlacementContext};
pub use crate::reconcile::ReconcileContext;
