//! Clients of cri-proxy's read socket: the CRI and the hint stream.
//!
//! Lists are read as streams ([`lists`]), since a list may be larger than a message.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use quintlet_cri_api::v1;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::lists::{self, List, MAX_MESSAGE};
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::stack::Caller;
use quintlet_model::ids::PodRef;
use quintlet_model::labels;
use quintlet_model::runtime::{Container, Sandbox};
use quintlet_proto::runtime::v1::runtime_event::Event;
use quintlet_proto::runtime::v1::runtime_events_client::RuntimeEventsClient;
use quintlet_proto::runtime::v1::{RuntimeEvent, WatchHintsRequest};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::convert::{self, Containers, Sandboxes};
use crate::traits::{
    ContainerRuntime, Filter, HintEvent, HintStream, ListedContainer, ListedSandbox, ReadError,
};

/// Client of the CRI on a unix socket.
#[derive(Debug, Clone)]
pub struct CriRuntime {
    socket: PathBuf,
    client: RuntimeServiceClient<Service>,
    service: Service,
    limit: Duration,
}

impl CriRuntime {
    /// Creates a client that connects on demand. `limit` applies to each list and each status.
    #[must_use]
    pub fn new(socket: PathBuf, limit: Duration) -> Self {
        let service = quintlet_kit::socket::caller(socket.clone());
        let client = RuntimeServiceClient::new(service.clone()).max_decoding_message_size(MAX_MESSAGE);
        Self { socket, client, service, limit }
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

type Service = Caller<Channel>;

impl CriRuntime {
    /// Reads all items of a list, or none if the stream fails.
    async fn listed<Q, R, T>(
        &self,
        method: &'static str,
        list: List,
        request: Q,
        take: impl Fn(R, &mut Vec<T>),
    ) -> Result<Vec<T>, ReadError>
    where
        Q: prost::Message + Clone + Send + Sync + 'static,
        R: prost::Message + Default + Send + Sync + 'static,
    {
        let mut items = Vec::new();
        let listing = list.each(self.service.clone(), Request::new(request), |m| take(m, &mut items));
        self.call(method, async { listing.await.map(Response::new) }).await?;
        Ok(items)
    }
}

/// Adds the path of the socket to the status of a failed connection.
pub(crate) fn placed(status: Status, socket: &Path) -> Status {
    if std::error::Error::source(&status).is_none() {
        return status;
    }
    Status::new(status.code(), format!("{}: {}", socket.display(), status.message()))
}

/// Converts NOT_FOUND to none.
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
        let take =
            |m: Sandboxes, items: &mut Vec<_>| items.extend(m.items.into_iter().map(convert::listed_sandbox));
        self.listed("ListPodSandbox", lists::SANDBOXES, request, take).await
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
        let take = |m: Containers, items: &mut Vec<_>| {
            items.extend(m.items.into_iter().map(convert::listed_container))
        };
        self.listed("ListContainers", lists::CONTAINERS, request, take).await
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

/// Client of `RuntimeEvents.Watch` on a unix socket.
#[derive(Debug, Clone)]
pub struct ProxyHints {
    socket: PathBuf,
    client: RuntimeEventsClient<Channel>,
    peer: Arc<Neighbour>,
}

impl ProxyHints {
    /// Returns the hints of the cri-proxy at a socket. Connects when it subscribes.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        let channel = quintlet_kit::socket::channel(socket.clone());
        let peer = Arc::new(Neighbour::new("cri-proxy", &[]));
        Self { socket, client: RuntimeEventsClient::new(channel), peer }
    }
}

#[async_trait]
impl HintStream for ProxyHints {
    async fn open(&self) -> Result<BoxStream<'static, Result<HintEvent, Status>>, Status> {
        let request = WatchHintsRequest { hello: Some(quintlet_proto::hello()) };
        let opened = self.client.clone().watch(request).await;
        let stream = opened.map_err(|e| placed(e, &self.socket))?.into_inner();
        let peer = Arc::clone(&self.peer);
        let hint = move |event: Result<RuntimeEvent, Status>| -> Result<Option<HintEvent>, Status> {
            let event = event?;
            if let Some(Event::Hello(hello)) = &event.event {
                peer.greeted(hello)?;
            }
            Ok(convert::hint(event))
        };
        Ok(stream.filter_map(move |event| std::future::ready(hint(event).transpose())).boxed())
    }
}
