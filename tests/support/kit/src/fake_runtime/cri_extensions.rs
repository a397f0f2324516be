//! CRI calls and fields that the bindings lack: UpdatePodSandboxResources, and stop signals of containers (Kubernetes 1.33).

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::Full;
use k8s_cri::v1;
use prost::Message as _;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::Shared;
use super::script::Method;
use super::serve::Raw;
use super::world::no_container;

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

/// The part of a container's configuration that the bindings lack.
#[derive(Clone, PartialEq, prost::Message)]
struct ConfigPart {
    #[prost(int32, tag = "18")]
    stop_signal: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CreatePart {
    #[prost(message, optional, tag = "2")]
    config: Option<ConfigPart>,
}

/// Returns the stop signal in the configuration of a container; 0 if there is none.
pub(super) fn stop_signal(request: &Request<v1::CreateContainerRequest>) -> i32 {
    let raw = request.extensions().get::<Raw>();
    let part = raw.and_then(|raw| CreatePart::decode(&*raw.0).ok()?.config);
    part.map_or(0, |part| part.stop_signal)
}

/// Number of SIGTERM.
const DEFAULT_SIGNAL: i32 = 23;

/// The part of a container's status that the bindings lack.
#[derive(Clone, PartialEq, prost::Message)]
struct StatusPart {
    #[prost(int32, tag = "19")]
    stop_signal: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Inspected {
    #[prost(bytes = "vec", tag = "1")]
    status: Vec<u8>,
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

/// ContainerStatus with the stop signal.
struct Inspect(Arc<Shared>);

impl tonic::server::UnaryService<v1::ContainerStatusRequest> for Inspect {
    type Response = Inspected;
    type Future = BoxFuture<'static, Result<Response<Inspected>, Status>>;

    fn call(&mut self, request: Request<v1::ContainerStatusRequest>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            let subjects = |q: &v1::ContainerStatusRequest| vec![q.container_id.clone()];
            let inspect = |shared: &Arc<Shared>, q: v1::ContainerStatusRequest| {
                let world = shared.world.lock();
                let container =
                    world.containers.get(&q.container_id).ok_or_else(|| no_container(&q.container_id))?;
                let signal = if container.stop_signal == 0 { DEFAULT_SIGNAL } else { container.stop_signal };
                let mut status = container.status.encode_to_vec();
                status.extend(StatusPart { stop_signal: signal }.encode_to_vec());
                Ok(Inspected { status, info: if q.verbose { container.info() } else { HashMap::new() } })
            };
            shared.simple(Method::ContainerStatus, request, subjects, inspect).await
        })
    }
}

type Reply = http::Response<tonic::body::Body>;

/// Executes a call that the bindings lack, or whose answer has a field that they lack. Returns `None` for other calls.
pub(super) fn answer(
    shared: &Arc<Shared>,
    request: &http::Request<Full<Bytes>>,
) -> Option<BoxFuture<'static, Result<Reply, Infallible>>> {
    let (shared, request) = (Arc::clone(shared), request.clone());
    match request.uri().path() {
        "/runtime.v1.RuntimeService/UpdatePodSandboxResources"
            if shared.sandbox_updates.load(Ordering::Relaxed) =>
        {
            Some(Box::pin(async move {
                let codec = ProstCodec::<Updated, UpdatePodSandboxResourcesRequest>::default();
                Ok(tonic::server::Grpc::new(codec).unary(Update(shared), request).await)
            }))
        }
        "/runtime.v1.RuntimeService/ContainerStatus" if shared.options.stop_signals => {
            Some(Box::pin(async move {
                let codec = ProstCodec::<Inspected, v1::ContainerStatusRequest>::default();
                Ok(tonic::server::Grpc::new(codec).unary(Inspect(shared), request).await)
            }))
        }
        _ => None,
    }
}
