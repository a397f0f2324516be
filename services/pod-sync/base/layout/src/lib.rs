//! What every part of pod-sync agrees on: paths on disk, settings of the node, and the interfaces of sources.
//!
//! | module | what it has |
//! |---|---|
//! | [`paths`] | where a pod's files are, as the kubelet has them |
//! | `settings`, `node_ips`, `runtime_state` | settings of the node, its addresses, and the last state of the container runtime |
//! | `extended_resources` | the devices of this node in numbers |
//! | `objects` | the interface to ConfigMaps, Secrets and other objects that pods refer to, and its errors |
//! | `token` | the interface to service account tokens, and their cache |
//! | `sources` | where desired pods come from |
//!
//! There is no task and no I/O here.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod extended_resources;
mod node_ips;
mod objects;
pub mod paths;
mod runtime_state;
mod settings;
mod sources;
mod token;

pub use crate::extended_resources::{ExtendedResources, ResourceCount};
pub use crate::node_ips::NodeIps;
pub use crate::objects::{ObjectError, ObjectKind, ObjectSource};
pub use crate::runtime_state::{HandlerFeatures, RuntimeState};
pub use crate::settings::{MemoryQos, NodeSettings};
pub use crate::sources::{ManifestProblem, SourceKind};
pub use crate::token::{NoValidToken, Token, TokenCache, TokenError, TokenKey, TokenSource};
