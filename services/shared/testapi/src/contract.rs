//! What this crate promises, as assertions against any API server.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Method, Request, header};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};

const STRATEGIC: &str = "application/strategic-merge-patch+json";
const MERGE: &str = "application/merge-patch+json";
const JSON_PATCH: &str = "application/json-patch+json";

/// How long a watch may take to say what it has to.
const WATCH_PATIENCE: Duration = Duration::from_secs(20);

/// Asserts the behaviours a node agent relies on. The namespace is made unless it is there; objects made are removed,
/// but for a node and a lease that bear the namespace's name, and events.
///
/// # Panics
/// The server behaves differently: the message says where.
pub async fn run_contract(client: kube::Client, namespace: &str) {
    let api = Wire { client, namespace: namespace.to_owned() };
    api.prepare().await;
    creation(&api).await;
    statuses(&api).await;
    concurrency(&api).await;
    patches(&api).await;
    deletion(&api).await;
    watching(&api).await;
    listing(&api).await;
    nodes_and_leases(&api).await;
    events(&api).await;
    configuration(&api).await;
    tokens(&api).await;
}

struct Wire {
    client: kube::Client,
    namespace: String,
}

/// HTTP code and JSON body.
type Answer = (u16, Value);

impl Wire {
    async fn call(&self, method: Method, path: &str, content_type: &str, body: &Value) -> Answer {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, content_type)
            .header(header::ACCEPT, "application/json")
            .body(Body::from(body))
            .expect("a path of the contract makes a request");
        let response = self.client.send(request).await.expect("the server answers");
        let code = response.status().as_u16();
        let bytes = response.into_body().collect().await.expect("the answer is complete").to_bytes();
        (code, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, "application/json", &Value::Null).await
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.call(Method::POST, path, "application/json", &body).await
    }

    async fn put(&self, path: &str, body: Value) -> Answer {
        self.call(Method::PUT, path, "application/json", &body).await
    }

    async fn patch(&self, path: &str, kind: &str, body: Value) -> Answer {
        self.call(Method::PATCH, path, kind, &body).await
    }

    async fn delete(&self, path: &str, options: Value) -> Answer {
        self.call(Method::DELETE, path, "application/json", &options).await
    }

    fn core(&self, rest: &str) -> String {
        format!("/api/v1/namespaces/{}/{rest}", self.namespace)
    }

    /// Lines of a watch until `enough`.
    async fn watch(&self, path: &str, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let request = Request::get(path).body(Body::empty()).expect("a path of the contract makes a request");
        let response = self.client.send(request).await.expect("the server answers");
        assert_eq!(response.status().as_u16(), 200, "watch {path}");
        let mut stream = response.into_body().into_data_stream();
        let (mut buffer, mut seen) = (Vec::<u8>::new(), Vec::new());
        let read = async {
            while !enough(&seen) {
                let Some(chunk) = stream.next().await else { break };
                let chunk: Bytes = chunk.expect("the watch goes on");
                buffer.extend_from_slice(&chunk);
                while let Some(end) = buffer.iter().position(|b| *b == b'\n') {
                    let line: Vec<u8> = buffer.drain(..=end).collect();
                    seen.push(serde_json::from_slice(&line).expect("a watch line is JSON"));
                }
            }
        };
        let in_time = tokio::time::timeout(WATCH_PATIENCE, read).await.is_ok();
        assert!(in_time && enough(&seen), "watch {path}: {seen:#?}");
        seen
    }

    async fn prepare(&self) {
        let (code, body) =
            self.post("/api/v1/namespaces", json!({"metadata": {"name": self.namespace}})).await;
        assert!(matches!(code, 201 | 409), "create namespace: {body}");
        // Without controllers nobody else makes it.
        let (code, body) =
            self.post(&self.core("serviceaccounts"), json!({"metadata": {"name": "default"}})).await;
        assert!(matches!(code, 201 | 409), "create service account: {body}");
        for pod in ["bare", "worker", "once", "finished", "held", "watched", "old"] {
            self.delete(&self.core(&format!("pods/{pod}")), json!({"gracePeriodSeconds": 0})).await;
        }
        // The account is seen by admission through a cache of its own.
        let deadline = tokio::time::Instant::now() + WATCH_PATIENCE;
        loop {
            let (code, body) = self.post(&self.core("pods"), pod("bare", "")).await;
            if code == 201 {
                break;
            }
            assert!(
                code == 403 && tokio::time::Instant::now() < deadline,
                "create the first pod: {code} {body}"
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.delete(&self.core("pods/bare"), Value::Null).await;
    }

    /// Creates a pod that was not there, returns it.
    async fn make(&self, object: Value) -> Value {
        let (code, body) = self.post(&self.core("pods"), object).await;
        assert_eq!(code, 201, "{body}");
        body
    }
}

fn pod(name: &str, node: &str) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [{
            "name": "main", "image": "registry.k8s.io/pause:3.10", "ports": [{"containerPort": 80}],
            "readinessProbe": {"httpGet": {"port": 80}},
        }]},
    });
    if !node.is_empty() {
        pod["spec"]["nodeName"] = json!(node);
    }
    pod
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn refused(answer: &Answer, code: u16, reason: &str) {
    assert_eq!(
        (answer.0, &answer.1["kind"], text(&answer.1["reason"]), &answer.1["status"]),
        (code, &json!("Status"), reason, &json!("Failure")),
        "{}",
        answer.1
    );
    assert!(!text(&answer.1["message"]).is_empty(), "a Status has a message: {}", answer.1);
}

async fn creation(api: &Wire) {
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
}

async fn statuses(api: &Wire) {
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
    let (code, body) = api.patch(&path, STRATEGIC, foreign).await;
    assert!(matches!(code, 409 | 422), "a patch for another UID is refused: {code} {body}");

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

async fn concurrency(api: &Wire) {
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

async fn patches(api: &Wire) {
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

async fn deletion(api: &Wire) {
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
    let (code, _) =
        api.patch(&api.core("pods/worker/status"), STRATEGIC, json!({"status": {"message": "going"}})).await;
    assert_eq!(code, 200, "a pod being deleted takes statuses");
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

async fn watching(api: &Wire) {
    let (_, list) = api.get(&api.core("pods")).await;
    let rv = text(&list["metadata"]["resourceVersion"]).to_owned();
    api.make(pod("watched", "contract-watch")).await;
    api.make(pod("old", "elsewhere")).await;
    api.patch(&api.core("pods/watched/status"), STRATEGIC, json!({"status": {"phase": "Running"}})).await;
    api.delete(&api.core("pods/watched"), json!({"gracePeriodSeconds": 7})).await;
    api.delete(&api.core("pods/watched"), json!({"gracePeriodSeconds": 0})).await;
    let kinds = |seen: &[Value]| -> Vec<String> {
        seen.iter().map(|e| text(&e["type"]).to_owned()).filter(|t| t != "BOOKMARK").collect()
    };
    let path = api.core(&format!(
        "pods?watch=true&fieldSelector=spec.nodeName%3Dcontract-watch&timeoutSeconds=30&resourceVersion={rv}"
    ));
    let seen = api.watch(&path, |seen| kinds(seen).last().is_some_and(|k| k == "DELETED")).await;
    assert_eq!(kinds(&seen), ["ADDED", "MODIFIED", "MODIFIED", "MODIFIED", "DELETED"], "{seen:#?}");
    assert!(seen.iter().all(|e| e["object"]["metadata"]["name"] == json!("watched")));
    let versions: Vec<u64> =
        seen.iter().filter_map(|e| text(&e["object"]["metadata"]["resourceVersion"]).parse().ok()).collect();
    assert!(versions.len() == 5 && versions.is_sorted(), "versions grow: {versions:?}");

    let path =
        api.core(&format!("pods?watch=1&labelSelector=app%3Dold&timeoutSeconds=30&resourceVersion={rv}"));
    api.patch(&api.core("pods/old"), MERGE, json!({"metadata": {"labels": {"app": "new"}}})).await;
    let seen = api.watch(&path, |seen| kinds(seen).len() >= 2).await;
    assert_eq!(kinds(&seen), ["ADDED", "DELETED"], "an object that no longer matches is gone");

    let path = api.core("pods?watch=1&timeoutSeconds=30&fieldSelector=metadata.name%3Dold");
    let seen = api.watch(&path, |seen| !seen.is_empty()).await;
    assert_eq!(kinds(&seen), ["ADDED"], "a watch from nowhere starts with what is there");

    let initial =
        "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=30";
    let path = api.core(&format!("pods?watch=1&{initial}"));
    let seen = api.watch(&path, |seen| seen.iter().any(|e| e["type"] == json!("BOOKMARK"))).await;
    let bookmark = seen.last().expect("the watch has lines");
    assert_eq!(bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], json!("true"));
    assert!(kinds(&seen).iter().all(|k| k == "ADDED"));
    refused(&api.get(&api.core("pods?watch=1&sendInitialEvents=true")).await, 422, "Invalid");
    api.delete(&api.core("pods/old"), json!({"gracePeriodSeconds": 0})).await;
}

async fn listing(api: &Wire) {
    for name in ["page-a", "page-b", "page-c"] {
        api.delete(&api.core(&format!("configmaps/{name}")), Value::Null).await;
        let map = json!({"metadata": {"name": name, "labels": {"page": "yes"}}});
        assert_eq!(api.post(&api.core("configmaps"), map).await.0, 201);
    }
    let (_, first) = api.get(&api.core("configmaps?labelSelector=page%3Dyes&limit=2")).await;
    assert_eq!(
        (text(&first["kind"]), first["items"].as_array().map(Vec::len)),
        ("ConfigMapList", Some(2)),
        "{first}"
    );
    let token = text(&first["metadata"]["continue"]).to_owned();
    let (_, second) =
        api.get(&api.core(&format!("configmaps?labelSelector=page%3Dyes&limit=2&continue={token}"))).await;
    assert_eq!(second["items"].as_array().map(Vec::len), Some(1), "{second}");
    assert_eq!(second["metadata"]["continue"], Value::Null);
    refused(&api.get(&api.core("pods?fieldSelector=spec.unknown%3D1")).await, 400, "BadRequest");
    let (code, _) = api
        .call(
            Method::DELETE,
            &api.core("configmaps?labelSelector=page%3Dyes"),
            "application/json",
            &Value::Null,
        )
        .await;
    assert_eq!(code, 200);
    let (_, none) = api.get(&api.core("configmaps?labelSelector=page%3Dyes")).await;
    assert_eq!(none["items"], json!([]));
}

async fn nodes_and_leases(api: &Wire) {
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

async fn events(api: &Wire) {
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

async fn configuration(api: &Wire) {
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
    for path in ["secrets/contract", "services/contract"] {
        assert_eq!(api.delete(&api.core(path), Value::Null).await.0, 200);
    }
}

async fn tokens(api: &Wire) {
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
