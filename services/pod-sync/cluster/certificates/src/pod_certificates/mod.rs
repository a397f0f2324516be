//! Certificates of pods, requested from signers by PodCertificateRequests
//! (`pkg/kubelet/podcertificate: IssuingManager`).
//!
//! [`decide`] has the decisions. The task `pod-certificates` owns the states and applies the decisions, and
//! one task `pod-certificate` for each creation generates a key and creates the request.

mod decide;
mod key;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, OptionFuture};
use futures::stream::{BoxStream, FuturesUnordered};
use futures::{FutureExt as _, StreamExt as _};
use jiff::SignedDuration;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{PodCertificateRequestSpec, PodCertificateRequestStatus};
use k8s_openapi::api::core::v1::{Node, Pod, PodCertificateProjection, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Api, ApiResource, Object, PostParams, TypeMeta};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use parking_lot::Mutex;
use pod_sync_clients::{EventType, Events, REQUEST_TIMEOUT, WorkerWakeups, retry_on_lag};
use pod_sync_direct_volumes::certificates::{CredentialBundle, CredentialBundles};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain::Work;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_telemetry::metrics::gauge_family;
use rand::RngExt as _;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::decide::{Action, CertificateState, Decision, Pending, RequestStatus, decide};
use self::key::{KeyAndRequest, generate};
use crate::served::{is_absent, served};

const KIND: &str = "PodCertificateRequest";
const PLURAL: &str = "podcertificaterequests";
/// Error of a pod whose API server does not serve the API.
const NOT_SERVED: &str =
    "the API server does not serve PodCertificateRequests (certificates.k8s.io/v1 or v1beta1)";
/// Longest time between two passes, as in the kubelet, for a wall clock that was set.
const PASS_PERIOD: Duration = Duration::from_secs(60);
/// Largest jitter of a refresh, and of the age at which a request that is not in the watch was deleted.
const MAX_JITTER: Duration = Duration::from_secs(5 * 60);
/// Delays between creations of requests for one source, and between questions whether the API server serves
/// the API.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(120);
/// Creations at a time. Each waits for two responses of the API server, at most 10 s for each.
const CREATIONS: usize = 4;

/// A PodCertificateRequest of any version.
type Request = Object<PodCertificateRequestSpec, PodCertificateRequestStatus>;

/// Inputs of [`PodCertificates`].
#[derive(Debug, Clone)]
pub struct PodCertificateContext {
    /// Name of the node, which the requests have.
    pub node: String,
    /// The Node of the API server.
    pub nodes: watch::Receiver<Option<Arc<Node>>>,
    /// Records events of pods whose request was refused.
    pub events: Events,
    /// Wakes the worker of a pod whose certificate was issued or refused.
    pub wakeups: Arc<WorkerWakeups>,
    /// Wall clock of validity, which tests replace.
    pub clock: Clock,
}

/// The certificates of this node's pods. Sends no request before the first read.
pub struct PodCertificates {
    client: kube::Client,
    inputs: PodCertificateContext,
    max_jitter: Duration,
    pods: Mutex<HashMap<PodUid, OfPod>>,
    served: Mutex<Served>,
    /// A source is new or gone.
    changed: Notify,
    creations: Semaphore,
    /// One key is generated at a time: a long RSA key uses a processor for seconds.
    keys: Semaphore,
    gauge: Family<StateLabel, Gauge>,
}

/// Whether the API server serves the API.
#[derive(Debug, Clone)]
enum Served {
    /// The API server was not asked, or did not answer.
    Unknown,
    No,
    Yes(ApiResource),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct StateLabel {
    signer_name: String,
    state: &'static str,
}

/// The sources of a pod.
struct OfPod {
    /// Identity of the pod, for events and requests.
    pod: Arc<Pod>,
    sources: BTreeMap<SourceKey, Record>,
    /// Issued and refused certificates so far.
    changes: u64,
}

/// Name of the volume, and position of the source in it.
type SourceKey = (String, usize);

struct Record {
    source: Arc<PodCertificateProjection>,
    state: CertificateState,
    /// A request is being created.
    is_creating: bool,
    /// Earliest next creation; `None` if there was none.
    next_creation: Option<Instant>,
    delays: Backoff,
}

impl Record {
    fn new(source: &PodCertificateProjection) -> Self {
        Self {
            source: Arc::new(source.clone()),
            state: CertificateState::Initial,
            is_creating: false,
            next_creation: None,
            delays: Backoff::new(FIRST_RETRY, 2.0, LAST_RETRY),
        }
    }
}

/// The creation of a request.
struct Creation {
    uid: PodUid,
    key: SourceKey,
    pod: Arc<Pod>,
    source: Arc<PodCertificateProjection>,
}

/// A creation that ended.
struct Created {
    target: Creation,
    result: Result<Pending, String>,
}

/// The work of a pass.
#[derive(Default)]
struct Due {
    create: Vec<Creation>,
    wait: Duration,
}

impl std::fmt::Debug for PodCertificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodCertificates").finish_non_exhaustive()
    }
}

impl PodCertificates {
    /// Starts the task `pod-certificates`, which runs until `stop`.
    #[must_use]
    pub fn start(client: kube::Client, inputs: PodCertificateContext, stop: CancellationToken) -> Arc<Self> {
        Self::with_jitter(client, inputs, MAX_JITTER, stop)
    }

    fn with_jitter(
        client: kube::Client,
        inputs: PodCertificateContext,
        max_jitter: Duration,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let this = Arc::new(Self {
            client,
            inputs,
            max_jitter,
            pods: Mutex::default(),
            served: Mutex::new(Served::Unknown),
            changed: Notify::new(),
            creations: Semaphore::new(CREATIONS),
            keys: Semaphore::new(1),
            gauge: gauge_family(
                "kubelet_podcertificate_states",
                "Gauge vector reporting the number of pod certificate projected volume sources, faceted by signer_name and state.",
            ),
        });
        // `stop` ends the task.
        drop(task::spawn("pod-certificates", Arc::clone(&this).run(stop)));
        this
    }

    async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut requests: Option<Requests> = None;
        let mut creations = FuturesUnordered::new();
        let mut delays = Backoff::new(FIRST_RETRY, 2.0, LAST_RETRY);
        let mut lookup_at = Instant::now();
        loop {
            // Nothing happens without the watch, so nothing else waits for the answer.
            if requests.is_none() && !self.pods.lock().is_empty() && Instant::now() >= lookup_at {
                requests = match stop.run_until_cancelled(self.find()).await {
                    None => return,
                    Some(found) => found,
                };
                lookup_at = quintlet_kit::clock::deadline_after(Instant::now(), delays.next_wait());
            }
            let work = self.pass(requests.as_ref().and_then(Requests::listed));
            creations.extend(work.create.into_iter().map(|creation| self.spawn_creation(creation)));
            let is_unwatched = requests.is_none();
            let next: OptionFuture<_> = requests.as_mut().map(Requests::next).into();
            let is_looking = is_unwatched && !self.pods.lock().is_empty();
            // Each arm only ends a wait. The watch keeps its position if its arm is dropped.
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.changed.notified() => {}
                Some(watched) = next => match watched {
                    // An API server may list a version that it does not serve.
                    Watched::Event => if requests.as_ref().is_some_and(|requests| requests.is_listed) {
                        delays.reset();
                    },
                    Watched::Absent => requests = None,
                },
                () = tokio::time::sleep_until(lookup_at), if is_looking => {}
                Some(created) = creations.next() => self.apply(created),
                () = tokio::time::sleep(work.wait) => {}
            }
        }
    }

    /// Looks for the version of the API that the API server serves, and starts its watch.
    async fn find(&self) -> Option<Requests> {
        let found = served(&self.client, KIND, PLURAL).await;
        let mut served = self.served.lock();
        match found {
            Ok(Some(resource)) => {
                if !matches!(&*served, Served::Yes(known) if *known == resource) {
                    tracing::info!(version = resource.api_version, "watching PodCertificateRequests");
                }
                let requests = Requests::watch(&self.client, &resource, &self.inputs.node);
                *served = Served::Yes(resource);
                Some(requests)
            }
            Ok(None) => {
                if !matches!(*served, Served::No) {
                    tracing::info!("API server has no PodCertificateRequests, pods that need one wait");
                }
                *served = Served::No;
                None
            }
            Err(error) => {
                tracing::debug!(%error, "failed to look for PodCertificateRequests, retrying");
                None
            }
        }
    }

    /// Decides about all sources and applies the decisions. Returns the creations to start, and when the next
    /// pass is due. Nothing happens before the requests were listed, as in the kubelet.
    fn pass(&self, requests: Option<Listed<'_>>) -> Due {
        let (now, wall) = (Instant::now(), self.inputs.clock.wall());
        let mut work = Due { create: Vec::new(), wait: PASS_PERIOD };
        let mut counts: BTreeMap<StateLabel, i64> = BTreeMap::new();
        let mut pods = self.pods.lock();
        for (uid, of_pod) in pods.iter_mut() {
            let namespace = of_pod.pod.metadata.namespace.as_deref().unwrap_or_default();
            let mut has_changed = false;
            // One creation per pod: a pod with a thousand sources delays no other.
            let mut is_busy = of_pod.sources.values().any(|record| record.is_creating);
            for (key, record) in &mut of_pod.sources {
                if let Some(requests) = requests.as_ref().filter(|_| !record.is_creating) {
                    let outcome = outcome(&record.state, namespace, requests);
                    let state = std::mem::replace(&mut record.state, CertificateState::Initial);
                    let decision = decide(state, outcome, wall, self.jitter(), namespace);
                    let Decision { state, action, events, is_changed } = decision;
                    record.state = state;
                    for event in events {
                        let (reason, message) = (&event.reason, &event.message);
                        self.inputs.events.pod(&of_pod.pod, EventType::Warning, reason, message, "");
                    }
                    has_changed |= is_changed;
                    work.wait = work.wait.min(match action {
                        Action::Create => match record.next_creation.filter(|at| *at > now) {
                            Some(at) => at.saturating_duration_since(now),
                            // The end of the other creation is another pass.
                            None if is_busy => PASS_PERIOD,
                            None => {
                                (record.is_creating, is_busy) = (true, true);
                                work.create.push(Creation {
                                    uid: uid.clone(),
                                    key: key.clone(),
                                    pod: Arc::clone(&of_pod.pod),
                                    source: Arc::clone(&record.source),
                                });
                                PASS_PERIOD
                            }
                        },
                        Action::WaitUntil(at) => {
                            if is_changed {
                                record.delays.reset();
                            }
                            Duration::try_from(wall.duration_until(at)).unwrap_or_default()
                        }
                        Action::Wait | Action::Nothing => PASS_PERIOD,
                    });
                }
                let label = StateLabel {
                    signer_name: record.source.signer_name.clone(),
                    state: decide::label(&record.state, wall),
                };
                let count = counts.entry(label).or_default();
                *count = count.saturating_add(1);
            }
            if has_changed {
                of_pod.changes = of_pod.changes.saturating_add(1);
                self.inputs.wakeups.wake(uid);
            }
        }
        drop(pods);
        self.gauge.clear();
        for (label, count) in counts {
            self.gauge.get_or_create(&label).set(count);
        }
        work
    }

    fn spawn_creation(self: &Arc<Self>, creation: Creation) -> BoxFuture<'static, Created> {
        let name = format!(
            "{}/{}",
            creation.pod.metadata.namespace.as_deref().unwrap_or_default(),
            creation.pod.metadata.name.as_deref().unwrap_or_default()
        );
        let work = Work::new(creation.uid.as_str(), name);
        let this = Arc::clone(self);
        let pod = Arc::clone(&creation.pod);
        let source = Arc::clone(&creation.source);
        let uid = creation.uid.clone();
        let create = async move {
            let _permit = this.creations.acquire().await.map_err(|error| error.to_string())?;
            if !this.pods.lock().contains_key(&uid) {
                return Err("the pod is gone".to_owned());
            }
            this.create(&pod, &source).await
        };
        let task = task::spawn_contained("pod-certificate", Some(work), create);
        let ended = task.map(|ended| {
            let result = match ended {
                Ok(Ok(result)) => result,
                // The panic was logged with the pod.
                Ok(Err(_)) => Err("the creation panicked".to_owned()),
                Err(error) => Err(error.to_string()),
            };
            Created { target: creation, result }
        });
        ended.boxed()
    }

    /// Generates a key and creates its request.
    async fn create(&self, pod: &Pod, source: &PodCertificateProjection) -> Result<Pending, String> {
        let meta = &pod.metadata;
        let namespace = meta.namespace.clone().unwrap_or_default();
        let (name, uid) = (meta.name.clone().unwrap_or_default(), meta.uid.clone().unwrap_or_default());
        let account = quintlet_model::pod::spec(pod).service_account_name.clone();
        let account = account.unwrap_or_else(|| "default".to_owned());
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), &namespace);
        let account_uid = retry_on_lag(REQUEST_TIMEOUT, || accounts.get(&account)).await;
        let account_uid = account_uid.map_err(|error| format!("while fetching service account: {error}"))?;
        let node_uid = self.inputs.nodes.borrow().as_ref().and_then(|node| node.metadata.uid.clone());
        let node = self.inputs.node.clone();
        let node_uid = node_uid
            .ok_or_else(|| format!("while getting node object from local cache: node {node:?} not found"))?;
        let KeyAndRequest { key, request } = {
            let _permit = self.keys.acquire().await.map_err(|error| error.to_string())?;
            let key_type = source.key_type.clone();
            let generated = task::blocking(move || generate(&key_type)).await;
            generated.map_err(|error| format!("while generating keypair: {error}"))?
        };
        let Served::Yes(resource) = self.served.lock().clone() else { return Err(NOT_SERVED.to_owned()) };
        let object = Request {
            types: Some(TypeMeta { api_version: resource.api_version.clone(), kind: KIND.to_owned() }),
            metadata: ObjectMeta {
                namespace: Some(namespace.clone()),
                generate_name: Some("req-".to_owned()),
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".to_owned(),
                    kind: "Pod".to_owned(),
                    name: name.clone(),
                    uid: uid.clone(),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            spec: PodCertificateRequestSpec {
                signer_name: source.signer_name.clone(),
                pod_name: name,
                pod_uid: uid,
                service_account_name: account,
                service_account_uid: account_uid.metadata.uid.unwrap_or_default(),
                node_name: node,
                node_uid,
                max_expiration_seconds: source.max_expiration_seconds,
                stub_pkc_s10_request: ByteString(request),
                unverified_user_annotations: source.user_annotations.clone(),
            },
            status: None,
        };
        let api = Api::<Request>::namespaced_with(self.client.clone(), &namespace, &resource);
        let parameters = PostParams::default();
        let created = retry_on_lag(REQUEST_TIMEOUT, || api.create(&parameters, &object)).await;
        let created = created.map_err(|error| format!("while creating on API: {error}"))?;
        let name = created.metadata.name.ok_or("while creating on API: the request has no name")?;
        // The age is counted by this clock: that of the API server may differ.
        Ok(Pending::new(key, name, self.inputs.clock.wall(), self.jitter()))
    }

    fn apply(&self, created: Created) {
        let Created { target, result } = created;
        let mut pods = self.pods.lock();
        let of_pod = pods.get_mut(&target.uid).filter(|of_pod| Arc::ptr_eq(&of_pod.pod, &target.pod));
        // The pod may be gone, and come back with other sources.
        let Some(record) = of_pod.and_then(|of_pod| of_pod.sources.get_mut(&target.key)) else { return };
        record.is_creating = false;
        let wait = record.delays.next_wait();
        record.next_creation = Some(quintlet_kit::clock::deadline_after(Instant::now(), wait));
        let (name, volume) = (target.pod.metadata.name.as_deref().unwrap_or_default(), target.key.0);
        match result {
            Ok(pending) => {
                let request = &pending.request;
                tracing::debug!(pod.uid = %target.uid, pod.name = name, volume, request, "created PodCertificateRequest");
                let state = std::mem::replace(&mut record.state, CertificateState::Initial);
                record.state = decide::created(state, pending);
            }
            Err(error) => {
                tracing::info!(pod.uid = %target.uid, pod.name = name, volume, error, "failed to create PodCertificateRequest, retrying");
            }
        }
    }

    fn jitter(&self) -> SignedDuration {
        let jitter = self.max_jitter.mul_f64(rand::rng().random::<f64>());
        SignedDuration::try_from(jitter).unwrap_or(SignedDuration::ZERO)
    }
}

impl CredentialBundles for PodCertificates {
    fn read(
        &self,
        pod: &Pod,
        uid: &PodUid,
        volume: &str,
        index: usize,
        source: &PodCertificateProjection,
    ) -> Result<Arc<CredentialBundle>, String> {
        let mut pods = self.pods.lock();
        let of_pod = pods.entry(uid.clone()).or_insert_with(|| OfPod {
            pod: Arc::new(identity(pod)),
            sources: BTreeMap::new(),
            changes: 0,
        });
        let record = of_pod.sources.entry((volume.to_owned(), index)).or_insert_with(|| {
            self.changed.notify_one();
            Record::new(source)
        });
        match (&record.state, &*self.served.lock()) {
            (CertificateState::Initial, Served::No) => Err(NOT_SERVED.to_owned()),
            (state, _) => decide::read(state),
        }
    }

    fn changes(&self, uid: &PodUid) -> u64 {
        self.pods.lock().get(uid).map_or(0, |of_pod| of_pod.changes)
    }

    fn forget(&self, uid: &PodUid) {
        if self.pods.lock().remove(uid).is_some() {
            self.changed.notify_one();
        }
    }
}

/// Returns a pod with the fields that events and requests name.
fn identity(pod: &Pod) -> Pod {
    let meta = &pod.metadata;
    Pod {
        metadata: ObjectMeta {
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            uid: meta.uid.clone(),
            ..ObjectMeta::default()
        },
        spec: Some(k8s_openapi::api::core::v1::PodSpec {
            service_account_name: quintlet_model::pod::spec(pod).service_account_name.clone(),
            ..Default::default()
        }),
        status: None,
    }
}

/// Returns the outcome of the pending request of a source; `None` without one, and if the watch does not have
/// it.
fn outcome(state: &CertificateState, namespace: &str, requests: &Listed<'_>) -> Option<RequestStatus> {
    let pending = match state {
        CertificateState::Waiting(pending) | CertificateState::Refreshing { pending, .. } => pending,
        CertificateState::Initial
        | CertificateState::Denied { .. }
        | CertificateState::Failed { .. }
        | CertificateState::Issued(_) => return None,
    };
    let reference = ObjectRef::new_with(&pending.request, requests.resource.clone()).within(namespace);
    Some(RequestStatus::of(requests.store.get(&reference)?.status.as_ref()))
}

/// The requests of this node, once they were listed.
struct Listed<'a> {
    resource: &'a ApiResource,
    store: &'a Store<Request>,
}

/// Result of the next step of a watch.
enum Watched {
    /// An event, or a failure that it recovers from.
    Event,
    /// The API server does not serve the version of the watch.
    Absent,
}

/// The watch of this node's requests.
struct Requests {
    resource: ApiResource,
    store: Store<Request>,
    writer: Writer<Request>,
    events: BoxStream<'static, watcher::Result<watcher::Event<Request>>>,
    is_listed: bool,
    is_failing: bool,
}

impl Requests {
    fn watch(client: &kube::Client, resource: &ApiResource, node: &str) -> Self {
        let writer = Writer::<Request>::new(resource.clone());
        let config = watcher::Config::default().any_semantic().fields(&format!("spec.nodeName={node}"));
        let events = watcher(Api::all_with(client.clone(), resource), config).default_backoff().boxed();
        Self {
            resource: resource.clone(),
            store: writer.as_reader(),
            writer,
            events,
            is_listed: false,
            is_failing: false,
        }
    }

    /// Returns the requests, once they were listed.
    fn listed(&self) -> Option<Listed<'_>> {
        self.is_listed.then_some(Listed { resource: &self.resource, store: &self.store })
    }

    /// Waits for the next event and applies it.
    ///
    /// Cancellation safety: the watch keeps its position.
    async fn next(&mut self) -> Watched {
        match self.events.next().await {
            // The stream of a watcher does not end.
            None => std::future::pending().await,
            Some(Err(error)) if is_absent(&error) => return Watched::Absent,
            Some(Ok(event)) => {
                self.writer.apply_watcher_event(&event);
                // A list begins before each attempt.
                self.is_failing &= matches!(event, watcher::Event::Init);
                self.is_listed |= matches!(event, watcher::Event::InitDone);
            }
            Some(Err(error)) => {
                let error = quintlet_kit::error_chain(&error);
                // One line when the watch begins to fail: the API server may be away for hours.
                match std::mem::replace(&mut self.is_failing, true) {
                    false => tracing::info!(error, "PodCertificateRequest watch failed, retrying"),
                    true => tracing::debug!(error, "PodCertificateRequest watch failed again, retrying"),
                }
            }
        }
        Watched::Event
    }
}
