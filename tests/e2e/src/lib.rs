//! A node for tests: the five services as built, a private containerd, and an API server in memory where one is wanted.
//!
//! - [`node`] — starts everything, kills and stops services, takes it down and looks for what is left;
//! - [`anew`] — services started with other settings, and the node after a reboot;
//! - [`cluster`] — an API server of either kind, as an administrator sees it;
//! - [`service`] — one supervised process, started again 200 ms after it ended, as `quintctl up` does;
//! - [`seen`] — a pod as pod-sync or the API server shows it;
//! - [`recorder`] — every state from before a fault until after it, and what must not have changed;
//! - [`registry`] — an image registry that can hold layers back;
//! - [`runtime`] — sandboxes and containers as the runtime has them, through cri-proxy;
//! - [`otlp`] — a receiver of traces;
//! - [`pods`] — manifests;
//! - [`sockets`] — connections that processes have open;
//! - [`terminal`] — a program in a terminal, with somebody who types;
//! - [`wait`] — predicates with a deadline.
//!
//! Tests need root, containerd, runc, CNI plugins, busybox and the built binaries (`make build` or `make test`); they fail without,
//! and are never skipped. A test that failed leaves the services' logs in `<target>/e2e/<test>` and prints their ends.

pub mod anew;
pub mod bins;
pub mod cluster;
pub mod node;
pub mod otlp;
pub mod pods;
pub mod recorder;
pub mod registry;
pub mod runtime;
pub mod seen;
pub mod service;
pub mod sockets;
pub mod terminal;
pub mod wait;

pub use node::{Node, Options};
pub use seen::Seen;
pub use terminal::Terminal;
pub use wait::until;
