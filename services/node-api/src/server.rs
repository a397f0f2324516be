//! The listeners: TCP and TLS in, requests out to [`crate::routes`], upgrades included.
//!
//! Tasks: one per listener, one per connection, one per request of HTTP/2, one per upgraded connection. Stopping: nobody new is let in, idle
//! connections end, requests in flight and upgraded connections get the grace, then everything is cut.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use quintlet_kit::notify::Heartbeat;
use quintlet_kit::task;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::counters::Counters;
use crate::life::{Answering, Impatient, Life, Streams, Verdict};
use crate::limits::{Gate, Limits};

/// How long requests in flight may go on after the stop.
pub const GRACE: Duration = Duration::from_secs(3);
/// A peer that has vanished is noticed after about so long.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Interval between TCP keepalive probes of a connection that does not answer.
const KEEPALIVE_PROBES: Duration = Duration::from_secs(10);

/// Time between two heartbeats of a listener without clients.
const BEAT_EVERY: Duration = Duration::from_secs(5);
/// A listener without a heartbeat for this long is stuck.
pub const STUCK: Duration = Duration::from_secs(60);

/// Who is at the other end; in the extensions of every request.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Where from.
    pub address: SocketAddr,
    /// What the client showed; empty without TLS or certificate.
    pub chain: Arc<[CertificateDer<'static>]>,
    /// The connection's life and place, for whoever judges its requests or goes on with it after an upgrade.
    pub life: Arc<Life>,
}

/// What answers requests.
pub trait Handler: Clone + Send + Sync + 'static {
    /// Answers one.
    fn handle(&self, request: Request<Incoming>) -> impl Future<Output = Response<Body>> + Send;
}

/// One listener.
#[derive(Clone)]
pub struct Listener<H> {
    /// What answers.
    pub handler: H,
    /// With TLS, or without.
    pub tls: Option<TlsAcceptor>,
    /// What is allowed.
    pub limits: Limits,
    /// Connections.
    pub gate: Gate,
    /// What is counted.
    pub counters: Counters,
    /// Tells that connections are accepted.
    pub heartbeat: Heartbeat,
    /// Tasks of connections.
    pub tasks: TaskTracker,
    /// Nobody new is let in.
    pub stop: CancellationToken,
    /// What goes on is cut.
    pub cut: CancellationToken,
}

impl<H: Handler> Listener<H> {
    /// Accepts until stopped.
    pub async fn run(self, listener: TcpListener) {
        loop {
            self.heartbeat.beat();
            // Dropping accept loses nothing: the connection stays in the backlog.
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(BEAT_EVERY) => continue,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely; others give some back.
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Some(pass) = self.gate.enter(address.ip(), &self.limits) else {
                self.counters.refused_connection();
                tracing::debug!(%address, "connection refused: too many are open");
                continue;
            };
            let work = self.clone().converse(stream, address, Life::new(pass, self.limits));
            drop(task::spawn_contained("node-api-connection", None, self.tasks.track_future(Box::pin(work))));
        }
    }

    async fn converse(self, stream: TcpStream, address: SocketAddr, life: Life) {
        // Without these a connection still works.
        let _ = stream.set_nodelay(true);
        let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_PROBES);
        let _ = socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        let life = Arc::new(life);
        let stream = Impatient::new(stream, life.clone());
        let Some(tls) = self.tls.clone() else {
            return self.serve(stream, Peer { address, chain: Arc::new([]), life }).await;
        };
        let shaken = tokio::select! {
            shaken = tokio::time::timeout(self.limits.handshake, tls.accept(stream)) => shaken,
            () = life.displaced() => return self.counters.displaced_connection(),
        };
        match shaken {
            Ok(Ok(stream)) => {
                let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
                let chain = shown.iter().map(|c| c.clone().into_owned()).collect();
                self.serve(stream, Peer { address, chain, life }).await;
            }
            Ok(Err(error)) => {
                self.counters.failed_handshake();
                tracing::debug!(%address, %error, "TLS handshake failed");
            }
            Err(_) => {
                self.counters.failed_handshake();
                tracing::debug!(%address, "TLS handshake took too long");
            }
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, peer: Peer) {
        let Self { handler, limits, stop, cut, counters, .. } = self;
        let (address, life) = (peer.address, peer.life.clone());
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            let handler = handler.clone();
            let in_flight = peer.life.request();
            request.extensions_mut().insert(peer.clone());
            async move {
                let answer = handler.handle(request).await;
                Ok::<_, Infallible>(answer.map(|body| Answering::new(body, in_flight)))
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
            let (is_last, next) = match life.verdict() {
                Verdict::Goes(next) => (stop.is_cancelled(), next),
                Verdict::Ends(next) => (true, next),
                Verdict::Over => return tracing::debug!(%address, "hung up"),
            };
            if is_last && !ends {
                connection.as_mut().graceful_shutdown();
                ends = true;
            }
            // The connection is polled on; dropping the others loses nothing.
            tokio::select! {
                served = connection.as_mut() => {
                    if let Err(error) = served {
                        tracing::debug!(%address, %error, "a connection failed");
                    }
                    return;
                }
                () = cut.cancelled() => return,
                () = stop.cancelled(), if !ends => {}
                () = life.displaced() => return counters.displaced_connection(),
                () = life.changed() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use quintlet_kit::clock::Clock;

    use super::*;

    #[derive(Clone)]
    struct Nothing;

    impl Handler for Nothing {
        async fn handle(&self, _: Request<Incoming>) -> Response<Body> {
            crate::answer::text(StatusCode::OK, "")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_listener_without_clients_has_a_heartbeat_and_one_that_is_stuck_has_none() {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1000));
        let heartbeat = Heartbeat::new(clock.clone());
        let listener = Listener {
            handler: Nothing,
            tls: None,
            limits: Limits::default(),
            gate: Gate::default(),
            counters: Counters::default(),
            heartbeat: heartbeat.clone(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            cut: CancellationToken::new(),
        };
        let bound = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let accepting = task::spawn("listen", listener.run(bound));
        for _ in 0..3 {
            clock.advance(STUCK.saturating_mul(2));
            tokio::time::sleep(BEAT_EVERY.saturating_mul(2)).await;
            assert_eq!(heartbeat.age(), Duration::ZERO);
        }
        accepting.abort();
        clock.advance(STUCK.saturating_mul(2));
        tokio::time::sleep(BEAT_EVERY.saturating_mul(2)).await;
        assert!(heartbeat.age() > STUCK);
    }
}
