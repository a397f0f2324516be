//! A private containerd, and images built on this machine.
//!
//! `quintctl up --private-containerd`, `make run` and the tests use it. Each instance has its own root,
//! state, socket, pod network and cgroup root, so several can run side by side, and an instance leaves no
//! traces. The host's containerd is never used.
//!
//! - `containerd`: starts, restarts, suspends, kills and removes an instance;
//! - [`oci`] and [`images`]: image archives built without a registry;
//! - [`import`](mod@import): imports an archive into any containerd, over any channel;
//! - `config`, [`cni`]: the files that containerd reads, rendered by pure functions;
//! - `cleanup`: finds and removes the traces of an instance on the machine.
//!
//! Life cycle: [`Containerd::start`] locks an index (see `index`), which determines the names of bridge,
//! subnet and cgroup root. [`Containerd::down`] releases everything, including `net.ipv4.ip_forward`. An
//! instance whose owner was killed is removed by the next start of any instance, unless it was started to be
//! kept.

mod cleanup;
pub mod cni;
mod config;
mod containerd;
pub mod cri;
pub mod host;
pub mod images;
pub mod import;
mod index;
pub mod oci;

mod error;
mod forwarding;
mod record;

pub use containerd::{Containerd, Options};
pub use error::Error;
