//! Requests of the contract as they are on the wire, and what its parts have in common.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Method, Request, header};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};

pub(super) const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(super) const MERGE: &str = "application/merge-patch+json";
pub(super) const JSON_PATCH: &str = "application/json-patch+json";

/// Longest wait for an event of a watch.
pub(super) const WATCH_TIMEOUT: Duration = Duration::from_secs(20);

/// A client of the API server, and the namespace of the contract's objects.
pub(super) struct Wire {
    pub(super) client: kube::Client,
    pub(super) namespace: String,
}

/// HTTP code and JSON body.
pub(super) type Answer = (u16, Value);

impl Wire {
    pub(super) async fn call(&self, method: Method, path: &str, content_type: &str, body: &Value) -> Answer {
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

    pub(super) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, "application/json", &Value::Null).await
    }

    pub(super) async fn post(&self, path: &str, body: Value) -> Answer {
        self.call(Method::POST, path, "application/json", &body).await
    }

    pub(super) async fn put(&self, path: &str, body: Value) -> Answer {
        self.call(Method::PUT, path, "application/json", &body).await
    }

    pub(super) async fn patch(&self, path: &str, kind: &str, body: Value) -> Answer {
        self.call(Method::PATCH, path, kind, &body).await
    }

    pub(super) async fn delete(&self, path: &str, options: Value) -> Answer {
        self.call(Method::DELETE, path, "application/json", &options).await
    }

    pub(super) fn core(&self, rest: &str) -> String {
        format!("/api/v1/namespaces/{}/{rest}", self.namespace)
    }

    /// Returns the lines of a watch until `enough` holds.
    pub(super) async fn watch(&self, path: &str, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let request = Request::get(path).body(Body::empty()).expect("a path of the contract makes a request");
        let response = self.client.send(request).await.expect("the server answers");
        assert_eq!(response.status().as_u16(), 200, "watch {path}");
        let mut stream = response.into_body().into_data_stream();
        let (mut buffer, mut seen) = (Vec::<u8>::new(), Vec::new());
        let read = async {
            while !enough(&seen) {
                let Some(chunk) = stream.next().await else { break };
                let chunk: Bytes = chunk.expect("the watch continues");
                buffer.extend_from_slice(&chunk);
                while let Some(end) = buffer.iter().position(|b| *b == b'\n') {
                    let line: Vec<u8> = buffer.drain(..=end).collect();
                    seen.push(serde_json::from_slice(&line).expect("a watch line is JSON"));
                }
            }
        };
        let in_time = tokio::time::timeout(WATCH_TIMEOUT, read).await.is_ok();
        assert!(in_time && enough(&seen), "watch {path}: {seen:#?}");
        seen
    }

    pub(super) async fn prepare(&self) {
        let (code, body) =
            self.post("/api/v1/namespaces", json!({"metadata": {"name": self.namespace}})).await;
        assert!(matches!(code, 201 | 409), "create namespace: {body}");
        // Without controllers nothing else creates the service account.
        let (code, body) =
            self.post(&self.core("serviceaccounts"), json!({"metadata": {"name": "default"}})).await;
        assert!(matches!(code, 201 | 409), "create service account: {body}");
        for pod in ["bare", "worker", "once", "finished", "held", "watched", "old"] {
            self.delete(&self.core(&format!("pods/{pod}")), json!({"gracePeriodSeconds": 0})).await;
        }
        // Admission sees the account through a cache.
        let deadline = tokio::time::Instant::now() + WATCH_TIMEOUT;
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

    /// Creates a pod that does not exist yet, and returns it.
    pub(super) async fn make(&self, object: Value) -> Value {
        let (code, body) = self.post(&self.core("pods"), object).await;
        assert_eq!(code, 201, "{body}");
        body
    }
}

pub(super) fn pod(name: &str, node: &str) -> Value {
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

pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(super) fn refused(answer: &Answer, code: u16, reason: &str) {
    assert_eq!(
        (answer.0, &answer.1["kind"], text(&answer.1["reason"]), &answer.1["status"]),
        (code, &json!("Status"), reason, &json!("Failure")),
        "{}",
        answer.1
    );
    assert!(!text(&answer.1["message"]).is_empty(), "a Status has a message: {}", answer.1);
}
