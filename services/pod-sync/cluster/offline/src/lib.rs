//! The offline cache: what a node needs to start its pods after a reboot while the API server is away.
//!
//! It is off by default. [`OfflineCache`] keeps the pods of the API server that this node has admitted, the
//! Node, and the answers of the API server that the starts of these pods need ([`AnswerKey`]).
//!
//! - [`WithOffline`] is put around each source of objects and tokens. It passes answers to the cache, and
//!   gives the kept ones while the API server is away.
//! - [`Contact`] knows whether the API server is away. Refusals are answers.
//! - `kept` is the state in memory, plain functions without I/O. `needs` has the answers that a pod needs.
//! - `store` has one file per pod with all that the pod needs, and one of the Node, below the root directory,
//!   for root only. `format` is their form, and `seal` their encryption.
//!
//! The task [`OfflineCache::run`] writes changes one second later, and syncs them. It has no channels: a
//! notification wakes it, and it takes what is due.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod answer;
mod cache;
mod contact;
mod format;
mod kept;
mod marks;
mod metrics;
mod needs;
mod seal;
mod sources;
mod store;

pub use crate::answer::{AnswerKey, TokenId};
pub use crate::cache::{OfflineCache, OfflineSettings};
pub use crate::contact::{Contact, Reply};
pub use crate::kept::{StartDecision, decide_start};
pub use crate::marks::OfflineStart;
pub use crate::seal::{KeyError, SealingKey};
pub use crate::sources::WithOffline;
pub use crate::store::DirectoryError;
