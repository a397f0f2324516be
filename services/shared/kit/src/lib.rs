//! What every service is built from: arguments, paths, tasks, sockets, servers, time.
//!
//! Tasks: [`server::Server::serve`] spawns one per connection, [`task`] names them all. Nothing here knows of pods.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod args;
pub mod atomic_file;
pub mod backoff;
pub mod beneath;
pub mod boot;
pub mod build;
pub mod clock;
pub mod contain;
pub mod grant;
pub mod lists;
pub mod notify;
pub mod patience;
pub mod redirect;
pub mod seam;
pub mod server;
pub mod signals;
pub mod socket;
pub mod task;
pub mod tls;
pub mod tree;

pub use args::paths;

/// Gives back what a burst of pods took. glibc's keeps it, some 20 MiB in all after 300 pods. Its settings are in `.cargo/config.toml`.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The exit code of a process. An error goes to stderr as one line, without a backtrace: what a person has to mend is in it.
#[must_use]
pub fn exit_code<E: AsRef<dyn std::error::Error + Send + Sync>>(
    name: &str,
    done: Result<(), E>,
) -> std::process::ExitCode {
    use std::io::Write as _;
    let Err(error) = done else { return std::process::ExitCode::SUCCESS };
    let text = error_chain(error.as_ref()).replace('\n', " ");
    // Without a standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "{name}: {text}");
    std::process::ExitCode::FAILURE
}

/// The text of an error and of everything behind it, joined by `: `.
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
