//! Collects every version of pods and events that an API server delivers.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use kube::core::WatchEvent;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::cluster::Cluster;
use crate::runtime::NODE;

/// The versions of one pod and of its events that the API server delivered, in order.
#[derive(Debug, Default)]
pub struct Seen {
    /// The versions of the pod; null after its deletion.
    pub pods: Vec<Value>,
    /// The versions of its events.
    pub events: Vec<Value>,
}

impl Seen {
    /// Returns the newest version of the pod; null if it does not exist.
    #[must_use]
    pub fn pod(&self) -> &Value {
        self.pods.last().unwrap_or(&Value::Null)
    }
}

/// All that was delivered.
#[derive(Debug, Default)]
struct Delivered {
    by_pod: BTreeMap<String, Seen>,
    /// The versions of the Node's volumes, equal ones in a row once.
    volumes: Vec<NodeVolumes>,
}

/// The volumes of a version of the Node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeVolumes {
    /// `volumesInUse`
    pub in_use: Vec<Value>,
    /// `volumesAttached`
    pub attached: Vec<Value>,
}

/// Watches of the Node and of the pods and events of namespace `default`. Dropping it ends them.
#[derive(Debug)]
pub struct Observer {
    seen: Arc<Mutex<Delivered>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Observer {
    /// Starts the watches.
    ///
    /// # Errors
    /// Fails if the API server refuses a list.
    pub async fn start(cluster: &Cluster) -> anyhow::Result<Self> {
        let seen: Arc<Mutex<Delivered>> = Arc::default();
        let mut tasks = Vec::new();
        for plural in ["pods", "events", "nodes"] {
            let scope = if plural == "nodes" { "" } else { "/namespaces/default" };
            let path = format!("/api/v1{scope}/{plural}");
            let list = cluster.get(&path).await?.context("no list")?;
            let version = list["metadata"]["resourceVersion"].as_str().unwrap_or("0").to_owned();
            let uri = format!("{path}?watch=true&timeoutSeconds=3600&resourceVersion={version}");
            let stream = cluster.watch(&uri).await?;
            let seen = Arc::clone(&seen);
            tasks.push(quintlet_kit::task::spawn("observer", async move {
                let mut stream = std::pin::pin!(stream);
                // A watch that ends early leaves histories incomplete, which their comparison shows.
                while let Ok(Some(event)) = stream.try_next().await {
                    keep(&mut seen.lock(), plural, event);
                }
            }));
        }
        Ok(Self { seen, tasks })
    }

    /// Looks at what was delivered of a pod so far.
    pub fn look<T>(&self, pod: &str, look: impl FnOnce(&Seen) -> T) -> T {
        look(self.seen.lock().by_pod.entry(pod.to_owned()).or_default())
    }

    /// Returns the different volumes that the Node had so far, in order.
    #[must_use]
    pub fn volumes(&self) -> Vec<NodeVolumes> {
        self.seen.lock().volumes.clone()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn keep(delivered: &mut Delivered, plural: &str, event: WatchEvent<Value>) {
    let (object, is_gone) = match event {
        WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
        WatchEvent::Deleted(object) => (object, true),
        WatchEvent::Bookmark(_) | WatchEvent::Error(_) => return,
    };
    let name = |at: &Value| at["name"].as_str().unwrap_or_default().to_owned();
    let seen = &mut delivered.by_pod;
    match (plural, is_gone) {
        ("pods", true) => {
            let of_pod = seen.entry(name(&object["metadata"])).or_default();
            of_pod.pods.extend([object, Value::Null]);
        }
        ("pods", false) => seen.entry(name(&object["metadata"])).or_default().pods.push(object),
        ("nodes", false) if object["metadata"]["name"] == NODE => {
            let list = |key: &str| object["status"][key].as_array().cloned().unwrap_or_default();
            delivered
                .volumes
                .push(NodeVolumes { in_use: list("volumesInUse"), attached: list("volumesAttached") });
            delivered.volumes.dedup();
        }
        ("nodes", false) | (_, true) => {}
        (_, false) => seen.entry(name(&object["involvedObject"])).or_default().events.push(object),
    }
}
