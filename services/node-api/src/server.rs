//! The listeners: accept TCP connections, terminate TLS, pass requests to [`crate::routes`], including
//! upgrades.
//!
//! Tasks: one per listener, per connection, per HTTP/2 request and per upgraded connection.
//!
//! Stopping: no connection is accepted, idle connections are closed, requests in flight and upgraded
//! connections have the grace period, then all are closed.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use node_api_access::limits::{Client, ConnectionLimiter, Limits};
use quintlet_kit::notify::Heartbeat;
use quintlet_kit::task;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::connection::{ConnectionDecision, ConnectionState, ResponseBody, Streams, WriteTimeout};
use crate::counters::Counters;
use crate::long_target::{LongTarget, Rest};

/// How long requests in flight may continue after the stop.
pub(crate) const GRACE: Duration = Duration::from_secs(3);
/// Idle time after which TCP keepalive probes begin.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Interval between TCP keepalive probes.
const KEEPALIVE_PROBES: Duration = Duration::from_secs(10);

/// Interval between heartbeats of an idle listener.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Age of the heartbeat at which a listener is considered stuck.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(60);

/// The client of a connection. Every request has it as an extension.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// Address of the client, for audit and limits.
    pub address: SocketAddr,
    /// The client's certificate chain; empty without TLS or a certificate.
    pub chain: Arc<[CertificateDer<'static>]>,
    /// ConnectionState cycle and slot of the connection.
    pub life: Arc<ConnectionState>,
}

/// Handles requests.
pub(crate) trait Handler: Clone + Send + Sync + 'static {
    /// Returns the client of a certificate chain that is valid.
    fn certified(&self, chain: &[CertificateDer<'static>]) -> Option<Client>;

    /// Returns the response to a request, errors included.
    fn handle(&self, request: Request<Incoming>) -> impl Future<Output = Response<Body>> + Send;
}

/// A bound socket with its handler and limits.
#[derive(Clone)]
pub(crate) struct Listener<H> {
    /// Handles the requests of each connection.
    pub handler: H,
    /// TLS; `None` for plain HTTP.
    pub tls: Option<TlsAcceptor>,
    /// Limits of the time and size of requests.
    pub limits: Limits,
    /// Limits the open connections of each client.
    pub gate: ConnectionLimiter,
    /// Metrics of connections.
    pub counters: Counters,
    /// Beats while connections are accepted.
    pub heartbeat: Heartbeat,
    /// Tasks of connections.
    pub tasks: TaskTracker,
    /// Cancelled when no more connections are accepted.
    pub stop: CancellationToken,
    /// Cancelled when open connections are closed.
    pub abort: CancellationToken,
}

impl<H: Handler> Listener<H> {
    /// Accepts connections until `stop` is cancelled.
    pub(crate) async fn run(self, listener: TcpListener) {
        loop {
            self.heartbeat.beat();
            // A dropped `accept` loses nothing: the connection stays in the backlog.
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(HEARTBEAT_INTERVAL) => continue,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Most likely the process is out of file descriptors. Other connections will free some.
                    tracing::warn!(%error, "failed to accept connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Some(pass) = self.gate.enter(address.ip(), &self.limits) else {
                self.counters.refused_connection();
                tracing::debug!(%address, "connection refused, too many are open");
                continue;
            };
            let work = self.clone().converse(stream, address, ConnectionState::new(pass, self.limits));
            drop(task::spawn_contained("node-api-connection", None, self.tasks.track_future(Box::pin(work))));
        }
    }

    async fn converse(self, stream: TcpStream, address: SocketAddr, life: ConnectionState) {
        // The connection works without these options.
        let _ = stream.set_nodelay(true);
        let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_PROBES);
        let _ = socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        let life = Arc::new(life);
        let stream = WriteTimeout::new(stream, life.clone());
        let Some(tls) = self.tls.clone() else {
            return self.serve(stream, Peer { address, chain: Arc::new([]), life }).await;
        };
        // Dropping the handshake closes the connection, which is what a displaced client gets.
        let shaken = tokio::select! {
            shaken = tokio::time::timeout(self.limits.handshake, tls.accept(stream)) => shaken,
            () = life.displaced() => return self.counters.displaced_connection(life.pool()),
        };
        match shaken {
            Ok(Ok(stream)) => {
                let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
                let chain: Arc<[_]> = shown.iter().map(|c| c.clone().into_owned()).collect();
                if let Some(client) = self.handler.certified(&chain) {
                    life.identify(&client);
                }
                self.serve(stream, Peer { address, chain, life }).await;
            }
            Ok(Err(error)) => {
                self.counters.failed_handshake();
                tracing::debug!(%address, %error, "TLS handshake failed");
            }
            Err(_) => {
                self.counters.failed_handshake();
                tracing::debug!(%address, "TLS handshake timed out");
            }
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, peer: Peer) {
        let Self { handler, limits, stop, abort, counters, .. } = self;
        let (address, life) = (peer.address, peer.life.clone());
        let rest = Rest::default();
        let stream = LongTarget::new(stream, rest.clone());
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            let handler = handler.clone();
            let in_flight = peer.life.request();
            request.extensions_mut().insert(peer.clone());
            let is_complete = rest.complete(&mut request);
            async move {
                let answer = if is_complete {
                    handler.handle(request).await
                } else {
                    node_api_base::answer::text(
                        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                        "request target is too long",
                    )
                };
                Ok::<_, Infallible>(answer.map(|body| ResponseBody::new(body, in_flight)))
            }
        });
        let mut builder = auto::Builder::new(Streams(life.clone()));
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header)
            .max_buf_size(limits.header_bytes)
            .half_close(false);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(limits.header_bytes).unwrap_or(u32::MAX))
            .max_concurrent_streams(limits.streams)
            .keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(limits.header);
        let mut connection =
            std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        let mut ends = false;
        loop {
            let (is_last, next) = match life.decision() {
                ConnectionDecision::Keep(next) => (stop.is_cancelled(), next),
                ConnectionDecision::Drain(next) => (true, next),
                ConnectionDecision::Close => return tracing::debug!(%address, "connection closed"),
            };
            if is_last && !ends {
                // Sends the answers that are complete. They would follow a GOAWAY otherwise, at which some
                // clients fail their requests.
                if let Poll::Ready(served) = futures::poll!(connection.as_mut()) {
                    return ended(address, served);
                }
                connection.as_mut().graceful_shutdown();
                ends = true;
            }
            // The connection is polled again; dropping the other arms loses nothing.
            tokio::select! {
                served = connection.as_mut() => return ended(address, served),
                () = abort.cancelled() => return,
                () = stop.cancelled(), if !ends => {}
                () = life.displaced() => return counters.displaced_connection(life.pool()),
                () = life.changed() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }
}

fn ended(address: SocketAddr, served: Result<(), impl std::fmt::Display>) {
    if let Err(error) = served {
        tracing::debug!(%address, %error, "connection failed");
    }
}

#[cfg(test)]
mod tests {
    use quintlet_kit::clock::Clock;

    use super::*;

    #[derive(Clone)]
    struct Nothing;

    impl Handler for Nothing {
        fn certified(&self, _: &[CertificateDer<'static>]) -> Option<Client> {
            None
        }

        async fn handle(&self, _: Request<Incoming>) -> Response<Body> {
            node_api_base::answer::text(StatusCode::OK, "")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_listener_has_a_heartbeat_and_a_stuck_one_has_none() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1000));
        let heartbeat = Heartbeat::new(clock.clone());
        let listener = Listener {
            handler: Nothing,
            tls: None,
            limits: Limits::default(),
            gate: ConnectionLimiter::default(),
            counters: Counters::default(),
            heartbeat: heartbeat.clone(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
        };
        let bound = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let accepting = task::spawn("listen", listener.run(bound));
        for _ in 0..3 {
            clock.advance(STUCK_AFTER.saturating_mul(2));
            tokio::time::sleep(HEARTBEAT_INTERVAL.saturating_mul(2)).await;
            assert_eq!(heartbeat.age(), Duration::ZERO);
        }
        accepting.abort();
        clock.advance(STUCK_AFTER.saturating_mul(2));
        tokio::time::sleep(HEARTBEAT_INTERVAL.saturating_mul(2)).await;
        assert!(heartbeat.age() > STUCK_AFTER);
    }
}
