//! The runtime and its hints behind cri-proxy's read socket.
//!
//! Lists are asked for by their streams: a full one may be larger than a message. cri-proxy has the streams whatever the runtime
//! has; only an older one passes on that the runtime lacks them, and then the list is asked for in whole.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use http::uri::PathAndQuery;
use k8s_cri::v1;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_model::ids::PodRef;
use quintlet_model::labels;
use quintlet_model::runtime::{Container, Sandbox};
use quintlet_proto::runtime::v1::WatchHintsRequest;
use quintlet_proto::runtime::v1::runtime_events_client::RuntimeEventsClient;
use quintlet_telemetry::propagate::PropagatingInterceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::convert;
use crate::seams::{
    ContainerRuntime, Filter, HintEvent, HintStream, ListedContainer, ListedSandbox, ReadError,
};

/// The largest answer taken, as the kubelet's (cri-client utils.go).
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

/// The CRI on a unix socket.
#[derive(Debug, Clone)]
pub struct CriRuntime {
    socket: PathBuf,
    client: RuntimeServiceClient<InterceptedService<Channel, PropagatingInterceptor>>,
    lists: Lists,
    limit: Duration,
}

impl CriRuntime {
    /// Connects when first asked, and again whenever needed. A list or a status that takes longer than `limit` is an error.
    #[must_use]
    pub fn new(socket: PathBuf, limit: Duration) -> Self {
        let channel = quintlet_kit::socket::channel(socket.clone());
        let lists = Lists::new(InterceptedService::new(channel.clone(), PropagatingInterceptor))
            .max_decoding_message_size(MAX_MESSAGE);
        let client = RuntimeServiceClient::with_interceptor(channel, PropagatingInterceptor)
            .max_decoding_message_size(MAX_MESSAGE);
        Self { socket, client, lists, limit }
    }
}

impl CriRuntime {
    async fn call<T>(
        &self,
        method: &'static str,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ReadError> {
        match tokio::time::timeout(self.limit, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(ReadError::Call { method, source: placed(status, &self.socket) }),
            Err(_) => Err(ReadError::Timeout { what: method, limit: self.limit }),
        }
    }
}

type Lists = tonic::client::Grpc<InterceptedService<Channel, PropagatingInterceptor>>;

impl CriRuntime {
    /// All items of a list, by the stream `method`; None: there is no such stream. An error loses the items that came before it.
    ///
    /// The bindings have no list streams yet. They take the lists' requests, and their messages have the items where the lists'
    /// answers have them: in field 1.
    async fn streamed<Q, R, T>(
        &self,
        method: &'static str,
        request: Q,
        take: impl Fn(R) -> Vec<T>,
    ) -> Result<Option<Vec<T>>, ReadError>
    where
        Q: prost::Message + Send + Sync + 'static,
        R: prost::Message + Default + Send + Sync + 'static,
    {
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{method}"));
        let path = path.map_err(|e| ReadError::Data(e.to_string()))?;
        let mut client = self.lists.clone();
        let listing = async {
            client.ready().await.map_err(|e| Status::unavailable(format!("not connected: {e}")))?;
            let codec = ProstCodec::<Q, R>::default();
            let mut messages =
                client.server_streaming(Request::new(request), path, codec).await?.into_inner();
            let mut items = Vec::new();
            while let Some(message) = messages.message().await? {
                items.extend(take(message));
            }
            Ok(Response::new(items))
        };
        match self.call(method, listing).await {
            Ok(items) => Ok(Some(items)),
            Err(ReadError::Call { source, .. }) if source.code() == Code::Unimplemented => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Names the socket where it is the connection that failed, and not the call.
pub(crate) fn placed(status: Status, socket: &Path) -> Status {
    if std::error::Error::source(&status).is_none() {
        return status;
    }
    Status::new(status.code(), format!("{}: {}", socket.display(), status.message()))
}

/// NOT_FOUND is an answer, not a failure.
fn known<T>(answer: Result<T, ReadError>) -> Result<Option<T>, ReadError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(ReadError::Call { source, .. }) if source.code() == Code::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[async_trait]
impl ContainerRuntime for CriRuntime {
    async fn sandboxes(&self, filter: Filter) -> Result<Vec<ListedSandbox>, ReadError> {
        let filter = match filter {
            Filter::All => None,
            Filter::Pod(uid) => Some(v1::PodSandboxFilter {
                label_selector: [(labels::POD_UID.to_owned(), uid.to_string())].into(),
                ..Default::default()
            }),
            Filter::Id(id) => Some(v1::PodSandboxFilter { id, ..Default::default() }),
        };
        let request = v1::ListPodSandboxRequest { filter };
        let take = |m: v1::ListPodSandboxResponse| m.items.into_iter().map(convert::listed_sandbox).collect();
        if let Some(listed) = self.streamed("StreamPodSandboxes", request.clone(), take).await? {
            return Ok(listed);
        }
        let mut client = self.client.clone();
        Ok(take(self.call("ListPodSandbox", client.list_pod_sandbox(request)).await?))
    }

    async fn containers(&self, filter: Filter) -> Result<Vec<ListedContainer>, ReadError> {
        let filter = match filter {
            Filter::All => None,
            Filter::Pod(uid) => Some(v1::ContainerFilter {
                label_selector: [(labels::POD_UID.to_owned(), uid.to_string())].into(),
                ..Default::default()
            }),
            Filter::Id(id) => Some(v1::ContainerFilter { id, ..Default::default() }),
        };
        let request = v1::ListContainersRequest { filter };
        let take =
            |m: v1::ListContainersResponse| m.containers.into_iter().map(convert::listed_container).collect();
        if let Some(listed) = self.streamed("StreamContainers", request.clone(), take).await? {
            return Ok(listed);
        }
        let mut client = self.client.clone();
        Ok(take(self.call("ListContainers", client.list_containers(request)).await?))
    }

    async fn sandbox(&self, id: &str) -> Result<Option<(PodRef, Sandbox)>, ReadError> {
        let mut client = self.client.clone();
        let request = v1::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        match known(self.call("PodSandboxStatus", client.pod_sandbox_status(request)).await)? {
            Some(answer) => convert::sandbox(answer.status).map(Some),
            None => Ok(None),
        }
    }

    async fn container(&self, id: &str, sandbox_id: &str) -> Result<Option<Container>, ReadError> {
        let mut client = self.client.clone();
        let request = v1::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        match known(self.call("ContainerStatus", client.container_status(request)).await)? {
            Some(answer) => convert::container(answer.status, sandbox_id).map(Some),
            None => Ok(None),
        }
    }
}

/// `RuntimeEvents.Watch` on a unix socket.
#[derive(Debug, Clone)]
pub struct ProxyHints {
    socket: PathBuf,
    client: RuntimeEventsClient<Channel>,
}

impl ProxyHints {
    /// Connects when opened.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        let channel = quintlet_kit::socket::channel(socket.clone());
        Self { socket, client: RuntimeEventsClient::new(channel) }
    }
}

#[async_trait]
impl HintStream for ProxyHints {
    async fn open(&self) -> Result<BoxStream<'static, Result<HintEvent, Status>>, Status> {
        let request = WatchHintsRequest { hello: Some(quintlet_proto::hello()) };
        let opened = self.client.clone().watch(request).await;
        let stream = opened.map_err(|e| placed(e, &self.socket))?.into_inner();
        Ok(stream.filter_map(|event| async { event.map(convert::hint).transpose() }).boxed())
    }
}
