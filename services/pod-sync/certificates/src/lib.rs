//! Trust anchors and certificates of projected volumes.
//!
//! [`ClusterTrustBundles`] has the ClusterTrustBundles of the cluster (`pkg/kubelet/clustertrustbundle`). The first read of a
//! pod starts its watch, by one task named `trust-bundle-watch`. A node without such a pod sends no request.
//!
//! Nothing is stored on disk.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![allow(missing_docs, reason = "only pod-sync and tests build on this crate")]

mod pem_blocks;
mod trust_bundles;

pub use trust_bundles::ClusterTrustBundles;
