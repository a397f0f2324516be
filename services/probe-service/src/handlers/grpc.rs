//! `grpc.health.v1`, with or without TLS (`pkg/probe/grpc`). Every answer but SERVING, and every error, is a
//! failure.

use std::io;
use std::time::Duration;

use ::http::Uri;
use ::http::uri::InvalidUri;
use hyper_util::rt::TokioIo;
use quintlet_kit::clock::deadline_after;
use quintlet_model::go_duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::client::TlsStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::attempt::{Attempt, USER_AGENT, go_status};
use super::dial::{self, Connection, DialError, Purpose};
use super::tls::{self, Protocols};

/// Largest answer, in bytes. It has one number. grpc-go reads 4 MiB, which times the probes of a node is too
/// much memory.
const MAX_ANSWER: usize = 64 << 10;

pub(super) async fn probe(host: &str, port: u16, service: &str, tls: bool, timeout: Duration) -> Attempt {
    let deadline = deadline_after(Instant::now(), timeout);
    let address = dial::join_host_port(host, port);
    let within = go_duration::format(timeout);
    let late = || Attempt::Failure(format!("timeout: health rpc did not complete within {within}"));
    let channel = match timeout_at(deadline, connect(host, port, &address, tls)).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(error)) => {
            return error.outcome(|error| {
                let status = tonic::Status::unavailable(format!("connection error: desc = {error:?}"));
                format!("error: health rpc probe failed: {}", go_status(&status))
            });
        }
        Err(_) => return late(),
    };
    let request = HealthCheckRequest { service: service.to_owned() };
    let mut client = HealthClient::new(channel).max_decoding_message_size(MAX_ANSWER);
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

/// Connects once. An address that refuses the connection fails the probe at once, as in kubelet 1.38, with
/// the description of grpc-go.
async fn connect(host: &str, port: u16, address: &str, tls: bool) -> Result<Channel, DialError> {
    let scheme = if tls { "https" } else { "http" };
    let origin: Uri =
        format!("{scheme}://{address}").parse().map_err(|error: InvalidUri| error.to_string())?;
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .and_then(|e| e.origin(origin).user_agent(USER_AGENT))
        .map_err(|e| quintlet_kit::error_chain(&e))?;
    let dialed = dial::dial(host, port, Purpose::Request).await;
    let dialing =
        |error: DialError| error.described(|text| format!("transport: Error while dialing: {text}"));
    let (connection, _) = dialed.map_err(dialing)?;
    if !tls {
        return Ok(open(&endpoint, connection).await?);
    }
    let failed = |error: String| format!("transport: authentication handshake failed: {error}");
    let connection = handshake(host, connection).await.map_err(failed)?;
    Ok(open(&endpoint, connection).await?)
}

async fn handshake(host: &str, connection: Connection) -> Result<TlsStream<Connection>, String> {
    let stream = tls::handshake(host, Protocols::Grpc, connection).await?;
    if stream.get_ref().1.alpn_protocol().is_none() {
        return Err("credentials: cannot check peer: missing selected ALPN property".to_owned());
    }
    Ok(stream)
}

async fn open<I>(endpoint: &Endpoint, connection: I) -> Result<Channel, String>
where
    I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut connection = Some(connection);
    let connector = tower::service_fn(move |_: Uri| {
        // The channel asks again if the connection breaks. The probe has failed then.
        let connection = connection.take().ok_or(io::ErrorKind::NotConnected);
        async move { Ok::<_, io::Error>(TokioIo::new(connection?)) }
    });
    let connected = endpoint.connect_with_connector(connector).await;
    connected.map_err(|e| format!("transport: {}", quintlet_kit::error_chain(&e)))
}
