//! The four handlers. Texts are those of the kubelet, since tools match on them.

mod attempt;
mod dial;
mod exec;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod grpc;
mod http;
mod tls;
mod url;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tonic::transport::Channel;

pub use self::attempt::{Attempt, Broken, MAX_OUTPUT, USER_AGENT};
use self::dial::Purpose;
pub use self::url::LocationError;
use crate::target::{Handler, Probe};

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
                Handler::Grpc { port: number, service, tls } => match port(*number) {
                    Ok(port) => Box::pin(grpc::probe(host, port, service, *tls, timeout)).await,
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
        Ok(Err(error)) => error.outcome(str::to_owned),
        Err(_) => Attempt::Failure(format!("dial tcp {}: i/o timeout", dial::join_host_port(host, port))),
    }
}

#[cfg(test)]
mod tests;
