//! `CSINode.status.storageHealth`: what is wrong with the storage behind the CSI drivers
//! (`nodeinfomanager: UpdateCSINodeStorageHealth`).

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::volumes::{StorageCondition, Volumes};

/// An element of `storageHealth`, whose key is the name of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageHealth {
    /// Name of the CSI driver.
    pub name: String,
    /// Problems that the driver reports; empty if its storage is healthy.
    #[serde(default)]
    pub health_conditions: Vec<StorageCondition>,
}

/// Returns whether two conditions have the same status, reason and modes.
fn is_same(a: &StorageCondition, b: &StorageCondition) -> bool {
    a.status == b.status
        && a.reason == b.reason
        && a.access_mode == b.access_mode
        && a.volume_mode == b.volume_mode
}

fn are_same(a: &[StorageCondition], b: &[StorageCondition]) -> bool {
    a.len() == b.len() && a.iter().all(|condition| b.iter().any(|other| is_same(other, condition)))
}

/// Returns the list of a CSINode. One that is no such list counts as empty, and is replaced.
fn of(csi_node: &Value) -> Vec<StorageHealth> {
    serde_json::from_value(csi_node["status"]["storageHealth"].clone()).unwrap_or_default()
}

/// Returns the list that the CSINode is to have; `None` if it has the same drivers with the same statuses,
/// reasons and modes.
///
/// A driver without known health keeps its entry, a driver whose storage is well or that was removed has
/// none. As in the kubelet, another message is no change.
#[must_use]
pub fn next_list(csi_node: &Value, volumes: &Volumes, now: Timestamp) -> Option<Vec<StorageHealth>> {
    let live = of(csi_node);
    let known =
        volumes.drivers.iter().filter_map(|(name, driver)| Some((name, driver.storage_health.as_ref()?)));
    let mut known: BTreeMap<&String, &Vec<StorageCondition>> = known.collect();
    let mut is_changed = false;
    let mut list = Vec::new();
    for entry in &live {
        let before = &entry.health_conditions;
        let kept = match known.remove(&entry.name) {
            Some(wanted) if are_same(before, wanted) && !wanted.is_empty() => Some(entry.clone()),
            Some(wanted) => with_times(&entry.name, wanted, before, now),
            None => Some(entry.clone()).filter(|entry| !volumes.removed.contains(&entry.name)),
        };
        is_changed |= kept.as_ref() != Some(entry);
        list.extend(kept);
    }
    let added = known.into_iter().filter_map(|(name, wanted)| with_times(name, wanted, &[], now));
    list.extend(added);
    (is_changed || list.len() != live.len()).then_some(list)
}

/// Returns the entry of a driver, or `None` if nothing is wrong with its storage. A condition that was there
/// before keeps its time.
fn with_times(
    name: &str,
    wanted: &[StorageCondition],
    before: &[StorageCondition],
    now: Timestamp,
) -> Option<StorageHealth> {
    let condition = |condition: &StorageCondition| {
        let since =
            before.iter().find(|old| is_same(old, condition)).and_then(|old| old.last_transition_time);
        let since = since.or_else(|| Timestamp::from_second(now.as_second()).ok());
        StorageCondition { last_transition_time: since, ..condition.clone() }
    };
    let health_conditions: Vec<_> = wanted.iter().map(condition).collect();
    (!health_conditions.is_empty()).then(|| StorageHealth { name: name.to_owned(), health_conditions })
}

/// Returns the merge patch of the status. The API server refuses it once another client has written the
/// object.
#[must_use]
pub fn patch(csi_node: &Value, list: &[StorageHealth]) -> Value {
    let version = &csi_node["metadata"]["resourceVersion"];
    json!({"metadata": {"resourceVersion": version}, "status": {"storageHealth": list}})
}

/// Returns whether an API server that has accepted a list has also stored it. One without the feature drops
/// the field.
#[must_use]
pub fn is_stored(csi_node: &Value, list: &[StorageHealth]) -> bool {
    let stored = of(csi_node);
    let is_in = |entry: &StorageHealth| {
        stored.iter().any(|other| {
            other.name == entry.name && are_same(&other.health_conditions, &entry.health_conditions)
        })
    };
    stored.len() == list.len() && list.iter().all(is_in)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::volumes::Driver;

    /// Reason and message.
    type Conditions<'a> = &'a [(&'a str, &'a str)];
    /// Drivers with what they report, removed drivers, and the list after that of the row before; `None` for
    /// no write.
    type Row<'a> = (&'a [(&'a str, Option<Conditions<'a>>)], &'a [&'a str], Option<&'a str>);

    fn driver(conditions: Option<Conditions<'_>>) -> Driver {
        let condition = |&(reason, message): &(&str, &str)| StorageCondition {
            status: "StorageDegraded".to_owned(),
            reason: reason.to_owned(),
            message: message.to_owned(),
            ..StorageCondition::default()
        };
        let storage_health = conditions.map(|list| list.iter().map(condition).collect());
        Driver { node_id: "n".to_owned(), storage_health, ..Driver::default() }
    }

    fn shown(list: &[StorageHealth]) -> String {
        let condition = |c: &StorageCondition| {
            format!("{} {:?} since {}", c.reason, c.message, c.last_transition_time.unwrap().as_second())
        };
        let entry = |entry: &StorageHealth| {
            let conditions: Vec<String> = entry.health_conditions.iter().map(condition).collect();
            format!("{}: {}", entry.name, conditions.join(", "))
        };
        list.iter().map(entry).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn a_list_follows_the_reports_and_keeps_what_is_not_known() {
        let table: [Row<'_>; 11] = [
            (&[], &[], None),
            (&[("b", Some(&[])), ("c", None)], &[], None),
            (&[("b", Some(&[("Slow", "1")]))], &[], Some("b: Slow \"1\" since 2")),
            // Another message is no change.
            (&[("b", Some(&[("Slow", "2")]))], &[], None),
            (
                &[("a", Some(&[("Full", "")])), ("b", Some(&[("Slow", "3"), ("Torn", "4")]))],
                &[],
                Some("b: Slow \"3\" since 2, Torn \"4\" since 4; a: Full \"\" since 4"),
            ),
            // Another order is no change.
            (&[("b", Some(&[("Torn", "4"), ("Slow", "3")]))], &[], None),
            // After a restart of pod-sync.
            (&[("b", None)], &[], None),
            (&[("b", Some(&[]))], &[], Some("a: Full \"\" since 4")),
            (&[("b", Some(&[("Slow", "5")]))], &[], Some("a: Full \"\" since 4; b: Slow \"5\" since 8")),
            (&[("b", None)], &["a"], Some("b: Slow \"5\" since 8")),
            (&[("b", Some(&[]))], &["a"], Some("")),
        ];
        let mut csi_node = json!({"metadata": {"resourceVersion": "7"}});
        for (second, (drivers, removed, expected)) in table.into_iter().enumerate() {
            let volumes = Volumes {
                drivers: drivers.iter().map(|(name, list)| ((*name).to_owned(), driver(*list))).collect(),
                removed: removed.iter().map(|name| (*name).to_owned()).collect(),
                in_use: None,
            };
            let now = Timestamp::from_millisecond(i64::try_from(second).unwrap() * 1000 + 500).unwrap();
            let list = next_list(&csi_node, &volumes, now);
            assert_eq!(list.as_deref().map(shown).as_deref(), expected, "row {second}");
            if let Some(list) = list {
                assert!(!is_stored(&csi_node, &list), "row {second}");
                let patch = patch(&csi_node, &list);
                assert_eq!(patch["metadata"]["resourceVersion"], "7");
                csi_node["status"] = patch["status"].clone();
                assert!(is_stored(&csi_node, &list), "row {second}");
            }
        }
    }

    #[test]
    fn modes_are_a_part_of_a_condition_and_a_broken_list_is_replaced() {
        let condition = |access: Option<&str>, volume: Option<&str>| StorageCondition {
            status: "StorageDegraded".to_owned(),
            reason: "Slow".to_owned(),
            access_mode: access.map(str::to_owned),
            volume_mode: volume.map(str::to_owned),
            ..StorageCondition::default()
        };
        let (all, block) = (condition(None, None), condition(Some("ReadWriteMany"), Some("Block")));
        assert!(are_same(&[all.clone(), block.clone()], &[block.clone(), all.clone()]));
        assert!(!are_same(std::slice::from_ref(&all), std::slice::from_ref(&block)));
        let expected = json!({"status": "StorageDegraded", "reason": "Slow", "accessMode": "ReadWriteMany", "volumeMode": "Block"});
        assert_eq!(json!(block), expected);
        let mut volumes = Volumes::default();
        volumes
            .drivers
            .insert("d".to_owned(), Driver { storage_health: Some(vec![all]), ..Driver::default() });
        let broken = json!({"status": {"storageHealth": [{"healthConditions": []}]}});
        assert_eq!(next_list(&broken, &volumes, Timestamp::UNIX_EPOCH).map(|list| list.len()), Some(1));
    }
}
