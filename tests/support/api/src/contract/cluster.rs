//! Behaviour of everything except pods.

use serde_json::{Value, json};

use super::wire::{STRATEGIC, Wire, pod, refused, text};

pub(super) async fn nodes_and_leases(api: &Wire) {
    let name = &api.namespace;
    let path = format!("/api/v1/nodes/{name}");
    api.delete(&path, Value::Null).await;
    let node =
        json!({"metadata": {"name": name, "labels": {"a": "b"}}, "status": {"capacity": {"cpu": "2"}}});
    let (code, made) = api.post("/api/v1/nodes", node.clone()).await;
    assert_eq!(
        (code, &made["status"]["capacity"]["cpu"]),
        (201, &json!("2")),
        "a node is made with its status: {made}"
    );
    refused(&api.post("/api/v1/nodes", node).await, 409, "AlreadyExists");
    let patch = json!({
        "metadata": {"labels": {"c": "d"}, "annotations": {"e": "f"}}, "spec": {"unschedulable": true},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "addresses": [{"type": "Hostname", "address": "h"}]},
    });
    let (_, patched) = api.patch(&format!("{path}/status"), STRATEGIC, patch).await;
    assert_eq!(
        (text(&patched["metadata"]["labels"]["a"]), text(&patched["metadata"]["labels"]["c"])),
        ("b", "d")
    );
    assert_eq!(patched["spec"]["unschedulable"], Value::Null, "a status patch leaves the spec");
    let replace = json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"$patch": "replace"}]}});
    let (_, replaced) = api.patch(&format!("{path}/status"), STRATEGIC, replace).await;
    assert_eq!(replaced["status"]["addresses"], json!([{"type": "InternalIP", "address": "10.0.0.1"}]));
    assert_eq!(replaced["status"]["conditions"][0]["type"], json!("Ready"));
    let pressure = json!({"status": {
        "$setElementOrder/conditions": [{"type": "MemoryPressure"}, {"type": "Ready"}],
        "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "message": "m"}],
        "images": [{"names": ["a:1"], "sizeBytes": 1}], "volumesInUse": ["kubernetes.io/csi/v"],
    }});
    let (_, pressed) = api.patch(&format!("{path}/status"), STRATEGIC, pressure).await;
    let conditions = &pressed["status"]["conditions"];
    assert_eq!(
        (&conditions[0]["type"], &conditions[1]["type"], &conditions[1]["status"], &conditions[1]["message"]),
        (&json!("MemoryPressure"), &json!("Ready"), &json!("True"), &json!("m")),
        "conditions are merged by type, in the order given: {pressed}"
    );
    let images = json!({"status": {"images": [{"names": ["b:1"], "sizeBytes": 2}]}});
    let (_, imaged) = api.patch(&format!("{path}/status"), STRATEGIC, images).await;
    assert_eq!(
        imaged["status"]["images"],
        json!([{"names": ["b:1"], "sizeBytes": 2}]),
        "images are one value"
    );
    assert_eq!(imaged["status"]["volumesInUse"], json!(["kubernetes.io/csi/v"]));

    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
    let namespace = json!({"metadata": {"name": "kube-node-lease"}});
    assert!(matches!(api.post("/api/v1/namespaces", namespace).await.0, 201 | 409));
    let path = format!("{leases}/{name}");
    api.delete(&path, Value::Null).await;
    let lease = json!({
        "metadata": {"name": name, "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": made["metadata"]["uid"]}]},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": "2026-01-01T00:00:00.000000Z"},
    });
    let (code, made) = api.post(leases, lease).await;
    assert_eq!(code, 201, "{made}");
    let mut renewed = made.clone();
    renewed["spec"]["renewTime"] = json!("2026-01-01T00:00:10.000000Z");
    let (code, body) = api.put(&path, renewed).await;
    assert_eq!(code, 200, "{body}");
    refused(&api.put(&path, made.clone()).await, 409, "Conflict");
    let mut without = made;
    without["metadata"]["resourceVersion"] = Value::Null;
    refused(&api.put(&path, without).await, 422, "Invalid");
}

pub(super) async fn events(api: &Wire) {
    let name = "contract.1";
    let path = api.core(&format!("events/{name}"));
    api.delete(&path, Value::Null).await;
    let event = json!({
        "metadata": {"name": name}, "involvedObject": {"kind": "Pod", "namespace": api.namespace, "name": "worker"},
        "reason": "Started", "message": "Container started", "type": "Normal", "count": 1,
        "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z", "source": {"component": "kubelet"},
    });
    let (code, body) = api.post(&api.core("events"), event).await;
    assert_eq!(code, 201, "{body}");
    let (code, body) =
        api.patch(&path, STRATEGIC, json!({"count": 2, "lastTimestamp": "2026-01-01T00:00:05Z"})).await;
    assert_eq!((code, &body["count"], &body["reason"]), (200, &json!(2), &json!("Started")));
    let (_, list) =
        api.get(&api.core("events?fieldSelector=involvedObject.name%3Dworker%2Creason%3DStarted")).await;
    assert!(
        list["items"]
            .as_array()
            .is_some_and(|items| items.iter().any(|e| e["metadata"]["name"] == json!(name)))
    );
    let gone = api.patch(&api.core("events/contract.missing"), STRATEGIC, json!({"count": 2})).await;
    refused(&gone, 404, "NotFound");
}

pub(super) async fn configuration(api: &Wire) {
    for path in ["secrets/contract", "services/contract"] {
        api.delete(&api.core(path), Value::Null).await;
    }
    let (code, secret) = api
        .post(&api.core("secrets"), json!({"metadata": {"name": "contract"}, "stringData": {"key": "value"}}))
        .await;
    assert_eq!((code, &secret["type"], &secret["data"]["key"]), (201, &json!("Opaque"), &json!("dmFsdWU=")));
    let service =
        json!({"metadata": {"name": "contract"}, "spec": {"selector": {"a": "b"}, "ports": [{"port": 80}]}});
    let (code, service) = api.post(&api.core("services"), service).await;
    assert_eq!(code, 201, "{service}");
    assert!(text(&service["spec"]["clusterIP"]).contains('.'), "{service}");
    assert_eq!(service["spec"]["ports"][0], json!({"port": 80, "protocol": "TCP", "targetPort": 80}));
    // The first is the selector of a kubelet.
    for (selector, selected) in [("spec.clusterIP!%3DNone", true), ("spec.clusterIP%3DNone", false)] {
        let (code, list) = api.get(&api.core(&format!("services?fieldSelector={selector}"))).await;
        assert_eq!(code, 200, "{list}");
        let names = list["items"].as_array().map_or(&[][..], Vec::as_slice);
        let found = names.iter().any(|service| service["metadata"]["name"] == "contract");
        assert_eq!(found, selected, "{selector}: {list}");
    }
    for path in ["secrets/contract", "services/contract"] {
        assert_eq!(api.delete(&api.core(path), Value::Null).await.0, 200);
    }
}

pub(super) async fn tokens(api: &Wire) {
    let made = api.make(pod("worker", "contract-node")).await;
    let path = api.core("serviceaccounts/default/token");
    let request = |uid: &Value, seconds: i64| {
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {
            "expirationSeconds": seconds, "audiences": [],
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "worker", "uid": uid},
        }})
    };
    let (code, body) = api.post(&path, request(&made["metadata"]["uid"], 3607)).await;
    assert_eq!(code, 201, "{body}");
    assert_eq!(text(&body["status"]["token"]).split('.').count(), 3, "a token is a JWT");
    assert!(text(&body["status"]["expirationTimestamp"]).ends_with('Z'));
    refused(
        &api.post(&path, request(&json!("00000000-0000-0000-0000-000000000000"), 3607)).await,
        409,
        "Conflict",
    );
    refused(&api.post(&path, request(&made["metadata"]["uid"], 10)).await, 422, "Invalid");
    let missing =
        api.post(&api.core("serviceaccounts/missing/token"), request(&made["metadata"]["uid"], 3607)).await;
    refused(&missing, 404, "NotFound");
    api.delete(&api.core("pods/worker"), json!({"gracePeriodSeconds": 0})).await;
}
