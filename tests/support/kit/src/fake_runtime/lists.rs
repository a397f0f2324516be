//! Lists, in one reply and as a stream of items.
//!
//! The bindings lack the list streams (CRI of Kubernetes 1.36). Their requests are those of the corresponding
//! list, and each message has its items in field 1, as the list's reply: the list's types serve for both.

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
use super::calls::Leave;
use super::script::Method;
use super::serve::MAX_MESSAGE;
use super::world::{ContainerRecord, SandboxRecord};

fn labels_match(selector: &HashMap<String, String>, labels: &HashMap<String, String>) -> bool {
    selector.iter().all(|(k, v)| labels.get(k) == Some(v))
}

fn id_matches(wanted: &str, id: &str) -> bool {
    wanted.is_empty() || id.starts_with(wanted)
}

/// Returns the IDs and pods that a list of sandboxes selects.
pub(super) fn sandbox_subjects(q: &v1::ListPodSandboxRequest) -> Vec<String> {
    q.filter.iter().flat_map(|f| f.label_selector.values().cloned().chain([f.id.clone()])).collect()
}

/// Returns the IDs and pods that a list of containers selects.
pub(super) fn container_subjects(q: &v1::ListContainersRequest) -> Vec<String> {
    q.filter.iter().flat_map(|f| f.label_selector.values().cloned().chain([f.id.clone()])).collect()
}

/// Returns the sandboxes that match a filter. The records are read without the lock, since there may be many.
fn found_sandboxes(shared: &Shared, q: v1::ListPodSandboxRequest) -> Vec<Arc<SandboxRecord>> {
    let filter = q.filter.unwrap_or_default();
    let mut found: Vec<_> = shared.world.lock().sandboxes.values().cloned().collect();
    found.retain(|s| {
        id_matches(&filter.id, &s.status.id)
            && filter.state.is_none_or(|f| f.state == s.status.state)
            && labels_match(&filter.label_selector, &s.status.labels)
    });
    found
}

fn sandbox_item(s: &SandboxRecord) -> v1::PodSandbox {
    let s = &s.status;
    v1::PodSandbox {
        id: s.id.clone(),
        metadata: s.metadata.clone(),
        state: s.state,
        created_at: s.created_at,
        labels: s.labels.clone(),
        annotations: s.annotations.clone(),
        runtime_handler: s.runtime_handler.clone(),
    }
}

fn found_containers(shared: &Shared, q: v1::ListContainersRequest) -> Vec<Arc<ContainerRecord>> {
    let filter = q.filter.unwrap_or_default();
    let mut found: Vec<_> = shared.world.lock().containers.values().cloned().collect();
    found.retain(|c| {
        id_matches(&filter.id, &c.status.id)
            && filter.state.is_none_or(|f| f.state == c.status.state)
            && id_matches(&filter.pod_sandbox_id, &c.sandbox_id)
            && labels_match(&filter.label_selector, &c.status.labels)
    });
    found
}

fn container_item(c: &ContainerRecord) -> v1::Container {
    v1::Container {
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
    }
}

pub(super) fn sandboxes(shared: &Shared, q: v1::ListPodSandboxRequest) -> Vec<v1::PodSandbox> {
    found_sandboxes(shared, q).iter().map(|s| sandbox_item(s)).collect()
}

pub(super) fn containers(shared: &Shared, q: v1::ListContainersRequest) -> Vec<v1::Container> {
    found_containers(shared, q).iter().map(|c| container_item(c)).collect()
}

pub(super) fn container_stats(shared: &Shared) -> Vec<v1::ContainerStats> {
    let all = shared.world.lock();
    let stats = |c: &Arc<ContainerRecord>| {
        let bytes = all.layers.get(c.name()).copied();
        let value = |value| Some(v1::UInt64Value { value });
        let layer = |bytes| v1::FilesystemUsage {
            used_bytes: value(bytes),
            inodes_used: value(1),
            ..Default::default()
        };
        // A container that does not run has a layer only, as with containerd 1.6.
        let memory = c.running().then(|| {
            let used = all.memory.get(c.name()).copied().unwrap_or(1 << 20);
            v1::MemoryUsage { usage_bytes: value(used), working_set_bytes: value(used), ..Default::default() }
        });
        v1::ContainerStats { writable_layer: bytes.map(layer), memory, ..attributes(c) }
    };
    all.containers.values().map(stats).collect()
}

pub(super) fn all_sandbox_stats(shared: &Shared) -> Vec<v1::PodSandboxStats> {
    shared.world.lock().sandboxes.values().map(|s| sandbox_stats(s)).collect()
}

pub(super) fn images(shared: &Shared, q: v1::ListImagesRequest) -> Vec<v1::Image> {
    let world = shared.world.lock();
    let wanted = q.filter.and_then(|f| f.image).map(|i| i.image).filter(|n| !n.is_empty());
    match wanted {
        Some(n) => world.image(&n).cloned().into_iter().collect(),
        None => world.images.values().cloned().collect(),
    }
}

pub(super) fn attributes(c: &ContainerRecord) -> v1::ContainerStats {
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

pub(super) fn sandbox_stats(s: &SandboxRecord) -> v1::PodSandboxStats {
    v1::PodSandboxStats {
        attributes: Some(v1::PodSandboxAttributes {
            id: s.status.id.clone(),
            metadata: s.status.metadata.clone(),
            labels: s.status.labels.clone(),
            annotations: s.status.annotations.clone(),
        }),
        linux: Some(v1::LinuxPodSandboxStats::default()),
        ..Default::default()
    }
}

/// A list as a stream.
struct Streamed<Q, T, R> {
    shared: Arc<Shared>,
    method: Method,
    subjects: fn(&Q) -> Vec<String>,
    find: fn(&Shared, Q) -> Vec<T>,
    /// Makes the message of an item when it is sent.
    message: fn(T) -> R,
}

impl<Q, T, R> tonic::server::ServerStreamingService<Q> for Streamed<Q, T, R>
where
    Q: Message + Send + 'static,
    T: Send + 'static,
    R: Send + 'static,
{
    type Response = R;
    type ResponseStream = BoxStream<'static, Result<R, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let method = self.method;
        let find = self.find;
        let message = self.message;
        let subjects = (self.subjects)(request.get_ref());
        Box::pin(async move {
            let (metadata, _, q) = request.into_parts();
            let bytes = Bytes::from(q.encode_to_vec());
            let mut plan = shared.script.enter(method, metadata, subjects, bytes);
            let _leave = Leave(Arc::clone(&shared), method);
            shared.script.pass(&mut plan).await?;
            let mut found = find(&shared, q);
            let failure = plan.after.take().map(Err);
            if failure.is_some() {
                // The stream fails midway.
                found.truncate(found.len().div_ceil(2));
            }
            let messages = found.into_iter().map(move |item| Ok(message(item))).chain(failure);
            Ok(Response::new(futures::stream::iter(messages).boxed()))
        })
    }
}

type Reply = http::Response<tonic::body::Body>;

async fn serve<Q, T, R>(
    streamed: Streamed<Q, T, R>,
    request: http::Request<Full<Bytes>>,
) -> Result<Reply, Infallible>
where
    Q: Message + Default + Send + 'static,
    T: Send + 'static,
    R: Message + Send + 'static,
{
    let mut grpc = tonic::server::Grpc::new(ProstCodec::<R, Q>::default())
        .apply_max_message_size_config(Some(MAX_MESSAGE), Some(MAX_MESSAGE));
    Ok(grpc.server_streaming(streamed, request).await)
}

/// Serves a list stream; `None` for other methods.
pub(super) fn stream(
    shared: &Arc<Shared>,
    request: &http::Request<Full<Bytes>>,
) -> Option<BoxFuture<'static, Result<Reply, Infallible>>> {
    let shared = Arc::clone(shared);
    let request = request.clone();
    Some(match request.uri().path() {
        "/runtime.v1.RuntimeService/StreamPodSandboxes" => {
            let (method, find) = (Method::StreamPodSandboxes, found_sandboxes as fn(&_, _) -> _);
            let message = |s: Arc<_>| v1::ListPodSandboxResponse { items: vec![sandbox_item(&s)] };
            let subjects = sandbox_subjects as fn(&_) -> _;
            Box::pin(serve(Streamed { shared, method, subjects, find, message }, request))
        }
        "/runtime.v1.RuntimeService/StreamContainers" => {
            let (method, find) = (Method::StreamContainers, found_containers as fn(&_, _) -> _);
            let message = |c: Arc<_>| v1::ListContainersResponse { containers: vec![container_item(&c)] };
            let subjects = container_subjects as fn(&_) -> _;
            Box::pin(serve(Streamed { shared, method, subjects, find, message }, request))
        }
        "/runtime.v1.RuntimeService/StreamContainerStats" => {
            let method = Method::StreamContainerStats;
            let find = |shared: &Shared, _: v1::ListContainerStatsRequest| container_stats(shared);
            let message = |item| v1::ListContainerStatsResponse { stats: vec![item] };
            Box::pin(serve(Streamed { shared, method, subjects: |_| Vec::new(), find, message }, request))
        }
        "/runtime.v1.RuntimeService/StreamPodSandboxStats" => {
            let method = Method::StreamPodSandboxStats;
            let find = |shared: &Shared, _: v1::ListPodSandboxStatsRequest| all_sandbox_stats(shared);
            let message = |item| v1::ListPodSandboxStatsResponse { stats: vec![item] };
            Box::pin(serve(Streamed { shared, method, subjects: |_| Vec::new(), find, message }, request))
        }
        "/runtime.v1.ImageService/StreamImages" => {
            let (method, find) = (Method::StreamImages, images as fn(&_, _) -> _);
            let message = |item| v1::ListImagesResponse { images: vec![item] };
            Box::pin(serve(Streamed { shared, method, subjects: |_| Vec::new(), find, message }, request))
        }
        _ => return None,
    })
}
