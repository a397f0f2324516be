//! What admission of a pod results in.

use super::rejection::Rejection;
use super::resources::InsufficientResource;

/// Result of admission (`pkg/kubelet/lifecycle: PodAdmitResult`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdmitResult {
    /// The pod may start.
    Admit,
    /// The pod is rejected and becomes Failed.
    Reject(Rejection),
    /// A critical pod that fits after other pods are preempted, with the resources that are insufficient.
    Preempt(Vec<InsufficientResource>),
}

/// Returns a rejection.
pub(super) fn reject(reason: &str, message: impl Into<String>) -> AdmitResult {
    AdmitResult::Reject(Rejection { reason: reason.to_owned(), message: message.into() })
}
