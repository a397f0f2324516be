//! Serves the socket, and breaks its connections.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::{BodyExt as _, Collected, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use quintlet_cri_api::v1::image_service_server::ImageServiceServer;
use quintlet_cri_api::v1::runtime_service_server::RuntimeServiceServer;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tower::Service;

use super::calls::Raw;
use super::cri::Cri;
use super::events::EventsServer;
use super::images::Images;
use super::shared::Shared;

/// Size of the gRPC message prefix: a flag for compression, which is not used here, and the length.
const FRAME_HEAD: usize = 5;

/// Size limit of a CRI message, as in the kubelet.
pub(super) const MAX_MESSAGE: usize = 16 * 1024 * 1024;

/// Keeps the bytes of each request: every CRI request is one message.
#[derive(Clone)]
struct Keep(Routes);

impl Service<http::Request<Incoming>> for Keep {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        <Routes as Service<http::Request<Full<Bytes>>>>::poll_ready(&mut self.0, cx)
    }

    fn call(&mut self, request: http::Request<Incoming>) -> Self::Future {
        let mut routes = self.0.clone();
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            // The received part of an incomplete request is processed, and nothing is returned.
            let bytes = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
            parts.extensions.insert(Raw(bytes.slice(FRAME_HEAD.min(bytes.len())..)));
            let request = http::Request::from_parts(parts, Full::new(bytes));
            routes.call(request).await
        })
    }
}

/// Runs the tasks of a connection until the runtime goes down. They then stop at once, as in a crash.
#[derive(Clone)]
struct Mortal(CancellationToken);

impl<F> hyper::rt::Executor<F> for Mortal
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        let token = self.0.clone();
        crate::spawn(async move { token.run_until_cancelled(future).await });
    }
}

pub(super) fn start(shared: &Arc<Shared>, path: &Path) -> io::Result<CancellationToken> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    let routes = Routes::new(
        RuntimeServiceServer::new(Cri(Arc::clone(shared)))
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE),
    )
    .add_service(
        ImageServiceServer::new(Images(Arc::clone(shared)))
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE),
    )
    .add_service(EventsServer(Arc::clone(shared)))
    .prepare();
    let token = CancellationToken::new();
    let mortal = Mortal(token.clone());
    crate::spawn(token.clone().run_until_cancelled_owned(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(Keep(routes.clone()));
            let connection = hyper::server::conn::http2::Builder::new(mortal.clone())
                .max_concurrent_streams(100_000)
                .serve_connection(TokioIo::new(stream), service);
            hyper::rt::Executor::execute(&mortal, async move {
                // A connection that the peer closes is not an error of the runtime.
                let _ = connection.await;
            });
        }
    }));
    Ok(token)
}
