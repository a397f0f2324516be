//! The contract of the kubelet's PodResources API, in the version of Kubernetes 1.37. Agents of the node ask
//! for the devices, CPUs and memory of containers through it.
//!
//! The files below `proto` have the names and field numbers of the public contracts. Servers and clients are
//! compiled: the tests use the clients.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

/// The current version (`k8s.io/kubelet/pkg/apis/podresources/v1`).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod v1 {
    tonic::include_proto!("v1");
}

/// The version of agents for Kubernetes before 1.20 (`k8s.io/kubelet/pkg/apis/podresources/v1alpha1`).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod v1alpha1 {
    tonic::include_proto!("v1alpha1");
}
