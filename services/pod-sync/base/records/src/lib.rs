//! Files that a restarted pod-sync reads.
//!
//! | type | files |
//! |---|---|
//! | [`Owner`] | lock and epoch of the root directory; one pod-sync owns it at a time |
//! | [`StateDir`] | one [`PodRecord`] per pod below `<run>/state`, written before the action that it describes |
//! | [`Allocations`] | the kubelet's checkpoints of allocated and actuated resources, and their journals in `<run>/state` |
//! | [`StateFile`], [`StateWriter`] | the kubelet's checkpoints of devices, claims, CPUs and memory |
//! | [`UserNamespaces`] | the range of host ids of each pod with a user namespace, in the pod's directory |
//!
//! A file that is damaged affects only its own pod, and its content is observed or computed again. There are
//! no tasks and no channels; calls read and write files.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod allocations;
mod journal;
mod owner;
mod records;
mod resize_metrics;
mod state_file;
mod user_namespaces;

pub use crate::allocations::Allocations;
pub use crate::owner::{Owner, OwnerError};
pub use crate::records::{PodRecord, RecordJson, StateDir, StateError, Termination};
pub use crate::resize_metrics::DeferralEnd;
pub use crate::state_file::{StateFile, StateOrigin, StateWriter};
pub use crate::user_namespaces::{ID_UNIT, IdPool, IdPoolError, UserNamespaceError, UserNamespaces};
