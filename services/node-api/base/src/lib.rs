//! What the pages of node-api have in common: answers in the form of Go's HTTP server, decoding of paths and
//! queries, clients of the other services, and the containers that a request names.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod answer;
pub mod pod_lookup;
pub mod services;
pub mod uri;
