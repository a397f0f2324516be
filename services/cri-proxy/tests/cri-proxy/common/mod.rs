//! A runtime that follows a script, frame by frame, and a client that records every frame.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]
use std::collections::HashMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cri_proxy::policy::Socket;
use cri_proxy::reply::{self, Body, Frames};
use cri_proxy::serve::{Config, Proxy};
use cri_proxy::upstream::Upstream;
use futures::StreamExt as _;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

/// Behaviour of the fake runtime for a call.
#[derive(Clone)]
pub(crate) enum Act {
    /// Headers, body chunks, trailers.
    Reply(HeaderMap, Vec<Bytes>, HeaderMap),
    /// One header block.
    TrailersOnly(HeaderMap),
    /// Sends every frame back, and then trailers.
    Echo(HeaderMap),
    /// Waits for a permit, and then behaves as given.
    After(Arc<Semaphore>, Box<Act>),
    /// Never replies.
    Hang,
    /// Breaks the connection without a reply.
    Cut,
    /// Streams the messages of the channel.
    Stream(Arc<tokio::sync::Mutex<mpsc::Receiver<Bytes>>>),
}

#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

#[derive(Clone, Default)]
pub(crate) struct Script {
    acts: Arc<Mutex<HashMap<String, Vec<Act>>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Script {
    /// Sets the behaviour for calls of a path, in order. The last one is repeated.
    pub(crate) fn on(&self, path: &str, acts: impl IntoIterator<Item = Act>) {
        let mut acts: Vec<_> = acts.into_iter().collect();
        acts.reverse();
        self.acts.lock().insert(path.to_owned(), acts);
    }

    pub(crate) fn seen(&self, path: &str) -> Vec<Seen> {
        self.seen.lock().iter().filter(|s| s.path == path).cloned().collect()
    }

    fn next(&self, path: &str) -> Act {
        let mut acts = self.acts.lock();
        let found = match acts.get_mut(path) {
            Some(list) if list.len() > 1 => list.pop(),
            Some(list) => list.last().cloned(),
            None => None,
        };
        found.unwrap_or_else(|| {
            Act::TrailersOnly(headers(&[("grpc-status", "12"), ("grpc-message", "no such method")]))
        })
    }

    async fn answer(self, request: Request<Incoming>, cut: CancellationToken) -> Response<Body> {
        let path = request.uri().path().to_owned();
        let act = self.next(&path);
        let (head, body) = request.into_parts();
        let seen =
            |body| self.seen.lock().push(Seen { path: path.clone(), headers: head.headers.clone(), body });
        if let Act::Echo(trailers) = act {
            seen(Bytes::new());
            let frames =
                body.into_data_stream().map(|data| data.map(Frame::data).map_err(reply::BoxError::from));
            let end = futures::stream::once(async move { Ok(Frame::trailers(trailers)) });
            return Response::new(reply::boxed(StreamBody::new(frames.chain(end))));
        }
        seen(body.collect().await.map(|b| b.to_bytes()).unwrap_or_default());
        Self::act(act, cut).await
    }

    fn act(act: Act, cut: CancellationToken) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>> {
        Box::pin(async move {
            match act {
                Act::Reply(headers, data, trailers) => {
                    let frames = data.into_iter().map(Frame::data).chain([Frame::trailers(trailers)]);
                    let mut response = Response::new(Body::new(Frames::new(frames.collect())));
                    *response.headers_mut() = headers;
                    response
                }
                Act::TrailersOnly(headers) => {
                    let mut response = Response::new(Frames::from_data(Vec::new()));
                    *response.headers_mut() = headers;
                    response
                }
                Act::After(gate, act) => {
                    gate.acquire().await.unwrap().forget();
                    Self::act(*act, cut).await
                }
                Act::Cut => {
                    cut.cancel();
                    std::future::pending().await
                }
                Act::Hang | Act::Echo(_) => std::future::pending().await,
                Act::Stream(receiver) => {
                    let frames = futures::stream::unfold(receiver, |receiver| async move {
                        let data = receiver.lock().await.recv().await?;
                        Some((Ok::<_, reply::BoxError>(Frame::data(data)), receiver))
                    });
                    Response::new(reply::boxed(StreamBody::new(frames)))
                }
            }
        })
    }

    /// Serves at `path` until the token is cancelled, which breaks all connections.
    pub(crate) fn serve(&self, path: &std::path::Path) -> CancellationToken {
        let _ = std::fs::remove_file(path);
        let listener = tokio::net::UnixListener::bind(path).unwrap();
        let stop = CancellationToken::new();
        let (script, stopped) = (self.clone(), stop.clone());
        tokio::spawn(async move {
            while let Some(Ok((stream, _))) = stopped.run_until_cancelled(listener.accept()).await {
                let (script, cut) = (script.clone(), stopped.child_token());
                let dropped = cut.clone();
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| {
                        let answer = script.clone().answer(request, cut.clone());
                        async move { Ok::<_, Infallible>(answer.await) }
                    });
                    let connection: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(
                        hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                            .auto_date_header(false)
                            .serve_connection(TokioIo::new(stream), service),
                    );
                    dropped.run_until_cancelled(connection).await
                });
            }
        });
        stop
    }
}

pub(crate) fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(*name, value.parse().unwrap());
    }
    map
}

/// Returns a successful reply with one message.
pub(crate) fn good(message: &impl prost::Message) -> Act {
    let head = headers(&[("content-type", "application/grpc")]);
    Act::Reply(head, vec![reply::frame(message)], headers(&[("grpc-status", "0")]))
}

pub(crate) fn failing(code: u8, message: &str) -> Act {
    let head =
        [("content-type", "application/grpc"), ("grpc-status", &code.to_string()), ("grpc-message", message)];
    Act::TrailersOnly(headers(&head))
}

/// A reply, as its caller receives it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Got {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Got {
    pub(crate) fn meta(&self, name: &str) -> &str {
        let value = |map: &HeaderMap| map.get(name).map(|v| v.to_str().unwrap().to_owned());
        let found = self.trailers.as_ref().and_then(value).or_else(|| value(&self.headers));
        // Leaked for brevity: tests compare it at once.
        found.map_or("", |s| String::leak(s))
    }

    pub(crate) fn outcome(&self) -> &str {
        self.meta("quintlet-outcome")
    }

    pub(crate) fn code(&self) -> &str {
        self.meta("grpc-status")
    }
}

pub(crate) async fn got(response: Response<Incoming>) -> Got {
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned();
    Got { headers: head.headers, body: body.to_bytes(), trailers }
}

/// Splits a body of complete gRPC frames into messages.
pub(crate) fn messages(mut body: &[u8]) -> Vec<Bytes> {
    let mut out = Vec::new();
    while let Some(&[flag, a, b, c, d]) = body.first_chunk::<5>() {
        assert_eq!(flag, 0, "not compressed");
        let (message, rest) = body[5..].split_at(u32::from_be_bytes([a, b, c, d]) as usize);
        out.push(Bytes::copy_from_slice(message));
        body = rest;
    }
    assert!(body.is_empty(), "{body:?}");
    out
}

/// A proxy in front of a scripted runtime.
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) script: Script,
    pub(crate) runtime: CancellationToken,
    pub(crate) clock: Clock,
    pub(crate) metrics: cri_proxy::metrics::Metrics,
    stop: CancellationToken,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.stop.cancel();
        self.runtime.cancel();
    }
}

impl Bench {
    pub(crate) async fn start() -> Self {
        Self::with("fake", "1", 64, Clock::system()).await
    }

    pub(crate) async fn with(name: &str, version: &str, hint_capacity: usize, clock: Clock) -> Self {
        Self::changed(name, version, hint_capacity, clock, |_| {}).await
    }

    /// Starts a proxy with a changed configuration.
    pub(crate) async fn changed(
        name: &str,
        version: &str,
        hint_capacity: usize,
        clock: Clock,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = Script::default();
        let answer = v1::VersionResponse {
            runtime_name: name.into(),
            runtime_version: version.into(),
            ..Default::default()
        };
        script.on("/runtime.v1.RuntimeService/Version", [good(&answer)]);
        let runtime = script.serve(&dir.path().join("runtime.sock"));
        let sockets = Socket::ALL.map(|s| (s, Self::path_in(&dir, s)));
        let mut config = Config {
            runtime: dir.path().join("runtime.sock"),
            images: None,
            timeout: cri_proxy::policy::CRI_TIMEOUT,
            namespace: "k8s.io".into(),
            sockets: sockets.into(),
            uids: Vec::new(),
            pod_logs_dir: dir.path().join("pod-logs"),
            byte_limit: cri_proxy::budget::limit,
            connections: cri_proxy::serve::connection_limit,
            hint_capacity,
            clock: clock.clone(),
            grant_key: dir.path().join("keys/grant.key"),
        };
        change(&mut config);
        let proxy = Proxy::bind(config).unwrap();
        let metrics = proxy.metrics().clone();
        let stop = CancellationToken::new();
        tokio::spawn(proxy.serve(stop.clone()));
        Self { dir, script, runtime, clock, metrics, stop }
    }

    fn path_in(dir: &tempfile::TempDir, socket: Socket) -> PathBuf {
        dir.path().join(socket.name()).join("cri.sock")
    }

    pub(crate) fn path(&self, socket: Socket) -> PathBuf {
        Self::path_in(&self.dir, socket)
    }

    pub(crate) fn caller(&self, socket: Socket) -> Upstream {
        Upstream::new(self.path(socket))
    }

    pub(crate) async fn call(
        &self,
        socket: Socket,
        path: &str,
        meta: &[(&'static str, &str)],
        body: Bytes,
    ) -> Got {
        let mut map = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
        map.extend(headers(meta));
        let request = reply::request(path, map, Frames::from_data(vec![body]));
        got(self.caller(socket).send(request).await.unwrap()).await
    }

    /// Stops the proxy like SIGTERM.
    pub(crate) fn end(&self) {
        self.stop.cancel();
    }

    /// Stops the runtime and breaks its connections.
    pub(crate) fn down(&self) {
        self.runtime.cancel();
        let _ = std::fs::remove_file(self.dir.path().join("runtime.sock"));
    }

    pub(crate) fn up(&mut self) {
        self.runtime = self.script.serve(&self.dir.path().join("runtime.sock"));
    }
}

/// Waits until `look` returns a value.
pub(crate) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
