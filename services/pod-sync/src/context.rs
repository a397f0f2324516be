//! What every worker shares.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::RwLock;
use pod_sync_cgroups::Cgroups;
use pod_sync_clients::{EventType, Events, Pleg, Probes, Runtime, Statuses, WorkerWakeups};
use pod_sync_cri_config::NodeSettings;
use pod_sync_cri_config::objects::ObjectSource;
use pod_sync_decisions::admission::Rejection;
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_decisions::status::NodeFacts;
use pod_sync_images::credentials::Credentials;
use pod_sync_images::pull_records::PullRecords;
use pod_sync_images::pulls::PullLimits;
use pod_sync_node::RuntimeState;
use pod_sync_sources::{ManifestProblem, SourceKind};
use pod_sync_volumes::Volumes;
use pod_sync_volumes::token::TokenSource;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain::Panic;
use quintlet_kit::grant::GrantKey;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::PodRuntime;
use tokio::sync::watch;

use crate::pod_workers::PodWorkers;
use crate::static_pod_gate::StaticPodGate;
use crate::view::{View, Waiting};
use pod_sync_containment::{Containment, PodWork};
use pod_sync_metrics::PodMetrics;
use pod_sync_state::Allocations;
use pod_sync_state::StateDir;
use pod_sync_state::UserNamespaces;
use pod_sync_storage::Measured;

/// Reason of the event and of the wait after a panic or a death of a process in the work of a pod.
pub const INTERNAL_ERROR: &str = "InternalError";

/// Shared by all workers of one pod-sync.
pub struct Context {
    /// Settings and facts of the node.
    pub node: Arc<NodeSettings>,
    /// What each pod was given.
    pub allocations: Allocations,
    /// Cgroup root and drivers.
    pub cgroups: Cgroups,
    /// Time.
    pub clock: Clock,
    /// Of this owner of the root directory.
    pub epoch: u64,
    /// Signs exec probes.
    pub grant_key: GrantKey,
    /// Records that outlive the process.
    pub state: StateDir,
    /// Panics and deaths in the work of pods.
    pub containment: Containment,
    /// Bells of the workers.
    pub wakes: Arc<WorkerWakeups>,
    /// The runtime.
    pub runtime: Runtime,
    /// What the runtime has.
    pub pleg: Arc<Pleg>,
    /// Probes.
    pub probes: Arc<Probes>,
    /// Statuses for the API server.
    pub statuses: Arc<Statuses>,
    /// Events.
    pub events: Events,
    /// ConfigMaps, Secrets, Services.
    pub objects: Arc<dyn ObjectSource>,
    /// Service account tokens; none without an API server.
    pub tokens: Option<Arc<dyn TokenSource>>,
    /// Volumes of all pods.
    pub volumes: Volumes,
    /// The runtime's own state.
    pub runtime_state: watch::Receiver<RuntimeState>,
    /// There is an API server.
    pub has_api: bool,
    /// Pod resync interval (`syncFrequency`).
    pub sync_frequency: Duration,
    /// What each pod's worker is to do.
    pub pod_workers: PodWorkers,
    /// What others see of each pod.
    pub views: Views,
    /// Directory of links to containers' logs.
    pub container_logs_dir: Option<PathBuf>,
    /// Which images were pulled here, and who may use them.
    pub pull_records: PullRecords,
    /// Pulls in flight, per registry and in all.
    pub pulls: PullLimits,
    /// Ranges of ids of pods with a user namespace.
    pub user_namespaces: UserNamespaces,
    /// What pulls present, but for the pods' own secrets.
    pub credentials: Credentials,
    /// What is counted.
    pub metrics: PodMetrics,
    /// What volumes take on the disk.
    pub measured: Arc<Measured>,
    /// Which dead containers are kept.
    pub dead: pod_sync_decisions::gc::GcPolicy,
    /// Delays before a container that keeps ending is started again.
    pub crash_loop: BackoffDelays,
    /// Static pods that others wait for.
    pub static_pod_gate: StaticPodGate,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("node", &self.node.node_name)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Facts of the node as the status needs them.
    #[must_use]
    pub fn facts(&self, handler: &str) -> NodeFacts {
        let runtime = self.runtime_state.borrow();
        NodeFacts {
            runtime_name: runtime.name.clone(),
            host_ips: self.node.node_ips.get(),
            recursive_read_only: runtime.handlers.get(handler).is_some_and(|h| h.recursive_read_only_mounts),
        }
    }

    /// Runs work of a pod beside its worker. A panic makes the pod wait, as one of the worker's passes does, and returns none.
    pub async fn contained<T>(&self, pod: &PodWork, work: impl Future<Output = T>) -> Option<T> {
        match self.containment.contained(&pod.uid, pod.name.clone(), work).await {
            Ok(done) => Some(done),
            Err(panic) => {
                self.panicked(pod, &panic, None);
                None
            }
        }
    }

    /// Runs work of a pod that does not wait, unless the pod waits after a panic or a death. After a panic, which has been logged,
    /// the pod goes on: this is for work that comes round by itself.
    pub fn unless_it_waits<T>(&self, uid: &PodUid, work: impl FnOnce() -> T) -> Option<T> {
        self.containment.unless_suspended(uid, work)
    }

    /// Takes note of a panic in the work of a pod, and has its worker show what it waits for now. `object`: the pod, where it
    /// is not shown yet.
    pub fn panicked(&self, pod: &PodWork, panic: &Panic, object: Option<&Arc<Pod>>) {
        let wait = self.containment.record_panic(&pod.uid, panic);
        let shown = self.views.get(&pod.uid).map(|view| Arc::clone(&view.pod));
        if let Some(object) = object.or(shown.as_ref()) {
            self.events.pod(object, EventType::Warning, INTERNAL_ERROR, &wait.message, "");
        }
        // The worker shows what the pod waits for, and a new one comes where the worker itself is the one that panicked.
        self.wakes.wake(&pod.uid);
        self.wakes.wake_housekeeping();
    }

    /// Whether nothing of a pod runs any more: its room is free.
    #[must_use]
    pub fn is_over(&self, uid: &PodUid) -> bool {
        self.views.get(uid).is_none() || self.pod_workers.read(|w| w.is_known_terminated(uid))
    }

    /// Directory of a pod under the root.
    #[must_use]
    pub fn pod_dir(&self, uid: &PodUid) -> PathBuf {
        pod_sync_cri_config::paths::pod_dir(&self.node.root_dir, uid)
    }

    /// A pod of the runtime is ours only if its directory is under our root or its sandbox bears our node's name.
    #[must_use]
    pub fn is_ours(&self, runtime: &PodRuntime) -> bool {
        let marked = |key: &BTreeMap<String, String>| {
            key.get(quintlet_model::labels::OWNER_NODE).is_some_and(|node| *node == self.node.node_name)
        };
        runtime.sandboxes.iter().any(|s| marked(&s.annotations)) || self.pod_dir(&runtime.pod.uid).is_dir()
    }
}

/// What others see: pods and problems of the sources, with a number that grows with every change.
#[derive(Debug)]
pub struct Views {
    pods: RwLock<HashMap<PodUid, Arc<View>>>,
    problems: RwLock<BTreeMap<SourceKind, Vec<(ManifestProblem, i64)>>>,
    version: watch::Sender<u64>,
    /// Pods known from before that no worker has shown yet.
    expected: watch::Sender<HashSet<PodUid>>,
}

/// After a start nobody waits longer for known pods to be shown: each has a worker, whose first pass takes milliseconds.
const SETTLE: Duration = Duration::from_secs(2);

impl Default for Views {
    fn default() -> Self {
        Self {
            pods: RwLock::default(),
            problems: RwLock::default(),
            version: watch::Sender::new(0),
            expected: watch::Sender::new(HashSet::new()),
        }
    }
}

impl Views {
    /// These will be shown soon: without them what is seen is not complete.
    pub fn expect(&self, uids: impl IntoIterator<Item = PodUid>) {
        self.expected.send_modify(|expected| expected.extend(uids));
    }

    /// Waits until every pod known from before is shown, so that a restart looks to nobody as if pods were gone; 2 s at most.
    pub async fn settled(&self) {
        let mut expected = self.expected.subscribe();
        // The sender lives as long as `self`.
        let _ = tokio::time::timeout(SETTLE, expected.wait_for(HashSet::is_empty)).await;
    }

    fn is_known(&self, uid: &PodUid) {
        self.expected.send_if_modified(|expected| expected.remove(uid));
    }

    /// Shows a pod.
    pub fn show(&self, uid: &PodUid, mut view: View) {
        self.version.send_modify(|v| {
            *v = v.saturating_add(1);
            view.version = *v;
            self.pods.write().insert(uid.clone(), Arc::new(view));
        });
        self.is_known(uid);
    }

    // Of a pod that is shown: what is hidden meanwhile stays hidden.
    fn change(&self, uid: &PodUid, change: impl FnOnce(&View) -> Option<View>) {
        self.version.send_if_modified(|v| {
            let mut pods = self.pods.write();
            let Some(shown) = pods.get_mut(uid) else { return false };
            let Some(mut view) = change(shown) else { return false };
            *v = v.saturating_add(1);
            view.version = *v;
            *shown = Arc::new(view);
            true
        });
    }

    /// Shows that something else is waited for, while the worker is in a call that takes its time.
    pub fn wait(&self, uid: &PodUid, waiting: Option<Waiting>) {
        self.change(uid, |shown| {
            let told = |w: &Waiting| (w.reason.clone(), w.container.clone(), w.message.clone());
            let is_new = shown.waiting.as_ref().map(told) != waiting.as_ref().map(told);
            is_new.then(|| View { waiting, ..shown.clone() })
        });
    }

    /// Shows what the source says of the end of a pod at once: its worker may be in a call that takes minutes.
    pub fn wanted(&self, uid: &PodUid, desired: &Desired) {
        let (is_removed, deletion) = (desired.removed, &desired.pod.metadata.deletion_timestamp);
        self.change(uid, |shown| {
            let is_new = shown.is_removed != is_removed || shown.deletion != *deletion;
            is_new.then(|| View { is_removed, deletion: deletion.clone(), ..shown.clone() })
        });
    }

    /// Shows a pod no more.
    pub fn hide(&self, uid: &PodUid) {
        if self.pods.write().remove(uid).is_some() {
            self.version.send_modify(|v| *v = v.saturating_add(1));
        }
        self.is_known(uid);
    }

    /// One pod.
    #[must_use]
    pub fn get(&self, uid: &PodUid) -> Option<Arc<View>> {
        self.pods.read().get(uid).cloned()
    }

    /// All pods, by namespace and name.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<View>> {
        let mut all: Vec<_> = self.pods.read().values().cloned().collect();
        all.sort_by(|a, b| {
            (&a.pod_ref.namespace, &a.pod_ref.name).cmp(&(&b.pod_ref.namespace, &b.pod_ref.name))
        });
        all
    }

    /// Replaces the problems of one source; each keeps the time it was first seen.
    pub fn set_problems(&self, source: SourceKind, problems: Vec<ManifestProblem>, now_unix_ns: i64) {
        let mut all = self.problems.write();
        let old = all.remove(&source).unwrap_or_default();
        let new: Vec<_> = problems
            .into_iter()
            .map(|p| {
                let since = old.iter().find(|(o, _)| *o == p).map_or(now_unix_ns, |(_, t)| *t);
                (p, since)
            })
            .collect();
        let changed = new != old;
        all.insert(source, new);
        drop(all);
        if changed {
            self.version.send_modify(|v| *v = v.saturating_add(1));
        }
    }

    /// Problems of all sources, with the time each was first seen.
    #[must_use]
    pub fn problems(&self) -> Vec<(SourceKind, ManifestProblem, i64)> {
        let all = self.problems.read();
        all.iter().flat_map(|(s, list)| list.iter().map(|(p, t)| (*s, p.clone(), *t))).collect()
    }

    /// Follows the number of changes.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }
}

/// A pod as its source has it, for its worker.
#[derive(Debug, Clone)]
pub struct Desired {
    /// The pod; its status is the API server's.
    pub pod: Arc<Pod>,
    /// Where it came from.
    pub source: SourceKind,
    /// The mirror of a static pod, as the API server has it.
    pub mirror: Option<Arc<Pod>>,
    /// The source no longer has it.
    pub removed: bool,
    /// Admission refused it.
    pub rejected: Option<Rejection>,
    /// Those that go first, so that it fits.
    pub after: Vec<Victim>,
}

/// A pod that makes room for another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// UID.
    pub uid: PodUid,
    /// Boottime from which on it is not waited for any more.
    pub until: Duration,
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_pod_that_is_hidden_while_its_worker_tells_what_it_waits_for_stays_hidden() {
        let uid = PodUid::parse("u1").expect("a UID");
        let shown = |views: &Views| {
            let pod: Pod = serde_json::from_value(serde_json::json!({
                "metadata": {"name": "p", "namespace": "default", "uid": "u1"},
            }))
            .expect("a pod");
            let view = View {
                pod_ref: quintlet_model::pod::pod_ref(&pod).expect("names"),
                source: SourceKind::Api,
                pod: Arc::new(pod),
                status: None,
                deletion: None,
                worker: "sync",
                is_removed: false,
                waiting: None,
                decision: Arc::default(),
                created_unix_ns: 0,
                resource_version: String::new(),
                mirror_uid: String::new(),
                version: 0,
            };
            views.show(&uid, view);
        };
        let views = Views::default();
        for round in 0..2000 {
            shown(&views);
            let together = std::sync::Barrier::new(2);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    together.wait();
                    views.wait(&uid, Some(Waiting { reason: round.to_string(), ..Waiting::default() }));
                });
                together.wait();
                views.hide(&uid);
            });
            assert!(views.get(&uid).is_none(), "round {round}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_start_nothing_is_complete_before_every_known_pod_is_shown_or_gone() {
        let views = Arc::new(Views::default());
        let began = Instant::now();
        views.settled().await;
        assert_eq!(began.elapsed(), Duration::ZERO, "a first start expects nothing");
        let uid = |name: &str| PodUid::parse(name).expect("a UID");
        views.expect([uid("u1"), uid("u2")]);
        let waiting = Arc::clone(&views);
        let waiting = quintlet_kit::task::spawn("settled", async move { waiting.settled().await });
        views.hide(&uid("u1"));
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(!waiting.is_finished());
        views.hide(&uid("u2"));
        waiting.await.expect("it ends");
        assert_eq!(began.elapsed(), Duration::from_millis(10));
        views.expect([uid("u3")]);
        views.settled().await;
        assert_eq!(
            began.elapsed(),
            SETTLE + Duration::from_millis(10),
            "one that is stuck does not hide the others"
        );
    }
}
