//! The CSINode object, and the annotation and labels that CSI drivers add to the Node
//! (`pkg/volume/csi/nodeinfomanager`).
//!
//! A driver is added to the Node before it is added to the CSINode, and removed from it after. The health of
//! the drivers' storage is the status of the CSINode ([`storage_health`]). Nothing waits for it, since only
//! an API server with the feature gate `CSIVolumeHealth` stores it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::Clock;
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::storage_health;
use super::volumes::{Driver, VolumeBoard, Volumes};
use crate::api::{ApiClient, ApiFailure, node_path};
use crate::status::{list, text};

/// Default interval between reads of the CSINode. A node may not watch it.
pub const CHECK_EVERY: Duration = Duration::from_secs(60);

/// Default pause after the API server did not take the health of storage.
pub const REFUSED_PAUSE: Duration = Duration::from_secs(600);

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Writes in one pass. A pass needs two for each driver that changed, and one more for each conflict.
const WRITES: usize = 64;
/// Writes of the health of storage in one pass: two more after conflicts.
const STATUS_WRITES: usize = 3;

const COLLECTION: &str = "/apis/storage.k8s.io/v1/csinodes";
/// Annotation of the Node with the node IDs by driver.
const NODE_ID: &str = "csi.volume.kubernetes.io/nodeid";
/// Annotation of the CSINode with the in-tree plugins whose volumes CSI drivers handle.
const MIGRATED: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// Plugins that Kubernetes 1.36 migrates, sorted (`pkg/volume/csi: csiPlugin.Init`).
const MIGRATED_PLUGINS: [&str; 7] = [
    "kubernetes.io/aws-ebs",
    "kubernetes.io/azure-disk",
    "kubernetes.io/azure-file",
    "kubernetes.io/cinder",
    "kubernetes.io/gce-pd",
    "kubernetes.io/portworx-volume",
    "kubernetes.io/vsphere-volume",
];

/// A label of the Node has another value than a driver reports (`updateTopologyLabels`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "detected topology value collision: driver reported {key:?}:{reported:?} but existing label is {key:?}:{existing:?}"
)]
pub struct Collision {
    key: String,
    reported: String,
    existing: String,
}

/// Returns the patch that adds a driver to the Node; `None` if the Node has it.
///
/// # Errors
/// A topology label of the driver has another value on the Node.
pub fn add_to_node(node: &Value, name: &str, driver: &Driver) -> Result<Option<Value>, Collision> {
    let mut labels = Map::new();
    for (key, reported) in &driver.topology {
        match node["metadata"]["labels"][key].as_str() {
            None => drop(labels.insert(key.clone(), json!(reported))),
            Some(existing) if existing == reported => {}
            Some(existing) => {
                let key = key.clone();
                let reported = reported.clone();
                let existing = existing.to_owned();
                return Err(Collision { key, reported, existing });
            }
        }
    }
    let mut ids = node_ids(node);
    let old = ids.insert(name.to_owned(), driver.node_id.clone());
    let mut metadata = Map::new();
    if old.as_ref() != Some(&driver.node_id) {
        metadata.insert("annotations".to_owned(), json!({ NODE_ID: json!(ids).to_string() }));
    }
    if !labels.is_empty() {
        metadata.insert("labels".to_owned(), Value::Object(labels));
    }
    Ok((!metadata.is_empty()).then(|| json!({ "metadata": metadata })))
}

/// Returns the patch that removes drivers from the Node; `None` if it has none of them. Topology labels stay.
#[must_use]
pub fn remove_from_node(node: &Value, removed: &BTreeSet<String>) -> Option<Value> {
    let before = node_ids(node);
    let after: BTreeMap<&String, &String> =
        before.iter().filter(|(name, _)| !removed.contains(*name)).collect();
    if after.len() == before.len() {
        return None;
    }
    let annotation = if after.is_empty() { Value::Null } else { json!(json!(after).to_string()) };
    Some(json!({"metadata": {"annotations": {NODE_ID: annotation}}}))
}

/// Returns the node IDs by driver. An annotation that is no map of strings counts as empty: only agents write
/// it.
fn node_ids(node: &Value) -> BTreeMap<String, String> {
    serde_json::from_str(text(&node["metadata"]["annotations"], NODE_ID)).unwrap_or_default()
}

/// A write of the CSINode.
#[derive(Debug, Clone, PartialEq)]
pub enum CsiNodeWrite {
    /// Creates the object, which does not exist.
    Create(Value),
    /// Replaces the object at its resource version.
    Update {
        /// The whole object.
        csi_node: Value,
        /// The driver that is added, replaced or removed to be added again.
        driver: Option<String>,
    },
}

/// Returns the next write of the CSINode of a Node; `None` if there is none.
///
/// A driver in `blocked` is not added. Node ID and topology keys of an entry cannot be changed: the entry is
/// removed in one write and added in the next.
#[must_use]
pub fn next_step(
    live: Option<&Value>,
    node: &Value,
    volumes: &Volumes,
    blocked: &BTreeSet<String>,
) -> Option<CsiNodeWrite> {
    let Some(live) = live else {
        return Some(CsiNodeWrite::Create(json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSINode",
            "metadata": {
                "name": node["metadata"]["name"],
                "annotations": {MIGRATED: MIGRATED_PLUGINS.join(",")},
                "ownerReferences": [{
                    "apiVersion": "v1", "kind": "Node",
                    "name": node["metadata"]["name"], "uid": node["metadata"]["uid"],
                }],
            },
            "spec": {"drivers": []},
        })));
    };
    let entries = list(&live["spec"], "drivers");
    let mut drivers: Vec<Value> =
        entries.iter().filter(|entry| !volumes.removed.contains(text(entry, "name"))).cloned().collect();
    let mut csi_node = live.clone();
    let is_migrated = is_migrated(live);
    if !is_migrated {
        csi_node["metadata"]["annotations"][MIGRATED] = json!(MIGRATED_PLUGINS.join(","));
    }
    let wanted = volumes.drivers.iter().filter(|(name, _)| !blocked.contains(*name));
    let mut changes = wanted.filter_map(|(name, driver)| {
        let at = drivers.iter().position(|entry| text(entry, "name") == name);
        let change = change(at.and_then(|at| drivers.get(at)), name, driver)?;
        Some((name.clone(), at, change))
    });
    let change = changes.next();
    if change.is_none() && is_migrated && drivers.len() == entries.len() {
        return None;
    }
    let mut driver = None;
    if let Some((name, at, change)) = change {
        driver = Some(name);
        match (at, change) {
            (Some(at), Change::Set(entry)) => drivers[at] = entry,
            (Some(at), Change::Remove) => drop(drivers.remove(at)),
            (None, Change::Set(entry)) => drivers.push(entry),
            (None, Change::Remove) => {}
        }
    }
    csi_node["spec"]["drivers"] = Value::Array(drivers);
    Some(CsiNodeWrite::Update { csi_node, driver })
}

enum Change {
    Set(Value),
    Remove,
}

/// Returns how the entry of a driver changes; `None` if it is up to date (`installDriverToCSINode`).
fn change(live: Option<&Value>, name: &str, driver: &Driver) -> Option<Change> {
    let keys: Vec<&String> = driver.topology.keys().collect();
    let entry = json!({"name": name, "nodeID": driver.node_id, "topologyKeys": keys});
    let Some(live) = live else { return Some(Change::Set(with_allocatable(entry, driver))) };
    let live_keys: BTreeSet<&str> = list(live, "topologyKeys").iter().filter_map(Value::as_str).collect();
    let same_keys = live_keys.into_iter().eq(keys.into_iter().map(String::as_str));
    if text(live, "nodeID") != driver.node_id || !same_keys {
        return Some(Change::Remove);
    }
    let count = live["allocatable"]["count"].as_i64();
    (count != driver.allocatable.map(i64::from)).then(|| Change::Set(with_allocatable(live.clone(), driver)))
}

fn with_allocatable(mut entry: Value, driver: &Driver) -> Value {
    if let Some(fields) = entry.as_object_mut() {
        match driver.allocatable {
            Some(count) => fields.insert("allocatable".to_owned(), json!({ "count": count })),
            None => fields.remove("allocatable"),
        };
    }
    entry
}

/// Reports whether the annotation has the migrated plugins, in any order (`setMigrationAnnotation`).
fn is_migrated(csi_node: &Value) -> bool {
    let annotated: BTreeSet<&str> = text(&csi_node["metadata"]["annotations"], MIGRATED).split(',').collect();
    annotated.into_iter().eq(MIGRATED_PLUGINS)
}

/// The only writer of the CSINode, and of what CSI drivers add to the Node.
pub struct CsiNodeKeeper {
    /// Client with the connections of storage.
    pub api: ApiClient,
    /// The node's volumes, and the Node.
    pub volumes: VolumeBoard,
    /// The clock of intervals.
    pub clock: Clock,
    /// Interval between reads of the CSINode.
    pub check_every: Duration,
    /// Pause after the API server did not take the health of storage.
    pub refused_pause: Duration,
}

/// State of the objects as the last pass read or wrote them.
#[derive(Default)]
struct Memory {
    csi_node: Option<Value>,
    /// UID of the Node.
    uid: String,
    node: Value,
    /// Errors of drivers that were logged.
    errors: BTreeMap<String, String>,
    /// When the health of storage is written again, after the API server did not take it.
    health_due: Option<Instant>,
}

impl CsiNodeKeeper {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        // The next process repeats a dropped write.
        tokio::select! {
            () = self.keep() => {}
            () = stop.cancelled() => {}
        }
    }

    async fn keep(&self) {
        let (mut reports, mut nodes) = (self.volumes.reports(), self.volumes.nodes());
        let mut backoff = Backoff::new(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
        let mut is_failing = false;
        let mut memory = Memory::default();
        let mut read_at = Instant::now();
        loop {
            let volumes = Arc::clone(&reports.borrow_and_update().volumes);
            let seen = nodes.borrow_and_update().as_ref().map(|seen| Arc::clone(&seen.node));
            if read_at.elapsed() >= self.check_every {
                memory.csi_node = None;
            }
            if memory.csi_node.is_none() {
                read_at = Instant::now();
            }
            let pass = match &seen {
                Some(node) => self.pass(node, &volumes, &mut memory).await,
                None => Ok(()),
            };
            let wait = match pass {
                Ok(()) => {
                    is_failing = false;
                    backoff.reset();
                    self.check_every
                }
                Err(failure) => {
                    memory.csi_node = None;
                    if !std::mem::replace(&mut is_failing, true) {
                        warn!(%failure, "write csi node failed, retrying");
                    }
                    failure.retry_after().unwrap_or_else(|| backoff.next_wait())
                }
            };
            let wait = tokio::time::sleep(wait);
            // A dropped branch loses nothing: the state is read again. The board has a sender of both
            // channels.
            if is_failing {
                wait.await;
            } else {
                tokio::select! {
                    Ok(()) = reports.changed() => {}
                    Ok(()) = nodes.changed() => {}
                    () = wait => {}
                }
            }
        }
    }

    /// Brings the Node and the CSINode up to date.
    async fn pass(&self, seen: &Value, volumes: &Volumes, memory: &mut Memory) -> Result<(), ApiFailure> {
        let uid = text(&seen["metadata"], "uid");
        if memory.uid != uid {
            // The CSINode of a Node that was deleted is deleted with it.
            *memory = Memory {
                uid: uid.to_owned(),
                errors: std::mem::take(&mut memory.errors),
                health_due: memory.health_due,
                ..Memory::default()
            };
        }
        if version(&memory.node) <= version(seen) {
            memory.node = seen.clone();
        }
        let mut failed = Failed::default();
        memory.errors.retain(|name, _| volumes.drivers.contains_key(name));
        for (name, driver) in &volumes.drivers {
            match add_to_node(&memory.node, name, driver) {
                Ok(None) => {}
                Ok(Some(patch)) => match self.patch_node(&memory.node, &patch).await {
                    Ok(node) => memory.node = node,
                    Err(failure) if failure.is_of_server() => return Err(failure),
                    Err(failure) => failed.add(memory, name, failure),
                },
                Err(collision) => failed.add(memory, name, ApiFailure::Refused(collision.to_string().into())),
            }
        }
        self.write_csi_node(volumes, memory, &mut failed).await?;
        if let Some(patch) = remove_from_node(&memory.node, &volumes.removed) {
            memory.node = self.patch_node(&memory.node, &patch).await?;
        }
        self.write_storage_health(volumes, memory).await?;
        memory.errors.retain(|name, _| failed.drivers.contains(name));
        failed.last.map_or(Ok(()), Err)
    }

    async fn write_csi_node(
        &self,
        volumes: &Volumes,
        memory: &mut Memory,
        failed: &mut Failed,
    ) -> Result<(), ApiFailure> {
        let name = text(&memory.node["metadata"], "name").to_owned();
        let path = format!("{COLLECTION}/{name}");
        for _ in 0..WRITES {
            if memory.csi_node.is_none() {
                match self.api.get(&path).await {
                    Ok(csi_node) => memory.csi_node = Some(csi_node),
                    Err(ApiFailure::NotFound(_)) => {}
                    Err(failure) => return Err(failure),
                }
            }
            let live = memory.csi_node.take();
            let (driver, written) = match next_step(live.as_ref(), &memory.node, volumes, &failed.drivers) {
                None => {
                    memory.csi_node = live;
                    self.volumes.csi_node_written();
                    return Ok(());
                }
                Some(CsiNodeWrite::Create(csi_node)) => {
                    info!(node = name, "creating csi node");
                    (None, self.api.create(COLLECTION, &csi_node).await)
                }
                Some(CsiNodeWrite::Update { csi_node, driver }) => {
                    debug!(node = name, driver, "updating csi node");
                    (driver, self.api.update(&path, &csi_node).await)
                }
            };
            match (written, driver) {
                (Ok(csi_node), _) => memory.csi_node = Some(csi_node),
                // Another client wrote or deleted the object: it is read again.
                (
                    Err(ApiFailure::Conflict(_) | ApiFailure::AlreadyExists(_) | ApiFailure::NotFound(_)),
                    _,
                ) => {}
                (
                    Err(
                        failure @ (ApiFailure::Invalid(_) | ApiFailure::Refused(_) | ApiFailure::TooLarge(_)),
                    ),
                    Some(driver),
                ) => failed.add(memory, &driver, failure),
                (Err(failure), _) => return Err(failure),
            }
        }
        Err(ApiFailure::Conflict(format!("CSINode {name} is not up to date after {WRITES} writes")))
    }

    /// Brings the status of the CSINode up to date.
    async fn write_storage_health(&self, volumes: &Volumes, memory: &mut Memory) -> Result<(), ApiFailure> {
        if memory.health_due.is_some_and(|due| Instant::now() < due) {
            return Ok(());
        }
        let path = format!("{COLLECTION}/{}", text(&memory.node["metadata"], "name"));
        for _ in 0..STATUS_WRITES {
            let Some(live) = &memory.csi_node else { return Ok(()) };
            let Some(list) = storage_health::next_list(live, volumes, self.clock.wall()) else {
                return Ok(());
            };
            let patch = storage_health::patch(live, &list);
            match self.api.merge_patch(&format!("{path}/status"), &patch).await {
                Ok(csi_node) => {
                    let is_stored = storage_health::is_stored(&csi_node, &list);
                    memory.csi_node = Some(csi_node);
                    if is_stored {
                        memory.health_due = None;
                    } else {
                        self.health_refused(memory, "the field is dropped");
                    }
                    return Ok(());
                }
                Err(ApiFailure::Conflict(_)) => memory.csi_node = Some(self.api.get(&path).await?),
                Err(failure @ ApiFailure::NotFound(_)) => {
                    // A CSINode that was deleted is created again. An API server without the feature does not
                    // serve the status.
                    memory.csi_node = Some(self.api.get(&path).await?);
                    self.health_refused(memory, &failure.to_string());
                    return Ok(());
                }
                Err(failure) if failure.is_declined() => {
                    self.health_refused(memory, &failure.to_string());
                    return Ok(());
                }
                Err(failure) => return Err(failure),
            }
        }
        Err(ApiFailure::Conflict(format!(
            "the status of {path} is not up to date after {STATUS_WRITES} writes"
        )))
    }

    /// Records that the API server did not take the health of storage.
    fn health_refused(&self, memory: &mut Memory, why: &str) {
        if memory.health_due.is_none() {
            let seconds = self.refused_pause.as_secs();
            info!(
                why,
                seconds, "api server does not take the health of storage, trying again at this interval"
            );
        }
        memory.health_due = Instant::now().checked_add(self.refused_pause);
    }

    async fn patch_node(&self, node: &Value, patch: &Value) -> Result<Value, ApiFailure> {
        self.api.patch(&format!("{}/status", node_path(text(&node["metadata"], "name"))), patch).await
    }
}

/// Drivers that could not be added in this pass. They do not keep others from being added.
#[derive(Default)]
struct Failed {
    drivers: BTreeSet<String>,
    last: Option<ApiFailure>,
}

impl Failed {
    fn add(&mut self, memory: &mut Memory, driver: &str, failure: ApiFailure) {
        let error = failure.to_string();
        if memory.errors.insert(driver.to_owned(), error.clone()).as_ref() != Some(&error) {
            warn!(driver, error, "add csi driver to the node failed, retrying");
        }
        self.drivers.insert(driver.to_owned());
        self.last = Some(failure);
    }
}

/// Returns the version of an object; 0 if it has none.
fn version(object: &Value) -> u64 {
    text(&object["metadata"], "resourceVersion").parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(node_id: &str, topology: &[(&str, &str)], allocatable: Option<i32>) -> Driver {
        let topology = topology.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Driver { node_id: node_id.to_owned(), topology, allocatable, ..Driver::default() }
    }

    fn volumes(drivers: &[(&str, &Driver)], removed: &[&str]) -> Volumes {
        Volumes {
            drivers: drivers.iter().map(|(name, driver)| ((*name).to_owned(), (*driver).clone())).collect(),
            removed: removed.iter().map(|name| (*name).to_owned()).collect(),
            in_use: None,
        }
    }

    fn node(labels: &Value, annotation: Option<&str>) -> Value {
        let mut node = json!({"metadata": {"name": "n1", "uid": "u1", "labels": labels}});
        if let Some(annotation) = annotation {
            node["metadata"]["annotations"][NODE_ID] = json!(annotation);
        }
        node
    }

    #[test]
    fn a_driver_adds_its_node_id_and_topology_labels_to_the_node() {
        let d = driver("id-1", &[("d.csi/zone", "z1")], None);
        let add = |node: &Value| add_to_node(node, "d.csi", &d);
        let annotations = |ids: &str| json!({ NODE_ID: ids });
        assert_eq!(
            add(&node(&json!({}), Some(r#"{"e.csi":"e"}"#))).unwrap().unwrap(),
            json!({"metadata": {
                "labels": {"d.csi/zone": "z1"},
                "annotations": annotations(r#"{"d.csi":"id-1","e.csi":"e"}"#),
            }})
        );
        let has_labels = json!({"d.csi/zone": "z1"});
        assert_eq!(add(&node(&has_labels, Some(r#"{"d.csi":"id-1"}"#))), Ok(None));
        // A changed ID replaces the old one, and an unreadable annotation is overwritten.
        for annotation in [r#"{"d.csi":"old"}"#, "torn"] {
            assert_eq!(
                add(&node(&has_labels, Some(annotation))).unwrap().unwrap(),
                json!({"metadata": {"annotations": annotations(r#"{"d.csi":"id-1"}"#)}})
            );
        }
        assert_eq!(
            add(&node(&json!({"d.csi/zone": "z2"}), None)).unwrap_err().to_string(),
            "detected topology value collision: driver reported \"d.csi/zone\":\"z1\" but existing label is \
             \"d.csi/zone\":\"z2\""
        );
    }

    #[test]
    fn a_removed_driver_leaves_the_annotation_and_the_last_one_removes_it() {
        let removed = BTreeSet::from(["d.csi".to_owned()]);
        let remove = |annotation: Option<&str>| remove_from_node(&node(&json!({}), annotation), &removed);
        let patch = |value: Value| Some(json!({"metadata": {"annotations": {NODE_ID: value}}}));
        assert_eq!(remove(Some(r#"{"d.csi":"a","e.csi":"e"}"#)), patch(json!(r#"{"e.csi":"e"}"#)));
        assert_eq!(remove(Some(r#"{"d.csi":"a"}"#)), patch(Value::Null));
        assert_eq!(remove(Some(r#"{"e.csi":"e"}"#)), None);
        assert_eq!(remove(None), None);
    }

    /// Applies the steps until there is none, as an API server that takes all of them. Returns the number of
    /// steps.
    fn settle(live: &mut Option<Value>, volumes: &Volumes, blocked: &BTreeSet<String>) -> usize {
        for at in 0..10 {
            match next_step(live.as_ref(), &node(&json!({}), None), volumes, blocked) {
                None => return at,
                Some(CsiNodeWrite::Create(csi_node) | CsiNodeWrite::Update { csi_node, .. }) => {
                    *live = Some(csi_node)
                }
            }
        }
        panic!("the steps do not end");
    }

    #[test]
    fn the_csi_node_is_created_for_its_node_and_gets_the_drivers() {
        let none = BTreeSet::new();
        let mut live = None;
        assert_eq!(settle(&mut live, &Volumes::default(), &none), 1);
        let created = live.clone().unwrap();
        assert_eq!(
            created["metadata"]["ownerReferences"],
            json!([{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}])
        );
        assert_eq!(
            created["metadata"]["annotations"][MIGRATED],
            "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,\
             kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume"
        );
        let d = driver("id-1", &[("b", "1"), ("a", "2")], Some(5));
        let e = driver("id-2", &[], None);
        assert_eq!(settle(&mut live, &volumes(&[("d", &d), ("e", &e)], &[]), &none), 2);
        let entries = json!([
            {"name": "d", "nodeID": "id-1", "topologyKeys": ["a", "b"], "allocatable": {"count": 5}},
            {"name": "e", "nodeID": "id-2", "topologyKeys": []},
        ]);
        assert_eq!(live.clone().unwrap()["spec"]["drivers"], entries);
        // Drivers that pod-sync has not found yet keep their entries; those that it deregistered lose them.
        assert_eq!(settle(&mut live, &Volumes::default(), &none), 0);
        assert_eq!(settle(&mut live, &volumes(&[("e", &e)], &["d", "unknown"]), &none), 1);
        assert_eq!(live.unwrap()["spec"]["drivers"], json!([entries[1]]));
    }

    #[test]
    fn a_limit_is_changed_in_place_and_an_id_or_topology_by_removing_the_entry_first() {
        let none = BTreeSet::new();
        let old = driver("id-1", &[("a", "1")], Some(5));
        for (new, steps) in [
            (driver("id-1", &[("a", "2")], Some(5)), 0),
            (driver("id-1", &[("a", "1")], Some(6)), 1),
            (driver("id-1", &[("a", "1")], None), 1),
            (driver("id-2", &[("a", "1")], Some(5)), 2),
            (driver("id-1", &[("b", "1")], Some(5)), 2),
        ] {
            let mut live = None;
            settle(&mut live, &volumes(&[("d", &old)], &[]), &none);
            let wanted = volumes(&[("d", &new)], &[]);
            let Some(CsiNodeWrite::Update { csi_node, driver }) =
                next_step(live.as_ref(), &Value::Null, &wanted, &none)
            else {
                assert_eq!(steps, 0, "{new:?}");
                continue;
            };
            assert_eq!(driver.as_deref(), Some("d"));
            assert_eq!(list(&csi_node["spec"], "drivers").is_empty(), steps == 2, "{new:?}");
            assert_eq!(settle(&mut live, &wanted, &none), steps, "{new:?}");
            let entry = &live.unwrap()["spec"]["drivers"][0];
            assert_eq!(text(entry, "nodeID"), new.node_id);
            assert_eq!(entry["allocatable"]["count"].as_i64(), new.allocatable.map(i64::from));
        }
    }

    #[test]
    fn foreign_fields_stay_and_a_blocked_driver_does_not_keep_others_out() {
        let (d, e) = (driver("id-1", &[], None), driver("id-2", &[], None));
        let mut live = Some(json!({
            "metadata": {"name": "n1", "labels": {"a": "b"}, "annotations": {"x": "y", MIGRATED: "kubernetes.io/cinder"}},
            "spec": {"drivers": [{"name": "other", "nodeID": "o", "topologyKeys": null}]},
        }));
        let wanted = volumes(&[("d", &d), ("e", &e)], &[]);
        assert_eq!(settle(&mut live, &wanted, &BTreeSet::from(["d".to_owned()])), 1);
        let live = live.unwrap();
        let names: Vec<&str> =
            list(&live["spec"], "drivers").iter().map(|entry| text(entry, "name")).collect();
        assert_eq!(names, ["other", "e"]);
        assert_eq!(
            (&live["metadata"]["labels"]["a"], &live["metadata"]["annotations"]["x"]),
            (&json!("b"), &json!("y"))
        );
        assert!(is_migrated(&live));
    }
}
