//! Connections to the runtime: made when needed, at most every 100 ms, and honest about what was sent.
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::reply::{Body, boxed};

/// A runtime that is away is asked for at most this often.
pub const RECONNECT_EVERY: Duration = Duration::from_millis(100);
/// A local socket connects at once or its backlog is full.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The runtime's answers may be this large per stream before they are read. Lists are read as they come.
const STREAM_WINDOW: u32 = 4 << 20;
/// And this large per connection, so that slow readers do not hold up the others: the four lists of their lane fill a quarter.
const CONNECTION_WINDOW: u32 = 64 << 20;

/// Why there is no connection.
#[derive(Debug, Clone, thiserror::Error)]
#[error("no runtime at {}: {why}", path.display())]
pub struct NotConnected {
    path: Arc<Path>,
    why: String,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The runtime never saw it.
    #[error(transparent)]
    NotSent(#[from] NotConnected),
    /// It was sent, or partly, and the connection or stream ended.
    #[error("the runtime's answer was cut")]
    Cut(#[source] hyper::Error),
}

/// One connection to the runtime, renewed when it ends. Clones share it.
#[derive(Clone)]
pub struct Upstream {
    path: Arc<Path>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    sender: Option<SendRequest<Body>>,
    /// Connections made so far.
    made: u64,
    failed: Option<(Instant, String)>,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Upstream {
    /// A connection to the socket at `path`, not made yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path: path.into(), state: Arc::default() }
    }

    /// The runtime's socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another connection to the same runtime, for one stream that must not hold up anything else.
    #[must_use]
    pub fn another(&self) -> Self {
        Self { path: self.path.clone(), state: Arc::default() }
    }

    /// Sends one request and waits for the head of the answer. What the connection gave back unsent is sent once
    /// more on a new one.
    ///
    /// # Errors
    /// [`SendError`], which says whether the runtime may have seen it.
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
                        if never_processed(&error) {
                            return Err(self.not_connected("the runtime takes no more calls").into());
                        }
                        return Err(SendError::Cut(error));
                    }
                },
            }
        }
    }

    /// Connects if there is no connection.
    ///
    /// # Errors
    /// [`NotConnected`], at once within 100 ms of the last failure.
    pub async fn ensure(&self) -> Result<(), NotConnected> {
        self.sender().await.map(drop)
    }

    /// Connects if there is no connection. Says which of this upstream's connections it is, counted from 1: a call sent after this
    /// goes by it, or by a later one.
    ///
    /// # Errors
    /// As [`Self::ensure`].
    pub async fn connection(&self) -> Result<u64, NotConnected> {
        self.sender().await?;
        Ok(self.state.lock().await.made)
    }

    /// Whether the connection stands.
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
            && at.elapsed() < RECONNECT_EVERY
        {
            return Err(self.not_connected(why));
        }
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.connect()).await;
        let result = connecting.unwrap_or_else(|_| Err("connecting took longer than 1 s".to_owned()));
        match result {
            Ok(sender) => {
                state.failed = None;
                state.made = state.made.saturating_add(1);
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
        // No HTTP/2 pings: a socket on this machine says at once when its peer ends, Go's gRPC servers hang up on
        // frequent ones, and a runtime that hangs must cost calls their deadline, not their connection.
        let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(quintlet_kit::socket::MAX_TRAILERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|e| e.to_string())?;
        drop(quintlet_kit::task::spawn_contained("runtime-connection", None, async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to the runtime ended");
            }
        }));
        Ok(sender)
    }
}

/// Whether a user may be the runtime of a proxy that runs as `own`. Whoever is gets the environment of every container, and says
/// what is removed from the node.
fn is_trusted(server: u32, own: u32) -> bool {
    server == 0 || server == own
}

/// Whether HTTP/2 itself says that the server did nothing with the request.
fn never_processed(error: &hyper::Error) -> bool {
    std::error::Error::source(error)
        .and_then(|s| s.downcast_ref::<h2::Error>())
        .is_some_and(|e| e.reason() == Some(h2::Reason::REFUSED_STREAM))
}

/// For the generated clients.
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
            let headers = crate::reply::forwardable(&head.headers);
            let response = upstream.send(crate::reply::request(path, headers, boxed(body))).await?;
            Ok(response.map(boxed))
        })
    }
}
