//! Connections to the runtime. They are opened on demand, at most every 100 ms. Errors say whether a request
//! was sent.
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use quintlet_kit::gathered::Gathered;
use quintlet_kit::socket::CONNECT_INTERVAL;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::reply::{Body, boxed};

/// A local socket accepts connections at once, unless its backlog is full.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// HTTP/2 window of a stream: data of the runtime that may be unread.
const STREAM_WINDOW: u32 = 4 << 20;
/// HTTP/2 window of the connection. Slow readers do not block others: the four concurrent lists fill a
/// quarter of it.
const CONNECTION_WINDOW: u32 = 64 << 20;

/// There is no connection to the runtime.
#[derive(Debug, Clone, thiserror::Error)]
#[error("no runtime at {}: {why}", path.display())]
pub struct NotConnected {
    path: Arc<Path>,
    why: String,
}

/// The reason why a request has no response.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The runtime did not receive the request.
    #[error(transparent)]
    NotSent(#[from] NotConnected),
    /// The request was sent, maybe partly, and the connection or stream ended.
    #[error("the runtime's reply was interrupted")]
    Interrupted(#[source] hyper::Error),
}

/// A connection to the runtime, reopened when it ends. Clones share it.
#[derive(Clone)]
pub struct Upstream {
    path: Arc<Path>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    sender: Option<SendRequest<Body>>,
    connections_made: u64,
    failed: Option<(Instant, String)>,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Upstream {
    /// Creates a connection to the socket at `path`. It is opened by the first request.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path: path.into(), state: Arc::default() }
    }

    /// Returns the path of the runtime's socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns another connection to the same runtime, for a stream that must not block other calls.
    #[must_use]
    pub fn new_connection(&self) -> Self {
        Self { path: self.path.clone(), state: Arc::default() }
    }

    /// Sends a request. Returns the head of the response. A request that the connection did not send is sent
    /// again on a new one.
    ///
    /// # Errors
    /// The error says whether the runtime may have received the request.
    pub async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, SendError> {
        let mut request = request;
        let mut again = true;
        loop {
            let mut sender = self.sender().await?;
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                Err(mut failed) => match failed.take_message() {
                    Some(unsent) if again => {
                        again = false;
                        self.state.lock().await.sender = None;
                        request = unsent;
                    }
                    Some(_) => return Err(self.not_connected("the connection closes at once").into()),
                    None => {
                        let error = failed.into_error();
                        if is_unprocessed(&error) {
                            return Err(self.not_connected("the runtime refuses the stream").into());
                        }
                        return Err(SendError::Interrupted(error));
                    }
                },
            }
        }
    }

    /// Connects if there is no connection.
    ///
    /// # Errors
    /// Fails without an attempt within 100 ms of the last failure.
    pub async fn ensure(&self) -> Result<(), NotConnected> {
        self.sender().await.map(drop)
    }

    /// Connects if there is no connection. Returns the number of the connection, counted from 1. A call sent
    /// after this uses this connection or a later one.
    ///
    /// # Errors
    /// Fails as [`Self::ensure`].
    pub async fn connection_number(&self) -> Result<u64, NotConnected> {
        self.sender().await?;
        Ok(self.state.lock().await.connections_made)
    }

    /// Returns whether a connection is open. Does not connect, and does not call the runtime.
    pub async fn is_connected(&self) -> bool {
        self.state.lock().await.sender.as_ref().is_some_and(|s| !s.is_closed())
    }

    fn not_connected(&self, why: &str) -> NotConnected {
        NotConnected { path: self.path.clone(), why: why.to_owned() }
    }

    async fn sender(&self) -> Result<SendRequest<Body>, NotConnected> {
        let mut state = self.state.lock().await;
        if let Some(sender) = state.sender.as_ref().filter(|s| !s.is_closed()) {
            return Ok(sender.clone());
        }
        state.sender = None;
        if let Some((at, why)) = &state.failed
            && at.elapsed() < CONNECT_INTERVAL
        {
            return Err(self.not_connected(why));
        }
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.connect()).await;
        let result = connecting.unwrap_or_else(|_| Err("connecting took longer than 1 s".to_owned()));
        match result {
            Ok(sender) => {
                state.failed = None;
                state.connections_made = state.connections_made.saturating_add(1);
                state.sender = Some(sender.clone());
                Ok(sender)
            }
            Err(why) => {
                let error = self.not_connected(&why);
                state.failed = Some((Instant::now(), why));
                Err(error)
            }
        }
    }

    async fn connect(&self) -> Result<SendRequest<Body>, String> {
        let stream = UnixStream::connect(&*self.path).await.map_err(|e| e.to_string())?;
        let server = stream.peer_cred().map_err(|e| e.to_string())?.uid();
        if !is_trusted(server, nix::unistd::geteuid().as_raw()) {
            return Err(format!("the socket is served by uid {server} and not by root: not trusted"));
        }
        // No HTTP/2 pings: a unix socket reports at once that its peer has ended, Go's gRPC servers close
        // connections with frequent pings, and calls to a runtime that hangs must fail by their deadline, not
        // by their connection.
        let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(quintlet_kit::socket::MAX_TRAILERS)
            .handshake(TokioIo::new(Gathered::new(stream)))
            .await
            .map_err(|e| e.to_string())?;
        drop(quintlet_kit::task::spawn_contained("runtime-connection", None, async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to the runtime failed");
            }
        }));
        Ok(sender)
    }
}

/// Returns whether a user may serve the runtime's socket. The runtime gets the environment of every
/// container, and decides what is removed from the node.
fn is_trusted(server: u32, own: u32) -> bool {
    server == 0 || server == own
}

/// Returns whether HTTP/2 guarantees that the server did not process the request.
fn is_unprocessed(error: &hyper::Error) -> bool {
    std::error::Error::source(error)
        .and_then(|s| s.downcast_ref::<h2::Error>())
        .is_some_and(|e| e.reason() == Some(h2::Reason::REFUSED_STREAM))
}

/// For generated clients.
impl tower::Service<Request<tonic::body::Body>> for Upstream {
    type Response = Response<Body>;
    type Error = SendError;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let upstream = self.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let path = head.uri.path_and_query().map_or("/", |p| p.as_str());
            let headers = crate::reply::forwardable_headers(&head.headers);
            let response = upstream.send(crate::reply::request(path, headers, boxed(body))).await?;
            Ok(response.map(boxed))
        })
    }
}
