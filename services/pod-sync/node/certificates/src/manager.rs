//! The tasks that keep the certificates of the node.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use rand::RngExt as _;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::decide::{
    CertificateFacts, CertificatePurpose, CertificateWork, ClientFacts, ClientWork, KubeconfigCredential,
    RequestReason, WantedCertificate, client_work, next_work,
};
use crate::follow::{NodeClient, read_client};
use crate::key::NodeKey;
use crate::kubeconfig::{self, KubeconfigError, credential_of};
use crate::metrics::CertificateMetrics;
use crate::published::PublishedDirectory;
use crate::request::{CertificateOrder, RequestFailure, obtain};
use crate::store::{CertificateStore, StoreError};

/// Smallest and largest share of the life of a certificate at which it is rotated.
const SHARES: std::ops::RangeInclusive<f64> = 0.7..=0.9;

/// The waits of a manager. The kubelet's by default.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    /// Wait after a failed request, which doubles, and shortest time from a successful request to the next
    /// one.
    pub(crate) first_retry: Duration,
    /// Longest wait after a failed request.
    pub(crate) last_retry: Duration,
    /// Longest time between two decisions: the wall clock may be set.
    pub(crate) check_period: Duration,
    /// Longest wait for an answer to a request.
    pub(crate) answer_limit: Duration,
    /// Share of the life of a certificate at which it is rotated; none draws it for each certificate.
    pub(crate) share: Option<f64>,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            first_retry: Duration::from_secs(2),
            last_retry: Duration::from_secs(32),
            check_period: Duration::from_secs(60),
            answer_limit: Duration::from_secs(15 * 60),
            share: None,
        }
    }
}

/// A certificate could not be obtained or stored.
#[derive(Debug, thiserror::Error)]
enum RenewError {
    #[error(transparent)]
    Request(#[from] RequestFailure),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    #[error("failed to generate a key: {0}")]
    Key(String),
}

/// Draws the share of the life of each certificate, once per certificate.
#[derive(Debug, Default)]
struct Share {
    fixed: Option<f64>,
    drawn: Option<(Timestamp, f64)>,
}

impl Share {
    fn of(&mut self, current: Option<&CertificateFacts>) -> f64 {
        let end = current.map_or(Timestamp::MIN, |facts| facts.not_after);
        match (self.fixed, self.drawn) {
            (Some(fixed), _) => fixed,
            (None, Some((drawn_for, share))) if drawn_for == end => share,
            (None, _) => {
                let share = rand::rng().random_range(SHARES);
                self.drawn = Some((end, share));
                share
            }
        }
    }
}

/// Keeps requests apart: a signer may issue certificates that are due for rotation at once, since their life
/// begins minutes earlier.
#[derive(Debug, Default)]
struct LastSuccess(Option<Instant>);

impl LastSuccess {
    fn set_now(&mut self) {
        self.0 = Some(Instant::now());
    }

    /// Returns the time until the next request is allowed; none if it is now.
    fn wait(&self, apart: Duration) -> Option<Duration> {
        let left = apart.saturating_sub(self.0?.elapsed());
        Some(left).filter(|left| !left.is_zero())
    }
}

/// Logs a failure once until its text changes.
#[derive(Debug, Default)]
struct LastFailure(Option<String>);

impl LastFailure {
    fn is_new(&mut self, text: &str) -> bool {
        let is_new = self.0.as_deref() != Some(text);
        self.0 = Some(text.to_owned());
        is_new
    }
}

/// Returns the wait until a deadline of the wall clock, at most the check period.
fn wait_until(deadline: Timestamp, now: Timestamp, timing: &Timing) -> Duration {
    let left = Duration::try_from(deadline.duration_since(now)).unwrap_or(Duration::ZERO);
    // A deadline that has passed leads to work, not to a wait.
    left.clamp(Duration::from_millis(100).min(timing.check_period), timing.check_period)
}

/// The client certificate of the node.
#[derive(Debug)]
pub struct ClientCertificate {
    node: String,
    kubeconfig: PathBuf,
    bootstrap: Option<PathBuf>,
    rotates: bool,
    store: CertificateStore,
    client: NodeClient,
    clock: Clock,
    timing: Timing,
}

impl ClientCertificate {
    /// Returns the client certificate of `node`, which the kubeconfig of `client` names. `bootstrap` is the
    /// bootstrap kubeconfig.
    #[must_use]
    pub fn new(node: &str, client: NodeClient, directory: &Path, kubeconfig: &Path, clock: Clock) -> Self {
        Self {
            node: node.to_owned(),
            kubeconfig: kubeconfig.to_owned(),
            bootstrap: None,
            rotates: false,
            store: CertificateStore::new(directory, CertificatePurpose::Client),
            client,
            clock,
            timing: Timing::default(),
        }
    }

    /// Sets the bootstrap kubeconfig.
    #[must_use]
    pub fn with_bootstrap(self, bootstrap: Option<PathBuf>) -> Self {
        Self { bootstrap, ..self }
    }

    /// Sets whether the certificate is requested again before it expires: the field `rotateCertificates`.
    #[must_use]
    pub fn with_rotation(self, rotates: bool) -> Self {
        Self { rotates, ..self }
    }

    #[cfg(test)]
    pub(crate) fn with_timing(self, timing: Timing) -> Self {
        Self { timing, ..self }
    }

    /// Bootstraps and rotates the certificate until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        // Requests that are under way stay in the API server.
        tokio::select! {
            () = self.keep() => {}
            () = stop.cancelled() => {}
        }
    }

    async fn keep(self) {
        let metrics = CertificateMetrics::register(CertificatePurpose::Client);
        let wanted = WantedCertificate::client(&self.node);
        let mut share = Share { fixed: self.timing.share, drawn: None };
        let mut delays = Backoff::new(self.timing.first_retry, 2.0, self.timing.last_retry);
        let mut last_failure = LastFailure::default();
        let mut last_success = LastSuccess::default();
        loop {
            let facts = self.facts().await;
            let current = match &facts.kubeconfig {
                KubeconfigCredential::Certificate(current) => Some(&**current),
                KubeconfigCredential::NoFile
                | KubeconfigCredential::Unusable(_)
                | KubeconfigCredential::Other => None,
            };
            metrics.set_end(&self.clock, current.map(|current| current.not_after));
            let now = self.clock.wall();
            let work = client_work(&facts, &wanted, now, share.of(current));
            let is_request = matches!(work, ClientWork::Bootstrap(_) | ClientWork::Rotate(_));
            if is_request && let Some(wait) = last_success.wait(self.timing.first_retry) {
                tokio::time::sleep(wait).await;
                continue;
            }
            let done = match &work {
                ClientWork::WaitUntil(deadline) => {
                    tokio::time::sleep(wait_until(*deadline, now, &self.timing)).await;
                    continue;
                }
                ClientWork::NotOurs => {
                    tokio::time::sleep(self.timing.check_period).await;
                    continue;
                }
                ClientWork::Stuck(reason) => {
                    if last_failure.is_new(reason) {
                        tracing::error!(
                            reason,
                            kubeconfig = %self.kubeconfig.display(),
                            "the node has no valid credential, replace the kubeconfig or give --bootstrap-kubeconfig with a valid token"
                        );
                    }
                    tokio::time::sleep(self.timing.last_retry).await;
                    continue;
                }
                ClientWork::WriteKubeconfig => self.write_kubeconfig().await,
                ClientWork::UseStored => self.point_to_stored().await,
                ClientWork::Bootstrap(reason) => self.bootstrap(&wanted, reason).await,
                ClientWork::Rotate(reason) => self.rotate(&wanted, reason).await,
            };
            match done {
                Ok(()) => {
                    if is_request {
                        last_success.set_now();
                    }
                    delays.reset();
                    last_failure = LastFailure::default();
                    self.client.notify();
                }
                Err(error) => {
                    if is_request {
                        metrics.count_failure();
                    }
                    let text = quintlet_kit::error_chain(&error);
                    if last_failure.is_new(&text) {
                        tracing::warn!(error = text, "client certificate was not renewed, retrying");
                    }
                    tokio::time::sleep(delays.next_wait()).await;
                }
            }
        }
    }

    async fn facts(&self) -> ClientFacts {
        let (kubeconfig, store) = (self.kubeconfig.clone(), self.store.clone());
        let has_bootstrap = self.bootstrap.is_some();
        let rotates = self.rotates;
        task::blocking(move || {
            let stored = store.recover().unwrap_or_else(|error| {
                tracing::debug!(error = quintlet_kit::error_chain(&error), "stored certificate is unusable");
                None
            });
            ClientFacts { kubeconfig: credential_of(&kubeconfig), stored, has_bootstrap, rotates }
        })
        .await
    }

    /// Makes the kubeconfig name the stored certificate.
    async fn write_kubeconfig(&self) -> Result<(), RenewError> {
        let Some(bootstrap) = self.bootstrap.clone() else { return Ok(()) };
        let (kubeconfig, store) = (self.kubeconfig.clone(), self.store.clone());
        let written = task::blocking(move || {
            kubeconfig::write_bootstrapped(&bootstrap, &kubeconfig, &store.current_path())?;
            store.drop_pending_key()?;
            Ok::<_, RenewError>(())
        });
        written.await?;
        tracing::info!(kubeconfig = %self.kubeconfig.display(), "wrote kubeconfig");
        Ok(())
    }

    /// Requests a certificate with the bootstrap credential. The key is kept until there is an answer.
    async fn bootstrap(&self, wanted: &WantedCertificate, reason: &RequestReason) -> Result<(), RenewError> {
        let Some(bootstrap) = &self.bootstrap else { return Ok(()) };
        let client = read_client(bootstrap.clone()).await?;
        let store = self.store.clone();
        let key = task::blocking(move || store.pending_key()).await?;
        tracing::info!(%reason, bootstrap = %bootstrap.display(), "requesting client certificate with the bootstrap credential");
        let order = self.order(wanted, &key, true);
        match obtain(&client, &order).await {
            Ok(chain) => {
                self.store(chain, key).await?;
                self.write_kubeconfig().await
            }
            Err(failure) => {
                if failure.ends_key() {
                    let store = self.store.clone();
                    task::blocking(move || store.drop_pending_key()).await?;
                }
                Err(failure.into())
            }
        }
    }

    /// Requests a certificate with the current one.
    async fn rotate(&self, wanted: &WantedCertificate, reason: &RequestReason) -> Result<(), RenewError> {
        let key = NodeKey::generate().map_err(|error| RenewError::Key(quintlet_kit::error_chain(&error)))?;
        tracing::info!(%reason, "requesting client certificate");
        let order = self.order(wanted, &key, false);
        let chain = obtain(&self.client.client(), &order).await?;
        self.store(chain, key).await?;
        self.point_to_stored().await
    }

    /// Makes the kubeconfig name the stored certificate, and keeps all else in it.
    async fn point_to_stored(&self) -> Result<(), RenewError> {
        let (kubeconfig, store) = (self.kubeconfig.clone(), self.store.clone());
        let pointed = task::blocking(move || kubeconfig::point_to(&kubeconfig, &store.current_path()));
        if pointed.await? {
            tracing::info!(kubeconfig = %self.kubeconfig.display(), "kubeconfig names the stored certificate");
        }
        Ok(())
    }

    fn order<'a>(
        &self,
        wanted: &'a WantedCertificate,
        key: &'a NodeKey,
        is_named: bool,
    ) -> CertificateOrder<'a> {
        CertificateOrder {
            purpose: CertificatePurpose::Client,
            wanted,
            key,
            is_named,
            now: self.clock.wall(),
            limit: self.timing.answer_limit,
        }
    }

    async fn store(&self, chain: String, key: NodeKey) -> Result<(), RenewError> {
        store(&self.store, chain, key, self.clock.wall()).await?;
        Ok(())
    }
}

async fn store(
    store: &CertificateStore,
    chain: String,
    key: NodeKey,
    now: Timestamp,
) -> Result<CertificateFacts, StoreError> {
    let (to_store, path) = (store.clone(), store.current_path());
    let facts = task::blocking(move || to_store.update(&chain, &key, now)).await?;
    tracing::info!(path = %path.display(), expires = %facts.not_after, "stored certificate");
    Ok(facts)
}

/// The serving certificate of the node API.
pub struct ServingCertificate {
    node: String,
    nodes: watch::Receiver<Option<Arc<Node>>>,
    client: kube::Client,
    store: CertificateStore,
    published: Option<PublishedDirectory>,
    clock: Clock,
    timing: Timing,
}

impl std::fmt::Debug for ServingCertificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServingCertificate").field("node", &self.node).finish_non_exhaustive()
    }
}

impl ServingCertificate {
    /// Returns the serving certificate of `node`, whose addresses are those of the Node object.
    #[must_use]
    pub fn new(
        node: &str,
        nodes: watch::Receiver<Option<Arc<Node>>>,
        client: kube::Client,
        directory: &Path,
        clock: Clock,
    ) -> Self {
        Self {
            node: node.to_owned(),
            nodes,
            client,
            store: CertificateStore::new(directory, CertificatePurpose::Serving),
            published: None,
            clock,
            timing: Timing::default(),
        }
    }

    /// Sets the directory of a copy for a node API without root. The copy is written if the directory exists.
    #[must_use]
    pub fn with_copy(self, directory: &Path) -> Self {
        Self { published: Some(PublishedDirectory::new(directory)), ..self }
    }

    #[cfg(test)]
    pub(crate) fn with_timing(self, timing: Timing) -> Self {
        Self { timing, ..self }
    }

    /// Requests and rotates the certificate until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        // Requests that are under way stay in the API server.
        tokio::select! {
            () = self.keep() => {}
            () = stop.cancelled() => {}
        }
    }

    fn wanted(&self) -> Option<WantedCertificate> {
        let node = self.nodes.borrow();
        let addresses = node.as_ref()?.status.as_ref()?.addresses.as_deref()?;
        WantedCertificate::serving(&self.node, addresses)
    }

    async fn keep(&mut self) {
        let metrics = CertificateMetrics::register(CertificatePurpose::Serving);
        let mut share = Share { fixed: self.timing.share, drawn: None };
        let mut delays = Backoff::new(self.timing.first_retry, 2.0, self.timing.last_retry);
        let mut last_failure = LastFailure::default();
        let mut last_success = LastSuccess::default();
        loop {
            self.nodes.mark_unchanged();
            let store = self.store.clone();
            let current = task::blocking(move || store.recover()).await.unwrap_or_else(|error| {
                let text = quintlet_kit::error_chain(&error);
                if last_failure.is_new(&text) {
                    tracing::warn!(
                        error = text,
                        "stored serving certificate is unusable, requesting another one"
                    );
                }
                None
            });
            metrics.set_end(&self.clock, current.as_ref().map(|current| current.not_after));
            if current.is_some() {
                self.publish().await;
            }
            let wanted = self.wanted();
            let now = self.clock.wall();
            let wait = match next_work(current.as_ref(), wanted.as_ref(), now, share.of(current.as_ref())) {
                CertificateWork::AwaitNames => self.timing.check_period,
                CertificateWork::WaitUntil(deadline) => wait_until(deadline, now, &self.timing),
                CertificateWork::Request(reason) => {
                    let Some(wanted) = &wanted else { continue };
                    if let Some(wait) = last_success.wait(self.timing.first_retry) {
                        self.wait(wait, Some(wanted)).await;
                        continue;
                    }
                    tracing::info!(%reason, "requesting serving certificate");
                    match self.renew(wanted).await {
                        Some(Ok(())) => {
                            if let Some(replaced) = &current {
                                metrics.record_age(replaced.not_before, self.clock.wall());
                            }
                            last_success.set_now();
                            delays.reset();
                            last_failure = LastFailure::default();
                            continue;
                        }
                        // Other names are wanted.
                        None => continue,
                        Some(Err(error)) => {
                            metrics.count_failure();
                            let text = quintlet_kit::error_chain(&error);
                            if last_failure.is_new(&text) {
                                tracing::warn!(error = text, "serving certificate was not renewed, retrying");
                            }
                            delays.next_wait()
                        }
                    }
                }
            };
            self.wait(wait, wanted.as_ref()).await;
        }
    }

    /// Writes the copy for the node API if the certificate has changed.
    async fn publish(&self) {
        let Some(published) = self.published.clone() else { return };
        let current = self.store.current_path();
        if let Err(error) = task::blocking(move || published.write_certificate(&current)).await {
            let error = quintlet_kit::error_chain(&error);
            tracing::warn!(error, "copy of the serving certificate failed, retrying");
        }
    }

    /// Waits, at most until other names are wanted.
    async fn wait(&mut self, wait: Duration, wanted: Option<&WantedCertificate>) {
        // Both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = self.names_change(wanted) => {}
        }
    }

    /// Returns once other names are wanted. Does not return after the end of the watch of the Node.
    async fn names_change(&mut self, wanted: Option<&WantedCertificate>) {
        loop {
            if self.nodes.changed().await.is_err() {
                return std::future::pending().await;
            }
            if self.wanted().as_ref() != wanted {
                return;
            }
        }
    }

    /// Requests and stores a certificate. Returns none if other names are wanted before it is issued.
    async fn renew(&mut self, wanted: &WantedCertificate) -> Option<Result<(), RenewError>> {
        let key = match NodeKey::generate() {
            Ok(key) => key,
            Err(error) => return Some(Err(RenewError::Key(quintlet_kit::error_chain(&error)))),
        };
        let (client, certificates) = (self.client.clone(), self.store.clone());
        let limit = self.timing.answer_limit;
        let order = CertificateOrder {
            purpose: CertificatePurpose::Serving,
            wanted,
            key: &key,
            is_named: false,
            now: self.clock.wall(),
            limit,
        };
        // The request that is dropped stays in the API server, as with a kubelet.
        let chain = tokio::select! {
            issued = obtain(&client, &order) => match issued {
                Ok(chain) => chain,
                Err(failure) => return Some(Err(failure.into())),
            },
            () = self.names_change(Some(wanted)) => return None,
        };
        let stored = store(&certificates, chain, key, self.clock.wall()).await;
        Some(stored.map(drop).map_err(RenewError::from))
    }
}
