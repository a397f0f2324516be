//! The CRI requests that a kubelet makes for given pods, recorded, and what is needed to compare ours to them.
//!
//! A recording is made by hand (`src/bin/record.rs`, see README.md): a real kubelet and a real API server, with the fake runtime
//! in the place of containerd. A fixture has the pod as that API server gave it, the objects that it refers to, and the facts:
//! the requests as JSON ([`wire`], [`schema`]), without what differs from run to run ([`facts`]).

pub mod compare;
pub mod facts;
pub mod fixture;
pub mod kubelet;
pub mod runtime;
pub mod schema;
pub mod settled;
pub mod wire;
