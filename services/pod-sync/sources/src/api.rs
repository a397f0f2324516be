//! Pods of this node as the API server has them (pkg/kubelet/config/apiserver.go), and the reads that go with them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::Api;
use kube::runtime::watcher;
use parking_lot::RwLock;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Snapshot, SourceKind, SourceSender, Update};

/// Shortest interval between requests while the API server refuses them (ARCHITECTURE.md, invariant 9).
const RETRY: Duration = Duration::from_secs(1);

/// Watches the pods bound to `node` and sends the whole set after every change. Nothing is sent before the first
/// complete list.
pub async fn run(client: kube::Client, node: String, out: SourceSender, stop: CancellationToken) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}")).any_semantic();
    let stream = watcher(Api::<Pod>::all(client), config);
    futures::pin_mut!(stream);
    let mut pods: BTreeMap<(String, String), Arc<Pod>> = BTreeMap::new();
    let mut fresh = BTreeMap::new();
    let mut complete = false;
    loop {
        // The watcher keeps its place when the arm is dropped: stop is the only other one.
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = stream.next() => event,
        };
        let Some(event) = event else { return };
        match event {
            Ok(watcher::Event::Init) => fresh.clear(),
            Ok(watcher::Event::InitApply(pod)) => {
                fresh.insert(key(&pod), slim(pod));
                continue;
            }
            Ok(watcher::Event::InitDone) => {
                pods = std::mem::take(&mut fresh);
                complete = true;
            }
            Ok(watcher::Event::Apply(pod)) => {
                pods.insert(key(&pod), slim(pod));
            }
            Ok(watcher::Event::Delete(pod)) => {
                pods.remove(&key(&pod));
            }
            Err(e) => {
                tell("pods", &e);
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(RETRY) => continue,
                }
            }
        }
        if !complete {
            continue;
        }
        let snapshot = Snapshot { pods: pods.values().cloned().collect(), ..Snapshot::default() };
        tokio::select! {
            () = stop.cancelled() => return,
            sent = out.send((SourceKind::Api, Update::Snapshot(snapshot))) => if sent.is_err() { return },
        }
    }
}

fn key(pod: &Pod) -> (String, String) {
    (pod.metadata.namespace.clone().unwrap_or_default(), pod.metadata.name.clone().unwrap_or_default())
}

fn slim(mut pod: Pod) -> Arc<Pod> {
    pod.metadata.managed_fields = None;
    Arc::new(pod)
}

/// The Node as it was read.
pub type SharedNode = Arc<Node>;

/// The Node, the Services and the RuntimeClasses, kept by watches of their own.
#[derive(Debug, Default)]
pub struct ClusterView {
    node: watch::Sender<Option<SharedNode>>,
    services: RwLock<Option<Arc<Vec<Arc<Service>>>>>,
    // Handlers by name.
    runtime_classes: RwLock<Option<BTreeMap<String, String>>>,
}

impl ClusterView {
    /// The Node of this agent; none before it was read or where it does not exist.
    #[must_use]
    pub fn node(&self) -> Option<SharedNode> {
        self.node.borrow().clone()
    }

    /// The same, to be waited for.
    #[must_use]
    pub fn nodes(&self) -> watch::Receiver<Option<SharedNode>> {
        self.node.subscribe()
    }

    /// All services; none before they were read once.
    #[must_use]
    pub fn services(&self) -> Option<Arc<Vec<Arc<Service>>>> {
        self.services.read().clone()
    }

    /// The handler of a RuntimeClass; none before they were read once, and an inner none where there is no such class.
    #[must_use]
    pub fn runtime_handler(&self, class: &str) -> Option<Option<String>> {
        self.runtime_classes.read().as_ref().map(|all| all.get(class).cloned())
    }

    /// Keeps the RuntimeClasses up to date until told to stop.
    pub async fn watch_runtime_classes(self: Arc<Self>, client: kube::Client, stop: CancellationToken) {
        let stream = watcher(Api::<RuntimeClass>::all(client), watcher::Config::default().any_semantic());
        futures::pin_mut!(stream);
        let mut fresh = BTreeMap::new();
        let named = |class: RuntimeClass| (class.metadata.name.unwrap_or_default(), class.handler);
        while let Some(event) = next(&mut stream, "runtime classes", &stop).await {
            match event {
                watcher::Event::Init => fresh.clear(),
                watcher::Event::InitApply(class) => fresh.extend([named(class)]),
                watcher::Event::InitDone => *self.runtime_classes.write() = Some(std::mem::take(&mut fresh)),
                watcher::Event::Apply(class) => {
                    self.runtime_classes.write().get_or_insert_default().extend([named(class)]);
                }
                watcher::Event::Delete(class) => {
                    let (name, _) = named(class);
                    if let Some(all) = self.runtime_classes.write().as_mut() {
                        all.remove(&name);
                    }
                }
            }
        }
    }

    /// Reads the Node now. The watch may bring an older one after it, and then this one again.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn read_node(&self, client: kube::Client, name: &str) -> Result<(), kube::Error> {
        if let Some(node) = Api::<Node>::all(client).get_opt(name).await? {
            self.node.send_replace(Some(Arc::new(node)));
        }
        Ok(())
    }

    /// Keeps the Node up to date until told to stop.
    pub async fn watch_node(self: Arc<Self>, client: kube::Client, name: String, stop: CancellationToken) {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}")).any_semantic();
        let stream = watcher(Api::<Node>::all(client), config);
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

    /// Keeps the Services up to date until told to stop.
    pub async fn watch_services(self: Arc<Self>, client: kube::Client, stop: CancellationToken) {
        let stream = watcher(Api::<Service>::all(client), watcher::Config::default().any_semantic());
        futures::pin_mut!(stream);
        let mut all: BTreeMap<(String, String), Arc<Service>> = BTreeMap::new();
        let mut fresh = BTreeMap::new();
        let key = |s: &Service| {
            (s.metadata.namespace.clone().unwrap_or_default(), s.metadata.name.clone().unwrap_or_default())
        };
        while let Some(event) = next(&mut stream, "services", &stop).await {
            match event {
                watcher::Event::Init => fresh.clear(),
                watcher::Event::InitApply(mut s) => {
                    s.metadata.managed_fields = None;
                    fresh.insert(key(&s), Arc::new(s));
                    continue;
                }
                watcher::Event::InitDone => all = std::mem::take(&mut fresh),
                watcher::Event::Apply(mut s) => {
                    s.metadata.managed_fields = None;
                    all.insert(key(&s), Arc::new(s));
                }
                watcher::Event::Delete(s) => {
                    all.remove(&key(&s));
                }
            }
            *self.services.write() = Some(Arc::new(all.values().cloned().collect()));
        }
    }
}

// An API server may be away for hours: lines of one watch are written once a minute.
fn tell(of: &'static str, error: &watcher::Error) {
    tracing::warn!(
        watch = of,
        error = quintlet_kit::error_chain(error),
        "a watch broke, it goes on by itself"
    );
}

async fn next<K, S>(stream: &mut S, of: &'static str, stop: &CancellationToken) -> Option<watcher::Event<K>>
where
    S: futures::Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Unpin,
{
    loop {
        let item = tokio::select! {
            () = stop.cancelled() => return None,
            item = stream.next() => item?,
        };
        match item {
            Ok(event) => return Some(event),
            Err(e) => {
                tell(of, &e);
                tokio::select! {
                    () = stop.cancelled() => return None,
                    () = tokio::time::sleep(RETRY) => {}
                }
            }
        }
    }
}
