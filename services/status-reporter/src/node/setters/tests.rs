use std::time::Duration;

use super::*;

const NOW: &str = "2026-01-01T00:01:00Z";

fn facts(observed: u64, not_ready: &[&str]) -> Facts {
    Facts {
        source: MAIN_SOURCE.into(),
        node: json!({
            "metadata": {"labels": {"a": "b"}},
            "status": {
                "capacity": {"cpu": "2", "memory": "1Gi", "pods": "110", "ephemeral-storage": "9Gi"},
                "nodeInfo": {"bootID": "boot-1"}, "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            },
        }),
        not_ready: not_ready.iter().map(|s| (*s).to_owned()).collect(),
        observed: Duration::from_secs(observed),
    }
}

fn readiness_of(facts: &[Facts], peers: &[Peer], boot: u64, started: u64) -> Readiness {
    let seconds = Duration::from_secs;
    readiness(View { facts, peers, own: None, boot: seconds(boot), started: seconds(started) })
}

#[test]
fn the_ready_condition_names_the_reasons_against_it() {
    let not = |problems: &[&str]| Readiness::NotReady(problems.iter().map(|s| (*s).to_owned()).collect());
    let peer = |down: Option<u64>, limit: u64| Peer {
        name: "pleg-service",
        down_for: down.map(Duration::from_secs),
        limit: Duration::from_secs(limit),
    };
    assert_eq!(readiness_of(&[], &[], 129, 100), Readiness::Unknown);
    assert_eq!(readiness_of(&[], &[], 130, 100), not(&["pod-sync has not reported yet"]));
    assert_eq!(readiness_of(&[facts(100, &[])], &[], 130, 100), Readiness::Ready);
    assert_eq!(
        readiness_of(&[facts(100, &[])], &[], 131, 100),
        not(&["pod-sync has not reported for more than 30 s"])
    );
    assert_eq!(readiness_of(&[facts(500, &[])], &[], 131, 100), Readiness::Ready, "the future is fresh");
    assert_eq!(
        readiness_of(&[facts(100, &["runtime down", "no network", "runtime down"])], &[], 101, 100),
        not(&["runtime down", "no network"])
    );
    assert_eq!(readiness_of(&[facts(100, &[])], &[peer(Some(180), 180)], 101, 100), Readiness::Ready);
    assert_eq!(
        readiness_of(&[facts(100, &["x"])], &[peer(Some(181), 180)], 101, 100),
        not(&["x", "pleg-service is not healthy: not serving for more than 180 s"])
    );
    assert_eq!(readiness_of(&[facts(100, &[])], &[peer(None, 180)], 101, 100), Readiness::Ready);
    let facts = [facts(100, &["x"])];
    let (boot, started) = (Duration::from_secs(101), Duration::from_secs(100));
    let own = Some(NO_CSI_NODE);
    assert_eq!(
        readiness(View { facts: &facts, peers: &[], own, boot, started }),
        not(&["x", "CSINode is not yet initialized"])
    );
}

#[test]
fn a_restart_keeps_a_ready_node_ready_while_its_csi_node_is_read() {
    let node = |status: &str| json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
    let (grace, second) = (START_GRACE, Duration::from_secs(1));
    for (live, has, since, own) in [
        (node("True"), false, grace.saturating_sub(second), None),
        (node("True"), false, grace, Some(NO_CSI_NODE)),
        (node("False"), false, second, Some(NO_CSI_NODE)),
        (json!({}), false, second, Some(NO_CSI_NODE)),
        (json!({}), true, second, None),
        (node("True"), true, grace, None),
    ] {
        assert_eq!(csi_node_problem(&live, has, since), own, "{live} {has} {since:?}");
    }
}

fn cond<'a>(node: &'a Value, kind: &str) -> &'a Value {
    condition(&node["status"], kind).unwrap()
}

fn reasons(events: &[Occurrence]) -> Vec<&str> {
    events.iter().map(|e| e.reason.as_str()).collect()
}

#[test]
fn a_fresh_node_gets_pressures_first_and_ready_last() {
    let live = initial("n1", "amd64");
    let (node, events) = desired(&live, &[facts(1, &[])], &Readiness::Ready, NOW);
    let kinds: Vec<&str> = list(&node["status"], "conditions").iter().map(|c| text(c, "type")).collect();
    assert_eq!(kinds, ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]);
    assert_eq!(
        *cond(&node, "Ready"),
        json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status",
            "lastHeartbeatTime": NOW, "lastTransitionTime": NOW})
    );
    assert_eq!(text(cond(&node, "DiskPressure"), "reason"), "KubeletHasNoDiskPressure");
    assert_eq!(
        reasons(&events),
        ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID"]
    );
    assert_eq!(
        (&node["metadata"]["labels"]["a"], &node["status"]["capacity"]["cpu"]),
        (&json!("b"), &json!("2"))
    );
}

#[test]
fn conditions_change_as_in_the_kubelet() {
    let old = "2026-01-01T00:00:00Z";
    let (first, _) = desired(&initial("n1", "amd64"), &[facts(1, &[])], &Readiness::Ready, old);
    let (same, events) = desired(&first, &[facts(1, &[])], &Readiness::Ready, NOW);
    assert!(events.is_empty());
    for kind in ["Ready", "MemoryPressure"] {
        let c = cond(&same, kind);
        assert_eq!((text(c, "lastTransitionTime"), text(c, "lastHeartbeatTime")), (old, NOW), "{kind}");
    }
    let problems = |p: &[&str]| Readiness::NotReady(p.iter().map(|s| (*s).to_owned()).collect());
    let (down, events) = desired(&first, &[facts(1, &[])], &problems(&["a", "b"]), NOW);
    let ready = cond(&down, "Ready");
    assert_eq!(
        (text(ready, "status"), text(ready, "message"), text(ready, "lastTransitionTime")),
        ("False", "[a, b]", NOW)
    );
    assert_eq!(
        events,
        [Occurrence::of_node("n1", "Normal", "NodeNotReady", "Node n1 status is now: NodeNotReady".into())]
    );
    let (other, events) = desired(&down, &[facts(1, &[])], &problems(&["c"]), "2026-01-01T00:02:00Z");
    assert_eq!(
        (text(cond(&other, "Ready"), "message"), text(cond(&other, "Ready"), "lastTransitionTime")),
        ("c", NOW)
    );
    assert!(events.is_empty(), "another message is no transition");

    let mut low = facts(1, &[]);
    low.node["status"]["conditions"] = json!([{"type": "MemoryPressure", "status": "True"}]);
    let (pressed, events) = desired(&first, &[low], &Readiness::Ready, NOW);
    assert_eq!(
        text(cond(&pressed, "MemoryPressure"), "message"),
        "kubelet has insufficient memory available"
    );
    assert_eq!(reasons(&events), ["NodeHasInsufficientMemory"]);
}

#[test]
fn ready_names_missing_capacity_and_is_kept_while_readiness_is_unknown() {
    let mut bare = facts(1, &[]);
    bare.node = json!({"status": {"capacity": {"cpu": "1"}}});
    let (node, _) = desired(&initial("n1", "amd64"), &[bare], &Readiness::Ready, NOW);
    assert_eq!(
        text(cond(&node, "Ready"), "message"),
        "missing node capacity for resources: memory, pods, ephemeral-storage"
    );
    let mut without_storage = facts(1, &[]);
    without_storage.node = json!({"status": {"capacity": {"cpu": "1", "memory": "1Gi", "pods": "110"}}});
    let (node, _) = desired(&initial("n1", "amd64"), &[without_storage], &Readiness::Ready, NOW);
    assert_eq!(text(cond(&node, "Ready"), "status"), "True", "local storage is not isolated");

    let mut live = initial("n1", "amd64");
    live["status"]["conditions"] = json!([{"type": "Ready", "status": "True", "lastHeartbeatTime": "x"}]);
    let (left, events) = desired(&live, &[], &Readiness::Unknown, NOW);
    assert_eq!((&left, events.len()), (&live, 0), "after a restart the API's word stands");
    let (fresh, _) = desired(&initial("n1", "amd64"), &[], &Readiness::Unknown, NOW);
    assert_eq!(text(cond(&fresh, "Ready"), "status"), "False");
}

#[test]
fn a_reboot_is_reported_when_the_boot_id_changes() {
    let mut live = initial("n1", "amd64");
    live["status"]["nodeInfo"] = json!({"bootID": "boot-0", "architecture": "amd64"});
    let (node, events) = desired(&live, &[facts(1, &[])], &Readiness::Ready, NOW);
    assert_eq!(events[0].message, "Node n1 has been rebooted, boot id: boot-1");
    assert_eq!(node["status"]["nodeInfo"], json!({"bootID": "boot-1", "architecture": "amd64"}));
    let (_, events) = desired(&node, &[facts(1, &[])], &Readiness::Ready, NOW);
    assert!(events.is_empty());
}

#[test]
fn huge_pages_of_a_size_that_the_machine_no_longer_has_are_removed() {
    let mut live = initial("n1", "amd64");
    let old = json!({"hugepages-2Mi": "4Mi", "hugepages-3Mi": "9Mi", "example.com/gpu": "1"});
    live["status"] = json!({"capacity": old, "allocatable": old});
    let (unknown, _) = desired(&live, &[], &Readiness::Ready, NOW);
    assert_eq!(unknown["status"]["capacity"], old, "nothing is known about the machine");
    let mut machine = facts(1, &[]);
    for field in ["capacity", "allocatable"] {
        machine.node["status"][field]["hugepages-2Mi"] = json!("2Mi");
        machine.node["status"][field]["hugepages-1Gi"] = json!("0");
    }
    let (node, _) = desired(&live, &[machine], &Readiness::Ready, NOW);
    let patch = patch(&live, &node, false).unwrap();
    for field in ["capacity", "allocatable"] {
        let change = &patch["status"][field];
        assert_eq!((&change["hugepages-2Mi"], &change["hugepages-1Gi"]), (&json!("2Mi"), &json!("0")));
        assert_eq!(change.get("hugepages-3Mi"), Some(&Value::Null), "{field} {change}");
        assert_eq!(change.get("example.com/gpu"), None, "another client's resource stays");
    }
}

#[test]
fn a_patch_has_only_owned_fields() {
    let mut live = initial("n1", "amd64");
    live["status"] = json!({"capacity": {"example.com/gpu": "1"}, "conditions": [{"type": "KernelDeadlock", "status": "False"}]});
    let (node, _) = desired(&live, &[facts(1, &[])], &Readiness::Ready, NOW);
    assert_eq!(node["status"]["capacity"]["example.com/gpu"], "1", "capacity of others stays");
    assert_eq!(weigh(&live, &node), Weight::Turned);
    let first = patch(&live, &node, false).unwrap();
    assert_eq!(first["metadata"], json!({"labels": {"a": "b"}}));
    assert_eq!(
        first["status"]["addresses"],
        json!([{"type": "InternalIP", "address": "10.0.0.1"}, {"$patch": "replace"}])
    );
    assert_eq!(first["status"]["conditions"].as_array().unwrap().len(), 4, "no foreign condition");
    assert_eq!(first["status"]["capacity"].get("example.com/gpu"), None);

    let (later, _) = desired(&node, &[facts(2, &[])], &Readiness::Ready, "2026-01-01T00:09:00Z");
    assert_eq!((weigh(&node, &later), patch(&node, &later, false)), (Weight::Nothing, None));
    let beat = patch(&node, &later, true).unwrap();
    assert_eq!(beat["status"].as_object().unwrap().len(), 1, "only conditions: {beat}");
    let mut moved = facts(3, &[]);
    moved.node["status"]["capacity"]["memory"] = json!("2Gi");
    let (moved, _) = desired(&node, &[moved], &Readiness::Ready, NOW);
    assert_eq!(weigh(&node, &moved), Weight::Changed);
    let mut nowhere = node.clone();
    nowhere["status"]["addresses"] = json!([]);
    assert_eq!(weigh(&nowhere, &node), Weight::Turned, "the first address");
    let mut same = facts(3, &[]);
    same.node["status"]["capacity"]["memory"] = json!("1024Mi");
    let (same, _) = desired(&node, &[same], &Readiness::Ready, NOW);
    assert_eq!(weigh(&node, &same), Weight::Nothing, "the same quantity in other words");
}

#[test]
fn readiness_is_written_at_once_other_changes_soon_and_heartbeats_rarely() {
    let s = |seconds: u64| Some(Duration::from_secs(seconds));
    let cases = [
        (Weight::Nothing, true, s(299), s(299), Due::Nothing),
        (Weight::Nothing, true, s(300), s(300), Due::Report),
        (Weight::Nothing, true, None, None, Due::Report),
        (Weight::Nothing, false, None, None, Due::Nothing),
        (Weight::Changed, true, s(9), s(9), Due::Nothing),
        (Weight::Changed, true, s(10), s(10), Due::Change),
        (Weight::Changed, false, None, None, Due::Change),
        (Weight::Volumes, true, Some(Duration::from_millis(999)), s(9), Due::Nothing),
        (Weight::Volumes, true, s(1), s(9), Due::Change),
        (Weight::Volumes, false, None, None, Due::Change),
        (Weight::Turned, true, s(0), s(0), Due::Change),
        (Weight::Turned, true, s(0), s(300), Due::Report),
        (Weight::Turned, false, s(0), None, Due::Change),
    ];
    for (weight, facts, update, report, want) in cases {
        assert_eq!(
            due(weight, facts, Ages { update, report }, UPDATE_EVERY, REPORT_EVERY),
            want,
            "{weight:?} {facts} {update:?} {report:?}"
        );
    }
}

#[test]
fn an_existing_node_keeps_its_labels_and_gets_the_default_ones() {
    let mut live = initial("n1", "amd64");
    live["metadata"]["labels"] = json!({"mine": "1", "kubernetes.io/arch": "old"});
    let mut initial = initial("n1", "arm64");
    initial["metadata"]["labels"]["tier"] = json!("blue");
    initial["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!("z1");
    let labels = &adopt(&live, &initial)["metadata"]["labels"];
    assert_eq!((&labels["mine"], &labels["kubernetes.io/arch"]), (&json!("1"), &json!("arm64")));
    assert_eq!(labels["topology.kubernetes.io/zone"], "z1");
    assert_eq!(labels.get("tier"), None, "only a node that is made gets custom labels");
    assert_eq!(adopt(&live, &initial)["metadata"]["annotations"][CONTROLLER_ATTACHES], "true");
    initial["metadata"]["annotations"] = json!({});
    assert_eq!(adopt(&live, &initial)["metadata"]["annotations"], json!({}));
}

#[test]
fn a_change_of_unschedulable_is_an_event() {
    let node =
        |unschedulable: bool| json!({"metadata": {"name": "n1"}, "spec": {"unschedulable": unschedulable}});
    assert_eq!(schedulable_event(None, &node(true)).unwrap().reason, "NodeNotSchedulable");
    assert_eq!(schedulable_event(Some(&node(true)), &node(false)).unwrap().reason, "NodeSchedulable");
    assert_eq!(schedulable_event(None, &node(false)), None);
}
