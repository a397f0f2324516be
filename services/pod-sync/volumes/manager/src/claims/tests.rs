use quintlet_testkit::pods::pod_json;
use serde_json::{Value, json};

use super::*;

fn claim(change: Value) -> PersistentVolumeClaim {
    let mut claim = json!({
        "metadata": {"name": "data", "namespace": "default", "uid": "claim-1"},
        "spec": {"volumeName": "pv-1"}, "status": {"phase": "Bound"},
    });
    merge(&mut claim, change);
    serde_json::from_value(claim).unwrap()
}

fn volume(change: Value) -> PersistentVolume {
    let mut volume = json!({
        "metadata": {"name": "pv-1"},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": "default", "name": "data", "uid": "claim-1"},
            "csi": {"driver": "d", "volumeHandle": "h", "fsType": "ext4", "readOnly": true,
                "nodeStageSecretRef": {"namespace": "ns", "name": "s"}},
        },
    });
    merge(&mut volume, change);
    serde_json::from_value(volume).unwrap()
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

fn pod() -> Pod {
    let mut pod = pod_json(json!({"containers": [{"name": "c"}]}));
    pod.metadata.namespace = Some("default".to_owned());
    pod.metadata.name = Some("web".to_owned());
    pod.metadata.uid = Some("u1".to_owned());
    pod
}

fn csi(provided: &Provided) -> &Volume {
    match &provided.source {
        Source::Csi(csi) => csi,
        Source::InTree(volume) => panic!("not of a driver: {volume:?}"),
    }
}

fn uses(mounts: &[&str], devices: &[&str]) -> Uses {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Uses { mounts: names(mounts), devices: names(devices) }
}

#[test]
fn a_claim_that_cannot_be_used_has_the_kubelets_text() {
    let named = ClaimOf { name: "data".to_owned(), read_only: false, is_ephemeral: false };
    let ephemeral = ClaimOf { name: "web-data".to_owned(), is_ephemeral: true, ..named.clone() };
    let owner = |uid: &str, controller: bool| {
        json!({"metadata": {"ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": controller},
        ]}})
    };
    let deleted = "2026-01-01T00:00:00Z";
    for (used, change, expected) in [
        (&named, json!({}), Ok("pv-1")),
        (
            &named,
            json!({"status": {"phase": "Pending"}}),
            Err("error processing PVC default/data: PVC is not bound"),
        ),
        (
            &named,
            json!({"status": {"phase": "Lost"}}),
            Err("error processing PVC default/data: PVC is not bound"),
        ),
        (
            &named,
            json!({"spec": {"volumeName": ""}}),
            Err("error processing PVC default/data: PVC has empty pvc.Spec.VolumeName"),
        ),
        (
            &named,
            json!({"metadata": {"deletionTimestamp": deleted}}),
            Err("error processing PVC default/data: PVC is being deleted"),
        ),
        (&named, json!({"metadata": {"deletionTimestamp": deleted, "finalizers": [PROTECTION]}}), Ok("pv-1")),
        (&ephemeral, owner("u1", true), Ok("pv-1")),
        (
            &ephemeral,
            owner("u2", true),
            Err("PVC default/web-data was not created for pod default/web (pod is not owner)"),
        ),
        (
            &ephemeral,
            owner("u1", false),
            Err("PVC default/web-data was not created for pod default/web (pod is not owner)"),
        ),
    ] {
        let got = check_claim(&pod(), used, &claim(change.clone()));
        assert_eq!(got, expected.map(str::to_owned).map_err(str::to_owned), "{change}");
    }
}

#[test]
fn a_volume_that_is_not_the_claims_has_the_kubelets_text() {
    let prefix = "error processing PVC default/data: found PV object pv-1 but";
    for (change, uses, expected) in [
        (
            json!({"spec": {"claimRef": null}}),
            uses(&["v"], &[]),
            format!("{prefix} it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"),
        ),
        (
            json!({"spec": {"claimRef": {"uid": "other"}}}),
            uses(&["v"], &[]),
            format!("{prefix} its pv.Spec.ClaimRef.UID other does not point to claim.UID claim-1"),
        ),
        (
            json!({"spec": {"volumeMode": "Block"}}),
            uses(&["v"], &[]),
            "volume v has volumeMode Block, but is specified in volumeMounts".to_owned(),
        ),
        (
            json!({}),
            uses(&[], &["v"]),
            "volume v has volumeMode Filesystem, but is specified in volumeDevices".to_owned(),
        ),
        (
            json!({"spec": {"csi": null, "flocker": {"datasetName": "d"}}}),
            uses(&["v"], &[]),
            "failed to get Plugin from volumeSpec for volume \"pv-1\" err=no volume plugin matched: \
             flocker of PersistentVolume pv-1 is not supported"
                .to_owned(),
        ),
    ] {
        let got = of_persistent_volume("v", &uses, false, &claim(json!({})), &volume(change));
        assert_eq!(got.unwrap_err(), expected);
    }
}

#[test]
fn the_claim_decides_whether_a_volume_is_read_only_and_a_csi_driver_gets_the_options_of_the_field_alone() {
    let of_pod = |source: Value| {
        let mut volume = json!({"name": "v"});
        volume["persistentVolumeClaim"] = source;
        claim_of(&pod(), &serde_json::from_value(volume).unwrap()).unwrap()
    };
    assert!(of_pod(json!({"claimName": "data", "readOnly": true})).read_only);
    assert!(!of_pod(json!({"claimName": "data"})).read_only);
    let provided = |read_only, change| {
        of_persistent_volume("v", &uses(&["v"], &[]), read_only, &claim(json!({})), &volume(change)).unwrap()
    };
    let plain = provided(false, json!({"spec": {"mountOptions": ["noatime"]}}));
    assert!(!plain.source.is_read_only() && !plain.is_block);
    assert_eq!(csi(&plain).mount_options, ["noatime"]);
    assert_eq!(plain.stage_secret, Some(SecretName { namespace: "ns".into(), name: "s".into() }));
    assert!(provided(true, json!({})).source.is_read_only());
    let annotations = json!({MOUNT_OPTIONS: "ro, nodev", GROUP: "1234"});
    let annotated = provided(
        false,
        json!({"metadata": {"annotations": annotations}, "spec": {"mountOptions": ["noatime"]}}),
    );
    assert_eq!(csi(&annotated).mount_options, ["noatime"]);
    assert_eq!(annotated.group, Some(1234));
    let spec = json!({"nfs": {"server": "s", "path": "/p"}, "mountOptions": ["noatime"], "csi": null});
    let nfs = provided(false, json!({"metadata": {"annotations": annotations}, "spec": spec}));
    let Source::InTree(nfs) = nfs.source else { panic!("{:?}", nfs.source) };
    assert_eq!(nfs.mount_options, ["ro", "nodev"]);
}

#[test]
fn a_volume_is_used_on_the_nodes_of_its_selector_only() {
    let limited = |terms: Value| {
        let nodes = json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
        of_persistent_volume("v", &uses(&["v"], &[]), false, &claim(json!({})), &volume(nodes)).unwrap()
    };
    let zone = |values: &[&str]| {
        limited(json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": values}]}]))
    };
    let named =
        limited(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]));
    let node = json!({"metadata": {"name": "n", "labels": {"zone": "a"}}});
    let node: Node = serde_json::from_value(node).unwrap();
    let anywhere =
        of_persistent_volume("v", &uses(&["v"], &[]), false, &claim(json!({})), &volume(json!({})));
    for (volume, node, expected) in [
        (anywhere.unwrap(), None, Ok(())),
        (zone(&["a", "b"]), Some(&node), Ok(())),
        (zone(&["b"]), Some(&node), Err("no matching NodeSelectorTerms")),
        (named, Some(&node), Err("no matching NodeSelectorTerms")),
        (zone(&["a"]), None, Err("error retrieving node: node \"n\" not found")),
    ] {
        assert_eq!(check_node(&volume, node, "n"), expected.map_err(str::to_owned), "{:?}", volume.nodes);
    }
}

#[test]
fn a_pod_gets_the_groups_of_its_volumes_that_it_does_not_have() {
    let mut pod = pod();
    let context = json!({"supplementalGroups": [5, 7], "fsGroup": 9});
    assert_eq!(extra_groups(&pod, BTreeSet::from([5])), [5]);
    pod.spec.as_mut().unwrap().security_context = serde_json::from_value(context).unwrap();
    assert_eq!(extra_groups(&pod, BTreeSet::from([5, 6, 9])), [6, 9]);
}

#[test]
fn an_inline_volume_has_the_fields_of_its_pod() {
    let source: CSIVolumeSource = serde_json::from_value(json!({
        "driver": "d", "fsType": "xfs", "readOnly": true, "volumeAttributes": {"size": "1"},
        "nodePublishSecretRef": {"name": "s"},
    }))
    .unwrap();
    let uid = PodUid::parse("u1").unwrap();
    let provided = of_inline(&pod(), &uid, "v", &source);
    assert_eq!(provided.publish_secret, Some(SecretName { namespace: "default".into(), name: "s".into() }));
    let csi = csi(&provided);
    assert_eq!((&*csi.driver, &*csi.fs_type, csi.read_only, &*csi.name), ("d", "xfs", true, "v"));
    assert_eq!(csi.attributes["size"], "1");
    assert_eq!(csi.handle, inline_handle("u1", "v"));
}

#[test]
fn a_driver_provides_only_the_life_cycle_modes_of_its_object() {
    use LifecycleMode::{Ephemeral, Persistent};
    let rules = |modes: Option<&[&str]>| {
        let object = modes.map(|modes| {
            let driver = json!({"metadata": {"name": "d"}, "spec": {"volumeLifecycleModes": modes}});
            serde_json::from_value::<CSIDriver>(driver).unwrap()
        });
        DriverRules::of(object.as_ref())
    };
    let no_object = "volume mode \"Ephemeral\" not supported by driver d (no CSIDriver object)";
    let only = |mode: &str, other: &str| {
        format!("volume mode {mode:?} not supported by driver d (only supports [{other:?}])")
    };
    for (modes, mode, expected) in [
        (None, Persistent, None),
        (None, Ephemeral, Some(no_object.to_owned())),
        (Some(&[][..]), Persistent, None),
        (Some(&[]), Ephemeral, Some(only("Ephemeral", "Persistent"))),
        (Some(&["Ephemeral"]), Ephemeral, None),
        (Some(&["Ephemeral"]), Persistent, Some(only("Persistent", "Ephemeral"))),
    ] {
        assert_eq!(rules(modes).refusal("d", mode), expected, "{modes:?} {mode:?}");
    }
}

#[test]
fn volumes_of_a_claim_are_attached_unless_the_driver_says_otherwise_and_inline_ones_belong_to_the_pod() {
    let uid = PodUid::parse("u1").unwrap();
    let object: CSIDriver =
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"attachRequired": false}}))
            .unwrap();
    let persistent =
        of_persistent_volume("v", &uses(&["v"], &[]), false, &claim(json!({})), &volume(json!({}))).unwrap();
    let attached = desired(&uid, &persistent, csi(&persistent), &DriverRules::of(None));
    assert_eq!(attached.size, Some(1 << 30));
    let mut read_only = persistent.clone();
    let Source::Csi(of_driver) = &mut read_only.source else { panic!("{:?}", persistent.source) };
    of_driver.read_only = true;
    assert_eq!(desired(&uid, &read_only, csi(&read_only), &DriverRules::of(None)).size, None);
    assert_eq!((attached.reach, attached.name.as_str()), (Reach::Attachable, "kubernetes.io/csi/d^h"));
    assert_eq!(
        desired(&uid, &persistent, csi(&persistent), &DriverRules::of(Some(&object))).reach,
        Reach::DeviceMountable
    );
    let source = CSIVolumeSource { driver: "d".to_owned(), ..CSIVolumeSource::default() };
    let inline = of_inline(&pod(), &uid, "v", &source);
    let inline = desired(&uid, &inline, csi(&inline), &DriverRules::of(None));
    assert_eq!((inline.reach, inline.name.as_str()), (Reach::PerPod, "kubernetes.io/csi/u1-v"));
}
