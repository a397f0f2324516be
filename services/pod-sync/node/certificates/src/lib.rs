//! The certificates of the node: the client certificate for the API server and, on request, the serving
//! certificate of the node API (`pkg/kubelet/certificate`, client-go `util/certificate`).
//!
//! [`decide`] has the decisions. The task `client-certificate` bootstraps and rotates the client certificate,
//! the task `serving-certificate` requests and rotates the serving certificate, and the task `kubeconfig`
//! makes a client of each new version of the kubeconfig. All requests of pod-sync go through
//! [`NodeClient::client`], which always uses the newest of these clients.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod decide;
mod follow;
mod key;
mod kubeconfig;
mod manager;
mod metrics;
mod published;
mod request;
mod store;

#[cfg(test)]
mod tests;

pub use crate::follow::NodeClient;
pub use crate::kubeconfig::{KubeconfigError, credential_of};
pub use crate::manager::{ClientCertificate, ServingCertificate};
