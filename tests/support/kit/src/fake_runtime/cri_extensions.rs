//! CRI calls that the bindings lack: UpdatePodSandboxResources (Kubernetes 1.33).

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::Full;
use k8s_cri::v1;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::Shared;
use super::script::Method;

#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// Resources of the sandbox itself.
    #[prost(message, optional, tag = "2")]
    pub overhead: Option<v1::LinuxContainerResources>,
    /// Resources of all containers together.
    #[prost(message, optional, tag = "3")]
    pub resources: Option<v1::LinuxContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Updated {}

struct Update(Arc<Shared>);

impl tonic::server::UnaryService<UpdatePodSandboxResourcesRequest> for Update {
    type Response = Updated;
    type Future = BoxFuture<'static, Result<Response<Updated>, Status>>;

    fn call(&mut self, request: Request<UpdatePodSandboxResourcesRequest>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            let subjects = |q: &UpdatePodSandboxResourcesRequest| vec![q.pod_sandbox_id.clone()];
            let method = Method::UpdatePodSandboxResources;
            shared.simple(method, request, subjects, |_, _| Ok(Updated {})).await
        })
    }
}

type Reply = http::Response<tonic::body::Body>;

/// Executes a call that the bindings lack. Returns `None` for other calls.
pub(super) fn answer(
    shared: &Arc<Shared>,
    request: &http::Request<Full<Bytes>>,
) -> Option<BoxFuture<'static, Result<Reply, Infallible>>> {
    if request.uri().path() != "/runtime.v1.RuntimeService/UpdatePodSandboxResources" {
        return None;
    }
    let (shared, request) = (Arc::clone(shared), request.clone());
    Some(Box::pin(async move {
        let mut grpc =
            tonic::server::Grpc::new(ProstCodec::<Updated, UpdatePodSandboxResourcesRequest>::default());
        Ok(grpc.unary(Update(shared), request).await)
    }))
}
