//! Building blocks of every service: arguments, paths, tasks, sockets, servers, time.
//!
//! Tasks: [`server::Server::serve`] spawns a task per connection; [`task`] spawns all named tasks. Apart from [`contain`], which
//! attributes work to a pod, this crate does not depend on pods.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod args;
pub mod atomic_file;
pub mod backoff;
pub mod beneath;
pub mod boot;
pub mod build;
pub mod clock;
pub mod contain;
pub mod failpoint;
pub mod grant;
pub mod lists;
pub mod notify;
pub mod peer_startup;
pub mod redirect;
pub mod server;
pub mod signals;
pub mod socket;
pub mod task;
pub mod tls;
pub mod tree;

pub use args::paths;

/// Returns memory to the system after a burst of pods. glibc's allocator keeps it: about 20 MiB in all processes after 300 pods.
/// Its settings are in `.cargo/config.toml`.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Returns the exit code of a process. Writes an error to stderr as one line, without a backtrace.
#[must_use]
pub fn exit_code<E: AsRef<dyn std::error::Error + Send + Sync>>(
    name: &str,
    done: Result<(), E>,
) -> std::process::ExitCode {
    use std::io::Write as _;
    let Err(error) = done else { return std::process::ExitCode::SUCCESS };
    let text = error_chain(error.as_ref()).replace('\n', " ");
    // A closed stderr cannot be reported anywhere.
    let _ = writeln!(std::io::stderr().lock(), "{name}: {text}");
    std::process::ExitCode::FAILURE
}

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
