//! The handle of the cache, and the task that writes its files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use quintlet_kit::atomic_file;
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use quintlet_model::ids::PodUid;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::answer::{Answer, AnswerKey};
use crate::contact::Contact;
use crate::kept::{Kept, StartDecision, file_of};
use crate::marks::{Marks, OfflineStart};
use crate::metrics::Metrics;
use crate::seal::SealingKey;
use crate::store::{DirectoryError, Store, StoreCounts, WriteError};

/// Time between a change and its write. The changes of a pod's start are written together.
const WRITE_DELAY: Duration = Duration::from_secs(1);
/// Interval between attempts to write a file, if the disk is full, for example.
const RETRY: Duration = Duration::from_secs(60);
/// JSON of an object that does not exist.
const NONE: &str = "null";

/// Settings of the cache.
#[derive(Debug, Clone)]
pub struct OfflineSettings {
    /// Directory of the files, which survive a boot.
    pub dir: PathBuf,
    /// File of the pods that were started from the cache. It has to be gone after a boot.
    pub marks: PathBuf,
    /// Name of the node.
    pub node: String,
    /// Time without an answer of the API server after which it is away.
    pub wait: Duration,
    /// Key of the files; none: they are not encrypted.
    pub key: Option<SealingKey>,
    /// Clock of the process.
    pub clock: Clock,
}

/// The pods of the API server that this node has admitted, with what they need for a start.
#[derive(Debug)]
pub struct OfflineCache {
    contact: Arc<Contact>,
    clock: Clock,
    node_name: String,
    kept: Mutex<Kept>,
    marks: Mutex<Marks>,
    // Locked only where blocking is allowed.
    store: Arc<Mutex<Store>>,
    /// Files of pods that were not usable at the start.
    unusable: Mutex<Vec<String>>,
    /// Files to remove.
    removals: Mutex<Vec<String>>,
    due: Notify,
    // One write at a time.
    writing: tokio::sync::Mutex<()>,
    metrics: Metrics,
    /// Cancelled once the API server has delivered its pods.
    listed: CancellationToken,
    /// Number of pods that were started from the cache and not confirmed.
    unconfirmed: watch::Sender<usize>,
}

impl OfflineCache {
    // Blocks: there is no pod before the start.
    /// Opens the cache and reads its files. A file that is not usable is logged and ignored.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn open(settings: &OfflineSettings) -> Result<Self, DirectoryError> {
        let (store, contents) = Store::open(&settings.dir, &settings.node, settings.key.clone())?;
        let (unusable, counts) = (store.unusable(), store.counts());
        let cache = Self {
            contact: Arc::new(Contact::new(settings.wait)),
            clock: settings.clock.clone(),
            node_name: settings.node.clone(),
            kept: Mutex::new(Kept::of(&settings.node, contents)),
            marks: Mutex::new(Marks::open(&settings.marks)),
            store: Arc::new(Mutex::new(store)),
            unusable: Mutex::new(unusable),
            removals: Mutex::default(),
            due: Notify::new(),
            writing: tokio::sync::Mutex::default(),
            metrics: Metrics::default(),
            listed: CancellationToken::new(),
            unconfirmed: watch::Sender::new(0),
        };
        cache.metrics.set_store(counts);
        cache.update_metrics();
        Ok(cache)
    }

    /// Returns whether the API server answers.
    #[must_use]
    pub fn contact(&self) -> &Arc<Contact> {
        &self.contact
    }

    /// Keeps an admitted pod, or its newest version.
    pub fn keep(&self, uid: &PodUid, pod: &Arc<Pod>) {
        let is_due = self.kept.lock().keep(uid, pod);
        self.notify_if(is_due);
    }

    /// Forgets a pod: it is gone, or not to be started again.
    pub fn forget(&self, uid: &PodUid) {
        let was_kept = self.kept.lock().forget(uid);
        if was_kept {
            self.removals.lock().push(file_of(uid));
        }
        self.notify_if(was_kept);
    }

    /// Forgets the mark of a pod of which nothing is left.
    pub fn forget_start(&self, uid: &PodUid) {
        self.marks.lock().remove(uid);
        self.update_metrics();
    }

    /// Forgets all other pods. Their files that were not usable at the start are removed.
    pub fn retain(&self, is_known: impl Fn(&PodUid) -> bool) {
        let unknown: Vec<PodUid> = self.kept.lock().uids().into_iter().filter(|uid| !is_known(uid)).collect();
        unknown.iter().for_each(|uid| self.forget(uid));
        // A file of a kept pod is written again.
        let unusable = std::mem::take(&mut *self.unusable.lock());
        let kept: Vec<String> = self.kept.lock().uids().iter().map(file_of).collect();
        let unusable: Vec<String> = unusable.into_iter().filter(|name| !kept.contains(name)).collect();
        let is_due = !unusable.is_empty();
        self.removals.lock().extend(unusable);
        self.notify_if(is_due);
    }

    /// Records that a container of a pod is about to be created. Returns when that is on the disk, if the
    /// next start depends on it.
    pub async fn container_runs(&self, uid: &PodUid) {
        let is_due = self.kept.lock().runs(uid);
        // The mark of a start precedes its first container.
        if is_due || self.marks.lock().is_due() {
            self.write().await;
        }
    }

    fn notify_if(&self, is_due: bool) {
        if is_due {
            self.due.notify_one();
        }
    }

    /// Keeps an answer of the API server; none: the object does not exist.
    pub(crate) fn remember<V: Answer>(&self, key: &AnswerKey, answer: Option<&V>) {
        let version = answer.map(Answer::version).unwrap_or_default();
        {
            let kept = self.kept.lock();
            if kept.has_version(key, &version) || !kept.is_needed(key) {
                return;
            }
        }
        let json = answer.map_or_else(|| Ok(NONE.to_owned()), Answer::encode);
        // Types of the API can be written as JSON.
        let Ok(json) = json else { return };
        let is_due = self.kept.lock().remember(key.clone(), version, json);
        self.notify_if(is_due);
    }

    /// Returns the last known answer of the API server.
    pub(crate) fn recall<V: Answer>(&self, key: &AnswerKey) -> Option<Option<V>> {
        let json = self.kept.lock().recall(key)?;
        if &*json == NONE { Some(None) } else { V::decode(&json).ok().map(Some) }
    }

    /// Waits until pods are to be started from the cache: the API server is away and has not delivered its
    /// pods before. Returns false once it has.
    pub async fn start_due(&self) -> bool {
        // Both arms only wait.
        tokio::select! {
            biased;
            () = self.listed.cancelled() => false,
            () = self.contact.away() => true,
        }
    }

    /// Returns the Node as it was known last.
    #[must_use]
    pub fn node(&self) -> Option<Arc<Node>> {
        self.kept.lock().node()
    }

    /// Returns the pods to start, the oldest first, and logs why the others are not started.
    #[must_use]
    pub fn starts(&self) -> Vec<Arc<Pod>> {
        let all = self.kept.lock().starts();
        let given = all.into_iter().filter(|(pod, decision)| {
            let reason = match decision {
                StartDecision::Give => return true,
                StartDecision::HasRun => "its restartPolicy is Never, and it has run",
                StartDecision::Finished => "it has succeeded or failed",
                StartDecision::OtherNode => "it is bound to another node",
            };
            let (name, uid) = (&pod.metadata.name, &pod.metadata.uid);
            let node = &self.node_name;
            tracing::info!(
                pod.name = name,
                pod.uid = uid,
                node,
                reason,
                "pod of the offline cache is not started"
            );
            false
        });
        given.map(|(pod, _)| pod).collect()
    }

    /// Marks a pod as started from the cache.
    pub fn mark_started(&self, uid: &PodUid) {
        self.marks.lock().started(uid, self.clock.wall());
        self.update_metrics();
        self.due.notify_one();
    }

    /// Records that the API server has delivered its pods.
    pub fn confirm(&self) {
        self.listed.cancel();
        self.marks.lock().confirm(self.clock.wall());
        self.update_metrics();
        self.due.notify_one();
    }

    /// Returns when a pod was started from the cache, if it was.
    #[must_use]
    pub fn start_of(&self, uid: &PodUid) -> Option<OfflineStart> {
        self.marks.lock().get(uid).cloned()
    }

    /// Returns the number of pods that were started from the cache and not confirmed.
    #[must_use]
    pub fn unconfirmed(&self) -> usize {
        self.marks.lock().unconfirmed()
    }

    /// Returns a receiver of that number.
    #[must_use]
    pub fn starts_seen(&self) -> watch::Receiver<usize> {
        self.unconfirmed.subscribe()
    }

    /// Returns whether a pod uses an image of the node whatever its `imagePullPolicy`: it was started from
    /// the cache, and the API server is away.
    #[must_use]
    pub fn prefers_local_images(&self, uid: &PodUid) -> bool {
        let is_unconfirmed = self.marks.lock().get(uid).is_some_and(|start| start.confirmed.is_none());
        is_unconfirmed && self.contact.is_away()
    }

    /// Writes changes and follows the Node until `stop`.
    pub async fn run(
        self: Arc<Self>,
        mut nodes: watch::Receiver<Option<Arc<Node>>>,
        stop: CancellationToken,
    ) {
        let mut retry = None;
        loop {
            let retried = async {
                match retry {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            // All arms only wait: what is due stays due.
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.due.notified() => {}
                () = retried => {}
                changed = nodes.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    let node = nodes.borrow_and_update().clone();
                    let is_due = node.is_some_and(|node| self.kept.lock().set_node(&node));
                    self.notify_if(is_due);
                    continue;
                }
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(WRITE_DELAY) => {}
            }
            let is_written = self.write().await;
            retry = (!is_written).then(|| quintlet_kit::clock::deadline_after(Instant::now(), RETRY));
        }
        self.write().await;
    }

    /// Writes what is due. Returns false if a file has to be written again later.
    async fn write(&self) -> bool {
        let _one = self.writing.lock().await;
        let removals = std::mem::take(&mut *self.removals.lock());
        let due = self.kept.lock().take_due(self.clock.wall());
        // A pod may have been forgotten and kept again.
        let removals: Vec<String> =
            removals.into_iter().filter(|name| due.iter().all(|(file, _)| file != name)).collect();
        let marks = self.marks.lock().take_due();
        let store = Arc::clone(&self.store);
        let (written, counts) = blocking(move || write_files(&mut store.lock(), marks, removals, due)).await;
        let mut is_written = true;
        for (name, result) in written {
            match result {
                Ok(()) => {
                    self.metrics.writes.inc();
                }
                Err(error) => {
                    self.metrics.failures.inc();
                    let error = quintlet_kit::error_chain(&error);
                    tracing::warn!(
                        file = name,
                        error,
                        "failed to write a file of the offline cache, retrying"
                    );
                    self.kept.lock().failed(&name);
                    is_written = false;
                }
            }
        }
        self.metrics.set_store(counts);
        self.update_metrics();
        is_written
    }

    fn update_metrics(&self) {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.metrics.pods.set(count(self.kept.lock().uids().len()));
        let unconfirmed = self.unconfirmed();
        self.metrics.started.set(count(unconfirmed));
        self.unconfirmed.send_if_modified(|known| std::mem::replace(known, unconfirmed) != unconfirmed);
    }
}

type Due = (String, serde_json::Result<Vec<u8>>);
type Written = Vec<(String, Result<(), WriteError>)>;

/// Writes and removes files. Returns the files that were written and those that have to be written again.
fn write_files(
    store: &mut Store,
    marks: Option<(PathBuf, Vec<u8>)>,
    removals: Vec<String>,
    due: Vec<Due>,
) -> (Written, StoreCounts) {
    if let Some((path, bytes)) = marks
        && let Err(error) = atomic_file::write(&path, &bytes, 0o600)
    {
        tracing::warn!(path = %path.display(), %error, "failed to write the marks of the offline cache");
    }
    for name in removals {
        if let Err(error) = store.delete_file(&name) {
            tracing::warn!(file = name, %error, "failed to remove a file of the offline cache");
        }
    }
    let mut written = Vec::new();
    for (name, content) in due {
        let was_left_out = store.is_left_out(&name);
        let result = match content {
            Ok(content) => store.write(&name, content),
            Err(error) => Err(WriteError::Write(error.into())),
        };
        match result {
            Err(error @ WriteError::Large { .. }) => {
                if !was_left_out {
                    tracing::warn!(file = name, %error, "pod left out of the offline cache");
                }
            }
            Ok(()) | Err(WriteError::Key(_) | WriteError::Write(_)) => written.push((name, result)),
        }
    }
    (written, store.counts())
}
