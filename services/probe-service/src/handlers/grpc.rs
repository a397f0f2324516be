//! `grpc.health.v1` without TLS. Every answer but SERVING, and every error, is a failure.

use std::io;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use quintlet_kit::clock::deadline_after;
use tokio::time::{Instant, timeout_at};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::attempt::{Attempt, USER_AGENT, go_status};
use super::dial::{self, Purpose};

use quintlet_model::go_duration;

pub(super) async fn probe(host: &str, port: u16, service: &str, timeout: Duration) -> Attempt {
    let deadline = deadline_after(Instant::now(), timeout);
    let address = dial::join_host_port(host, port);
    let within = go_duration::format(timeout);
    let late = || Attempt::Failure(format!("timeout: health rpc did not complete within {within}"));
    let channel = match timeout_at(deadline, connect(host, port, &address)).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(error)) => {
            let status = tonic::Status::unavailable(format!("connection error: desc = {error:?}"));
            return Attempt::Failure(format!("error: health rpc probe failed: {}", go_status(&status)));
        }
        Err(_) => return late(),
    };
    let request = HealthCheckRequest { service: service.to_owned() };
    let mut client = HealthClient::new(channel);
    let reply = match timeout_at(deadline, client.check(request)).await {
        Ok(reply) => reply,
        Err(_) => return late(),
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
            Code::DeadlineExceeded => return late(),
            _ => format!("error: health rpc probe failed: {}", go_status(&status)),
        }),
    }
}

/// Connects once. An address that refuses the connection fails the probe at once, as in kubelet 1.38, with the description of grpc-go.
async fn connect(host: &str, port: u16, address: &str) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .and_then(|e| e.user_agent(USER_AGENT))
        .map_err(|e| quintlet_kit::error_chain(&e))?;
    let dialed = dial::dial(host, port, Purpose::Request).await;
    let (connection, _) = dialed.map_err(|error| format!("transport: Error while dialing: {error}"))?;
    let mut connection = Some(connection);
    let connector = tower::service_fn(move |_: http::Uri| {
        // The channel asks again if the connection breaks. The probe has failed then.
        let connection = connection.take().ok_or(io::ErrorKind::NotConnected);
        async move { Ok::<_, io::Error>(TokioIo::new(connection?)) }
    });
    let connected = endpoint.connect_with_connector(connector).await;
    connected.map_err(|e| format!("transport: {}", quintlet_kit::error_chain(&e)))
}
