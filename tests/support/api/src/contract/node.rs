//! Permissions of a node: the Node authorizer and the NodeRestriction admission plugin.

use serde_json::{Value, json};
use tokio::time::Instant;

use super::wire::{Answer, MERGE, STRATEGIC, WATCH_TIMEOUT, Wire, pod, refused, text};

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

/// Clients with the identities of a node and of an administrator.
pub(super) struct Both<'a> {
    pub(super) admin: &'a Wire,
    pub(super) node: &'a Wire,
    pub(super) name: &'a str,
}

/// Repeats a request until it has the expected code, since authorizer and admission use caches that lag
/// behind.
async fn eventually<F: Future<Output = Answer>>(want: u16, mut ask: impl FnMut() -> F) -> Value {
    let deadline = Instant::now() + WATCH_TIMEOUT;
    loop {
        let (code, body) = ask().await;
        if code == want {
            return body;
        }
        assert!(Instant::now() < deadline, "{want} never comes, at last {code}: {body}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

impl Both<'_> {
    pub(super) async fn prepare(&self) {
        for pod in ["own", "foreign", "mirror", "stray"] {
            let path = self.admin.core(&format!("pods/{pod}"));
            self.admin.delete(&path, json!({"gracePeriodSeconds": 0})).await;
        }
        for map in ["related", "unrelated"] {
            self.admin.delete(&self.admin.core(&format!("configmaps/{map}")), Value::Null).await;
            let (code, body) =
                self.admin.post(&self.admin.core("configmaps"), json!({"metadata": {"name": map}})).await;
            assert_eq!(code, 201, "{body}");
        }
        self.admin.delete(&format!("/api/v1/nodes/{}", self.name), Value::Null).await;
    }

    fn own(&self) -> String {
        format!("/api/v1/nodes/{}", self.name)
    }

    fn denied(&self, answer: &Answer) {
        refused(answer, 403, "Forbidden");
    }

    /// A node creates and reads its own Node and changes the allowed fields, and no other Node.
    pub(super) async fn registers(&self) {
        let (node, own) = (self.node, self.own());
        refused(&node.get(&own).await, 404, "NotFound");
        self.denied(&node.get("/api/v1/nodes/another-node").await);
        self.denied(&node.get("/api/v1/nodes").await);
        let object = |name: &str, label: &str| {
            json!({
                "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux", label: "x"}},
                "status": {"capacity": {"cpu": "2"}},
            })
        };
        self.denied(&node.post("/api/v1/nodes", object("another-node", "example.com/a")).await);
        let restricted = object(self.name, "node-restriction.kubernetes.io/a");
        self.denied(&node.post("/api/v1/nodes", restricted).await);
        let (code, made) = node.post("/api/v1/nodes", object(self.name, "example.com/a")).await;
        assert_eq!(code, 201, "{made}");
        assert_eq!(
            made["spec"]["taints"],
            json!([{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]),
            "a node starts as not ready"
        );
        let again = node.post("/api/v1/nodes", object(self.name, "example.com/a")).await;
        refused(&again, 409, "AlreadyExists");

        let status = format!("{own}/status");
        let patch = json!({
            "metadata": {"labels": {"kubernetes.io/arch": "amd64"}, "annotations": {"example.com/a": "1"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        });
        let (code, patched) = node.patch(&status, STRATEGIC, patch).await;
        assert_eq!((code, &patched["metadata"]["labels"]["kubernetes.io/arch"]), (200, &json!("amd64")));
        let label = json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}});
        self.denied(&node.patch(&status, STRATEGIC, label).await);
        let taints = json!({"spec": {"taints": [{"key": "example.com/a", "effect": "NoSchedule"}]}});
        self.denied(&node.patch(&own, MERGE, taints).await);
        let foreign = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let (code, _) = node.patch("/api/v1/nodes/another-node/status", STRATEGIC, foreign).await;
        assert!(matches!(code, 403 | 404), "another node's status: {code}");
        self.denied(&node.delete(&own, Value::Null).await);
        let selected = format!("/api/v1/nodes?fieldSelector=metadata.name%3D{}", self.name);
        let (code, list) = node.get(&selected).await;
        assert_eq!((code, list["items"].as_array().map(Vec::len)), (200, Some(1)), "{list}");
    }

    pub(super) async fn heartbeats(&self) {
        self.admin.delete(&format!("{LEASES}/{}", self.name), Value::Null).await;
        let lease = |name: &str| json!({"metadata": {"name": name}, "spec": {"holderIdentity": name, "leaseDurationSeconds": 40}});
        self.denied(&self.node.post(LEASES, lease("another-node")).await);
        let (code, made) = self.node.post(LEASES, lease(self.name)).await;
        assert_eq!(code, 201, "{made}");
        let path = format!("{LEASES}/{}", self.name);
        assert_eq!(self.node.get(&path).await.0, 200);
        assert_eq!(self.node.put(&path, made).await.0, 200);
        self.denied(&self.node.get(&format!("{LEASES}/another-node")).await);
        self.denied(&self.node.get(LEASES).await);
        let elsewhere = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.node.namespace);
        self.denied(&self.node.post(&elsewhere, lease(self.name)).await);
    }

    /// A node reads and deletes the pods that are bound to it and writes their statuses, and no other pods.
    pub(super) async fn has_pods(&self) {
        let (admin, node) = (self.admin, self.node);
        let mut own = pod("own", self.name);
        own["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "related"}}]);
        let own = admin.make(own).await;
        admin.make(pod("foreign", "another-node")).await;

        self.denied(&node.get("/api/v1/pods").await);
        self.denied(&node.get("/api/v1/pods?fieldSelector=spec.nodeName%3Danother-node").await);
        let selected = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}", self.name);
        let (code, list) = node.get(&selected).await;
        assert_eq!((code, list["items"][0]["metadata"]["name"].clone()), (200, json!("own")), "{list}");
        let watch = format!("{selected}&watch=1&timeoutSeconds=30&resourceVersion=0");
        let seen = node.watch(&watch, |seen| !seen.is_empty()).await;
        assert_eq!(
            (&seen[0]["type"], &seen[0]["object"]["metadata"]["name"]),
            (&json!("ADDED"), &json!("own"))
        );
        eventually(200, || async { node.get(&node.core("pods/own")).await }).await;
        self.denied(&node.get(&node.core("pods/foreign")).await);
        // A node cannot find out whether a pod of another node exists.
        self.denied(&node.get(&node.core("pods/missing")).await);

        let status = json!({"metadata": {"uid": own["metadata"]["uid"]}, "status": {"phase": "Running"}});
        let (code, body) = node.patch(&node.core("pods/own/status"), STRATEGIC, status).await;
        assert_eq!((code, text(&body["status"]["phase"])), (200, "Running"), "{body}");
        let running = json!({"status": {"phase": "Running"}});
        self.denied(&node.patch(&node.core("pods/foreign/status"), STRATEGIC, running.clone()).await);
        refused(&node.patch(&node.core("pods/missing/status"), STRATEGIC, running).await, 404, "NotFound");
        let labels = json!({"metadata": {"labels": {"a": "b"}}});
        self.denied(&node.patch(&node.core("pods/own/status"), STRATEGIC, labels.clone()).await);
        self.denied(&node.patch(&node.core("pods/own"), STRATEGIC, labels).await);

        self.configuration().await;
        self.tokens(&own["metadata"]["uid"]).await;

        self.denied(&node.delete(&node.core("pods/foreign"), json!({"gracePeriodSeconds": 0})).await);
        let now = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": own["metadata"]["uid"]}});
        let (code, body) = node.delete(&node.core("pods/own"), now).await;
        assert_eq!(code, 200, "{body}");
        admin.delete(&admin.core("pods/foreign"), json!({"gracePeriodSeconds": 0})).await;
    }

    /// A node reads the objects that its pods refer to, by name, and no others.
    async fn configuration(&self) {
        let node = self.node;
        let path = node.core("configmaps/related");
        eventually(200, || async { node.get(&path).await }).await;
        let named = node.core("configmaps?fieldSelector=metadata.name%3Drelated");
        let (code, list) = node.get(&named).await;
        assert_eq!((code, list["items"].as_array().map(Vec::len)), (200, Some(1)), "{list}");
        self.denied(&node.get(&node.core("configmaps/unrelated")).await);
        self.denied(&node.get(&node.core("configmaps")).await);
        self.denied(&node.get(&node.core("secrets/unrelated")).await);
        self.denied(&node.post(&node.core("configmaps"), json!({"metadata": {"name": "by-node"}})).await);
        assert_eq!(node.get("/api/v1/services").await.0, 200);
        self.denied(&node.get("/api/v1/namespaces").await);
        assert_eq!(node.get("/apis/node.k8s.io/v1/runtimeclasses").await.0, 200);

        let event = json!({
            "metadata": {"generateName": "by-node."}, "reason": "Started", "type": "Normal",
            "involvedObject": {"kind": "Pod", "namespace": node.namespace, "name": "own"},
        });
        let (code, made) = node.post(&node.core("events"), event).await;
        assert_eq!(code, 201, "{made}");
        let path = node.core(&format!("events/{}", text(&made["metadata"]["name"])));
        assert_eq!(node.patch(&path, STRATEGIC, json!({"count": 2})).await.0, 200);
        self.denied(&node.get(&path).await);
        self.denied(&node.delete(&path, Value::Null).await);
    }

    /// A token is issued for the service account of a pod of this node, and bound to that pod.
    async fn tokens(&self, uid: &Value) {
        let node = self.node;
        let request = |bound: Value| {
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                "spec": {"expirationSeconds": 3607, "audiences": [], "boundObjectRef": bound}})
        };
        let pod =
            |name: &str, uid: &Value| json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid});
        let path = node.core("serviceaccounts/default/token");
        let bound = request(pod("own", uid));
        let body = eventually(201, || async { node.post(&path, bound.clone()).await }).await;
        assert_eq!(text(&body["status"]["token"]).split('.').count(), 3);
        self.denied(&node.post(&path, request(Value::Null)).await);
        self.denied(&node.post(&path, request(pod("own", &Value::Null))).await);
        let (_, foreign) = self.admin.get(&self.admin.core("pods/foreign")).await;
        self.denied(&node.post(&path, request(pod("foreign", &foreign["metadata"]["uid"]))).await);
        let other = node.core("serviceaccounts/unrelated/token");
        self.denied(&node.post(&other, request(pod("own", uid))).await);
    }

    /// A node creates only mirror pods, for itself and without references.
    pub(super) async fn mirrors(&self) {
        let node = self.node;
        let (_, owner) = node.get(&self.own()).await;
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": self.name, "uid": owner["metadata"]["uid"], "controller": true}]);
        let mirror = |change: &dyn Fn(&mut Value)| {
            let mut object = json!({
                "metadata": {
                    "name": "mirror", "ownerReferences": owner,
                    "annotations": {"kubernetes.io/config.mirror": "1", "kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "1"},
                },
                "spec": {"nodeName": self.name, "containers": [{"name": "main", "image": "i:1"}]},
            });
            change(&mut object);
            object
        };
        type Change = dyn Fn(&mut Value);
        let refusals: [(&str, &Change); 8] = [
            ("no mirror", &|o| {
                o["metadata"]["annotations"] = json!({});
            }),
            ("another node", &|o| o["spec"]["nodeName"] = json!("another-node")),
            ("no owner", &|o| o["metadata"]["ownerReferences"] = json!([])),
            ("another owner", &|o| o["metadata"]["ownerReferences"][0]["name"] = json!("another-node")),
            ("no controller", &|o| o["metadata"]["ownerReferences"][0]["controller"] = json!(false)),
            ("another uid", &|o| o["metadata"]["ownerReferences"][0]["uid"] = json!("1-2-3")),
            ("a service account", &|o| o["spec"]["serviceAccountName"] = json!("default")),
            ("a secret", &|o| {
                o["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "s"}}]);
            }),
        ];
        for (what, change) in refusals {
            let answer = node.post(&node.core("pods"), mirror(change)).await;
            assert_eq!(answer.0, 403, "a mirror with {what}: {}", answer.1);
            self.denied(&answer);
        }
        let path = node.core("pods/mirror");
        let made = eventually(201, || async { node.post(&node.core("pods"), mirror(&|_| {})).await }).await;
        assert_eq!(made["spec"]["volumes"], Value::Null, "no token is mounted: {made}");
        let status = json!({"metadata": {"uid": made["metadata"]["uid"]}, "status": {"phase": "Running"}});
        assert_eq!(node.patch(&format!("{path}/status"), STRATEGIC, status).await.0, 200);
        let other = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": "1-2-3"}});
        eventually(409, || async { node.delete(&path, other.clone()).await }).await;
        let now = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": made["metadata"]["uid"]}});
        assert_eq!(node.delete(&path, now).await.0, 200);
    }
}
