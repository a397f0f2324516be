//! The socket, and breaking it.

use std::io;
use std::path::Path;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use k8s_cri::v1::image_service_server::ImageServiceServer;
use k8s_cri::v1::runtime_service_server::RuntimeServiceServer;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::Shared;
use super::cri::Cri;
use super::events::EventsServer;
use super::images::Images;

/// The CRI's limit of a message, as the kubelet has it.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

/// Runs the tasks of a connection until the runtime goes down, when all of them end where they are, as in a crash.
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
            let service = TowerToHyperService::new(routes.clone());
            let connection = hyper::server::conn::http2::Builder::new(mortal.clone())
                .max_concurrent_streams(100_000)
                .serve_connection(TokioIo::new(stream), service);
            hyper::rt::Executor::execute(&mortal, async move {
                // A peer that goes away is not the runtime's business.
                let _ = connection.await;
            });
        }
    }));
    Ok(token)
}
