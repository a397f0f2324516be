//! The four handlers and what comes of one attempt. Texts are those of the kubelet: tools match on them.

mod dial;
mod exec;
mod grpc;
mod http;
mod url;

/// What `tests/fuzz` calls of the private parts.
#[doc(hidden)]
pub mod fuzzing {
    use super::url::Url;

    /// A URL, taken apart.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Parts {
        /// All of it.
        pub text: String,
        /// Https.
        pub tls: bool,
        /// The host that is dialed.
        pub host: String,
        /// The port that is dialed.
        pub port: u16,
        /// What stands in the request line.
        pub target: String,
    }

    fn parts(url: &Url) -> Parts {
        let Url { tls, host, port, target, .. } = url.clone();
        Parts { text: url.to_string(), tls, host, port, target }
    }

    /// The URL of a probe.
    #[must_use]
    pub fn of_probe(tls: bool, host: &str, port: u16, path: &str) -> Parts {
        parts(&Url::of_probe(tls, host, port, path))
    }

    /// Where `location` leads from the URL of a probe.
    ///
    /// # Errors
    /// It leads nowhere.
    pub fn redirected(tls: bool, host: &str, port: u16, path: &str, location: &str) -> Result<Parts, String> {
        Url::of_probe(tls, host, port, path).join(location).map(|url| parts(&url))
    }
}

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tonic::transport::Channel;

use crate::target::{Handler, Probe};

/// User agent of HTTP and gRPC probes.
pub const USER_AGENT: &str = "kube-probe/1.36";

/// Longest output kept of an HTTP body or a command, in bytes.
pub const MAX_OUTPUT: usize = 10 * 1024;

/// What came of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attempt {
    /// It passed; the output.
    Success(String),
    /// It passed, and somebody should know; the output.
    Warning(String),
    /// It failed; why.
    Failure(String),
    /// It could not be done, which says nothing of the container.
    Broken(Broken),
}

/// Why an attempt could not be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The result the kubelet names beside the error: `unknown` or `failure`.
    pub state: &'static str,
    /// What went wrong.
    pub error: String,
    /// Whether it is worth an event: not when a service of ours or the runtime is away, which is no news of the pod.
    pub event: bool,
}

impl Attempt {
    /// An error that says nothing of the container and is worth an event.
    pub(crate) fn unknown(error: impl Into<String>) -> Self {
        Self::Broken(Broken { state: "unknown", error: error.into(), event: true })
    }
}

/// What makes attempts.
pub trait Attempts: Send + Sync + 'static {
    /// One attempt at `probe` on the container `container_id` of a pod at `pod_ip`.
    fn attempt(&self, probe: Arc<Probe>, container_id: String, pod_ip: String)
    -> BoxFuture<'static, Attempt>;
}

/// Attempts over the network, and through cri-proxy for commands.
#[derive(Debug, Clone)]
pub struct RealAttempts {
    exec: Channel,
}

impl RealAttempts {
    /// Commands go through the probe socket of cri-proxy at `socket`, which need not be there yet.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self { exec: quintlet_kit::socket::channel(socket.to_owned()) }
    }
}

impl Attempts for RealAttempts {
    fn attempt(
        &self,
        probe: Arc<Probe>,
        container_id: String,
        pod_ip: String,
    ) -> BoxFuture<'static, Attempt> {
        let exec = self.exec.clone();
        Box::pin(async move {
            let timeout = probe.timeout;
            let host = probe.handler.host(&pod_ip).unwrap_or_default();
            match &probe.handler {
                Handler::Http(get) => match port(get.port) {
                    Ok(port) => http::probe(get, host, port, timeout).await,
                    Err(broken) => broken,
                },
                Handler::Tcp { port: number, .. } => match port(*number) {
                    Ok(port) => tcp(host, port, timeout).await,
                    Err(broken) => broken,
                },
                Handler::Grpc { port: number, service } => match port(*number) {
                    Ok(port) => grpc::probe(host, port, service, timeout).await,
                    Err(broken) => broken,
                },
                Handler::Exec { command, grant } => {
                    exec::probe(exec, container_id, command.clone(), grant.clone(), timeout).await
                }
                Handler::Broken(why) => Attempt::unknown(why.clone()),
                Handler::Missing => Attempt::unknown("missing probe handler"),
            }
        })
    }
}

fn port(number: u32) -> Result<u16, Attempt> {
    match u16::try_from(number) {
        Ok(port) if port > 0 => Ok(port),
        Ok(_) | Err(_) => Err(Attempt::unknown(format!("invalid port number: {number}"))),
    }
}

async fn tcp(host: &str, port: u16, timeout: Duration) -> Attempt {
    match tokio::time::timeout(timeout, dial::dial(host, port)).await {
        Ok(Ok(_closed_on_drop)) => Attempt::Success(String::new()),
        Ok(Err(error)) => Attempt::Failure(error),
        Err(_) => Attempt::Failure(format!("dial tcp {}: i/o timeout", dial::join_host_port(host, port))),
    }
}

/// Whole seconds as Go writes a duration: `1s`, `1m30s`, `2h0m0s`.
fn go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        (_, _) => format!("{hours}h{minutes}m{rest}s"),
    }
}

/// A gRPC status as Go prints it.
fn go_status(status: &tonic::Status) -> String {
    format!("rpc error: code = {:?} desc = {}", status.code(), status.message())
}

#[cfg(test)]
mod tests;
