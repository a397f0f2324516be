//! The lists of the CRI, asked for by their streams (Kubernetes 1.36), since a full one may be larger than a message.
//!
//! The bindings have no list streams yet. They take the lists' requests, and their messages have the items where the lists' answers
//! have them: in field 1. cri-proxy has the streams whatever the runtime has; only an older one passes on that the runtime lacks them,
//! and then the list is asked for in whole.

use http::uri::PathAndQuery;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::codegen::{Bytes, StdError};
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// The largest message taken, as the kubelet's (cri-client utils.go).
pub const MAX_MESSAGE: usize = 16 << 20;

/// A list and its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct List {
    /// Path of the call with one answer.
    list: &'static str,
    /// Path of the call with a stream of them.
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
    /// Pod sandboxes.
    SANDBOXES, "RuntimeService", "ListPodSandbox", "StreamPodSandboxes"
);
list!(
    /// Containers.
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
    /// Images.
    IMAGES, "ImageService", "ListImages", "StreamImages"
);

impl List {
    /// Hands the messages of the list to `take` as they come, and lets others have their turn after each. Returns the metadata of
    /// the end.
    ///
    /// # Errors
    /// What the call came to. Whatever was taken before it is then part of no list.
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
        let again = Request::from_parts(metadata.clone(), extensions.clone(), message.clone());
        let request = Request::from_parts(metadata, extensions, message);
        client.ready().await.map_err(ready)?;
        let path = PathAndQuery::from_static(self.stream);
        let mut taken = false;
        // Boxed, both: who asks for a list must not carry the state of two calls.
        let asked = Box::pin(client.server_streaming(request, path, ProstCodec::<Q, R>::default())).await;
        let lacking = match asked {
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
                        Err(status) if taken => return Err(status),
                        Err(status) => break status,
                    }
                    taken = true;
                    tokio::task::yield_now().await;
                }
            }
            Err(status) => status,
        };
        if lacking.code() != Code::Unimplemented {
            return Err(lacking);
        }
        client.ready().await.map_err(ready)?;
        let path = PathAndQuery::from_static(self.list);
        let (metadata, message, _) =
            Box::pin(client.unary(again, path, ProstCodec::<Q, R>::default())).await?.into_parts();
        take(message);
        Ok(metadata)
    }
}
