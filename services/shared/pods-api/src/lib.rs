//! The kubelet's Pods API (KEP-4188): its contract, and the protobuf form of a Pod that its messages carry.
//!
//! The types of the API server are JSON only, so [`encode`] writes their protobuf form by a table of fields.
//! No I/O.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod encoding;
mod table;

pub use encoding::{Unencodable, encode};

/// The contract, `k8s.io/kubelet/pkg/apis/pods/v1alpha1`.
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod v1alpha1 {
    tonic::include_proto!("v1alpha1");
}
