//! Test doubles, and waiting for conditions.
//!
//! [`budget`] has the number of cases of properties; [`certificates`] makes those of clients and servers;
//! [`fake_runtime`] is a container runtime in memory behind a real CRI socket; [`http_server`] is an HTTP
//! server; [`logind`] is a bus with a fake logind; [`logs`] captures log lines; [`pod_panics`] injects panics
//! into the work of one pod; [`pods`] builds pods and runtime states for tables; [`wait`] waits for a
//! predicate with a deadline. Only tests use this crate.

pub mod budget;
mod bus;
pub mod certificates;
pub mod command_line;
pub mod fake_runtime;
pub mod fields;
pub mod http_server;
pub mod logind;
pub mod logs;
pub mod pod_panics;
pub mod pods;
pub mod systemd;
pub mod wait;

/// Starts a task of a test double. These have no names: a test names its own scene.
#[expect(clippy::disallowed_methods, reason = "kit's named tasks are for services")]
pub(crate) fn spawn<F>(future: F) -> tokio::task::JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(future)
}
