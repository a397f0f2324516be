//! A node for tests: the five services as built, a private containerd, and optionally an API server in
//! memory.
//!
//! - `node` — starts all processes, kills and stops services, removes everything and checks for leftovers;
//! - `restarts` — restarts of services with other settings, and reboots of the node;
//! - [`claims`] — claims of volumes of the tests' own CSI driver;
//! - `cluster` — an administrator's client of an API server;
//! - [`cost`] — CPU, memory, wake-ups and requests of an agent's processes;
//! - [`follow`] — programs that follow logs;
//! - [`service`] — a supervised process, restarted 200 ms after it exits, as by `quintctl up`;
//! - `seen` — a pod as shown by pod-sync or the API server;
//! - `recorder` — records all states around a fault, and checks what must not change;
//! - [`registry`] — an image registry that can delay layers;
//! - [`runtime`] — the runtime's sandboxes and containers, through cri-proxy;
//! - [`monitoring`] — expressions of the chart's dashboard and alerts;
//! - [`otlp`] — a receiver of traces;
//! - [`pods`] — manifests;
//! - [`ports`] — free ports;
//! - [`sockets`] — open connections of processes;
//! - `terminal` — a program in a terminal with simulated input;
//! - `wait` — predicates with a deadline;
//! - [`work`] — bursts of pods and their deletion.
//!
//! Tests need root, containerd, runc, CNI plugins, busybox and the built binaries (`make build` or
//! `make test`). Without them they fail; they are never skipped. A failed test leaves the services' logs in
//! `<target>/e2e/<test>` and prints their last lines.

pub mod bins;
pub mod claims;
mod cluster;
pub mod cost;
pub mod follow;
mod local_images;
pub mod mixin;
pub mod monitoring;
mod node;
pub mod otlp;
pub mod pods;
pub mod ports;
mod recorder;
pub mod registry;
mod restarts;
pub mod runtime;
mod seen;
pub mod service;
pub mod sockets;
mod terminal;
mod wait;
pub mod work;

pub use node::{Machine, NODE, NODE_API_UID, Node, Options, Runtime, arguments, page, unmount_all};
pub use seen::Seen;
pub use terminal::Terminal;
pub use wait::{LONG, until};
