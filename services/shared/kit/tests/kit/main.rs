//! Tests of servers and lists on real sockets.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod fifty_subscribers;
mod lists;
mod profile;
mod server;
mod streams;
mod subscribe;
