//! Calls the list methods of the CRI as streams (Kubernetes 1.36), since a whole list may exceed the size
//! limit of a message.
//!
//! The methods of a pair take the same request on the wire, and both have their items in field 1, so that one
//! type of messages serves for both. cri-proxy offers the streams even if the runtime does not. An older
//! cri-proxy passes on the runtime's UNIMPLEMENTED; the client then falls back to the unary method.

use http::uri::PathAndQuery;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::codegen::{Bytes, StdError};
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// Largest message in bytes (`k8s.io/cri-client/pkg: maxMsgSize`).
pub const MAX_MESSAGE: usize = 16 << 20;

/// A list method and its streaming variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct List {
    /// Path of the unary method.
    list: &'static str,
    /// Path of the streaming method.
    stream: &'static str,
}

macro_rules! list {
    ($(#[$doc:meta])* $name:ident, $service:literal, $list:literal, $stream:literal) => {
        $(#[$doc])*
        pub const $name: List = List {
            list: concat!("/runtime.v1.", $service, "/", $list),
            stream: concat!("/runtime.v1.", $service, "/", $stream),
        };
    };
}
list!(
    /// Lists of pod sandboxes.
    SANDBOXES, "RuntimeService", "ListPodSandbox", "StreamPodSandboxes"
);
list!(
    /// Lists of containers of all pods.
    CONTAINERS, "RuntimeService", "ListContainers", "StreamContainers"
);
list!(
    /// Statistics of containers.
    CONTAINER_STATS, "RuntimeService", "ListContainerStats", "StreamContainerStats"
);
list!(
    /// Statistics of pod sandboxes.
    SANDBOX_STATS, "RuntimeService", "ListPodSandboxStats", "StreamPodSandboxStats"
);
list!(
    /// Lists of images of the runtime.
    IMAGES, "ImageService", "ListImages", "StreamImages"
);

impl List {
    /// Passes each message of the list to `take` as it arrives, and yields to other tasks after each. Returns
    /// the metadata of the response, including the trailers.
    ///
    /// # Errors
    /// Returns the status of the call if it fails. Messages passed to `take` before must then be discarded.
    pub async fn each<S, Q, R>(
        self,
        service: S,
        request: Request<Q>,
        mut take: impl FnMut(R),
    ) -> Result<MetadataMap, Status>
    where
        S: GrpcService<Body>,
        S::ResponseBody: tonic::codegen::Body<Data = Bytes> + Send + 'static,
        <S::ResponseBody as tonic::codegen::Body>::Error: Into<StdError> + Send,
        Q: prost::Message + Clone + Send + Sync + 'static,
        R: prost::Message + Default + Send + Sync + 'static,
    {
        let mut client = Grpc::new(service).max_decoding_message_size(MAX_MESSAGE);
        let ready = |e: S::Error| {
            let error: StdError = e.into();
            let mut status = Status::unavailable(format!("not connected: {error}"));
            status.set_source(std::sync::Arc::from(error));
            status
        };
        let (metadata, extensions, message) = request.into_parts();
        let fallback = Request::from_parts(metadata.clone(), extensions.clone(), message.clone());
        let request = Request::from_parts(metadata, extensions, message);
        client.ready().await.map_err(ready)?;
        let path = PathAndQuery::from_static(self.stream);
        let mut received_any = false;
        // Both calls are boxed, so that the caller's future does not contain the state of two calls.
        let response = Box::pin(client.server_streaming(request, path, ProstCodec::<Q, R>::default())).await;
        let failure = match response {
            Ok(answer) => {
                let (metadata, mut messages, _) = answer.into_parts();
                loop {
                    match messages.message().await {
                        Ok(Some(message)) => take(message),
                        Ok(None) => {
                            let mut all = metadata.into_headers();
                            all.extend(messages.trailers().await?.unwrap_or_default().into_headers());
                            return Ok(MetadataMap::from_headers(all));
                        }
                        Err(status) if received_any => return Err(status),
                        Err(status) => break status,
                    }
                    received_any = true;
                    tokio::task::yield_now().await;
                }
            }
            Err(status) => status,
        };
        if failure.code() != Code::Unimplemented {
            return Err(failure);
        }
        client.ready().await.map_err(ready)?;
        let path = PathAndQuery::from_static(self.list);
        let (metadata, message, _) =
            Box::pin(client.unary(fallback, path, ProstCodec::<Q, R>::default())).await?.into_parts();
        take(message);
        Ok(metadata)
    }
}
