//! The ConfigMaps and Secrets that pods refer to (`pkg/kubelet/util/manager`).
//!
//! [`ObjectCache`] is the handle. Workers register their pods, read objects, and unregister their pods.
//! [`ChangeDetectionStrategy`] is the kubelet's `configMapAndSecretChangeDetectionStrategy`:
//!
//! - `Watch`: one LIST and one WATCH per referenced object, by one task named `object-watch` for each. A read
//!   returns the watched object. It waits at most one second for the first list, and fails with
//!   [`ObjectError::NotReady`](pod_sync_layout::ObjectError::NotReady) after that. A change wakes the workers
//!   of the pods that refer to the object.
//! - `Cache`: a read returns the last read object until its time to live has elapsed.
//! - `Get`: a read is a request.
//!
//! [`References`] are the objects of a pod. A registry counts the pods per object: the first pod starts the
//! watch of an object, and the last one stops it. The watch of an immutable object ends when the object is
//! read. The watch of an object that is not read for five sync periods ends until the next read;
//! [`ObjectCache::stop_idle_watches`] is the task for that.
//!
//! Channels: each watched object has a `tokio::sync::watch` with the latest version, for readers that wait
//! for the first list. Nothing is stored on disk: a new process begins with new lists.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod cache;
mod get;
mod kind;
mod references;
mod registry;
mod ttl;
mod watched;

#[cfg(test)]
mod tests;

pub use cache::{ChangeDetectionStrategy, ObjectCache, ObjectCacheSettings};
pub use references::References;
