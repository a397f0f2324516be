//! Lists, in one reply and as a stream of items.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use prost::Message;
use quintlet_cri_api::v1;
use tonic::{Request, Response, Status};

use super::calls::Leave;
use super::script::Method;
use super::shared::Shared;
use super::world::{ContainerRecord, SandboxRecord};

fn labels_match(selector: &HashMap<String, String>, labels: &HashMap<String, String>) -> bool {
    selector.iter().all(|(k, v)| labels.get(k) == Some(v))
}

fn id_matches(wanted: &str, id: &str) -> bool {
    wanted.is_empty() || id.starts_with(wanted)
}

/// Returns the IDs and pods that a list of sandboxes selects.
pub(super) fn sandbox_subjects(filter: Option<&v1::PodSandboxFilter>) -> Vec<String> {
    filter.into_iter().flat_map(|f| f.label_selector.values().cloned().chain([f.id.clone()])).collect()
}

/// Returns the IDs and pods that a list of containers selects.
pub(super) fn container_subjects(filter: Option<&v1::ContainerFilter>) -> Vec<String> {
    filter.into_iter().flat_map(|f| f.label_selector.values().cloned().chain([f.id.clone()])).collect()
}

/// Returns the sandboxes that match a filter. The records are read without the lock, since there may be many.
pub(super) fn found_sandboxes(
    shared: &Shared,
    filter: Option<v1::PodSandboxFilter>,
) -> Vec<Arc<SandboxRecord>> {
    let filter = filter.unwrap_or_default();
    let mut found: Vec<_> = shared.world.lock().sandboxes.values().cloned().collect();
    found.retain(|s| {
        id_matches(&filter.id, &s.status.id)
            && filter.state.is_none_or(|f| f.state == s.status.state)
            && labels_match(&filter.label_selector, &s.status.labels)
    });
    found
}

pub(super) fn sandbox_item(s: &SandboxRecord) -> v1::PodSandbox {
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

pub(super) fn found_containers(
    shared: &Shared,
    filter: Option<v1::ContainerFilter>,
) -> Vec<Arc<ContainerRecord>> {
    let filter = filter.unwrap_or_default();
    let mut found: Vec<_> = shared.world.lock().containers.values().cloned().collect();
    found.retain(|c| {
        id_matches(&filter.id, &c.status.id)
            && filter.state.is_none_or(|f| f.state == c.status.state)
            && id_matches(&filter.pod_sandbox_id, &c.sandbox_id)
            && labels_match(&filter.label_selector, &c.status.labels)
    });
    found
}

pub(super) fn container_item(c: &ContainerRecord) -> v1::Container {
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
    found_sandboxes(shared, q.filter).iter().map(|s| sandbox_item(s)).collect()
}

pub(super) fn containers(shared: &Shared, q: v1::ListContainersRequest) -> Vec<v1::Container> {
    found_containers(shared, q.filter).iter().map(|c| container_item(c)).collect()
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

pub(super) fn images(shared: &Shared, filter: Option<v1::ImageFilter>) -> Vec<v1::Image> {
    let world = shared.world.lock();
    let wanted = filter.and_then(|f| f.image).map(|i| i.image).filter(|n| !n.is_empty());
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

/// Messages of a list stream.
pub(super) type ListStream<R> = BoxStream<'static, Result<R, Status>>;

/// Executes a list as a stream of messages with one item each. `find` reads the items, and `message` makes
/// the message of an item when it is sent. A runtime without list streams does not implement the method.
pub(super) async fn stream<Q: Message, T: Send + 'static, R: Send + 'static>(
    shared: &Arc<Shared>,
    method: Method,
    request: Request<Q>,
    subjects: Vec<String>,
    find: impl FnOnce(&Shared, Q) -> Vec<T>,
    message: fn(T) -> R,
) -> Result<Response<ListStream<R>>, Status> {
    if !shared.list_streams.load(Ordering::Relaxed) {
        return Err(Status::unimplemented(format!("method {method:?} not implemented")));
    }
    let (metadata, _, q) = request.into_parts();
    let mut plan = shared.script.enter(method, metadata, subjects, Bytes::from(q.encode_to_vec()));
    let _leave = Leave(Arc::clone(shared), method);
    shared.script.pass(&mut plan).await?;
    let mut found = find(shared, q);
    let failure = plan.after.take().map(Err);
    if failure.is_some() {
        // The stream fails midway.
        found.truncate(found.len().div_ceil(2));
    }
    let messages = found.into_iter().map(move |item| Ok(message(item))).chain(failure);
    Ok(Response::new(futures::stream::iter(messages).boxed()))
}
