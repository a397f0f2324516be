//! The decisions of pod-sync about the node: pure functions of a snapshot.
//!
//! No function here is async, does I/O or reads a clock. Those about one pod are in the crate
//! `pod-sync-decisions`.
//!
//! - [`admission::admit`] admits new pods, and [`preempt::pods_to_preempt`] selects pods to preempt for
//!   critical ones.
//! - [`gc`] selects dead containers to remove. [`image_gc`] selects images to delete, [`image_access`] says
//!   which pod may use an image, and [`image_name`] parses names of images.
//! - [`shutdown`] plans the termination of all pods when the node shuts down.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod admission;
pub mod gc;
pub mod image_access;
pub mod image_gc;
pub mod image_name;
pub mod preempt;
pub mod shutdown;
