//! In-place resize (`pkg/kubelet/allocation`): what a pod was given, whether it gets what it asks for now, and in which order the
//! change is made.
//!
//! Three sets of resources: *desired* is the source's spec; *allocated* is what the node granted, and all a worker sees;
//! *actuated* is what was last handed to the runtime. [`feasibility`] moves desired to allocated, [`plan`] (asked by
//! [`super::actions`]) moves allocated to actuated, [`conditions`] tells of both. [`checkpoint`] is how the two that must
//! survive lie on disk.
//!
//! Where this differs from the kubelet, and why:
//! - A checkpoint that cannot be read is put aside, never fatal (ARCHITECTURE.md, invariant 6): what was allocated is then taken from the
//!   record of the pod or from the status the API server has ([`allocation::of_status`]), so that no running pod is refused
//!   or restarted for it.
//! - A container without an actuated record is compared with what the runtime reports, and is taken as up to date where that
//!   reports nothing; the kubelet would update or restart it.
//! - Other pods a critical pod's resize may displace are ended first; until they are gone the resize is Deferred. The kubelet
//!   kills them within admission.
//! - A CPU quota of "none" is the largest there is, so that a first limit counts as a decrease.
//! - Removed pods leave the checkpoints at once: a static pod may come back under its UID.
//! - The pod's group grows before sidecars that the resize restarts, not after.

pub mod allocation;
pub mod checkpoint;
pub mod conditions;
pub mod feasibility;
pub mod message;
pub mod plan;
