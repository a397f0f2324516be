//! Why a pod is not admitted.

/// Reason and message of the event and status of a pod that is not admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// For example `OutOfcpu`.
    pub reason: String,
    /// Message without the prefix `Pod was rejected: `, which the status adds.
    pub message: String,
}
