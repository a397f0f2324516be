//! The runtime's state of every pod, as pleg-service streams it.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use parking_lot::RwLock;
use quintlet_kit::messages::timely;
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_kit::stack::Caller;
use quintlet_model::convert;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{Cursor, Known, SharedPodRuntime};
use quintlet_proto::pleg::v1 as wire;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::WorkerWakeups;

/// Longest wait for an observation, which makes CRI calls of 2 min each at most.
const OBSERVE: Duration = Duration::from_secs(130);
/// Longest wait for the health of pleg-service.
const HEALTH: Duration = Duration::from_secs(2);

/// Reason why the runtime state of a pod is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObserveError {
    /// pleg-service did not answer, or could not reach the runtime.
    #[error("runtime state cannot be read: {0}")]
    Unavailable(String),
    /// The runtime returned an error or an answer that cannot be used.
    #[error("error determining status: {0}")]
    Runtime(String),
}

/// Reason why pleg-service is not healthy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlegHealthError {
    /// Relists fail or take too long; the message of the node's condition.
    #[error("{0}")]
    Unhealthy(String),
    /// pleg-service did not answer.
    #[error("{0}")]
    Unavailable(String),
}

/// Runtime state of one pod, as pleg-service inspected it for this request.
#[derive(Debug, Clone)]
pub struct Observed {
    /// Epoch of pleg-service; it changes when pleg-service restarts.
    pub epoch: u64,
    /// `None` if the runtime has neither a sandbox nor a container of the pod.
    pub pod: Option<SharedPodRuntime>,
}

fn request(uid: &PodUid, known: &Known, full: bool) -> wire::ObserveRequest {
    let sandboxes: Vec<String> = known.sandboxes.iter().map(ToString::to_string).collect();
    let containers = known.containers.iter();
    let containers = containers
        .map(|(id, sandbox)| wire::KnownContainer { id: id.to_string(), sandbox_id: sandbox.to_string() })
        .collect();
    // A pleg-service of the previous release reads only `ids`.
    wire::ObserveRequest { uid: uid.to_string(), ids: known.ids(), full, sandboxes, containers }
}

#[derive(Debug, Default)]
struct Cache {
    pods: HashMap<PodUid, SharedPodRuntime>,
    cursor: Option<Cursor>,
    complete: bool,
}

/// Client of pleg-service, with a cache of the latest runtime state of every pod.
#[derive(Debug)]
pub struct Pleg {
    client: PlegClient<Caller<Channel>>,
    peer: Neighbour,
    cache: RwLock<Cache>,
    wakes: Arc<WorkerWakeups>,
}

impl Pleg {
    /// Creates a client of the socket at `path`, which need not exist yet.
    #[must_use]
    pub fn new(path: PathBuf, wakes: Arc<WorkerWakeups>) -> Self {
        let channel = quintlet_kit::socket::caller(path);
        let peer = Neighbour::new("pleg-service", &[]);
        Self { client: PlegClient::new(channel), peer, cache: RwLock::default(), wakes }
    }

    /// Returns the newest runtime state of a pod.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<SharedPodRuntime> {
        self.cache.read().pods.get(uid).cloned()
    }

    /// Returns every pod that the runtime has, or `None` before the first complete snapshot.
    #[must_use]
    pub fn all(&self) -> Option<Vec<SharedPodRuntime>> {
        let cache = self.cache.read();
        cache.complete.then(|| cache.pods.values().cloned().collect())
    }

    /// Has pleg-service inspect a pod now: the sandboxes and containers in `known` and, if `full`, those in a
    /// new list, too.
    pub async fn observe(&self, uid: &PodUid, known: Known, full: bool) -> Result<Observed, ObserveError> {
        self.peer.check().map_err(|s| ObserveError::Unavailable(s.message().to_owned()))?;
        let mut client = self.client.clone();
        let reply = timely(OBSERVE, client.observe(request(uid, &known, full)))
            .await
            .map_err(|s| ObserveError::Unavailable(s.message().to_owned()))?
            .into_inner();
        let at = Cursor::from(reply.cursor.unwrap_or_default());
        let epoch = at.epoch;
        let Some(record) = reply.pod else {
            self.drop_until(uid, at);
            return Ok(Observed { epoch, pod: None });
        };
        let pod =
            Arc::new(convert::pod_runtime(record, epoch).map_err(|e| ObserveError::Runtime(e.to_string()))?);
        if let Some(error) = &pod.error {
            return Err(ObserveError::Runtime(error.clone()));
        }
        self.apply(Arc::clone(&pod));
        Ok(Observed { epoch, pod: Some(pod) })
    }

    /// Removes a pod that did not exist at `at`. A record with a later cursor stays, since replies and the
    /// stream are not ordered.
    fn drop_until(&self, uid: &PodUid, at: Cursor) {
        let mut cache = self.cache.write();
        if cache.pods.get(uid).is_some_and(|have| have.cursor <= at) {
            cache.pods.remove(uid);
        }
    }

    /// Stores a record unless the cache is newer. Returns whether the record was stored.
    ///
    /// A late reply does not bring back a pod that the stream has reported as gone: a pod that is not in the
    /// cache, although the stream has passed the record's cursor, is gone.
    fn apply(&self, pod: SharedPodRuntime) -> bool {
        let mut cache = self.cache.write();
        let passed = cache.complete && cache.cursor.is_some_and(|at| at >= pod.cursor);
        match cache.pods.get(&pod.pod.uid) {
            Some(have) if have.cursor >= pod.cursor => false,
            None if passed => false,
            Some(_) | None => {
                cache.pods.insert(pod.pod.uid.clone(), pod);
                true
            }
        }
    }

    /// Returns the pod of a record and whether the cache changed. A record that cannot be converted still
    /// shows that the pod exists.
    fn take(&self, record: wire::PodRecord, epoch: u64) -> Option<(PodUid, bool)> {
        let uid = PodUid::parse(&record.uid).ok()?;
        match convert::pod_runtime(record, epoch) {
            Ok(pod) => Some((uid, self.apply(Arc::new(pod)))),
            Err(e) => {
                tracing::warn!(pod.uid = %uid, error = %e, "pod record of pleg-service is invalid, ignoring");
                Some((uid, false))
            }
        }
    }

    /// Checks that relists succeed, for the node's Ready condition (pkg/kubelet/pleg: Healthy).
    ///
    /// # Errors
    /// The text of the condition.
    pub async fn check_health(&self) -> Result<(), PlegHealthError> {
        self.peer.check().map_err(|s| PlegHealthError::Unavailable(s.message().to_owned()))?;
        let mut client = self.client.clone();
        let reply = client.health(wire::HealthRequest {});
        match timely(HEALTH, reply).await.map(tonic::Response::into_inner) {
            Ok(health) if health.healthy => Ok(()),
            Ok(health) => Err(PlegHealthError::Unhealthy(health.message)),
            Err(status) => Err(PlegHealthError::Unavailable(status.message().to_owned())),
        }
    }

    /// Follows pleg-service until `stop`, across its restarts.
    pub async fn follow(self: Arc<Self>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            // Dropping the stream loses nothing: the next one resumes at the cursor.
            tokio::select! {
                () = stop.cancelled() => return,
                ended = self.stream() => {
                    if let Err(status) = ended {
                        tracing::debug!(error = status.message(), "pleg stream ended");
                    }
                }
            }
            tokio::time::sleep(self.peer.next_wait(CONNECT_INTERVAL)).await;
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
        // Records of a snapshot that is not complete yet.
        let mut snapshot = false;
        let mut records = Vec::new();
        // Workers may have been waiting for pleg-service.
        self.wakes.wake_all();
        while let Some(event) = events.next().await {
            let event = event?;
            let at = event.cursor.map(Cursor::from);
            match event.event {
                Some(wire::watch_event::Event::SnapshotBegin(_)) => {
                    snapshot = true;
                    records.clear();
                }
                // The epoch comes with the end of the snapshot.
                Some(wire::watch_event::Event::Pod(record)) if snapshot => records.push(record),
                Some(wire::watch_event::Event::Pod(record)) => {
                    if let Some((uid, true)) = self.take(record, at.unwrap_or_default().epoch) {
                        self.wakes.wake(&uid);
                    }
                }
                Some(wire::watch_event::Event::Gone(gone)) => {
                    if let Ok(uid) = PodUid::parse(&gone.uid) {
                        self.cache.write().pods.remove(&uid);
                        self.wakes.wake(&uid);
                    }
                }
                Some(wire::watch_event::Event::SnapshotEnd(_)) => {
                    snapshot = false;
                    let epoch = at.unwrap_or_default().epoch;
                    // The cursor is valid again at the end of the snapshot.
                    self.cache.write().cursor = None;
                    let seen: HashSet<PodUid> =
                        records.drain(..).filter_map(|r| Some(self.take(r, epoch)?.0)).collect();
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
                    tracing::info!(reason = resync.reason, "pleg-service sends a new snapshot");
                }
                Some(wire::watch_event::Event::Hello(hello)) => {
                    let was_refused = self.peer.check().is_err();
                    self.peer.greeted(&hello)?;
                    if was_refused {
                        self.wakes.wake_all();
                    }
                }
                Some(wire::watch_event::Event::Beat(_)) | None => {}
            }
            if let Some(at) = at
                && !snapshot
            {
                self.cache.write().cursor = Some(at);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream::BoxStream;
    use quintlet_kit::server::Server;
    use quintlet_kit::socket::{PeerPolicy, bind_unix};
    use quintlet_proto::common::v1::Hello;
    use quintlet_proto::pleg::v1::pleg_server::{Pleg as Service, PlegServer};
    use std::sync::atomic::{AtomicU32, Ordering};
    use tonic::{Request, Response, Status};

    /// Answers Observe with rev 1, then sends a snapshot in which the pod is at rev 2 and stays connected.
    /// Its Hello has `schema`.
    #[derive(Clone)]
    struct Scripted {
        schema: Arc<AtomicU32>,
    }

    fn record(rev: u64) -> wire::PodRecord {
        wire::PodRecord {
            uid: "u".into(),
            name: "p".into(),
            namespace: "n".into(),
            rev,
            ..Default::default()
        }
    }

    const EPOCH: u64 = 5;

    /// Serves a scripted pleg-service. Returns the directory of its socket, its schema, a client and the
    /// token that stops it.
    fn scripted(schema: u32) -> (tempfile::TempDir, Arc<AtomicU32>, Arc<Pleg>, CancellationToken) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pleg.sock");
        let stop = CancellationToken::new();
        let service = Scripted { schema: Arc::new(AtomicU32::new(schema)) };
        let schema = Arc::clone(&service.schema);
        let server = Server::new("pleg-service").add_service(PlegServer::new(service));
        let listener = bind_unix(&path, 0o600).unwrap();
        quintlet_kit::task::spawn("server", server.serve(listener, PeerPolicy::Any, stop.clone()));
        (dir, schema, Arc::new(Pleg::new(path, Arc::default())), stop)
    }

    async fn until(holds: impl Fn() -> bool) {
        let waited = async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), waited).await.expect("the condition holds in time");
    }

    #[tonic::async_trait]
    impl Service for Scripted {
        type WatchStream = BoxStream<'static, Result<wire::WatchEvent, Status>>;
        type LifecycleStream = BoxStream<'static, Result<wire::LifecycleEvent, Status>>;

        async fn watch(&self, _: Request<wire::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            use wire::watch_event::Event;
            let schema = self.schema.load(Ordering::SeqCst);
            let hello = Hello { schema, ..quintlet_proto::hello() };
            let event = |event, cursor| Ok(wire::WatchEvent { event: Some(event), cursor, trace: None });
            let end = Some(wire::Cursor { epoch: EPOCH, rev: 2 });
            let events = [
                event(Event::Hello(hello), None),
                event(Event::SnapshotBegin(wire::SnapshotBegin {}), None),
                event(Event::Pod(record(2)), None),
                event(Event::SnapshotEnd(wire::SnapshotEnd {}), end),
            ];
            Ok(Response::new(futures::stream::iter(events).chain(futures::stream::pending()).boxed()))
        }

        async fn observe(
            &self,
            _: Request<wire::ObserveRequest>,
        ) -> Result<Response<wire::ObserveReply>, Status> {
            let cursor = Some(wire::Cursor { epoch: EPOCH, rev: 1 });
            Ok(Response::new(wire::ObserveReply { pod: Some(record(1)), cursor }))
        }

        async fn lifecycle(
            &self,
            _: Request<wire::LifecycleRequest>,
        ) -> Result<Response<Self::LifecycleStream>, Status> {
            Err(Status::unimplemented(""))
        }

        async fn health(
            &self,
            _: Request<wire::HealthRequest>,
        ) -> Result<Response<wire::HealthReply>, Status> {
            Ok(Response::new(wire::HealthReply { healthy: true, ..wire::HealthReply::default() }))
        }
    }

    #[tokio::test]
    async fn a_late_reply_neither_restores_a_removed_pod_nor_removes_a_newer_record() {
        let pleg = Pleg::new("/nowhere".into(), Arc::default());
        let uid = PodUid::parse("u").unwrap();
        let at = |rev| Cursor { epoch: EPOCH, rev };
        let apply = |rev| pleg.apply(Arc::new(convert::pod_runtime(record(rev), EPOCH).unwrap()));
        let known = || pleg.get(&uid).map(|p| p.cursor.rev);
        assert!(apply(4), "nothing is known before the first snapshot");
        {
            let mut cache = pleg.cache.write();
            (cache.complete, cache.cursor) = (true, Some(at(6)));
        }
        pleg.drop_until(&uid, at(3));
        assert_eq!(known(), Some(4), "gone before, and made again");
        pleg.drop_until(&uid, at(6));
        assert_eq!(known(), None);
        assert!(!apply(5), "the stream has passed it");
        assert_eq!(known(), None, "a reply of before the end");
        assert!(apply(7));
        assert_eq!(known(), Some(7), "made again since");
    }

    #[tokio::test]
    async fn a_snapshot_replaces_what_was_observed_before_it() {
        let (_dir, _schema, pleg, stop) = scripted(quintlet_proto::SCHEMA);
        let uid = PodUid::parse("u").unwrap();
        let observed = pleg.observe(&uid, Known::default(), true).await.unwrap().pod.unwrap();
        assert_eq!(observed.cursor, Cursor { epoch: EPOCH, rev: 1 });
        quintlet_kit::task::spawn("follow", Arc::clone(&pleg).follow(stop.clone()));
        until(|| pleg.get(&uid).is_some_and(|p| p.cursor.rev == 2)).await;
        assert_eq!(pleg.all().map(|all| all.len()), Some(1));
        stop.cancel();
    }

    #[tokio::test]
    async fn a_pleg_service_of_an_incompatible_schema_is_refused_until_it_is_replaced() {
        let (_dir, schema, pleg, stop) = scripted(quintlet_proto::SCHEMA + 2);
        let uid = PodUid::parse("u").unwrap();
        let reason = || pleg.peer.check().err().map(|status| status.message().to_owned());
        quintlet_kit::task::spawn("follow", Arc::clone(&pleg).follow(stop.clone()));
        until(|| reason().is_some()).await;
        let why = reason().unwrap();
        assert!(why.starts_with("pleg-service ") && why.contains(" is too new: its schema is "), "{why}");
        let observed = pleg.observe(&uid, Known::default(), true).await.unwrap_err();
        assert_eq!(observed, ObserveError::Unavailable(why.clone()));
        let health = pleg.check_health().await.unwrap_err();
        assert_eq!(health, PlegHealthError::Unavailable(why), "the Node is not Ready");
        assert!(pleg.all().is_none(), "no record of it is used");
        schema.store(quintlet_proto::SCHEMA + 1, Ordering::SeqCst);
        until(|| pleg.all().is_some()).await;
        pleg.check_health().await.unwrap();
        pleg.observe(&uid, Known::default(), true).await.unwrap();
        stop.cancel();
    }
}
