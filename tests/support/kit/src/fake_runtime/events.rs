//! Serves containerd's event service, and publishes exits of processes that ExecSync runs.
#![allow(clippy::disallowed_methods, reason = "the queues of a runtime in tests need no metrics")]

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use containerd_client::services::v1::SubscribeRequest;
use containerd_client::types::Envelope;
use futures::future::BoxFuture;
use prost::Message;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::event_bus::Event;
use super::script::Method;
use super::shared::Shared;

/// containerd's event service: only Subscribe, since the client bindings have no server half.
#[derive(Clone)]
pub(crate) struct EventsServer(pub(crate) Arc<Shared>);

impl tonic::server::NamedService for EventsServer {
    const NAME: &'static str = "containerd.services.events.v1.Events";
}

impl Service<http::Request<Body>> for EventsServer {
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            if request.uri().path() != "/containerd.services.events.v1.Events/Subscribe" {
                return Ok(Status::unimplemented("only Subscribe").into_http());
            }
            let mut grpc = tonic::server::Grpc::new(ProstCodec::<Envelope, SubscribeRequest>::default());
            Ok(grpc.server_streaming(Subscribe(shared), request).await)
        })
    }
}

struct Subscribe(Arc<Shared>);

impl tonic::server::ServerStreamingService<SubscribeRequest> for Subscribe {
    type Response = Envelope;
    type ResponseStream = ReceiverStream<Result<Envelope, Status>>;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Self::ResponseStream>, Status>> + Send>>;

    fn call(&mut self, request: Request<SubscribeRequest>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            let bytes = Bytes::from(request.get_ref().encode_to_vec());
            let mut plan =
                shared.script.enter(Method::Subscribe, request.metadata().clone(), Vec::new(), bytes);
            shared.script.leave(Method::Subscribe);
            shared.script.pass(&mut plan).await?;
            shared.bus.subscribe_containerd(&request.get_ref().filters).map(Response::new)
        })
    }
}

/// Publishes the exit of a process run in a container by exec, as containerd does.
pub(crate) async fn exec_exit(shared: &Shared, container: &str, exec_id: &str, after: Duration, code: i32) {
    tokio::time::sleep(after).await;
    shared.bus.containerd(Event::Exit { id: container.to_owned(), exec_id: Some(exec_id.to_owned()), code });
}
