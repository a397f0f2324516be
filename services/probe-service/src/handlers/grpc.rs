//! `grpc.health.v1` without TLS. Every answer but SERVING, and every error, is a failure.

use std::time::Duration;

use hyper_util::rt::TokioIo;
use quintlet_kit::clock::deadline_after;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::attempt::{Attempt, USER_AGENT, go_status};
use super::dial::{self, Purpose};

use quintlet_model::go_duration;

/// Wait between attempts to connect within the timeout.
const RECONNECT: Duration = Duration::from_millis(100);

pub(super) async fn probe(host: &str, port: u16, service: &str, timeout: Duration) -> Attempt {
    let deadline = deadline_after(Instant::now(), timeout);
    let address = dial::join_host_port(host, port);
    let within = go_duration::format(timeout);
    let channel = match timeout_at(deadline, connect(host.to_owned(), port, &address)).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(error)) => {
            return Attempt::Failure(format!("error: failed to connect service at {address:?}: {error}"));
        }
        Err(_) => {
            return Attempt::Failure(format!(
                "timeout: failed to connect service {address:?} within {within}: context deadline exceeded"
            ));
        }
    };
    let request = HealthCheckRequest { service: service.to_owned() };
    let mut client = HealthClient::new(channel);
    let reply = match timeout_at(deadline, client.check(request)).await {
        Ok(reply) => reply,
        Err(_) => return Attempt::Failure(format!("timeout: health rpc did not complete within {within}")),
    };
    match reply {
        Ok(reply) => {
            let status = reply.into_inner().status;
            let name = ServingStatus::try_from(status)
                .map_or_else(|_| status.to_string(), |s| s.as_str_name().to_owned());
            if status == ServingStatus::Serving as i32 {
                Attempt::Success("service healthy".to_owned())
            } else {
                Attempt::Failure(format!("service unhealthy (responded with {name:?})"))
            }
        }
        Err(status) => Attempt::Failure(match status.code() {
            Code::Unimplemented => format!(
                "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
                status.message()
            ),
            Code::DeadlineExceeded => format!("timeout: health rpc did not complete within {within}"),
            _ => format!("error: health rpc probe failed: {}", go_status(&status)),
        }),
    }
}

/// Connects, and retries until the caller's deadline, as the kubelet's blocking dial does.
async fn connect(host: String, port: u16, address: &str) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .and_then(|e| e.user_agent(USER_AGENT))
        .map_err(|e| quintlet_kit::error_chain(&e))?;
    loop {
        let host = host.clone();
        let connector = tower::service_fn(move |_: http::Uri| {
            let host = host.clone();
            async move {
                let connected = dial::dial(&host, port, Purpose::Request).await;
                let (connection, _) = connected.map_err(std::io::Error::other)?;
                Ok::<_, std::io::Error>(TokioIo::new(connection))
            }
        });
        if let Ok(channel) = endpoint.connect_with_connector(connector).await {
            return Ok(channel);
        }
        sleep(RECONNECT).await;
    }
}
