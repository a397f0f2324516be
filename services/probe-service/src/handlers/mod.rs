//! The four handlers. Texts are those of the kubelet, since tools match on them.

mod dial;
mod exec;
mod grpc;
mod http;
mod url;

/// Private functions for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    use super::url::{LocationError, Url};

    /// The parts of a URL.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Parts {
        /// The whole URL.
        pub text: String,
        pub tls: bool,
        pub host: String,
        pub port: u16,
        /// The target in the request line.
        pub target: String,
    }

    fn parts(url: &Url) -> Parts {
        let Url { tls, host, port, target, .. } = url.clone();
        Parts { text: url.to_string(), tls, host, port, target }
    }

    #[must_use]
    pub fn of_probe(tls: bool, host: &str, port: u16, path: &str) -> Parts {
        parts(&Url::of_probe(tls, host, port, path))
    }

    /// Resolves the header `Location` against the URL of a probe.
    ///
    /// # Errors
    /// The header is invalid.
    pub fn redirected(
        tls: bool,
        host: &str,
        port: u16,
        path: &str,
        location: &str,
    ) -> Result<Parts, LocationError> {
        Url::of_probe(tls, host, port, path).join(location).map(|url| parts(&url))
    }
}

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tonic::transport::Channel;

use self::dial::Purpose;
pub use self::url::LocationError;
use crate::target::{Handler, Probe};

/// User agent of HTTP and gRPC probes.
pub const USER_AGENT: &str = "kube-probe/1.36";

/// Longest output of an HTTP body or a command that is kept, in bytes.
pub const MAX_OUTPUT: usize = 10 * 1024;

/// The outcome of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attempt {
    /// The output of an attempt that passed.
    Success(String),
    /// The output of an attempt that passed and is reported as an event.
    Warning(String),
    /// The output or the error of an attempt that failed.
    Failure(String),
    /// The attempt could not be made: the result is unknown.
    Broken(Broken),
}

/// The error of an attempt that could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The result that the kubelet reports with the error: `unknown` or `failure`.
    pub state: &'static str,
    pub error: String,
    /// Whether to record an event of the pod. False if a service or the runtime is unavailable, which is no fault of the pod.
    pub event: bool,
}

impl Attempt {
    /// Returns an unknown outcome that is recorded as an event.
    pub(crate) fn unknown(error: impl Into<String>) -> Self {
        Self::Broken(Broken { state: "unknown", error: error.into(), event: true })
    }
}

/// Executes attempts of probes. Tests replace it.
pub trait Attempts: Send + Sync + 'static {
    /// Makes one attempt of `probe` on a container of a pod with the address `pod_ip`.
    fn attempt(&self, probe: Arc<Probe>, container_id: String, pod_ip: String)
    -> BoxFuture<'static, Attempt>;
}

/// Makes attempts over the network, and through cri-proxy for commands.
#[derive(Debug, Clone)]
pub struct RealAttempts {
    /// Shared, since a clone of a channel allocates, and only commands need one.
    exec: Arc<Channel>,
}

impl RealAttempts {
    /// `socket` is cri-proxy's probe socket, which need not exist yet.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self { exec: Arc::new(quintlet_kit::socket::channel(socket.to_owned())) }
    }
}

impl Attempts for RealAttempts {
    fn attempt(
        &self,
        probe: Arc<Probe>,
        container_id: String,
        pod_ip: String,
    ) -> BoxFuture<'static, Attempt> {
        let exec = Arc::clone(&self.exec);
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
                    Ok(port) => Box::pin(grpc::probe(host, port, service, timeout)).await,
                    Err(broken) => broken,
                },
                Handler::Exec { command, grant } => {
                    let (command, grant) = (command.clone(), grant.clone());
                    Box::pin(exec::probe((*exec).clone(), container_id, command, grant, timeout)).await
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
    match tokio::time::timeout(timeout, dial::dial(host, port, Purpose::Handshake)).await {
        Ok(Ok(_connected)) => Attempt::Success(String::new()),
        Ok(Err(error)) => Attempt::Failure(error),
        Err(_) => Attempt::Failure(format!("dial tcp {}: i/o timeout", dial::join_host_port(host, port))),
    }
}

/// Formats a gRPC status as Go does.
fn go_status(status: &tonic::Status) -> String {
    format!("rpc error: code = {:?} desc = {}", status.code(), status.message())
}

#[cfg(test)]
mod tests;
