//! In-place resize (`pkg/kubelet/allocation`): what a pod has been allocated, whether a resize fits now, and
//! in which order it is actuated.
//!
//! There are three sets of resources. *Desired* resources are in the source's spec. *Allocated* resources
//! were granted by the node; a pod worker sees only these. *Actuated* resources were last sent to the
//! runtime. [`feasibility`] decides whether desired resources are allocated, [`plan`] (called by
//! [`super::actions`]) plans how allocated resources are actuated, and [`conditions`] reports both.
//! [`checkpoint`] is the format in which allocated and actuated resources are saved.
//!
//! Differences to the kubelet:
//! - An unreadable checkpoint is moved aside and never fatal (ARCHITECTURE.md, invariant 6). The allocation
//!   then comes from the pod's record or from the status in the API server ([`allocation::of_status`]), so no
//!   running pod is rejected or restarted.
//! - A container without an actuated record is compared with what the runtime reports, and is up to date if
//!   the runtime reports nothing. The kubelet would update or restart it.
//! - Pods that are preempted for a critical pod's resize are terminated first; until then the resize is
//!   Deferred. The kubelet kills them during admission.
//! - A CPU quota of "none" is the largest quota, so a first limit counts as a decrease.
//! - Removed pods leave the checkpoints at once, since a static pod may return with the same UID.
//! - The pod's cgroup grows before, not after, a restart of sidecars by the resize.

pub mod allocation;
pub mod checkpoint;
pub mod conditions;
pub mod feasibility;
pub mod message;
pub mod plan;
pub mod volumes;
