//! Lists and watches.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use super::wire::{MERGE, STRATEGIC, Wire, pod, refused, text};

pub(super) async fn watching(api: &Wire) {
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
    assert_eq!(kinds(&seen), ["ADDED"], "a watch without a version starts with the existing objects");

    let initial =
        "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=30";
    let path = api.core(&format!("pods?watch=1&{initial}"));
    let seen = api.watch(&path, |seen| seen.iter().any(|e| e["type"] == json!("BOOKMARK"))).await;
    let bookmark = seen.last().expect("the watch has lines");
    assert_eq!(bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], json!("true"));
    assert!(kinds(&seen).iter().all(|k| k == "ADDED"));
    refused(&api.get(&api.core("pods?watch=1&sendInitialEvents=true")).await, 422, "Invalid");

    // Version 1 precedes the history of the server, at the latest after a restart.
    let path = api.core("pods?watch=1&timeoutSeconds=30&resourceVersion=1");
    let seen = api.watch(&path, |seen| !seen.is_empty()).await;
    let status = &seen[0]["object"];
    assert_eq!(
        (&seen[0]["type"], text(&status["kind"]), &status["code"], text(&status["reason"])),
        (&json!("ERROR"), "Status", &json!(410), "Expired"),
        "{seen:#?}"
    );

    // A watch without events gets a bookmark before it ends.
    let quiet = "allowWatchBookmarks=true&timeoutSeconds=6&fieldSelector=spec.nodeName%3Dnobody";
    let (_, list) = api.get(&api.core("pods")).await;
    let rv = text(&list["metadata"]["resourceVersion"]).to_owned();
    let path = api.core(&format!("pods?watch=1&{quiet}&resourceVersion={rv}"));
    let others = async {
        for n in 0.. {
            let body = json!({"status": {"message": format!("change {n}")}});
            api.patch(&api.core("pods/old/status"), STRATEGIC, body).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    // The changes continue as long as the watch.
    let seen = tokio::select! {
        seen = api.watch(&path, |seen| seen.iter().any(|e| e["type"] == json!("BOOKMARK"))) => seen,
        () = others => Vec::new(),
    };
    let number = |text: &str| text.parse::<u64>().expect("a version is a number");
    let version = number(text(&seen[0]["object"]["metadata"]["resourceVersion"]));
    assert!(kinds(&seen).is_empty() && version > number(&rv), "from {rv}: {seen:#?}");
    api.delete(&api.core("pods/old"), json!({"gracePeriodSeconds": 0})).await;
}

pub(super) async fn listing(api: &Wire) {
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
