//! Trust anchors and certificates of projected volumes.
//!
//! [`ClusterTrustBundles`] has the ClusterTrustBundles of the cluster (`pkg/kubelet/clustertrustbundle`). The
//! first read of a pod starts its watch, by one task named `trust-bundle-watch`. A node without such a pod
//! sends no request.
//!
//! [`PodCertificates`] has the keys and certificates of sources `podCertificate`
//! (`pkg/kubelet/podcertificate`). The task `pod-certificates` owns them, and the first read of a pod starts
//! its watch of PodCertificateRequests. A task `pod-certificate` creates one request; there are at most four
//! at a time, which generate one key at a time.
//!
//! Both kinds are read in the newest version that the API server serves: `v1`, or `v1beta1` before Kubernetes
//! 1.37. A server that stops serving a version is asked again for the others.
//!
//! Nothing is stored on disk. A new process requests new certificates, and the files of pods keep the old
//! ones until then.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod pem_blocks;
mod pod_certificates;
mod served;
mod trust_bundles;

pub use pod_certificates::{PodCertificateContext, PodCertificates};
pub use trust_bundles::ClusterTrustBundles;
