//! Clients of the services' sockets.

use std::path::PathBuf;
use std::time::Duration;

use quintlet_kit::args::paths::{CriSocket, Paths, socket_names};
use quintlet_kit::messages::Chunk;
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};

use crate::error::Error;

/// Time limit of a call. The kernel accepts connections for a stopped process, which then sends no response.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest response, in bytes: a full ring buffer of spans, or a few hundred pods with their objects.
pub(crate) const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// A service and its socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Name of the service, followed by the name of the instance for probe-service.
    pub(crate) service: String,
    pub(crate) path: PathBuf,
}

impl Peer {
    #[must_use]
    pub(crate) fn new(service: impl Into<String>, path: PathBuf) -> Self {
        Self { service: service.into(), path }
    }

    #[must_use]
    pub(crate) fn pod_sync(paths: &Paths) -> Self {
        Self::new("pod-sync", paths.podsync())
    }

    #[must_use]
    pub(crate) fn pleg(paths: &Paths) -> Self {
        Self::new("pleg-service", paths.pleg())
    }

    /// Returns cri-proxy at the first of its sockets that exists: the read socket on a node, another socket
    /// in a container.
    #[must_use]
    pub(crate) fn cri_proxy(paths: &Paths) -> Self {
        // Every socket serves the health service. A container mounts only the sockets of its own service.
        let all = [CriSocket::Read, CriSocket::Sync, CriSocket::Admin, CriSocket::NodeApi, CriSocket::Probe];
        let first = all.into_iter().find(|socket| paths.cri(*socket).exists());
        Self::new("cri-proxy", paths.cri(first.unwrap_or(CriSocket::Read)))
    }

    #[must_use]
    pub(crate) fn status_reporter(paths: &Paths) -> Self {
        Self::new("status-reporter", paths.status())
    }

    #[must_use]
    pub(crate) fn node_api(paths: &Paths) -> Self {
        Self::new("node-api", paths.node_api())
    }

    /// Returns all instances of probe-service, sorted by name.
    #[must_use]
    pub(crate) fn probes(paths: &Paths) -> Vec<Self> {
        let instance = |id: String| {
            let prefix = if id.starts_with("probe") { "" } else { "probe-" };
            Self::new(format!("probe-service {prefix}{id}"), paths.probe(&id))
        };
        let mut out: Vec<Self> = socket_names(&paths.probe_dir()).into_iter().map(instance).collect();
        out.sort_by(|a, b| a.service.cmp(&b.service));
        out
    }

    /// Returns the five services in start order, then the node API if its socket exists. Without an instance
    /// of probe-service, a placeholder path in its directory represents the service.
    #[must_use]
    pub(crate) fn all(paths: &Paths) -> Vec<Self> {
        let mut out = vec![Self::cri_proxy(paths), Self::pleg(paths)];
        let probes = Self::probes(paths);
        if probes.is_empty() {
            out.push(Self::new("probe-service", paths.probe("*")));
        }
        out.extend(probes);
        out.extend([Self::status_reporter(paths), Self::pod_sync(paths)]);
        // The node API is optional.
        out.extend(Some(Self::node_api(paths)).filter(|api| api.path.exists()));
        out
    }

    /// Returns a channel to the service.
    ///
    /// # Errors
    /// The socket does not accept connections.
    pub(crate) async fn channel(&self) -> Result<Channel, Error> {
        tokio::net::UnixStream::connect(&self.path).await.map_err(|source| Error::Unreachable {
            service: self.service.clone(),
            path: self.path.clone(),
            source,
        })?;
        Ok(quintlet_kit::socket::channel(self.path.clone()))
    }

    /// Returns the response to `call`, which is unary or opens a stream.
    ///
    /// # Errors
    /// The service returns an error, or no response within [`RESPONSE_TIMEOUT`].
    pub(crate) async fn call<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(RESPONSE_TIMEOUT, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.error(&status)),
            Err(_) => Err(self.unresponsive(format!("no response within {}s", RESPONSE_TIMEOUT.as_secs()))),
        }
    }

    /// Returns a list that comes as a stream of chunks. The time limit is that of each chunk: the pods of a
    /// node may have hundreds of megabytes.
    ///
    /// # Errors
    /// The service returns an error, or no chunk within [`RESPONSE_TIMEOUT`].
    pub(crate) async fn list<T: Chunk>(
        &self,
        call: impl Future<Output = Result<Response<Streaming<T>>, Status>>,
    ) -> Result<T, Error> {
        let mut chunks = self.call(call).await?;
        let mut list = T::default();
        while let Some(chunk) = self.call(next(&mut chunks)).await? {
            list.append(chunk);
        }
        Ok(list)
    }

    /// Converts a status of this service to an error.
    #[must_use]
    pub(crate) fn error(&self, status: &Status) -> Error {
        // A status with a source was made by the client transport, not by the service.
        if std::error::Error::source(status).is_some() && status.code() != Code::NotFound {
            return self.unresponsive("the connection closed".to_owned());
        }
        let message = quintctl_text::clean(status.message());
        match status.code() {
            Code::NotFound => Error::NotFound(message),
            Code::Unavailable => self.unresponsive(message),
            code => Error::Rpc { service: self.service.clone(), code, message },
        }
    }

    fn unresponsive(&self, reason: String) -> Error {
        Error::Unresponsive { service: self.service.clone(), path: self.path.clone(), reason }
    }
}

async fn next<T>(chunks: &mut Streaming<T>) -> Result<Response<Option<T>>, Status> {
    chunks.message().await.map(Response::new)
}
