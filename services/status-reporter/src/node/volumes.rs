//! The volumes of the node: what pod-sync reports, and what the Node in the API server has of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::status::list;

/// An element of `healthConditions` in `CSINode.status.storageHealth`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageCondition {
    /// Type of the problem, such as `StorageUnreachable`.
    pub status: String,
    /// The driver's code, in CamelCase.
    pub reason: String,
    /// The driver's description, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Access mode of the affected volumes; `None` for all modes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_mode: Option<String>,
    /// Volume mode of the affected volumes; `None` for both modes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_mode: Option<String>,
    /// Wall-clock time at which the problem was first reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Timestamp>,
}

/// A CSI driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Driver {
    /// The driver's ID of this node.
    pub node_id: String,
    /// Topology segments, which become labels of the Node.
    pub topology: BTreeMap<String, String>,
    /// Largest number of volumes, if the driver has a limit.
    pub allocatable: Option<i32>,
    /// Conditions of the driver's storage; `None` if pod-sync does not know it.
    pub storage_health: Option<Vec<StorageCondition>>,
}

/// The newest report of pod-sync.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Volumes {
    /// The registered CSI drivers by name.
    pub drivers: BTreeMap<String, Driver>,
    /// Drivers whose entries are to be removed. Entries of drivers in neither field stay.
    pub removed: BTreeSet<String>,
    /// Unique names for `status.volumesInUse`; `None` until pod-sync knows the volumes of all its pods.
    pub in_use: Option<BTreeSet<String>>,
}

/// A report with its number.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// 0 before the first report.
    pub number: u64,
    /// The volumes of the report.
    pub volumes: Arc<Volumes>,
}

/// The Node as it was last read or written.
#[derive(Debug, Clone)]
pub struct LastNode {
    /// The object, as the API server returned it.
    pub node: Arc<Value>,
    /// Number of the report whose volumes in use the Node has; `None` if it has not those of the newest one.
    pub written: Option<u64>,
}

/// Connects the streams of pod-sync with the writers of the Node and of CSINode. Clones share it.
#[derive(Debug, Clone)]
pub struct VolumeBoard {
    report: watch::Sender<Report>,
    seen: watch::Sender<Option<LastNode>>,
    has_csi_node: watch::Sender<bool>,
}

impl Default for VolumeBoard {
    fn default() -> Self {
        Self {
            report: watch::Sender::new(Report::default()),
            seen: watch::Sender::new(None),
            has_csi_node: watch::Sender::new(false),
        }
    }
}

impl VolumeBoard {
    /// Stores a report, and returns its number.
    #[must_use]
    pub fn put(&self, volumes: Volumes) -> u64 {
        let mut number = 0;
        self.report.send_modify(|report| {
            number = report.number.saturating_add(1);
            *report = Report { number, volumes: Arc::new(volumes) };
        });
        number
    }

    /// Returns a receiver of the newest report.
    #[must_use]
    pub fn reports(&self) -> watch::Receiver<Report> {
        self.report.subscribe()
    }

    /// Returns a receiver of the Node; `None` until it was read.
    #[must_use]
    pub fn nodes(&self) -> watch::Receiver<Option<LastNode>> {
        self.seen.subscribe()
    }

    /// Returns a receiver of whether the CSINode exists and is up to date, which is then always true.
    #[must_use]
    pub fn csi_node(&self) -> watch::Receiver<bool> {
        self.has_csi_node.subscribe()
    }

    /// Records that the CSINode exists and is up to date.
    pub fn csi_node_written(&self) {
        self.has_csi_node.send_if_modified(|has| !std::mem::replace(has, true));
    }

    /// Publishes the Node. `report` is the newest report when its volumes in use were compared with the Node.
    pub fn publish(&self, node: &Value, report: &Report) {
        let written = is_in_use_written(node, &report.volumes).then_some(report.number);
        self.seen.send_if_modified(|seen| {
            let version = |node: &Value| node["metadata"]["resourceVersion"].clone();
            let is_same = seen
                .as_ref()
                .is_some_and(|old| old.written == written && version(&old.node) == version(node));
            if !is_same {
                *seen = Some(LastNode { node: Arc::new(node.clone()), written });
            }
            !is_same
        });
    }
}

/// Sets `status.volumesInUse` of a Node (`pkg/kubelet/nodestatus: VolumesInUse`). Without a list of pod-sync,
/// it stays.
pub fn set_in_use(node: &mut Value, volumes: &Volumes) {
    // The API server leaves out an empty list.
    if let Some(in_use) = &volumes.in_use
        && !is_in_use_written(node, volumes)
    {
        node["status"]["volumesInUse"] = json!(in_use);
    }
}

/// Reports whether `desired` has volumes in use that `live` has not.
#[must_use]
pub fn adds_in_use(live: &Value, desired: &Value) -> bool {
    !in_use(desired).is_subset(&in_use(live))
}

fn is_in_use_written(node: &Value, volumes: &Volumes) -> bool {
    volumes
        .in_use
        .as_ref()
        .is_none_or(|wanted| in_use(node).into_iter().eq(wanted.iter().map(String::as_str)))
}

fn in_use(node: &Value) -> BTreeSet<&str> {
    list(&node["status"], "volumesInUse").iter().filter_map(Value::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volumes(in_use: Option<&[&str]>) -> Volumes {
        let in_use = in_use.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        Volumes { in_use, ..Volumes::default() }
    }

    #[test]
    fn volumes_in_use_are_set_sorted_and_kept_until_pod_sync_knows_them() {
        let node =
            |names: &Value| json!({"metadata": {"resourceVersion": "7"}, "status": {"volumesInUse": names}});
        for (live, wanted, after, adds) in [
            (json!(["a"]), None, json!(["a"]), false),
            (json!(["a"]), Some(&["b", "a"][..]), json!(["a", "b"]), true),
            (json!(["a", "b"]), Some(&["b"][..]), json!(["b"]), false),
            (json!(["a"]), Some(&[][..]), json!([]), false),
            (Value::Null, Some(&[][..]), Value::Null, false),
            (json!(["a"]), Some(&["b"][..]), json!(["b"]), true),
        ] {
            let mut desired = node(&live);
            set_in_use(&mut desired, &volumes(wanted));
            assert_eq!(desired, node(&after), "{live} {wanted:?}");
            assert_eq!(adds_in_use(&node(&live), &desired), adds, "{live} {wanted:?}");
        }
    }

    #[test]
    fn a_report_is_written_once_the_node_has_its_volumes() {
        let board = VolumeBoard::default();
        let (mut nodes, reports) = (board.nodes(), board.reports());
        let live = |version: &str, names: &[&str]| json!({"metadata": {"resourceVersion": version}, "status": {"volumesInUse": names}});
        let written = |board: &VolumeBoard| board.nodes().borrow().as_ref().map(|seen| seen.written);
        assert_eq!(written(&board), None);
        let first = board.put(volumes(Some(&["a"])));
        board.publish(&live("1", &[]), &reports.borrow());
        assert_eq!(written(&board), Some(None));
        board.publish(&live("2", &["a"]), &reports.borrow());
        assert_eq!(written(&board), Some(Some(first)));
        let _ = nodes.borrow_and_update();
        board.publish(&live("2", &["a"]), &reports.borrow());
        assert!(!nodes.has_changed().unwrap(), "the Node is the same");
        let second = board.put(volumes(Some(&["a"])));
        board.publish(&live("2", &["a"]), &reports.borrow());
        assert!(second > first && written(&board) == Some(Some(second)));
    }
}
