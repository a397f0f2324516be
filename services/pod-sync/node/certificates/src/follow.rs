//! A client of the API server that follows the kubeconfig: each request goes through the client of the newest
//! version of the files.
//!
//! A request that is under way, such as a watch, keeps the connection on which it began.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pod_sync_clients::NoIdentity;
use quintlet_kit::task;
use quintlet_kit::timers::FileChecks;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::kubeconfig::KubeconfigError;
use crate::published::PublishedDirectory;

/// Read timeout of a connection. It is longer than any watch without events.
const SILENCE: Duration = Duration::from_secs(300);
/// Longest wait between checks of the files, for a credential that another program renews.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Longest wait of a request for the first client, during a bootstrap.
const FIRST_CLIENT: Duration = Duration::from_secs(30);

/// Returns a client of a kubeconfig.
///
/// # Errors
/// Fails if the kubeconfig cannot be used.
// Blocks: the files are read at the start, and by tasks on a blocking thread.
pub(crate) async fn client_of(path: &Path) -> Result<kube::Client, KubeconfigError> {
    let content = |reason: &dyn std::error::Error| KubeconfigError::Content {
        path: path.to_owned(),
        reason: quintlet_kit::error_chain(reason),
    };
    let kubeconfig = kube::config::Kubeconfig::read_from(path).map_err(|error| content(&error))?;
    let options = kube::config::KubeConfigOptions::default();
    let mut config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|error| content(&error))?;
    // The roots of the system, which no connection would use, take 0.1 MiB per client.
    if config.cluster_url.scheme_str() == Some("http") {
        config.root_cert = Some(Vec::new());
    }
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    kube::Client::try_from(config).map_err(|error| content(&error))
}

/// Returns a client of a kubeconfig, read on a blocking thread.
pub(crate) async fn read_client(path: PathBuf) -> Result<kube::Client, KubeconfigError> {
    let runtime = tokio::runtime::Handle::current();
    task::blocking(move || runtime.block_on(client_of(&path))).await
}

/// The client of the node, which follows its kubeconfig.
#[derive(Clone)]
pub struct NodeClient {
    path: PathBuf,
    newest: watch::Sender<Option<kube::Client>>,
    changed: Arc<Notify>,
    published: Option<PublishedDirectory>,
}

impl std::fmt::Debug for NodeClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeClient").field("path", &self.path).finish_non_exhaustive()
    }
}

impl NodeClient {
    /// Returns the client of a kubeconfig that exists.
    ///
    /// # Errors
    /// Fails if the kubeconfig cannot be used. An API server that cannot be reached is not an error.
    pub async fn open(path: &Path) -> Result<Self, KubeconfigError> {
        let this = Self::awaiting(path);
        this.newest.send_replace(Some(client_of(path).await?));
        Ok(this)
    }

    /// Returns the client of a kubeconfig that a bootstrap will write. Requests wait for it, 30 s at most.
    #[must_use]
    pub fn awaiting(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            newest: watch::Sender::new(None),
            changed: Arc::new(Notify::new()),
            published: None,
        }
    }

    /// Sets the directory of a copy of the kubeconfig for services without root. The copy is written if the
    /// directory exists.
    #[must_use]
    pub fn with_copy(self, directory: &Path) -> Self {
        Self { published: Some(PublishedDirectory::new(directory)), ..self }
    }

    /// Returns a client whose requests each go through the newest client.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        let newest = self.newest.subscribe();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let mut newest = newest.clone();
            async move {
                let first = tokio::time::timeout(FIRST_CLIENT, newest.wait_for(Option::is_some)).await;
                let client = first.ok().and_then(|found| found.ok().and_then(|client| client.clone()));
                let client = client.ok_or_else(|| kube::Error::Service(NoIdentity::NoCertificate.into()))?;
                client.send(request).await
            }
        });
        kube::Client::new(service, "default")
    }

    /// Returns a client as [`NodeClient::client`] does, whose requests wait until `opened` is true, 30 s at
    /// most.
    #[must_use]
    pub fn client_after(&self, opened: watch::Receiver<bool>) -> kube::Client {
        let client = self.client();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (mut opened, client) = (opened.clone(), client.clone());
            async move {
                let waited = tokio::time::timeout(FIRST_CLIENT, opened.wait_for(|is_open| *is_open)).await;
                if waited.is_ok_and(|found| found.is_ok()) {
                    client.send(request).await
                } else {
                    Err(kube::Error::Service(NoIdentity::UncheckedName.into()))
                }
            }
        });
        kube::Client::new(service, "default")
    }

    /// Returns whether there is a client.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.newest.borrow().is_some()
    }

    async fn publish(&self) {
        let Some(published) = self.published.clone() else { return };
        let path = self.path.clone();
        if let Err(error) = task::blocking(move || published.write_kubeconfig(&path)).await {
            tracing::warn!(error = quintlet_kit::error_chain(&error), "copy of the kubeconfig failed");
        }
    }

    /// Makes [`NodeClient::follow`] check the files now.
    pub(crate) fn notify(&self) {
        self.changed.notify_one();
    }

    /// Makes a client of each version of the kubeconfig and the files that it names. Runs until `stop`. A
    /// version that cannot be used leaves the client before it in use.
    pub async fn follow(self, stop: CancellationToken) {
        let fingerprint = |path: PathBuf| task::blocking(move || digests(&path));
        let mut checks = FileChecks::new(LONGEST_WAIT);
        // Read before the client is made, so that a change in between is noticed.
        let mut known = None;
        if self.is_ready() {
            known = Some(fingerprint(self.path.clone()).await);
        }
        let mut published = None;
        loop {
            let seen = fingerprint(self.path.clone()).await;
            if published.as_ref() != Some(&seen) && seen.first().is_some_and(Option::is_some) {
                self.publish().await;
                published = Some(seen.clone());
            }
            if known.as_ref() != Some(&seen) && seen.first().is_some_and(Option::is_some) {
                match read_client(self.path.clone()).await {
                    Ok(client) => {
                        tracing::info!(path = %self.path.display(), "loaded kubeconfig");
                        self.newest.send_replace(Some(client));
                    }
                    Err(error) => {
                        let error = quintlet_kit::error_chain(&error);
                        tracing::warn!(path = %self.path.display(), error, "load kubeconfig failed, previous credential is kept");
                    }
                }
                known = Some(seen);
                checks.reset();
            }
            // All arms only wait.
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.changed.notified() => {}
                () = checks.pause() => {}
            }
        }
    }
}

/// Returns the digests of the kubeconfig and of the files that it names, none for a file that cannot be read.
fn digests(path: &Path) -> Vec<Option<[u8; 32]>> {
    let digest = |bytes: &[u8]| Sha256::digest(bytes).into();
    let whole = std::fs::read(path).ok();
    let parsed = whole.as_deref().and_then(|bytes| {
        std::str::from_utf8(bytes).ok().and_then(|text| serde_saphyr::from_str::<Value>(text).ok())
    });
    let beside = path.parent().unwrap_or(Path::new("/"));
    let mut found = vec![whole.as_deref().map(digest)];
    for (list, inner, fields) in [
        ("clusters", "cluster", &["certificate-authority"][..]),
        ("users", "user", &["client-certificate", "client-key", "tokenFile"]),
    ] {
        for item in parsed.iter().flat_map(|parsed| parsed[list].as_array().into_iter().flatten()) {
            let files = fields.iter().filter_map(|field| item[inner][*field].as_str());
            found.extend(files.map(|file| std::fs::read(beside.join(file)).ok().as_deref().map(digest)));
        }
    }
    found
}
