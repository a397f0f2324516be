//! The services behind their sockets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_kit::paths::{CriSocket, Paths};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::error::Error;

/// How long an answer may take: a service that is stopped accepts connections and says nothing.
pub const ANSWER: Duration = Duration::from_secs(5);

/// Largest answer: a full ring of spans, or a few hundred pods with their objects.
pub const MAX_ANSWER: usize = 64 << 20;

/// One service at one socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Name, with the instance where there may be several.
    pub service: String,
    /// Its socket.
    pub path: PathBuf,
}

impl Peer {
    /// The service `service` at `path`.
    #[must_use]
    pub fn new(service: impl Into<String>, path: PathBuf) -> Self {
        Self { service: service.into(), path }
    }

    /// pod-sync.
    #[must_use]
    pub fn pod_sync(paths: &Paths) -> Self {
        Self::new("pod-sync", paths.podsync())
    }

    /// pleg-service.
    #[must_use]
    pub fn pleg(paths: &Paths) -> Self {
        Self::new("pleg-service", paths.pleg())
    }

    /// cri-proxy, on the first of its sockets that exists here: the one for readers on a node, another one in a container.
    #[must_use]
    pub fn cri_proxy(paths: &Paths) -> Self {
        // Every socket answers for health; a container has those of its own service only.
        let of_all =
            [CriSocket::Read, CriSocket::Sync, CriSocket::Admin, CriSocket::NodeApi, CriSocket::Probe];
        let here = of_all.into_iter().find(|socket| paths.cri(*socket).exists());
        Self::new("cri-proxy", paths.cri(here.unwrap_or(CriSocket::Read)))
    }

    /// status-reporter.
    #[must_use]
    pub fn status_reporter(paths: &Paths) -> Self {
        Self::new("status-reporter", paths.status())
    }

    /// The node API.
    #[must_use]
    pub fn node_api(paths: &Paths) -> Self {
        Self::new("node-api", paths.node_api())
    }

    /// All instances of probe-service, by name.
    #[must_use]
    pub fn probes(paths: &Paths) -> Vec<Self> {
        let mut out: Vec<Self> = sockets(&paths.probe_dir())
            .into_iter()
            .map(|path| {
                let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let service = if id.starts_with("probe") {
                    format!("probe-service {id}")
                } else {
                    format!("probe-service probe-{id}")
                };
                Self::new(service, path)
            })
            .collect();
        out.sort_by(|a, b| a.service.cmp(&b.service));
        out
    }

    /// The five, in the order in which they start, and the node API where there is one. Without any instance of probe-service its directory stands for it.
    #[must_use]
    pub fn all(paths: &Paths) -> Vec<Self> {
        let mut out = vec![Self::cri_proxy(paths), Self::pleg(paths)];
        let probes = Self::probes(paths);
        if probes.is_empty() {
            out.push(Self::new("probe-service", paths.probe("*")));
        }
        out.extend(probes);
        out.extend([Self::status_reporter(paths), Self::pod_sync(paths)]);
        // A node need not have one.
        out.extend(Some(Self::node_api(paths)).filter(|api| api.path.exists()));
        out
    }

    /// A channel, once somebody listens.
    ///
    /// # Errors
    /// Nobody does.
    pub async fn channel(&self) -> Result<Channel, Error> {
        tokio::net::UnixStream::connect(&self.path).await.map_err(|source| Error::Unreachable {
            service: self.service.clone(),
            path: self.path.clone(),
            source,
        })?;
        Ok(quintlet_kit::socket::channel(self.path.clone()))
    }

    /// The answer to a unary call, or to the opening of a stream.
    ///
    /// # Errors
    /// It is an error, or does not come within [`ANSWER`].
    pub async fn answer<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(ANSWER, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.failed(&status)),
            Err(_) => Err(self.silent(format!("nothing within {}s", ANSWER.as_secs()))),
        }
    }

    /// An error of this service.
    #[must_use]
    pub fn failed(&self, status: &Status) -> Error {
        // Of our own side of a connection, not of the service.
        if std::error::Error::source(status).is_some() && status.code() != Code::NotFound {
            return self.silent("the connection broke".to_owned());
        }
        let message = crate::text::clean(status.message());
        match status.code() {
            Code::NotFound => Error::NotFound(message),
            Code::Unavailable => self.silent(message),
            code => Error::Refused { service: self.service.clone(), code, message },
        }
    }

    fn silent(&self, why: String) -> Error {
        Error::Silent { service: self.service.clone(), path: self.path.clone(), why }
    }
}

fn sockets(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let hidden = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
    entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "sock") && !hidden(p)).collect()
}
