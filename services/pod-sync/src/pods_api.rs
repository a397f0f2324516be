//! Serves the kubelet's Pods API (KEP-4188) at `<root>/pods-api/pods-api.sock`, to root.
//!
//! It reads the same views as podsync.v1. A watch has no queue of changes: it compares the views with what it
//! has sent, so a slow watcher misses states of a pod and costs no memory.

mod events;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use parking_lot::Mutex;
use pod_sync_views::{PodView, PodViews};
use pod_sync_worker::context::Reporting;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use quintlet_kit::clock::Clock;
use quintlet_kit::messages::{self, Bounded};
use quintlet_kit::queue;
use quintlet_kit::rate::{Rate, RateLimiter};
use quintlet_kit::server::Server;
use quintlet_kit::socket::PeerPolicy;
use quintlet_kit::status_code;
use quintlet_model::ids::PodUid;
use quintlet_pods_api::v1alpha1::pods_server::{Pods, PodsServer};
use quintlet_pods_api::v1alpha1::{
    EventType, GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent,
    WatchPodsRequest,
};
use quintlet_proto::limits;
use quintlet_telemetry::metrics::{counter, counter_family};
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

use self::events::{Watched, object};

/// Calls of all methods per second, and their burst (`pkg/kubelet/apis/pods: DefaultQPS`,
/// `DefaultBurstTokens`).
const CALLS: u32 = 100;
const BURST: u32 = 10;
/// Open calls per connection, as in kubelet 1.38. A further call waits in its client.
const STREAMS: u32 = 100;
/// Watches at once. Agents of a node have one each; a client that leaks them gets an error before the node
/// runs out of memory.
const WATCHES: usize = 100;
/// Events of a watch that wait to be sent. Each has up to 4 MiB.
const QUEUE: usize = 2;
/// Longest wait for a watcher that does not read. Its stream ends then.
const STALL: Duration = Duration::from_secs(30);
/// The streams and lists in metrics.
const WATCH_PODS: &str = "Pods.WatchPods";
const LIST_PODS: &str = "Pods.ListPods";

/// Returns the path of the socket.
pub(crate) fn socket(root_dir: &Path) -> PathBuf {
    root_dir.join("pods-api/pods-api.sock")
}

/// Serves until `stop`. Only root and the user of this process may call.
pub(crate) async fn serve(
    service: PodsApi,
    listener: UnixListener,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let server = Server::new("pods-api").streams(STREAMS).add_service(PodsServer::new(service));
    server.serve(listener, PeerPolicy::root_and_self(), stop).await
}

/// Labels of a request, as the kubelet has them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabel {
    server_api_version: &'static str,
    status_code: &'static str,
}

type Requests = Family<RequestLabel, Counter>;

/// Counters of requests, under the names of the kubelet.
#[derive(Debug, Clone)]
struct Metrics {
    all: Requests,
    lists: Requests,
    gets: Requests,
    watches: Requests,
    dropped: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            all: counter_family("kubelet_pod_requests", "Requests to the Pods API"),
            lists: counter_family("kubelet_pod_requests_list", "Calls of ListPods of the Pods API"),
            gets: counter_family("kubelet_pod_requests_get", "Calls of GetPod of the Pods API"),
            watches: counter_family("kubelet_pod_requests_watch", "Calls of WatchPods of the Pods API"),
            dropped: counter(
                "kubelet_pod_watch_events_dropped",
                "Events of the Pods API that were not sent, since the watcher did not read",
            ),
        }
    }
}

impl Metrics {
    fn count(&self, method: &Requests, code: Code) {
        let label = RequestLabel { server_api_version: "v1alpha1", status_code: status_code::go_name(code) };
        self.all.get_or_create(&label).inc();
        method.get_or_create(&label).inc();
    }

    fn counted<T>(&self, method: &Requests, result: Result<T, Status>) -> Result<Response<T>, Status> {
        self.count(method, result.as_ref().map_or_else(Status::code, |_| Code::Ok));
        result.map(Response::new)
    }
}

/// The service `v1alpha1.Pods`, with the limits of its clients.
#[derive(Debug, Clone)]
pub(crate) struct PodsApi {
    reporting: Arc<Reporting>,
    clock: Clock,
    limiter: Arc<Mutex<Option<RateLimiter>>>,
    watches: Arc<Semaphore>,
    metrics: Metrics,
}

impl PodsApi {
    /// Returns the service.
    pub(crate) fn new(reporting: Arc<Reporting>, clock: Clock) -> Self {
        Self {
            reporting,
            clock,
            limiter: Arc::new(Mutex::new(Rate::new(CALLS, BURST).map(RateLimiter::new))),
            watches: Arc::new(Semaphore::new(WATCHES)),
            metrics: Metrics::default(),
        }
    }

    /// Takes a call of the rate. A rejected call is not counted, as in the kubelet.
    fn take_call(&self) -> Result<(), Status> {
        let is_allowed =
            self.limiter.lock().as_mut().is_none_or(|limiter| limiter.try_take(self.clock.boot()));
        if is_allowed { Ok(()) } else { Err(Status::resource_exhausted("rejected by rate limit")) }
    }

    /// Returns an error until every source has delivered its pods; then waits for the views of restored pods.
    async fn ready(&self) -> Result<(), Status> {
        if !self.reporting.views.are_sources_ready() {
            return Err(Status::failed_precondition("Kubelet is initializing"));
        }
        self.reporting.views.restored().await;
        Ok(())
    }

    async fn list(&self) -> Result<ListPodsResponse, Status> {
        self.ready().await?;
        let mut views = self.reporting.views.all();
        views.sort_by(|first, second| first.pod_ref.uid.cmp(&second.pod_ref.uid));
        let mut pods = Vec::new();
        let mut bytes = 0_usize;
        for view in views {
            let pod = encoded(EventType::Added, &view)?;
            if pod.len() > limits::ITEM {
                messages::count_left_out(LIST_PODS);
                tracing::info!(pod.uid = %view.pod_ref.uid, bytes = pod.len(), "pod is too large for the list of pods");
                continue;
            }
            bytes = bytes.saturating_add(pod.len());
            if bytes > limits::ANSWER {
                return Err(Status::resource_exhausted(format!(
                    "the pods have more than {} bytes, use WatchPods",
                    limits::ANSWER
                )));
            }
            pods.push(pod);
        }
        Ok(ListPodsResponse { pods })
    }

    async fn get(&self, uid: &str) -> Result<GetPodResponse, Status> {
        self.ready().await?;
        let view = PodUid::parse(uid).ok().and_then(|uid| self.reporting.views.get(&uid));
        let view = view.ok_or_else(|| Status::not_found(format!("pod with UID {uid} not found")))?;
        let pod = encoded(EventType::Added, &view)?;
        if pod.len() > limits::ITEM {
            let text = format!("the pod has {} bytes, more than {}", pod.len(), limits::ITEM);
            return Err(Status::resource_exhausted(text));
        }
        Ok(GetPodResponse { pod })
    }

    async fn watch(&self) -> Result<Bounded<WatchPodsEvent>, Status> {
        self.ready().await?;
        let permit = Arc::clone(&self.watches).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!("{WATCHES} watches are open, no more are served"))
        })?;
        let (sender, receiver) = queue::channel("pods-api-watch", QUEUE);
        let (end_sender, end) = oneshot::channel();
        let reporting = Arc::clone(&self.reporting);
        let metrics = self.metrics.clone();
        quintlet_kit::task::spawn("pods-api-watch", async move {
            let ended = send_events(&reporting.views, &sender).await;
            metrics.count(&metrics.watches, ended.code());
            if ended.code() == Code::ResourceExhausted {
                metrics.dropped.inc();
                tracing::info!("watch of the Pods API ended, its client does not read");
            }
            // The receiver may have been dropped; that is not an error.
            let _ = end_sender.send(ended);
            drop((sender, permit));
        });
        // The status follows the events that are still queued.
        let end = futures::stream::once(end).filter_map(|end| std::future::ready(end.ok().map(Err)));
        Ok(Bounded::new(WATCH_PODS, ReceiverStream::new(receiver).chain(end)))
    }
}

/// Sends events until the client goes away or does not read. Returns the status of the watch.
async fn send_events(views: &PodViews, sender: &mpsc::Sender<Result<WatchPodsEvent, Status>>) -> Status {
    let mut versions = views.subscribe();
    let mut watched = Watched::default();
    let mut is_first = true;
    loop {
        versions.mark_unchanged();
        for (kind, view) in watched.advance(views.all()) {
            // Each event is made when it can be sent: together they may have hundreds of megabytes.
            let place = match tokio::time::timeout(STALL, sender.reserve()).await {
                Ok(Ok(place)) => place,
                Ok(Err(_)) => return Status::cancelled("the client ended the watch"),
                Err(_) => return Status::resource_exhausted("watch client channel closed"),
            };
            let event = encoded(kind, &view).map(|pod| WatchPodsEvent { r#type: kind.into(), pod });
            match event {
                Ok(event) => place.send(Ok(event)),
                Err(status) => return status,
            }
        }
        if std::mem::take(&mut is_first) {
            let r#type = EventType::InitialSyncComplete.into();
            match sender.send_timeout(Ok(WatchPodsEvent { r#type, pod: Vec::new() }), STALL).await {
                Ok(()) => {}
                Err(mpsc::error::SendTimeoutError::Closed(_)) => {
                    return Status::cancelled("the client ended the watch");
                }
                Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                    return Status::resource_exhausted("watch client channel closed");
                }
            }
        }
        // The version only signals a change; the views are read above.
        tokio::select! {
            () = sender.closed() => return Status::cancelled("the client ended the watch"),
            changed = versions.changed() => if changed.is_err() { return Status::unavailable("pod-sync ends") },
        }
    }
}

fn encoded(kind: EventType, view: &PodView) -> Result<Vec<u8>, Status> {
    quintlet_pods_api::encode(&object(kind, view))
        .map_err(|error| Status::internal(format!("failed to marshal pod: {error}")))
}

#[tonic::async_trait]
impl Pods for PodsApi {
    type WatchPodsStream = Bounded<WatchPodsEvent>;

    async fn watch_pods(
        &self,
        _: Request<WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        self.take_call()?;
        let opened = self.watch().await;
        // A watch that is open is counted with the status of its end.
        if let Err(status) = &opened {
            self.metrics.count(&self.metrics.watches, status.code());
        }
        opened.map(Response::new)
    }

    async fn list_pods(&self, _: Request<ListPodsRequest>) -> Result<Response<ListPodsResponse>, Status> {
        self.take_call()?;
        self.metrics.counted(&self.metrics.lists, self.list().await)
    }

    async fn get_pod(&self, request: Request<GetPodRequest>) -> Result<Response<GetPodResponse>, Status> {
        self.take_call()?;
        self.metrics.counted(&self.metrics.gets, self.get(&request.into_inner().pod_uid).await)
    }
}

#[cfg(test)]
mod tests;
