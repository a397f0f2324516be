//! The runtime's state of every pod, as pleg-service streams it.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use parking_lot::RwLock;
use quintlet_model::convert;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{Cursor, SharedPodRuntime};
use quintlet_proto::pleg::v1 as wire;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::Wakes;

/// Local sockets are tried again this often.
const RETRY: Duration = Duration::from_millis(100);
/// One observation may take as long as one CRI call.
const OBSERVE: Duration = Duration::from_secs(130);

/// Why nothing is known of a pod right now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObserveError {
    /// pleg-service or the runtime cannot be asked.
    #[error("runtime state cannot be read: {0}")]
    Unavailable(String),
    /// The runtime answered, and not usefully.
    #[error("error determining status: {0}")]
    Runtime(String),
}

#[derive(Debug, Default)]
struct Cache {
    pods: HashMap<PodUid, SharedPodRuntime>,
    cursor: Option<Cursor>,
    complete: bool,
}

/// Cache and client of pleg-service.
#[derive(Debug)]
pub struct Pleg {
    client: PlegClient<Channel>,
    cache: RwLock<Cache>,
    wakes: Arc<Wakes>,
}

impl Pleg {
    /// Uses the socket at `path`; it need not be there yet.
    #[must_use]
    pub fn new(path: PathBuf, wakes: Arc<Wakes>) -> Self {
        let channel = quintlet_kit::socket::channel(path);
        Self {
            client: PlegClient::new(channel).max_decoding_message_size(64 << 20),
            cache: RwLock::default(),
            wakes,
        }
    }

    /// The newest record of a pod, if there is one.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<SharedPodRuntime> {
        self.cache.read().pods.get(uid).cloned()
    }

    /// Every pod the runtime has; none until a complete snapshot came once.
    #[must_use]
    pub fn all(&self) -> Option<Vec<SharedPodRuntime>> {
        let cache = self.cache.read();
        cache.complete.then(|| cache.pods.values().cloned().collect())
    }

    /// Inspects a pod now. `None`: the runtime knows nothing of it.
    ///
    /// # Errors
    /// It cannot be asked, or its answer is an error.
    pub async fn observe(
        &self,
        uid: &PodUid,
        ids: Vec<String>,
        full: bool,
    ) -> Result<Option<SharedPodRuntime>, ObserveError> {
        let mut request = tonic::Request::new(wire::ObserveRequest { uid: uid.to_string(), ids, full });
        quintlet_telemetry::propagate::inject(request.metadata_mut());
        let mut client = self.client.clone();
        let reply = tokio::time::timeout(OBSERVE, client.observe(request))
            .await
            .map_err(|_| ObserveError::Unavailable("no answer".to_owned()))?
            .map_err(|s| ObserveError::Unavailable(s.message().to_owned()))?
            .into_inner();
        let epoch = reply.cursor.unwrap_or_default().epoch;
        let Some(record) = reply.pod else {
            self.cache.write().pods.remove(uid);
            return Ok(None);
        };
        let pod =
            Arc::new(convert::pod_runtime(record, epoch).map_err(|e| ObserveError::Runtime(e.to_string()))?);
        if let Some(error) = &pod.error {
            return Err(ObserveError::Runtime(error.clone()));
        }
        self.apply(Arc::clone(&pod));
        Ok(Some(pod))
    }

    // True if it changed what is known.
    fn apply(&self, pod: SharedPodRuntime) -> bool {
        let mut cache = self.cache.write();
        match cache.pods.get(&pod.pod.uid) {
            Some(have) if have.cursor >= pod.cursor => false,
            Some(_) | None => {
                cache.pods.insert(pod.pod.uid.clone(), pod);
                true
            }
        }
    }

    /// Whether lists succeed, for the node's Ready condition.
    ///
    /// # Errors
    /// pleg-service cannot be asked.
    pub async fn health(&self) -> Result<wire::HealthReply, String> {
        let mut client = self.client.clone();
        let asked = client.health(wire::HealthRequest {});
        match tokio::time::timeout(Duration::from_secs(2), asked).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(status.message().to_owned()),
            Err(_) => Err("no answer".to_owned()),
        }
    }

    /// Follows pleg-service until told to stop, over any number of its restarts.
    pub async fn follow(self: Arc<Self>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            // Cutting the stream loses nothing: the cursor says where to go on.
            tokio::select! {
                () = stop.cancelled() => return,
                ended = self.stream() => {
                    if let Err(status) = ended {
                        tracing::debug!(error = status.message(), "pleg stream ended");
                    }
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn stream(&self) -> Result<(), tonic::Status> {
        let resume = {
            let cache = self.cache.read();
            cache.cursor.filter(|_| cache.complete).map(Into::into)
        };
        let request = wire::WatchRequest { hello: Some(quintlet_proto::hello()), resume };
        let mut client = self.client.clone();
        let mut events = client.watch(request).await?.into_inner();
        let mut snapshot: Option<HashSet<PodUid>> = None;
        // Whoever waited for pleg-service may go on.
        self.wakes.wake_all();
        while let Some(event) = events.next().await {
            let event = event?;
            let at = event.cursor.map(Cursor::from);
            match event.event {
                Some(wire::watch_event::Event::SnapshotBegin(_)) => snapshot = Some(HashSet::new()),
                Some(wire::watch_event::Event::Pod(record)) => {
                    let uid = record.uid.clone();
                    match convert::pod_runtime(record, at.unwrap_or_default().epoch) {
                        Ok(pod) => {
                            let uid = pod.pod.uid.clone();
                            if let Some(seen) = snapshot.as_mut() {
                                seen.insert(uid.clone());
                            }
                            if self.apply(Arc::new(pod)) {
                                self.wakes.wake(&uid);
                            }
                        }
                        Err(e) => {
                            tracing::warn!(pod.uid = uid, error = %e, "record of pleg-service not understood")
                        }
                    }
                }
                Some(wire::watch_event::Event::Gone(gone)) => {
                    if let Ok(uid) = PodUid::parse(&gone.uid) {
                        self.cache.write().pods.remove(&uid);
                        self.wakes.wake(&uid);
                    }
                }
                Some(wire::watch_event::Event::SnapshotEnd(_)) => {
                    let seen = snapshot.take().unwrap_or_default();
                    let gone: Vec<PodUid> = {
                        let mut cache = self.cache.write();
                        cache.complete = true;
                        let gone: Vec<_> =
                            cache.pods.keys().filter(|uid| !seen.contains(*uid)).cloned().collect();
                        for uid in &gone {
                            cache.pods.remove(uid);
                        }
                        gone
                    };
                    for uid in &gone {
                        self.wakes.wake(uid);
                    }
                    self.wakes.wake_all();
                }
                Some(wire::watch_event::Event::Resync(resync)) => {
                    tracing::info!(reason = resync.reason, "pleg-service sends everything again");
                }
                Some(wire::watch_event::Event::Hello(_) | wire::watch_event::Event::Beat(_)) | None => {}
            }
            if let Some(at) = at
                && snapshot.is_none()
            {
                self.cache.write().cursor = Some(at);
            }
        }
        Ok(())
    }
}
