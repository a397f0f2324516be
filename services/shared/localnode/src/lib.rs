//! A private containerd, and images made on this machine.
//!
//! What `quintctl up --private-containerd`, `make run` and the tests stand on: a containerd with a root, state, socket,
//! pod network and cgroup root of its own, which several can run side by side, and which leaves nothing behind. The
//! host's containerd is never used or touched.
//!
//! - [`containerd`]: start, restart, kill, pause and take down one instance;
//! - [`oci`] and [`images`]: image archives made without a registry;
//! - [`import`](mod@import): an archive into any containerd, over any channel;
//! - [`config`], [`cni`]: the files containerd reads, rendered by pure functions;
//! - [`cleanup`]: finds and removes what an instance has on the machine, alive or dead.
//!
//! Life cycle: [`Containerd::start`] takes an index (a lock file, see [`index`]), which names bridge, subnet and cgroup
//! root; [`Containerd::down`] gives all of it back, `net.ipv4.ip_forward` included. An instance whose owner died is removed by the next start of any
//! instance, unless it was started to be kept.

#![allow(missing_docs, reason = "only quintctl and tests use the crate")]

pub mod cleanup;
pub mod cni;
pub mod config;
pub mod containerd;
pub mod cri;
pub mod host;
pub mod images;
pub mod import;
pub mod index;
pub mod oci;

mod error;
mod forwarding;
mod record;

pub use containerd::{Containerd, Options};
pub use error::Error;
