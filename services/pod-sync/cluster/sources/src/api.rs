//! Pods of this node from the API server (`pkg/kubelet/config: NewSourceApiserver`), and watches of Node,
//! Services and RuntimeClasses.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Pod, Service, ServicePort, ServiceSpec};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource as _;
use kube::api::Api;
use kube::runtime::watcher;
use parking_lot::RwLock;
use quintlet_model::ids::PodUid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use pod_sync_clients::NoIdentity;
use pod_sync_layout::{ManifestProblem, SourceKind};

use super::known::{KnownList, ListTask};
use super::lenient::{Lenient, Undecodable};
use super::{Snapshot, SourceEvent, SourceSender};

/// Shortest interval between requests while the API server fails (ARCHITECTURE.md, invariant 9).
const RETRY: Duration = Duration::from_secs(1);

/// Watches the pods bound to `node`. Sends all of them after each complete list, and the changed pod after an
/// event.
pub async fn run(client: kube::Client, node: String, out: SourceSender, stop: CancellationToken) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}")).any_semantic();
    let stream = watcher(Api::<Lenient<Pod>>::all(client), config);
    futures::pin_mut!(stream);
    let (mut pods, mut fresh) = (Pods::default(), Pods::default());
    loop {
        // The watcher keeps its position if this arm is dropped.
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = stream.next() => event,
        };
        let Some(event) = event else { return };
        let updates = match event {
            Ok(watcher::Event::Init) => {
                fresh = Pods::default();
                continue;
            }
            Ok(watcher::Event::InitApply(pod)) => {
                let before = pods.before(pod.meta());
                fresh.apply(pod, before);
                continue;
            }
            Ok(watcher::Event::InitDone) => {
                pods = std::mem::take(&mut fresh);
                vec![SourceEvent::Snapshot(pods.snapshot())]
            }
            Ok(watcher::Event::Apply(pod)) => pods.change(pod),
            Ok(watcher::Event::Delete(pod)) => pods.take(&key(pod.meta())),
            Err(e) => {
                log_watch_error("pods", &e);
                // Both arms only wait.
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(RETRY) => continue,
                }
            }
        };
        for update in updates {
            // An update that is not sent is lost with the receiver, which stops as well.
            tokio::select! {
                () = stop.cancelled() => return,
                sent = out.send((SourceKind::Api, update)) => if sent.is_err() { return },
            }
        }
    }
}

type Key = (String, String);

fn key(meta: &ObjectMeta) -> Key {
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

/// The pods of the API server by namespace and name. They are sent on and not kept, since the receiver keeps
/// them.
#[derive(Debug, Default)]
struct Pods {
    // UIDs of the pods that were decoded, in this version or an earlier one.
    decoded: BTreeMap<Key, String>,
    // Those that were not sent yet.
    unsent: BTreeMap<Key, Pod>,
    undecodable: BTreeMap<Key, Undecodable>,
    // Entries of `undecodable` that no snapshot has reported yet.
    unreported: BTreeSet<Key>,
}

/// State of a pod before an event.
#[derive(Debug, Default)]
struct Before {
    // The UID, if the pod was decoded.
    decoded: Option<String>,
    // The error of an undecodable pod, if a snapshot has reported it.
    reported: Option<String>,
}

impl Pods {
    fn before(&self, meta: &ObjectMeta) -> Before {
        let key = key(meta);
        let decoded = self.decoded.get(&key).filter(|uid| Some(*uid) == meta.uid.as_ref()).cloned();
        let reported = self.undecodable.get(&key).filter(|_| !self.unreported.contains(&key));
        Before { decoded, reported: reported.map(|undecodable| undecodable.error.clone()) }
    }

    /// Stores a pod. A pod that was decoded as an earlier version stays as that version.
    fn apply(&mut self, pod: Lenient<Pod>, before: Before) {
        let key = key(pod.meta());
        self.remove(&key);
        match pod.into_result() {
            Ok(pod) => {
                self.decoded.insert(key.clone(), pod.metadata.uid.clone().unwrap_or_default());
                self.unsent.insert(key, pod);
            }
            Err(undecodable) => {
                self.decoded.extend(before.decoded.map(|uid| (key.clone(), uid)));
                if before.reported.as_ref() != Some(&undecodable.error) {
                    self.unreported.insert(key.clone());
                }
                self.undecodable.insert(key, undecodable);
            }
        }
    }

    fn remove(&mut self, key: &Key) {
        self.decoded.remove(key);
        self.unsent.remove(key);
        self.undecodable.remove(key);
        self.unreported.remove(key);
    }

    /// Stores a pod. Returns the updates that it causes.
    fn change(&mut self, pod: Lenient<Pod>) -> Vec<SourceEvent> {
        let key = key(pod.meta());
        let before = self.before(pod.meta());
        let other = self.decoded.get(&key).filter(|uid| Some(*uid) != pod.meta().uid.as_ref());
        let replaced = other.and_then(|uid| removed(uid));
        let was_undecodable = self.undecodable.contains_key(&key);
        self.apply(pod, before);
        let alone = if was_undecodable { None } else { self.unsent.remove(&key) };
        match alone {
            Some(pod) => replaced.into_iter().chain([SourceEvent::Changed(Arc::new(pod))]).collect(),
            None => vec![SourceEvent::Snapshot(self.snapshot())],
        }
    }

    /// Removes a pod. Returns the updates that this causes.
    fn take(&mut self, key: &Key) -> Vec<SourceEvent> {
        let was_undecodable = self.undecodable.contains_key(key);
        let gone = self.decoded.get(key).and_then(|uid| removed(uid));
        self.remove(key);
        if was_undecodable {
            return vec![SourceEvent::Snapshot(self.snapshot())];
        }
        gone.into_iter().collect()
    }

    fn snapshot(&mut self) -> Snapshot {
        let unreported = std::mem::take(&mut self.unreported);
        let problem = |((namespace, name), undecodable): (&Key, &Undecodable)| ManifestProblem {
            origin: format!("API server: {namespace}/{name}"),
            field: undecodable.field.clone(),
            message: format!("failed to decode the pod: {}", undecodable.error),
        };
        let unsent = std::mem::take(&mut self.unsent);
        let sent = self.decoded.iter().filter(|(key, _)| !unsent.contains_key(*key));
        Snapshot {
            unchanged: sent.filter_map(|(_, uid)| PodUid::parse(uid).ok()).collect(),
            pods: unsent.into_values().map(Arc::new).collect(),
            problems: self.undecodable.iter().map(problem).collect(),
            undecodable: unreported.iter().filter_map(|key| self.undecodable.get(key).cloned()).collect(),
            ..Snapshot::default()
        }
    }
}

// A pod whose UID is invalid was not taken over.
fn removed(uid: &str) -> Option<SourceEvent> {
    PodUid::parse(uid).ok().map(SourceEvent::Removed)
}

/// The Node as the watch last delivered it.
pub type SharedNode = Arc<Node>;

/// Node, Services and RuntimeClasses, kept up to date by watches.
#[derive(Debug, Default)]
pub struct ClusterView {
    node: watch::Sender<Option<SharedNode>>,
    services: RwLock<Option<Arc<Vec<Arc<Service>>>>>,
    // Handlers by name of the class.
    runtime_classes: RwLock<Option<BTreeMap<String, String>>>,
    // Directory of the lists for the next process.
    lists: Option<PathBuf>,
}

impl ClusterView {
    /// Returns a view whose lists of Services and RuntimeClasses are kept in files of `dir`. They are used by
    /// the next process if the API server does not deliver lists for ten seconds.
    #[must_use]
    pub fn with_lists(dir: &Path) -> Self {
        Self { lists: Some(dir.to_owned()), ..Self::default() }
    }

    /// Returns the Node; `None` until it has been read, and if it does not exist.
    #[must_use]
    pub fn node(&self) -> Option<SharedNode> {
        self.node.borrow().clone()
    }

    /// Returns a receiver of the Node.
    #[must_use]
    pub fn nodes(&self) -> watch::Receiver<Option<SharedNode>> {
        self.node.subscribe()
    }

    /// Returns all services, with what environment variables are made from; `None` until they have been
    /// listed.
    #[must_use]
    pub fn services(&self) -> Option<Arc<Vec<Arc<Service>>>> {
        self.services.read().clone()
    }

    /// Returns the handler of a RuntimeClass. The outer `None` means that the classes have not been listed
    /// yet; the inner one, that the class does not exist.
    #[must_use]
    pub fn runtime_handler(&self, class: &str) -> Option<Option<String>> {
        self.runtime_classes.read().as_ref().map(|all| all.get(class).cloned())
    }

    /// Watches RuntimeClasses until `stop`.
    pub async fn watch_runtime_classes(self: Arc<Self>, client: kube::Client, stop: CancellationToken) {
        let stream =
            watcher(Api::<Lenient<RuntimeClass>>::all(client), watcher::Config::default().any_semantic());
        let list = KnownList::open(self.lists.as_deref(), ".runtime-classes").await;
        let publish = |all: &BTreeMap<Key, String>| {
            let handlers = all.iter().map(|((_, name), handler)| (name.clone(), handler.clone()));
            *self.runtime_classes.write() = Some(handlers.collect());
        };
        follow(stream, "runtime classes", list, |class: RuntimeClass| class.handler, publish, &stop).await;
    }

    /// Reads the Node now. The watch may deliver an older version afterwards, followed by this one.
    ///
    /// # Errors
    /// Fails if the request fails.
    pub async fn read_node(&self, client: kube::Client, name: &str) -> Result<(), kube::Error> {
        if let Some(node) = Api::<Node>::all(client).get_opt(name).await? {
            self.node.send_replace(Some(Arc::new(node)));
        }
        Ok(())
    }

    /// Sets the Node as it was known before, if it has not been read yet. The watch replaces it.
    pub fn set_known_node(&self, known: Node) {
        self.node.send_if_modified(|node| {
            let is_missing = node.is_none();
            if is_missing {
                *node = Some(Arc::new(known));
            }
            is_missing
        });
    }

    /// Watches the Node until `stop`.
    pub async fn watch_node(self: Arc<Self>, client: kube::Client, name: String, stop: CancellationToken) {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}")).any_semantic();
        let stream = watcher(Api::<Lenient<Node>>::all(client), config);
        futures::pin_mut!(stream);
        let mut seen = None;
        while let Some(event) = next(&mut stream, "the node", &stop).await {
            match event {
                watcher::Event::Init => seen = None,
                watcher::Event::InitApply(node) => seen = Some(Arc::new(node)),
                watcher::Event::InitDone => drop(self.node.send_replace(seen.take())),
                watcher::Event::Apply(node) => drop(self.node.send_replace(Some(Arc::new(node)))),
                watcher::Event::Delete(_) => drop(self.node.send_replace(None)),
            }
        }
    }

    /// Watches the Services until `stop`.
    pub async fn watch_services(self: Arc<Self>, client: kube::Client, stop: CancellationToken) {
        let stream = watcher(Api::<Lenient<Service>>::all(client), watcher::Config::default().any_semantic());
        let list = KnownList::open(self.lists.as_deref(), ".services").await;
        let publish = |all: &BTreeMap<Key, Arc<Service>>| {
            *self.services.write() = Some(Arc::new(all.values().cloned().collect()));
        };
        let value = |service| Arc::new(without_unused_fields(service));
        follow(stream, "services", list, value, publish, &stop).await;
    }
}

/// Publishes the objects of a watch, after its first list and after each change of one. The kept list is
/// published while the watch delivers none.
async fn follow<K, V>(
    stream: impl futures::Stream<Item = Result<watcher::Event<Lenient<K>>, watcher::Error>>,
    watch: &'static str,
    mut list: KnownList<Vec<(Key, V)>>,
    value: impl Fn(K) -> V,
    publish: impl Fn(&BTreeMap<Key, V>),
    stop: &CancellationToken,
) where
    K: kube::Resource + Default,
    V: Clone + PartialEq + Serialize + DeserializeOwned + Send + 'static,
{
    futures::pin_mut!(stream);
    let (mut all, mut fresh) = (BTreeMap::new(), BTreeMap::new());
    loop {
        // Both arms keep their position.
        let event = tokio::select! {
            event = next(&mut stream, watch, stop) => event,
            task = list.task() => {
                match task {
                    ListTask::Use(kept) => publish(&kept.into_iter().collect()),
                    ListTask::Write => list.write(all.clone().into_iter().collect::<Vec<_>>()).await,
                }
                continue;
            }
        };
        match event {
            None => return,
            // The list begins, and nothing is known of it yet.
            Some(watcher::Event::Init) => {
                fresh.clear();
                continue;
            }
            Some(watcher::Event::InitApply(object)) => {
                fresh.insert(key(object.meta()), value(object));
                continue;
            }
            Some(watcher::Event::InitDone) => all = std::mem::take(&mut fresh),
            Some(watcher::Event::Apply(object)) => {
                let (key, value) = (key(object.meta()), value(object));
                if all.get(&key) == Some(&value) {
                    continue;
                }
                all.insert(key, value);
            }
            Some(watcher::Event::Delete(object)) => {
                all.remove(&key(object.meta()));
            }
        }
        publish(&all);
        list.changed();
    }
}

/// Returns what environment variables are made from: a cluster has many Services.
fn without_unused_fields(service: Service) -> Service {
    let ports = |ports: Vec<ServicePort>| {
        let port = |port: ServicePort| ServicePort {
            name: port.name,
            port: port.port,
            protocol: port.protocol,
            ..ServicePort::default()
        };
        ports.into_iter().map(port).collect()
    };
    Service {
        metadata: ObjectMeta {
            name: service.metadata.name,
            namespace: service.metadata.namespace,
            ..ObjectMeta::default()
        },
        spec: service.spec.map(|spec| ServiceSpec {
            cluster_ip: spec.cluster_ip,
            ports: spec.ports.map(ports),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

// The API server may be unavailable for hours: errors of one watch are logged once a minute. A certificate
// may be approved hours later, too.
fn log_watch_error(watch: &'static str, error: &watcher::Error) {
    let has_no_identity = NoIdentity::in_chain(error).is_some();
    let error = quintlet_kit::error_chain(error);
    if has_no_identity {
        tracing::debug!(watch, error, "watch waits for the identity of the node");
    } else {
        tracing::warn!(watch, error, "watch failed, retrying");
    }
}

/// Waits for the next event whose object can be decoded. Returns `None` if stopped. An object that cannot be
/// decoded keeps its last version.
async fn next<K, S>(
    stream: &mut S,
    watch: &'static str,
    stop: &CancellationToken,
) -> Option<watcher::Event<K>>
where
    K: kube::Resource + Default,
    S: futures::Stream<Item = Result<watcher::Event<Lenient<K>>, watcher::Error>> + Unpin,
{
    loop {
        // The stream is not read again after a stop.
        let item = tokio::select! {
            () = stop.cancelled() => return None,
            item = stream.next() => item?,
        };
        match item {
            Ok(event) => match decoded(event) {
                Ok(event) => return Some(event),
                Err(undecodable) => {
                    let (namespace, name) = key(&undecodable.metadata);
                    let Undecodable { field, error, .. } = undecodable;
                    tracing::warn!(watch, namespace, name, field, error, "failed to decode object");
                }
            },
            Err(e) => {
                log_watch_error(watch, &e);
                // Both arms only wait.
                tokio::select! {
                    () = stop.cancelled() => return None,
                    () = tokio::time::sleep(RETRY) => {}
                }
            }
        }
    }
}

fn decoded<K>(event: watcher::Event<Lenient<K>>) -> Result<watcher::Event<K>, Undecodable>
where
    K: kube::Resource + Default,
{
    let named = |undecodable: Undecodable| {
        let mut object = K::default();
        *object.meta_mut() = *undecodable.metadata;
        object
    };
    Ok(match event {
        watcher::Event::Init => watcher::Event::Init,
        watcher::Event::InitDone => watcher::Event::InitDone,
        watcher::Event::InitApply(object) => watcher::Event::InitApply(object.into_result()?),
        watcher::Event::Apply(object) => watcher::Event::Apply(object.into_result()?),
        // A deletion needs only the name.
        watcher::Event::Delete(object) => watcher::Event::Delete(object.into_result().unwrap_or_else(named)),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, uid: &str, deadline: serde_json::Value) -> Lenient<Pod> {
        let pod = json!({
            "metadata": {"namespace": "default", "name": name, "uid": uid},
            "spec": {"containers": [], "activeDeadlineSeconds": deadline},
        });
        serde_json::from_value(pod).unwrap()
    }

    fn apply(pods: &mut Pods, pod: Lenient<Pod>) {
        let before = pods.before(pod.meta());
        pods.apply(pod, before);
    }

    /// Names and deadlines of the pods that a snapshot sends.
    type Sent = Vec<(String, Option<i64>)>;

    /// Returns the pods, the unchanged pods, the number of problems, and the undecodable pods of a snapshot.
    fn seen(pods: &mut Pods) -> (Sent, Vec<String>, usize, Vec<String>) {
        let snapshot = pods.snapshot();
        let deadline = |pod: &Pod| pod.spec.as_ref().and_then(|s| s.active_deadline_seconds);
        let sent = snapshot.pods.iter().map(|p| (p.metadata.name.clone().unwrap(), deadline(p)));
        let unchanged = snapshot.unchanged.iter().map(ToString::to_string);
        let undecodable = snapshot.undecodable.into_iter().filter_map(|u| u.metadata.name);
        (sent.collect(), unchanged.collect(), snapshot.problems.len(), undecodable.collect())
    }

    #[test]
    fn an_undecodable_pod_is_reported_once_and_leaves_the_others_alone() {
        let mut pods = Pods::default();
        apply(&mut pods, pod("good", "u1", json!(1)));
        apply(&mut pods, pod("bad", "u2", json!("x")));
        let u1 = "u1".to_owned();
        let u2 = "u2".to_owned();
        let bad = "bad".to_owned();
        assert_eq!(seen(&mut pods), (vec![("good".to_owned(), Some(1))], vec![], 1, vec![bad.clone()]));
        let good = vec![u1.clone()];
        apply(&mut pods, pod("bad", "u2", json!("x")));
        assert_eq!(seen(&mut pods), (vec![], good.clone(), 1, vec![]), "the same error");
        apply(&mut pods, pod("bad", "u2", json!("y")));
        assert_eq!(seen(&mut pods), (vec![], good.clone(), 1, vec![bad.clone()]), "another error");
        apply(&mut pods, pod("bad", "u2", json!(2)));
        assert_eq!(seen(&mut pods), (vec![(bad, Some(2))], good.clone(), 0, vec![]));
        assert_eq!(seen(&mut pods), (vec![], vec![u2, u1], 0, vec![]));
        pods.remove(&("default".to_owned(), "bad".to_owned()));
        assert_eq!(seen(&mut pods), (vec![], good, 0, vec![]));
    }

    #[test]
    fn a_pod_that_becomes_undecodable_stays_as_it_was_until_another_has_its_name() {
        let mut pods = Pods::default();
        apply(&mut pods, pod("web", "u1", json!(1)));
        assert_eq!(seen(&mut pods).0, [("web".to_owned(), Some(1))]);
        apply(&mut pods, pod("web", "u1", json!("x")));
        let (web, u1) = (vec!["web".to_owned()], vec!["u1".to_owned()]);
        assert_eq!(seen(&mut pods), (vec![], u1.clone(), 1, web));
        // The same after a new list.
        let mut fresh = Pods::default();
        let listed = pod("web", "u1", json!("x"));
        let before = pods.before(listed.meta());
        fresh.apply(listed, before);
        assert_eq!(seen(&mut fresh), (vec![], u1, 1, vec![]));
        apply(&mut fresh, pod("web", "u2", json!("x")));
        assert_eq!(seen(&mut fresh).1, [""; 0]);
    }

    /// Describes updates, with the pods of a snapshot by name.
    fn described(updates: Vec<SourceEvent>) -> Vec<String> {
        let name = |pod: &Arc<Pod>| pod.metadata.name.clone().unwrap();
        let describe = |update: SourceEvent| match update {
            SourceEvent::Snapshot(s) => {
                let unchanged = s.unchanged.iter().map(ToString::to_string);
                format!("all: {}", s.pods.iter().map(name).chain(unchanged).collect::<Vec<_>>().join(" "))
            }
            SourceEvent::Changed(pod) => format!("{} changed", name(&pod)),
            SourceEvent::Removed(uid) => format!("{uid} removed"),
            SourceEvent::Offline(_) => "offline".to_owned(),
            SourceEvent::Problems(_) => "problems".to_owned(),
        };
        updates.into_iter().map(describe).collect()
    }

    #[test]
    fn a_change_is_sent_alone_unless_a_pod_is_or_was_undecodable() {
        let mut pods = Pods::default();
        let cases = [
            ("added", pod("a", "u1", json!(1)), vec!["a changed"]),
            ("another", pod("b", "u2", json!(1)), vec!["b changed"]),
            ("replaced", pod("a", "u3", json!(1)), vec!["u1 removed", "a changed"]),
            ("undecodable", pod("b", "u2", json!("x")), vec!["all: u3 u2"]),
            ("another while one is undecodable", pod("a", "u3", json!(2)), vec!["a changed"]),
            ("replaced by an undecodable one", pod("b", "u4", json!("x")), vec!["all: u3"]),
            ("decodable again", pod("b", "u4", json!(1)), vec!["all: b u3"]),
        ];
        for (name, changed, want) in cases {
            assert_eq!(described(pods.change(changed)), want, "{name}");
        }
        let key = |name: &str| ("default".to_owned(), name.to_owned());
        assert_eq!(described(pods.take(&key("a"))), ["u3 removed"]);
        assert_eq!(described(pods.take(&key("a"))), [""; 0]);
        apply(&mut pods, pod("c", "u5", json!("x")));
        assert_eq!(described(pods.take(&key("c"))), ["all: u4"]);
    }
}
