//! `/pods` and `/runningpods/`.

use std::collections::BTreeMap;
use std::task::{Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::Stream;
use http::StatusCode;
use quintlet_cri_api::v1::{
    ContainerState, ContainerStateValue, ListContainersRequest, ListContainersResponse,
    ListPodSandboxRequest, ListPodSandboxResponse, PodSandboxState,
};
use quintlet_kit::{lists, queue, task};
use quintlet_proto::podsync::v1::PodView;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tonic::{Request, Status};

use node_api_base::answer::{Answer, error, json};
use node_api_base::services::{PodSnapshot, Services};

const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Time limit for a client to read one pod of a list. pod-sync holds the rest of the list for that long.
const READ: Duration = Duration::from_secs(30);

/// The parts of a PodList around its items. A list without items has null.
const EMPTY: &str = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":null}"#;
const BEGIN: &str = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#;
const NEXT: &str = ",";
const END: &str = "]}";

/// Returns a PodList.
fn list(items: &[Value]) -> Answer {
    if items.is_empty() {
        return json(EMPTY);
    }
    let items: Vec<String> = items.iter().map(Value::to_string).collect();
    json([BEGIN, &items.join(NEXT), END].concat())
}

/// Returns a PodList of the objects that `object` returns, which are JSON. Each pod is sent as it arrives:
/// the objects of a node may have hundreds of megabytes. An error after the first pod ends the connection.
pub(crate) async fn list_each(
    node: &Services,
    object: impl Fn(PodView) -> Option<Vec<u8>> + Send + Sync + 'static,
) -> Answer {
    let mut objects = match node.pods().await {
        Ok(snapshot) => Objects { snapshot, object },
        Err(status) => return unavailable(&status),
    };
    let first = match objects.next().await {
        Ok(Some(first)) => first,
        Ok(None) => return json(EMPTY),
        Err(status) => return unavailable(&status),
    };
    let (tx, rx) = queue::channel("node-api-pod-list", 1);
    drop(task::spawn_contained("node-api-pod-list", None, async move {
        // A failed send means that the client has disconnected, or reads too slowly.
        if let Err(status) = send_list(&tx, first, objects).await {
            tracing::warn!(error = status.message(), "list of pods ends before the last pod");
            let _ = send(&tx, Err(status)).await;
        }
    }));
    json(Body::from_stream(complete(rx)))
}

/// Returns the answer if pod-sync has given no pod.
pub(crate) fn unavailable(status: &Status) -> Answer {
    error(StatusCode::INTERNAL_SERVER_ERROR, format!("pod-sync: {}", status.message()))
}

/// The objects of a PodList.
struct Objects<F> {
    snapshot: PodSnapshot,
    object: F,
}

impl<F: Fn(PodView) -> Option<Vec<u8>>> Objects<F> {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Status> {
        while let Some(view) = self.snapshot.next().await? {
            if let Some(object) = (self.object)(view) {
                return Ok(Some(object));
            }
        }
        Ok(None)
    }
}

type Pieces = mpsc::Sender<Result<Bytes, Status>>;

/// Sends a PodList. Returns early if it is not received.
///
/// # Errors
/// The error of pod-sync.
async fn send_list<F>(tx: &Pieces, first: Vec<u8>, mut objects: Objects<F>) -> Result<(), Status>
where
    F: Fn(PodView) -> Option<Vec<u8>>,
{
    let (mut before, mut next) = (BEGIN, Some(first));
    while let Some(object) = next {
        if !(send(tx, Ok(before.into())).await && send(tx, Ok(object.into())).await) {
            return Ok(());
        }
        (before, next) = (NEXT, objects.next().await?);
    }
    send(tx, Ok(END.into())).await;
    Ok(())
}

/// Returns whether the piece has a place before [`READ`] has passed.
async fn send(tx: &Pieces, piece: Result<Bytes, Status>) -> bool {
    tokio::time::timeout(READ, tx.send(piece)).await.is_ok_and(|sent| sent.is_ok())
}

/// Returns the pieces of a list, with an error at the end if [`END`] is not the last one: a client would take
/// the end of the response for that of the list.
fn complete(mut rx: mpsc::Receiver<Result<Bytes, Status>>) -> impl Stream<Item = Result<Bytes, Status>> {
    let mut ended = false;
    futures::stream::poll_fn(move |cx| {
        let piece = ready!(rx.poll_recv(cx));
        if piece.is_none() && ended {
            return Poll::Ready(None);
        }
        let piece = piece.unwrap_or_else(|| Err(Status::aborted("the list of pods is not complete")));
        ended = piece.as_ref().map_or(true, |piece| piece == END);
        Poll::Ready(Some(piece))
    })
}

/// Returns the pods of the node as pod-sync has them, with their newest status.
pub async fn pods(node: &Services) -> Answer {
    // pod-sync has serialized the objects: they are passed on as bytes.
    list_each(node, |view| Some(view.pod)).await
}

/// Returns the pods that the runtime runs.
pub async fn running(node: &Services) -> Answer {
    match find_running(node).await {
        Ok(pods) => list(&pods),
        Err(status) => error(StatusCode::INTERNAL_SERVER_ERROR, status.message()),
    }
}

async fn find_running(node: &Services) -> Result<Vec<Value>, tonic::Status> {
    let mut pods: BTreeMap<(String, String, String), Vec<Value>> = BTreeMap::new();
    // Only this part of each message is kept: the full messages of a full node are much larger than the
    // response.
    let take = |message: ListPodSandboxResponse| {
        let ready = message.items.iter().filter(|s| s.state == PodSandboxState::SandboxReady as i32);
        for pod in ready.filter_map(|s| pod_of(&s.labels)) {
            pods.entry(pod).or_default();
        }
    };
    lists::SANDBOXES.each(node.cri(), Request::new(ListPodSandboxRequest::default()), take).await?;
    let filter = quintlet_cri_api::v1::ContainerFilter {
        state: Some(ContainerStateValue { state: ContainerState::ContainerRunning.into() }),
        ..Default::default()
    };
    let request = ListContainersRequest { filter: Some(filter) };
    let take = |message: ListContainersResponse| {
        for container in &message.containers {
            let image = container.image.as_ref().map_or("", |i| i.image.as_str());
            if let (Some(pod), Some(name)) = (pod_of(&container.labels), container.labels.get(CONTAINER_NAME))
            {
                pods.entry(pod).or_default().push(json!({"name": name, "image": image, "resources": {}}));
            }
        }
    };
    lists::CONTAINERS.each(node.cri(), Request::new(request), take).await?;
    Ok(pods
        .into_iter()
        .map(|((namespace, name, uid), mut containers)| {
            containers.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
            json!({
                "metadata": {"name": name, "namespace": namespace, "uid": uid, "creationTimestamp": null},
                "spec": {"containers": containers},
                "status": {},
            })
        })
        .collect())
}

fn pod_of(labels: &std::collections::HashMap<String, String>) -> Option<(String, String, String)> {
    let label = |name: &str| labels.get(name).cloned();
    Some((label(POD_NAMESPACE)?, label(POD_NAME)?, label(POD_UID)?))
}
