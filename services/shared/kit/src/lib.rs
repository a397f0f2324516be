//! Building blocks of every service: arguments, paths, tasks, sockets, servers, time.
//!
//! Tasks: [`server::Server::serve`] spawns a task per connection; [`task`] spawns all named tasks. Apart from
//! [`contain`], which attributes work to a pod, this crate does not depend on pods.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod args;
pub mod atomic_file;
pub mod backoff;
pub mod beneath;
pub mod boot;
pub mod build;
pub mod clock;
pub mod command;
pub mod contain;
pub mod control;
pub mod crypto;
pub mod failpoint;
pub mod file_system;
pub mod gathered;
pub mod grant;
pub mod journal;
pub mod lists;
pub mod local_authority;
pub mod lookup;
mod loop_device;
pub mod messages;
pub mod mount_point;
pub mod mount_table;
pub mod neighbour;
pub mod notify;
pub mod own_limits;
pub mod peer_startup;
pub mod profile;
pub mod queue;
pub mod rate;
pub mod redirect;
pub mod reflection;
pub mod server;
pub mod service;
mod signals;
pub mod slots;
pub mod socket;
pub mod stack;
pub mod stalls;
pub mod status_code;
pub mod subscribe;
pub mod task;
pub mod timers;
pub mod tls;
pub mod tree;
pub mod url_scheme;

/// Returns the texts of an error and of all its sources, joined by `: `.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut out = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        // Some libraries repeat their source in their own text.
        if !out.ends_with(&text) {
            out.push_str(": ");
            out.push_str(&text);
        }
        next = cause.source();
    }
    out
}
