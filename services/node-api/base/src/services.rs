//! Clients of the other services.

use std::path::PathBuf;
use std::time::Duration;

use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::args::paths::{CriSocket, Paths, socket_names};
use quintlet_kit::messages::{timely, whole_within};
use quintlet_kit::neighbour::admit;
use quintlet_kit::stack::Caller;
use quintlet_kit::{socket, task};
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::debug::v1::{ConfigRequest, MetricsRequest};
use quintlet_proto::podsync::v1::checkpoints_client::CheckpointsClient;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::storage_client::StorageClient;
use quintlet_proto::podsync::v1::watch_pods_event::Event;
use quintlet_proto::podsync::v1::{
    CheckpointRequest, GetPodRequest, ListStorageReply, ListStorageRequest, PodView, WatchPodsEvent,
    WatchPodsRequest,
};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tracing::Span;

/// Time limit of a call on the node. A stopped service accepts connections and does not answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Time limit of frequent calls whose result is optional.
const QUICK: Duration = Duration::from_secs(2);
/// Maximum size of an answer of the runtime.
const MAX_ANSWER: usize = 64 << 20;
/// Bytes of whole pods that pod-sync sends before they are read.
const LIST_WINDOW: u32 = 256 << 10;

/// A connection whose calls are in the trace of the request that they serve.
pub type TracedChannel = Caller<Channel>;

/// Clients of pod-sync and cri-proxy.
#[derive(Debug, Clone)]
pub struct Services {
    paths: Paths,
    podsync: TracedChannel,
    cri: TracedChannel,
}

/// The pods of pod-sync at one time, in the order of namespaces and names.
///
/// It is the snapshot of a watch, since ListPods of an earlier release is one message.
#[derive(Debug)]
pub struct PodSnapshot {
    events: Streaming<WatchPodsEvent>,
    /// Serves the stream until its end.
    _connection: TracedChannel,
}

impl PodSnapshot {
    async fn open(channel: TracedChannel, request: WatchPodsRequest) -> Result<Self, Status> {
        let request = WatchPodsRequest { hello: Some(quintlet_proto::hello()), ..request };
        let events = within(ANSWER, PodSyncClient::new(channel.clone()).watch_pods(request)).await?;
        Ok(Self { events, _connection: channel })
    }

    /// Returns the next pod, or `None` after the last one. A pod that is too large for a message is left out.
    ///
    /// # Errors
    /// Fails if pod-sync sends nothing for longer than a call may take, or ends the stream early.
    pub async fn next(&mut self) -> Result<Option<PodView>, Status> {
        while let Some(message) = timely(ANSWER, self.events.message()).await? {
            match message.event {
                Some(Event::Pod(view)) if view.pod.is_empty() => {
                    tracing::debug!(pod.uid = view.uid, "pod left out, it is too large");
                }
                Some(Event::Pod(view)) => return Ok(Some(view)),
                Some(Event::SnapshotEnd(_)) => return Ok(None),
                Some(Event::Hello(hello)) => admit("pod-sync", &hello)?,
                // A pod is removed only after the snapshot. Or it is an event of a later version.
                Some(Event::Removed(_) | Event::Problems(_)) | None => {}
            }
        }
        Err(Status::unavailable("pod-sync ended the stream of pods before the last one"))
    }
}

/// A service that has metrics.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// Name of the service, such as `pleg-service`.
    pub service: String,
    /// Name of the instance; empty if there is only one.
    pub instance: String,
    /// Socket on which the service serves its metrics.
    pub socket: PathBuf,
}

impl Services {
    /// Creates clients for the sockets at `paths`.
    #[must_use]
    pub fn new(paths: Paths) -> Self {
        let podsync = socket::caller(paths.podsync());
        let cri = socket::caller(paths.cri(CriSocket::NodeApi));
        Self { paths, podsync, cri }
    }

    /// Returns the connection to cri-proxy's socket for this process.
    #[must_use]
    pub fn cri(&self) -> TracedChannel {
        self.cri.clone()
    }

    /// Returns a client of the CRI.
    #[must_use]
    pub fn runtime(&self) -> RuntimeServiceClient<TracedChannel> {
        RuntimeServiceClient::new(self.cri.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns all pods of pod-sync, with their objects: the JSON of a v1 Pod that pod-sync has serialized.
    /// They may have hundreds of megabytes, so each is received when it is asked for.
    ///
    /// The connection serves this call alone, with a small window: pods that a slow client does not take
    /// would use up the window of the connection, and stop all other calls on it.
    ///
    /// # Errors
    /// Fails if pod-sync does not answer.
    pub async fn pods(&self) -> Result<PodSnapshot, Status> {
        let channel = Caller::new(socket::channel_with_window(self.paths.podsync(), LIST_WINDOW));
        PodSnapshot::open(channel, WatchPodsRequest::default()).await
    }

    /// Returns all pods of pod-sync, with what statistics need of their objects. A pod-sync of an earlier
    /// release sends whole objects.
    ///
    /// # Errors
    /// Fails if pod-sync does not answer, or sends no pod for longer than a call may take.
    pub async fn pods_for_statistics(&self) -> Result<Vec<PodView>, Status> {
        let request = WatchPodsRequest { for_statistics: true, ..WatchPodsRequest::default() };
        let mut snapshot = PodSnapshot::open(self.podsync.clone(), request).await?;
        let mut pods = Vec::new();
        while let Some(view) = snapshot.next().await? {
            pods.push(view);
        }
        Ok(pods)
    }

    /// Returns a pod by namespace and name. The span of the request names its UID.
    ///
    /// # Errors
    /// Fails if pod-sync does not answer.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<PodView>, Status> {
        let mut client = PodSyncClient::new(self.podsync.clone());
        let request = GetPodRequest { pod: format!("{namespace}/{name}") };
        match within(ANSWER, client.get_pod(request)).await {
            // pod-sync also accepts the name of a static pod without the suffix of the node. kubectl never
            // sends it.
            Ok(view) if view.name == name && view.namespace == namespace => {
                Span::current().record("k8s.pod.uid", &view.uid);
                Ok(Some(view))
            }
            Ok(_) => Ok(None),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => {
                record_error(&status);
                Err(status)
            }
        }
    }

    /// Returns the disk usage of volumes, as last measured, and the file systems of the runtime.
    ///
    /// # Errors
    /// Fails if pod-sync does not answer, or is too old to have the method.
    pub async fn storage(&self) -> Result<ListStorageReply, Status> {
        let mut client = StorageClient::new(self.podsync.clone());
        whole_within(ANSWER, client.list(ListStorageRequest {})).await
    }

    /// Checkpoints a running container. Returns the path of the file. pod-sync bounds the time.
    ///
    /// # Errors
    /// Fails with a message for the user.
    pub async fn checkpoint(&self, uid: &str, container: &str, seconds: i64) -> Result<String, Status> {
        let request = CheckpointRequest {
            pod_uid: uid.to_owned(),
            container: container.to_owned(),
            timeout_seconds: seconds,
        };
        let mut client = CheckpointsClient::new(self.podsync.clone());
        Ok(client.checkpoint(request).await?.into_inner().location)
    }

    /// Returns whether pod-sync reports a service as SERVING.
    pub async fn podsync_serves(&self, service: &str) -> bool {
        let mut client = HealthClient::new(self.podsync.clone());
        let request = HealthCheckRequest { service: service.to_owned() };
        match within(QUICK, client.check(request)).await {
            Ok(reply) => reply.status() == ServingStatus::Serving,
            // An older pod-sync has no health of its loop. It is enough that it answers.
            Err(status) => status.code() == Code::NotFound,
        }
    }

    /// Returns all services that have metrics, with every instance of probe-service.
    pub async fn sources(&self) -> Vec<Source> {
        let node = self.clone();
        task::blocking(move || node.find_sources()).await
    }

    fn find_sources(&self) -> Vec<Source> {
        let one = |service: &str, socket: PathBuf| Source {
            service: service.to_owned(),
            instance: String::new(),
            socket,
        };
        let mut out = vec![
            one("cri-proxy", self.paths.cri(CriSocket::NodeApi)),
            one("pleg-service", self.paths.pleg()),
            one("status-reporter", self.paths.status()),
            one("pod-sync", self.paths.podsync()),
        ];
        let probes = socket_names(&self.paths.probe_dir()).into_iter().map(|instance| Source {
            service: "probe-service".to_owned(),
            socket: self.paths.probe(&instance),
            instance,
        });
        let mut probes: Vec<Source> = probes.collect();
        if probes.is_empty() {
            probes.push(one("probe-service", self.paths.probe("none")));
        }
        out.extend(probes);
        out.sort();
        out
    }

    /// Returns the configuration of a service: a KubeletConfiguration as JSON.
    ///
    /// # Errors
    /// Fails if the service does not answer, or is too old to have the method.
    pub async fn configuration(&self, source: &Source) -> Result<String, Status> {
        let mut client = DebugClient::new(socket::channel(source.socket.clone()));
        Ok(within(QUICK, client.config(ConfigRequest {})).await?.kubelet_configuration)
    }

    /// Returns the metrics of a service as OpenMetrics text.
    ///
    /// # Errors
    /// Fails if the service does not answer.
    pub async fn metrics(&self, source: &Source) -> Result<String, Status> {
        let mut client = DebugClient::new(socket::channel(source.socket.clone()));
        Ok(whole_within(QUICK, client.metrics(MetricsRequest {})).await?.text)
    }
}

/// Records the error of a call in the span of the request.
pub fn record_error(status: &Status) {
    Span::current().record("error", format!("{:?}: {}", status.code(), status.message()));
}

/// Awaits a call with a time limit.
///
/// # Errors
/// Returns the error of the call, or DEADLINE_EXCEEDED.
async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    timely(limit, call).await.map(tonic::Response::into_inner)
}
