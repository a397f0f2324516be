//! Creation, updates and deletion of pods.

use serde_json::{Value, json};

use super::wire::{JSON_PATCH, MERGE, STRATEGIC, Wire, pod, refused, text};

pub(super) async fn creation(api: &Wire) {
    let made = api.make(pod("worker", "contract-node")).await;
    let meta = &made["metadata"];
    for field in ["uid", "creationTimestamp", "resourceVersion"] {
        assert!(!text(&meta[field]).is_empty(), "{field} is assigned: {meta}");
    }
    assert_eq!(meta["generation"], json!(1), "a pod starts with generation 1");
    assert_eq!(
        (text(&made["status"]["phase"]), text(&made["status"]["qosClass"])),
        ("Pending", "BestEffort")
    );
    let spec = &made["spec"];
    for (field, want) in [
        ("restartPolicy", json!("Always")),
        ("dnsPolicy", json!("ClusterFirst")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("securityContext", json!({})),
        ("enableServiceLinks", json!(true)),
        ("serviceAccountName", json!("default")),
    ] {
        assert_eq!(spec[field], want, "default of {field}");
    }
    let container = &spec["containers"][0];
    for (field, want) in [
        ("terminationMessagePath", json!("/dev/termination-log")),
        ("terminationMessagePolicy", json!("File")),
        ("imagePullPolicy", json!("IfNotPresent")),
        ("resources", json!({})),
    ] {
        assert_eq!(container[field], want, "default of {field}");
    }
    assert_eq!(container["ports"][0]["protocol"], json!("TCP"));
    let probe = &container["readinessProbe"];
    assert_eq!(
        (
            &probe["timeoutSeconds"],
            &probe["periodSeconds"],
            &probe["successThreshold"],
            &probe["failureThreshold"]
        ),
        (&json!(1), &json!(10), &json!(1), &json!(3))
    );
    assert_eq!((&probe["httpGet"]["path"], &probe["httpGet"]["scheme"]), (&json!("/"), &json!("HTTP")));
    let volume = &spec["volumes"][0];
    assert!(text(&volume["name"]).starts_with("kube-api-access-"), "the token is mounted: {spec}");
    let sources = &volume["projected"]["sources"];
    assert_eq!(sources[0]["serviceAccountToken"]["path"], json!("token"));
    assert_eq!(sources[1]["configMap"]["name"], json!("kube-root-ca.crt"));
    assert_eq!(sources[2]["downwardAPI"]["items"][0]["fieldRef"]["fieldPath"], json!("metadata.namespace"));
    let mount = &container["volumeMounts"][0];
    assert_eq!(text(&mount["mountPath"]), "/var/run/secrets/kubernetes.io/serviceaccount");
    let tolerated =
        |key: &str| spec["tolerations"].as_array().is_some_and(|t| t.iter().any(|t| t["key"] == json!(key)));
    assert!(tolerated("node.kubernetes.io/not-ready") && tolerated("node.kubernetes.io/unreachable"));

    refused(&api.post(&api.core("pods"), pod("worker", "")).await, 409, "AlreadyExists");
    refused(&api.get(&api.core("pods/missing")).await, 404, "NotFound");
    refused(
        &api.post(
            &api.core("pods"),
            json!({"metadata": {"name": "Bad_Name"}, "spec": {"containers": [{"name": "a", "image": "b"}]}}),
        )
        .await,
        422,
        "Invalid",
    );
    refused(
        &api.post(&api.core("pods"), json!({"metadata": {"name": "empty"}, "spec": {}})).await,
        422,
        "Invalid",
    );
    refused(
        &api.post("/api/v1/namespaces/no-such-namespace/configmaps", json!({"metadata": {"name": "a"}}))
            .await,
        404,
        "NotFound",
    );

    let mut generated = pod("x", "");
    generated["metadata"] = json!({"generateName": "gen-"});
    let made = api.make(generated).await;
    let name = text(&made["metadata"]["name"]).to_owned();
    assert!(name.starts_with("gen-") && name.len() == 9, "{name}");
    api.delete(&api.core(&format!("pods/{name}")), Value::Null).await;

    // Resources of the pod level decide the class of a pod whose containers have none.
    let mut whole = pod("whole", "");
    let amounts = json!({"cpu": "1", "memory": "64Mi"});
    whole["spec"]["resources"] = json!({"limits": amounts, "requests": amounts});
    let made = api.make(whole).await;
    assert_eq!(text(&made["status"]["qosClass"]), "Guaranteed");
    api.delete(&api.core("pods/whole"), Value::Null).await;
}

pub(super) async fn statuses(api: &Wire) {
    let path = api.core("pods/worker/status");
    let (_, before) = api.get(&api.core("pods/worker")).await;
    let uid = before["metadata"]["uid"].clone();
    let patch = |status: Value| json!({"metadata": {"uid": uid}, "status": status});
    let (code, after) = api
        .patch(&path, STRATEGIC, patch(json!({
            "phase": "Running", "podIP": "10.1.1.1", "podIPs": [{"ip": "10.1.1.1"}],
            "conditions": [{"type": "Ready", "status": "False"}, {"type": "example.com/foreign", "status": "True"}],
            "containerStatuses": [{"name": "main", "ready": false, "restartCount": 0, "image": "a", "imageID": "b", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}],
        })))
        .await;
    assert_eq!(code, 200, "{after}");
    assert_eq!(after["status"]["qosClass"], json!("BestEffort"), "fields not named stay");
    assert_ne!(after["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"]);
    assert_eq!(after["metadata"]["generation"], json!(1), "a status is no new generation");

    let (_, merged) = api
        .patch(&path, STRATEGIC, patch(json!({"conditions": [{"type": "Ready", "status": "True"}]})))
        .await;
    let conditions = |pod: &Value| -> Vec<(String, String)> {
        let list = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        list.iter().map(|c| (text(&c["type"]).to_owned(), text(&c["status"]).to_owned())).collect()
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(conditions(&merged), [pair("Ready", "True"), pair("example.com/foreign", "True")]);
    let (_, same) = api
        .patch(&path, STRATEGIC, patch(json!({"conditions": [{"type": "Ready", "status": "True"}]})))
        .await;
    assert_eq!(
        same["metadata"]["resourceVersion"], merged["metadata"]["resourceVersion"],
        "no change, no new version"
    );

    let (_, ordered) = api
        .patch(
            &path,
            STRATEGIC,
            patch(json!({
                "$setElementOrder/conditions": [{"type": "example.com/foreign"}, {"type": "New"}],
                "conditions": [{"$patch": "delete", "type": "Ready"}, {"type": "New", "status": "True"}],
            })),
        )
        .await;
    assert_eq!(conditions(&ordered), [pair("example.com/foreign", "True"), pair("New", "True")]);

    let (_, moved) = api
        .patch(&path, STRATEGIC, patch(json!({"podIP": "10.1.1.2", "podIPs": [{"$patch": "delete", "ip": "10.1.1.1"}, {"ip": "10.1.1.2"}]})))
        .await;
    assert_eq!(moved["status"]["podIPs"], json!([{"ip": "10.1.1.2"}]));

    let foreign =
        json!({"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}, "status": {"phase": "Failed"}});
    refused(&api.patch(&path, STRATEGIC, foreign).await, 422, "Invalid");
    let mut other = merged.clone();
    other["metadata"]["uid"] = json!("00000000-0000-0000-0000-000000000000");
    other["metadata"]["resourceVersion"] = Value::Null;
    refused(&api.put(&path, other).await, 409, "Conflict");

    let (_, spec) = api
        .patch(&path, STRATEGIC, json!({"spec": {"activeDeadlineSeconds": 5}, "status": {"message": "m"}}))
        .await;
    assert_eq!(
        (&spec["spec"]["activeDeadlineSeconds"], &spec["status"]["message"]),
        (&Value::Null, &json!("m"))
    );
    let (_, ignored) = api
        .patch(
            &api.core("pods/worker"),
            STRATEGIC,
            json!({"metadata": {"labels": {"a": "b"}}, "status": {"message": "x"}}),
        )
        .await;
    assert_eq!(
        (&ignored["metadata"]["labels"]["a"], &ignored["status"]["message"]),
        (&json!("b"), &json!("m")),
        "{ignored}"
    );
    let frozen = api.patch(&api.core("pods/worker"), STRATEGIC, json!({"spec": {"hostNetwork": true}})).await;
    refused(&frozen, 422, "Invalid");
    let (_, deadline) =
        api.patch(&api.core("pods/worker"), STRATEGIC, json!({"spec": {"activeDeadlineSeconds": 500}})).await;
    assert_eq!(deadline["metadata"]["generation"], json!(2), "a new spec is a new generation");

    let mut once = pod("once", "contract-node");
    once["spec"]["restartPolicy"] = json!("Never");
    api.make(once).await;
    let state = |state: Value| json!({"status": {"containerStatuses": [{"name": "main", "ready": false, "restartCount": 0, "image": "a", "imageID": "b", "state": state}]}});
    let path = api.core("pods/once/status");
    let (code, body) = api.patch(&path, STRATEGIC, state(json!({"terminated": {"exitCode": 1}}))).await;
    assert_eq!(code, 200, "{body}");
    let revived = api.patch(&path, STRATEGIC, state(json!({"running": {}}))).await;
    refused(&revived, 422, "Invalid");
    api.delete(&api.core("pods/once"), json!({"gracePeriodSeconds": 0})).await;
}

pub(super) async fn concurrency(api: &Wire) {
    let path = api.core("pods/worker/status");
    let (_, stale) = api.get(&api.core("pods/worker")).await;
    api.patch(&path, STRATEGIC, json!({"status": {"message": "newer"}})).await;
    let mut put = stale;
    put["status"]["message"] = json!("older");
    refused(&api.put(&path, put.clone()).await, 409, "Conflict");
    let versioned = json!({"metadata": {"resourceVersion": put["metadata"]["resourceVersion"]}, "status": {"message": "older"}});
    refused(&api.patch(&path, STRATEGIC, versioned).await, 409, "Conflict");
    put["metadata"]["resourceVersion"] = Value::Null;
    let (code, body) = api.put(&path, put).await;
    assert_eq!((code, text(&body["status"]["message"])), (200, "older"), "a PUT without version wins");
    refused(&api.put(&api.core("pods/missing"), pod("missing", "")).await, 404, "NotFound");
}

pub(super) async fn patches(api: &Wire) {
    let path = api.core("pods/worker");
    let (code, merged) =
        api.patch(&path, MERGE, json!({"metadata": {"labels": {"a": null, "m": "1"}}})).await;
    assert_eq!(
        (code, &merged["metadata"]["labels"]["a"], text(&merged["metadata"]["labels"]["m"])),
        (200, &Value::Null, "1")
    );
    let (code, patched) = api
        .patch(&path, JSON_PATCH, json!([{"op": "replace", "path": "/metadata/labels/m", "value": "2"}]))
        .await;
    assert_eq!((code, text(&patched["metadata"]["labels"]["m"])), (200, "2"), "{patched}");
    let (code, _) = api.patch(&path, "application/x-unknown", json!({})).await;
    assert_eq!(code, 415);
}

pub(super) async fn deletion(api: &Wire) {
    let path = api.core("pods/worker");
    let wrong =
        json!({"gracePeriodSeconds": 0, "preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}});
    refused(&api.delete(&path, wrong).await, 409, "Conflict");
    let (code, deleted) = api.delete(&path, Value::Null).await;
    assert_eq!((code, &deleted["metadata"]["deletionGracePeriodSeconds"]), (200, &json!(30)), "{deleted}");
    assert!(deleted["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(deleted["metadata"]["generation"], json!(3), "deletion is a new generation");
    let (_, again) = api.delete(&path, json!({"gracePeriodSeconds": 60})).await;
    assert_eq!(again["metadata"]["deletionGracePeriodSeconds"], json!(30), "grace never grows");
    let (_, shorter) = api.delete(&path, json!({"gracePeriodSeconds": 5})).await;
    assert_eq!(shorter["metadata"]["deletionGracePeriodSeconds"], json!(5));
    let ends = |pod: &Value| text(&pod["metadata"]["deletionTimestamp"]).to_owned();
    assert!(ends(&shorter) < ends(&again), "less grace ends earlier: {shorter}");
    let (_, unsaid) = api.delete(&path, Value::Null).await;
    assert_eq!(unsaid["metadata"], shorter["metadata"], "a second delete that says nothing changes nothing");
    let (code, _) =
        api.patch(&api.core("pods/worker/status"), STRATEGIC, json!({"status": {"message": "going"}})).await;
    assert_eq!(code, 200, "a pod being deleted takes statuses");
    let versioned = json!({"gracePeriodSeconds": 0, "preconditions": {"resourceVersion": unsaid["metadata"]["resourceVersion"]}});
    refused(&api.delete(&path, versioned).await, 409, "Conflict");
    let right = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": shorter["metadata"]["uid"]}});
    assert_eq!(api.delete(&path, right).await.0, 200);
    refused(&api.get(&path).await, 404, "NotFound");
    refused(&api.delete(&path, Value::Null).await, 404, "NotFound");

    api.make(pod("bare", "")).await;
    assert_eq!(api.delete(&api.core("pods/bare"), Value::Null).await.0, 200);
    refused(&api.get(&api.core("pods/bare")).await, 404, "NotFound");

    api.make(pod("finished", "contract-node")).await;
    api.patch(&api.core("pods/finished/status"), STRATEGIC, json!({"status": {"phase": "Succeeded"}})).await;
    api.delete(&api.core("pods/finished"), Value::Null).await;
    refused(&api.get(&api.core("pods/finished")).await, 404, "NotFound");

    let mut held = pod("held", "contract-node");
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    api.make(held).await;
    api.delete(&api.core("pods/held"), json!({"gracePeriodSeconds": 0})).await;
    let (code, held) = api.get(&api.core("pods/held")).await;
    assert_eq!(
        (code, held["metadata"]["deletionTimestamp"].is_string()),
        (200, true),
        "a finalizer holds it"
    );
    api.patch(&api.core("pods/held"), MERGE, json!({"metadata": {"finalizers": null}})).await;
    refused(&api.get(&api.core("pods/held")).await, 404, "NotFound");
}
