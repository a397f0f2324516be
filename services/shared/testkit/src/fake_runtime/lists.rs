//! Lists, in one answer and item by item.
//!
//! The bindings know no list streams yet (CRI of Kubernetes 1.36). They take the request of the list they are named after, and each
//! message has its items in field 1, as the list's answer has: the list's types do for both.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use http_body_util::Full;
use k8s_cri::v1;
use prost::Message;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::Shared;
use super::cri::Leave;
use super::script::Method;
use super::serve::MAX_MESSAGE;
use super::world;

fn labels_match(selector: &HashMap<String, String>, labels: &HashMap<String, String>) -> bool {
    selector.iter().all(|(k, v)| labels.get(k) == Some(v))
}

fn id_matches(wanted: &str, id: &str) -> bool {
    wanted.is_empty() || id.starts_with(wanted)
}

/// What a list of sandboxes is about.
pub(super) fn sandbox_subjects(q: &v1::ListPodSandboxRequest) -> Vec<String> {
    q.filter.iter().flat_map(|f| f.label_selector.values().cloned().chain([f.id.clone()])).collect()
}

/// What a list of containers is about.
pub(super) fn container_subjects(q: &v1::ListContainersRequest) -> Vec<String> {
    q.filter.iter().flat_map(|f| f.label_selector.values().cloned().chain([f.id.clone()])).collect()
}

pub(super) fn sandboxes(shared: &Shared, q: v1::ListPodSandboxRequest) -> Vec<v1::PodSandbox> {
    let filter = q.filter.unwrap_or_default();
    let world = shared.world.lock();
    world
        .sandboxes
        .values()
        .map(|s| &s.status)
        .filter(|s| id_matches(&filter.id, &s.id))
        .filter(|s| filter.state.is_none_or(|f| f.state == s.state))
        .filter(|s| labels_match(&filter.label_selector, &s.labels))
        .map(|s| v1::PodSandbox {
            id: s.id.clone(),
            metadata: s.metadata.clone(),
            state: s.state,
            created_at: s.created_at,
            labels: s.labels.clone(),
            annotations: s.annotations.clone(),
            runtime_handler: s.runtime_handler.clone(),
        })
        .collect()
}

pub(super) fn containers(shared: &Shared, q: v1::ListContainersRequest) -> Vec<v1::Container> {
    let filter = q.filter.unwrap_or_default();
    let world = shared.world.lock();
    world
        .containers
        .values()
        .filter(|c| id_matches(&filter.id, &c.status.id))
        .filter(|c| filter.state.is_none_or(|f| f.state == c.status.state))
        .filter(|c| id_matches(&filter.pod_sandbox_id, &c.sandbox_id))
        .filter(|c| labels_match(&filter.label_selector, &c.status.labels))
        .map(|c| v1::Container {
            id: c.status.id.clone(),
            pod_sandbox_id: c.sandbox_id.clone(),
            metadata: c.status.metadata.clone(),
            image: c.status.image.clone(),
            image_ref: c.status.image_ref.clone(),
            state: c.status.state,
            created_at: c.status.created_at,
            labels: c.status.labels.clone(),
            annotations: c.status.annotations.clone(),
            image_id: c.status.image_id.clone(),
        })
        .collect()
}

pub(super) fn container_stats(shared: &Shared) -> Vec<v1::ContainerStats> {
    shared.world.lock().containers.values().filter(|c| c.running()).map(attributes).collect()
}

pub(super) fn all_sandbox_stats(shared: &Shared) -> Vec<v1::PodSandboxStats> {
    shared.world.lock().sandboxes.values().map(sandbox_stats).collect()
}

pub(super) fn images(shared: &Shared, q: v1::ListImagesRequest) -> Vec<v1::Image> {
    let world = shared.world.lock();
    let wanted = q.filter.and_then(|f| f.image).map(|i| i.image).filter(|n| !n.is_empty());
    match wanted {
        Some(n) => world.image(&n).cloned().into_iter().collect(),
        None => world.images.values().cloned().collect(),
    }
}

pub(super) fn attributes(c: &world::ContainerRecord) -> v1::ContainerStats {
    v1::ContainerStats {
        attributes: Some(v1::ContainerAttributes {
            id: c.status.id.clone(),
            metadata: c.status.metadata.clone(),
            labels: c.status.labels.clone(),
            annotations: c.status.annotations.clone(),
        }),
        ..Default::default()
    }
}

pub(super) fn sandbox_stats(s: &world::SandboxRecord) -> v1::PodSandboxStats {
    v1::PodSandboxStats {
        attributes: Some(v1::PodSandboxAttributes {
            id: s.status.id.clone(),
            metadata: s.status.metadata.clone(),
            labels: s.status.labels.clone(),
            annotations: s.status.annotations.clone(),
        }),
        ..Default::default()
    }
}

/// One list as a stream.
struct Streamed<Q, R> {
    shared: Arc<Shared>,
    method: Method,
    subjects: fn(&Q) -> Vec<String>,
    /// One message for each item.
    items: fn(&Shared, Q) -> Vec<R>,
}

impl<Q, R> tonic::server::ServerStreamingService<Q> for Streamed<Q, R>
where
    Q: Message + Send + 'static,
    R: Send + 'static,
{
    type Response = R;
    type ResponseStream = BoxStream<'static, Result<R, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let (shared, method, items) = (Arc::clone(&self.shared), self.method, self.items);
        let subjects = (self.subjects)(request.get_ref());
        Box::pin(async move {
            let (metadata, _, q) = request.into_parts();
            let bytes = Bytes::from(q.encode_to_vec());
            let mut plan = shared.script.enter(method, metadata, subjects, bytes);
            let _leave = Leave(Arc::clone(&shared), method);
            shared.script.pass(&mut plan).await?;
            let mut messages: Vec<Result<R, Status>> = items(&shared, q).into_iter().map(Ok).collect();
            if let Some(status) = plan.after.take() {
                // It fails in the middle.
                messages.truncate(messages.len().div_ceil(2));
                messages.push(Err(status));
            }
            Ok(Response::new(futures::stream::iter(messages).boxed()))
        })
    }
}

type Reply = http::Response<tonic::body::Body>;

async fn serve<Q, R>(
    streamed: Streamed<Q, R>,
    request: http::Request<Full<Bytes>>,
) -> Result<Reply, Infallible>
where
    Q: Message + Default + Send + 'static,
    R: Message + Send + 'static,
{
    let mut grpc = tonic::server::Grpc::new(ProstCodec::<R, Q>::default())
        .apply_max_message_size_config(Some(MAX_MESSAGE), Some(MAX_MESSAGE));
    Ok(grpc.server_streaming(streamed, request).await)
}

/// Answers a list stream; None: this is none.
pub(super) fn stream(
    shared: &Arc<Shared>,
    request: &http::Request<Full<Bytes>>,
) -> Option<BoxFuture<'static, Result<Reply, Infallible>>> {
    let shared = Arc::clone(shared);
    let request = request.clone();
    Some(match request.uri().path() {
        "/runtime.v1.RuntimeService/StreamPodSandboxes" => {
            let items = |shared: &Shared, q| {
                let message = |item| v1::ListPodSandboxResponse { items: vec![item] };
                sandboxes(shared, q).into_iter().map(message).collect()
            };
            let (method, subjects) = (Method::StreamPodSandboxes, sandbox_subjects as fn(&_) -> _);
            Box::pin(serve(Streamed { shared, method, subjects, items }, request))
        }
        "/runtime.v1.RuntimeService/StreamContainers" => {
            let items = |shared: &Shared, q| {
                let message = |item| v1::ListContainersResponse { containers: vec![item] };
                containers(shared, q).into_iter().map(message).collect()
            };
            let (method, subjects) = (Method::StreamContainers, container_subjects as fn(&_) -> _);
            Box::pin(serve(Streamed { shared, method, subjects, items }, request))
        }
        "/runtime.v1.RuntimeService/StreamContainerStats" => {
            let items = |shared: &Shared, _: v1::ListContainerStatsRequest| {
                let message = |item| v1::ListContainerStatsResponse { stats: vec![item] };
                container_stats(shared).into_iter().map(message).collect()
            };
            let (method, subjects) = (Method::StreamContainerStats, (|_| Vec::new()) as fn(&_) -> _);
            Box::pin(serve(Streamed { shared, method, subjects, items }, request))
        }
        "/runtime.v1.RuntimeService/StreamPodSandboxStats" => {
            let items = |shared: &Shared, _: v1::ListPodSandboxStatsRequest| {
                let message = |item| v1::ListPodSandboxStatsResponse { stats: vec![item] };
                all_sandbox_stats(shared).into_iter().map(message).collect()
            };
            let (method, subjects) = (Method::StreamPodSandboxStats, (|_| Vec::new()) as fn(&_) -> _);
            Box::pin(serve(Streamed { shared, method, subjects, items }, request))
        }
        "/runtime.v1.ImageService/StreamImages" => {
            let items = |shared: &Shared, q| {
                let message = |item| v1::ListImagesResponse { images: vec![item] };
                images(shared, q).into_iter().map(message).collect()
            };
            let (method, subjects) = (Method::StreamImages, (|_| Vec::new()) as fn(&_) -> _);
            Box::pin(serve(Streamed { shared, method, subjects, items }, request))
        }
        _ => return None,
    })
}
