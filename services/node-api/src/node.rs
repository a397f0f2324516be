//! What the node is asked about: the other services behind their sockets.

use std::path::PathBuf;
use std::time::Duration;

use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::paths::{CriSocket, Paths};
use quintlet_kit::socket;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::debug::v1::{ConfigRequest, MetricsRequest};
use quintlet_proto::podsync::v1::checkpoints_client::CheckpointsClient;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::storage_client::StorageClient;
use quintlet_proto::podsync::v1::{
    CheckpointRequest, GetPodRequest, ListPodsRequest, ListStorageReply, ListStorageRequest, PodView,
};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// How long a local answer may take: a service that is stopped accepts connections and says nothing.
const ANSWER: Duration = Duration::from_secs(5);
/// The same for what is asked often and can do without.
const QUICK: Duration = Duration::from_secs(2);
/// Largest answer: a few hundred pods with their objects.
const MAX_ANSWER: usize = 64 << 20;

/// The other services.
#[derive(Debug, Clone)]
pub struct Node {
    paths: Paths,
    podsync: Channel,
    cri: Channel,
}

/// A service that has metrics.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// Its name.
    pub service: String,
    /// Which of several; empty when there is but one.
    pub instance: String,
    /// Its socket.
    pub socket: PathBuf,
}

impl Node {
    /// The services whose sockets are at `paths`.
    #[must_use]
    pub fn new(paths: Paths) -> Self {
        let podsync = socket::channel(paths.podsync());
        let cri = socket::channel(paths.cri(CriSocket::NodeApi));
        Self { paths, podsync, cri }
    }

    /// cri-proxy's socket for this process.
    #[must_use]
    pub fn cri(&self) -> Channel {
        self.cri.clone()
    }

    /// The CRI.
    #[must_use]
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.cri.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    /// All pods of pod-sync, with their objects.
    ///
    /// # Errors
    /// pod-sync does not answer.
    pub async fn pods(&self) -> Result<Vec<PodView>, Status> {
        let mut client = PodSyncClient::new(self.podsync.clone()).max_decoding_message_size(MAX_ANSWER);
        Ok(within(ANSWER, client.list_pods(ListPodsRequest::default())).await?.pods)
    }

    /// A pod by namespace and name; none when there is none.
    ///
    /// # Errors
    /// pod-sync does not answer.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<PodView>, Status> {
        let mut client = PodSyncClient::new(self.podsync.clone()).max_decoding_message_size(MAX_ANSWER);
        let request = GetPodRequest { pod: format!("{namespace}/{name}") };
        match within(ANSWER, client.get_pod(request)).await {
            // pod-sync also takes a static pod's name without the node's; kubectl never does.
            Ok(view) => Ok(Some(view).filter(|v| v.name == name && v.namespace == namespace)),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    /// What pods' volumes take on the disk, as last measured, and what the runtime's file systems have.
    ///
    /// # Errors
    /// pod-sync does not answer, or is too old to measure.
    pub async fn storage(&self) -> Result<ListStorageReply, Status> {
        let mut client = StorageClient::new(self.podsync.clone()).max_decoding_message_size(MAX_ANSWER);
        within(ANSWER, client.list(ListStorageRequest {})).await
    }

    /// Has a running container checkpointed; where the file is. Takes as long as the runtime does, which pod-sync bounds.
    ///
    /// # Errors
    /// It cannot be done; the message is for the user.
    pub async fn checkpoint(&self, uid: &str, container: &str, seconds: i64) -> Result<String, Status> {
        let request = CheckpointRequest {
            pod_uid: uid.to_owned(),
            container: container.to_owned(),
            timeout_seconds: seconds,
        };
        let mut client = CheckpointsClient::new(self.podsync.clone());
        Ok(client.checkpoint(request).await?.into_inner().location)
    }

    /// Whether a service of pod-sync says that it serves.
    pub async fn podsync_serves(&self, service: &str) -> bool {
        let mut client = HealthClient::new(self.podsync.clone());
        let request = HealthCheckRequest { service: service.to_owned() };
        match within(QUICK, client.check(request)).await {
            Ok(reply) => reply.status() == ServingStatus::Serving,
            // An older pod-sync that does not tell of its loop answers at least.
            Err(status) => status.code() == Code::NotFound,
        }
    }

    /// Where metrics are to be had now: the five, with every instance of probe-service.
    #[must_use]
    pub fn sources(&self) -> Vec<Source> {
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
        let entries = std::fs::read_dir(self.paths.probe_dir()).into_iter().flatten().flatten();
        let mut probes: Vec<Source> = entries
            .map(|e| e.path())
            .filter(|p| p.extension().is_some_and(|e| e == "sock"))
            .filter_map(|socket| {
                let instance = socket.file_stem()?.to_str().filter(|n| !n.starts_with('.'))?.to_owned();
                Some(Source { service: "probe-service".to_owned(), instance, socket })
            })
            .collect();
        if probes.is_empty() {
            probes.push(one("probe-service", self.paths.probe("none")));
        }
        out.extend(probes);
        out.sort();
        out
    }

    /// What one service runs with: a KubeletConfiguration as JSON.
    ///
    /// # Errors
    /// It does not answer, or is too old to say.
    pub async fn configuration(&self, source: &Source) -> Result<String, Status> {
        let mut client = DebugClient::new(socket::channel(source.socket.clone()));
        Ok(within(QUICK, client.config(ConfigRequest {})).await?.kubelet_configuration)
    }

    /// The metrics of one service, as OpenMetrics text.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn metrics(&self, source: &Source) -> Result<String, Status> {
        let mut client = DebugClient::new(socket::channel(source.socket.clone()));
        Ok(within(QUICK, client.metrics(MetricsRequest {})).await?.text)
    }
}

/// The answer to a call, in time.
///
/// # Errors
/// It is an error, or late.
async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded(format!("nothing within {}s", limit.as_secs()))),
    }
}
