//! The CSI drivers and volumes in use, on their way to the Node and CSINode objects, and the attachments that
//! the Node reports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::StorageHealthCondition;
use parking_lot::Mutex;
use quintlet_kit::messages::bounded_requests;
use quintlet_kit::neighbour::Neighbour;
use quintlet_kit::queue;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_proto::status::v1 as wire;
use quintlet_proto::status::v1::status_reporter_client::StatusReporterClient;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// Requests that wait in the stream. A full stream delays only the next request, which has the newest state.
const STREAM: usize = 4;

/// A CSI driver, as the CSINode and Node objects have it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeCsiDriver {
    /// The driver's ID of this node.
    pub node_id: String,
    /// Topology segments, which become labels of the Node.
    pub topology: BTreeMap<String, String>,
    /// Largest number of volumes, if the driver has a limit.
    pub allocatable: Option<i32>,
    /// Conditions of the driver's storage; `None` if the driver was not asked yet, or does not report it.
    pub storage_health: Option<Vec<StorageHealthCondition>>,
}

/// The CSI drivers of the node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeCsiDrivers {
    /// The registered drivers by name.
    pub registered: BTreeMap<String, NodeCsiDriver>,
    /// Drivers that were deregistered and are not registered again. Drivers in neither list keep their
    /// entries in the CSINode.
    pub removed: BTreeSet<String>,
}

/// State of the node's volumes in the Node of the API server, by unique name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NodeVolumesState {
    /// The Node was not read yet.
    #[default]
    Unknown,
    /// status-reporter has no API server.
    NoApi,
    /// The Node was read.
    Known {
        /// Volumes that `status.volumesInUse` has, and has had since [`NodeVolumes::set_in_use`] was last
        /// called without them.
        in_use: BTreeSet<String>,
        /// `status.volumesAttached`, with device paths, at the time when `in_use` was written or later.
        attached: BTreeMap<String, String>,
    },
}

/// The newest Node and the volumes that are certainly in its `volumesInUse`.
#[derive(Debug, Default)]
struct Seen {
    /// Version of the Node that `attached` is from; `None` until the Node was read.
    version: Option<u64>,
    attached: BTreeMap<String, String>,
    in_use: BTreeSet<String>,
    no_api: bool,
}

impl Seen {
    fn state(&self) -> NodeVolumesState {
        match (self.no_api, self.version) {
            (true, _) => NodeVolumesState::NoApi,
            (false, None) => NodeVolumesState::Unknown,
            (false, Some(_)) => {
                NodeVolumesState::Known { in_use: self.in_use.clone(), attached: self.attached.clone() }
            }
        }
    }

    /// Takes the attachments of a Node, unless they are older than the known ones.
    fn attachments(&mut self, version: u64, attached: impl Iterator<Item = (String, String)>) {
        if self.version.is_none_or(|known| known <= version) {
            self.version = Some(version);
            self.attached = attached.collect();
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    drivers: NodeCsiDrivers,
    /// `None` until the volumes of all pods are known.
    in_use: Option<BTreeSet<String>>,
    /// Number of the newest state.
    generation: u64,
    seen: Seen,
}

/// Client of status-reporter for the volumes of the node. Holds the newest state, and sends it after each
/// connection.
#[derive(Debug)]
pub struct NodeVolumes {
    client: StatusReporterClient<Channel>,
    peer: Neighbour,
    inner: Mutex<Inner>,
    changed: Notify,
    state: watch::Sender<NodeVolumesState>,
}

impl NodeVolumes {
    /// Creates a client of the socket at `path`, which need not exist yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        let client = StatusReporterClient::new(quintlet_kit::socket::channel(path));
        let state = watch::Sender::new(NodeVolumesState::Unknown);
        let peer = Neighbour::new("status-reporter", &[]);
        Self { client, peer, inner: Mutex::default(), changed: Notify::new(), state }
    }

    /// Sets the CSI drivers.
    pub fn set_drivers(&self, drivers: NodeCsiDrivers) {
        self.change(|inner| {
            let changed = inner.drivers != drivers;
            inner.drivers = drivers;
            changed
        });
    }

    /// Sets the unique names of the volumes in use. Call this once the volumes of all pods are known: until
    /// the first call, the Node keeps the `volumesInUse` that it has.
    pub fn set_in_use(&self, volumes: BTreeSet<String>) {
        self.change(|inner| {
            // A volume that leaves the list may be detached, and counts again when it was written again.
            inner.seen.in_use.retain(|volume| volumes.contains(volume));
            let changed = inner.in_use.as_ref() != Some(&volumes);
            inner.in_use = Some(volumes);
            changed
        });
    }

    /// Takes the attachments of a Node that pod-sync's watch delivered. They arrive earlier than those of
    /// status-reporter, which reads the Node periodically.
    pub fn observe(&self, node: &Node) {
        let Some(version) = node.metadata.resource_version.as_ref().and_then(|text| text.parse().ok()) else {
            return;
        };
        let attached = node.status.iter().flat_map(|status| status.volumes_attached.iter().flatten());
        let attached = attached.map(|volume| (volume.name.clone(), volume.device_path.clone()));
        let mut inner = self.inner.lock();
        inner.seen.attachments(version, attached);
        self.publish(&inner);
    }

    /// Observes each Node of a watch until `stop`.
    pub async fn follow_node(
        self: Arc<Self>,
        mut nodes: watch::Receiver<Option<Arc<Node>>>,
        stop: CancellationToken,
    ) {
        loop {
            if let Some(node) = nodes.borrow_and_update().clone() {
                self.observe(&node);
            }
            // A dropped wait loses nothing: the watch keeps the newest Node.
            tokio::select! {
                () = stop.cancelled() => return,
                changed = nodes.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Returns a receiver of the state of the Node.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<NodeVolumesState> {
        self.state.subscribe()
    }

    /// Keeps the stream open until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            // Dropping the stream loses nothing: the next one sends the newest state.
            tokio::select! {
                () = stop.cancelled() => return,
                ended = self.stream() => if let Err(status) = ended {
                    tracing::debug!(error = status.message(), "node volumes stream ended");
                },
            }
            tokio::time::sleep(self.peer.next_wait(CONNECT_INTERVAL)).await;
        }
    }

    async fn stream(&self) -> Result<(), tonic::Status> {
        let (tx, rx) = queue::channel("node-volumes", STREAM);
        let _ = queue::offer(&tx, "node-volumes", self.request(Some(quintlet_proto::hello())));
        let mut client = self.client.clone();
        let mut replies =
            client.node_volumes(bounded_requests("StatusReporter.NodeVolumes", rx)).await?.into_inner();
        let write = async {
            loop {
                self.changed.notified().await;
                if tx.send(self.request(None)).await.is_err() {
                    return;
                }
            }
        };
        let read = async {
            while let Some(reply) = replies.next().await {
                let reply = reply?;
                if let Some(hello) = &reply.hello {
                    self.peer.greeted(hello)?;
                }
                self.replied(reply);
            }
            Ok(())
        };
        // When one half ends, both are dropped; the next stream sends the newest state.
        tokio::select! {
            () = write => Ok(()),
            ended = read => ended,
        }
    }

    fn change(&self, apply: impl FnOnce(&mut Inner) -> bool) {
        let mut inner = self.inner.lock();
        if apply(&mut inner) {
            inner.generation = inner.generation.saturating_add(1);
            self.publish(&inner);
            drop(inner);
            self.changed.notify_one();
        }
    }

    fn request(&self, hello: Option<quintlet_proto::common::v1::Hello>) -> wire::NodeVolumesRequest {
        let inner = self.inner.lock();
        let driver = |(name, driver): (&String, &NodeCsiDriver)| wire::CsiDriver {
            name: name.clone(),
            node_id: driver.node_id.clone(),
            topology: driver.topology.clone().into_iter().collect(),
            allocatable: driver.allocatable,
            storage_health: driver.storage_health.as_deref().map(wire_health),
        };
        let names =
            |volumes: &BTreeSet<String>| wire::VolumesInUse { names: volumes.iter().cloned().collect() };
        wire::NodeVolumesRequest {
            hello,
            // 0 is no generation.
            generation: inner.generation.saturating_add(1),
            drivers: inner.drivers.registered.iter().map(driver).collect(),
            removed_drivers: inner.drivers.removed.iter().cloned().collect(),
            in_use: inner.in_use.as_ref().map(names),
        }
    }

    fn replied(&self, reply: wire::NodeVolumesReply) {
        let mut inner = self.inner.lock();
        inner.seen.no_api = !reply.has_api;
        if let Ok(version) = reply.resource_version.parse() {
            let attached = reply.volumes_attached.into_iter().map(|volume| (volume.name, volume.device_path));
            inner.seen.attachments(version, attached);
            if reply.generation == inner.generation.saturating_add(1)
                && let Some(volumes) = &inner.in_use
            {
                let written = reply.volumes_in_use.into_iter().filter(|volume| volumes.contains(volume));
                inner.seen.in_use = written.collect();
            }
        }
        self.publish(&inner);
    }

    fn publish(&self, inner: &Inner) {
        let state = inner.seen.state();
        self.state.send_if_modified(|old| {
            let changed = *old != state;
            *old = state;
            changed
        });
    }
}

fn wire_health(conditions: &[StorageHealthCondition]) -> wire::StorageHealth {
    let condition = |condition: &StorageHealthCondition| wire::StorageHealthCondition {
        status: condition.status.clone(),
        reason: condition.reason.clone(),
        message: condition.message.clone().unwrap_or_default(),
        access_mode: condition.access_mode.clone(),
        volume_mode: condition.volume_mode.clone(),
    };
    wire::StorageHealth { conditions: conditions.iter().map(condition).collect() }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{AttachedVolume, NodeStatus};

    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn node(version: u64, attached: &[&str]) -> Node {
        let volume = |name: &&str| AttachedVolume { name: (*name).to_owned(), device_path: "/d".to_owned() };
        let mut node = Node::default();
        node.metadata.resource_version = Some(version.to_string());
        node.status = Some(NodeStatus {
            volumes_attached: Some(attached.iter().map(volume).collect()),
            ..NodeStatus::default()
        });
        node
    }

    fn reply(generation: u64, version: u64, in_use: &[&str], attached: &[&str]) -> wire::NodeVolumesReply {
        let volume =
            |name: &&str| wire::AttachedVolume { name: (*name).to_owned(), device_path: "/d".to_owned() };
        wire::NodeVolumesReply {
            hello: None,
            has_api: true,
            generation,
            resource_version: version.to_string(),
            volumes_in_use: in_use.iter().map(|name| (*name).to_owned()).collect(),
            volumes_attached: attached.iter().map(volume).collect(),
        }
    }

    fn known(volumes: &NodeVolumes) -> (Vec<String>, Vec<String>) {
        match &*volumes.state().borrow() {
            NodeVolumesState::Known { in_use, attached } => {
                (in_use.iter().cloned().collect(), attached.keys().cloned().collect())
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_volume_counts_as_in_use_once_the_request_that_has_it_is_written() {
        let volumes = NodeVolumes::new("/nonexistent".into());
        assert_eq!(*volumes.state().borrow(), NodeVolumesState::Unknown);
        volumes.set_in_use(set(&["a"]));
        let first = volumes.request(None);
        // The Node of an earlier process has the volume, and the answer is for an earlier request.
        volumes.replied(reply(first.generation - 1, 10, &["a"], &["a"]));
        assert_eq!(known(&volumes), (vec![], vec!["a".to_owned()]));
        volumes.replied(reply(first.generation, 11, &["a"], &["a"]));
        assert_eq!(known(&volumes).0, ["a"]);
        // Another volume does not take the first one out of use.
        volumes.set_in_use(set(&["a", "b"]));
        assert_eq!(known(&volumes).0, ["a"]);
        volumes.replied(reply(volumes.request(None).generation, 12, &["a", "b"], &["a"]));
        assert_eq!(known(&volumes).0, ["a", "b"]);
        volumes.observe(&node(13, &["a", "b"]));
        assert_eq!(known(&volumes).1, ["a", "b"]);
    }

    #[tokio::test]
    async fn a_volume_that_left_the_list_counts_again_only_after_another_write() {
        let volumes = NodeVolumes::new("/nonexistent".into());
        volumes.set_in_use(set(&["a"]));
        let first = volumes.request(None).generation;
        volumes.replied(reply(first, 11, &["a"], &["a"]));
        volumes.set_in_use(set(&[]));
        volumes.set_in_use(set(&["a"]));
        volumes.replied(reply(first, 11, &["a"], &["a"]));
        assert_eq!(known(&volumes).0, [""; 0]);
        // The controller detached the volume meanwhile, which a late event of the watch does not have.
        volumes.replied(reply(volumes.request(None).generation, 15, &["a"], &[]));
        volumes.observe(&node(12, &["a"]));
        assert_eq!(known(&volumes), (vec!["a".to_owned()], vec![]));
    }

    #[tokio::test]
    async fn without_an_api_server_the_state_says_so_and_an_unread_node_stays_unknown() {
        let volumes = NodeVolumes::new("/nonexistent".into());
        volumes.replied(wire::NodeVolumesReply { has_api: true, ..wire::NodeVolumesReply::default() });
        assert_eq!(*volumes.state().borrow(), NodeVolumesState::Unknown);
        volumes.replied(wire::NodeVolumesReply::default());
        assert_eq!(*volumes.state().borrow(), NodeVolumesState::NoApi);
        let request = volumes.request(None);
        assert_eq!((request.in_use, request.generation), (None, 1));
    }
}
