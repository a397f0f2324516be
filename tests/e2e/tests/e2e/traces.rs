//! Traces of many pods at an OTLP receiver: one complete tree for each operation, and the share of its time
//! that the spans explain.

use std::collections::BTreeSet;

use futures::future::join_all;
use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::otlp::{Receiver, Span, root};
use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use serde_json::{Value, json};

/// Pods that are created and deleted.
const PODS: usize = 50;
/// Pods that are created and deleted at a time.
const AT_A_TIME: usize = 5;
/// Prefix of the names of the pods.
const PREFIX: &str = "traced";

/// Least share of the time of all creations that their spans explain, in percent. A worker without a pass
/// waits for a probe or for a call of the runtime, which have spans of their own. The rest is the time until
/// a task is woken and runs.
const LEAST_PERCENT: u64 = 95;
/// Shortest gap that is printed, in nanoseconds.
const LONG_GAP: u64 = 20_000_000;

/// A time in which a trace has no span but its root.
#[derive(Debug)]
struct Gap {
    after: String,
    before: String,
    ns: u64,
}

/// Returns the gaps of a trace. The writes of events do not count as its work: no pass waits for them.
fn gaps(spans: &[Span]) -> Vec<Gap> {
    let root = root(spans);
    let mut steps: Vec<&Span> =
        spans.iter().filter(|span| span.id != root.id && span.name != "write event").collect();
    steps.sort_by_key(|span| span.start_unix_ns);
    let ends = (root.end_unix_ns, "the end");
    let starts = steps.iter().map(|span| (span.start_unix_ns.min(root.end_unix_ns), span.name.as_str()));
    let mut gaps = Vec::new();
    let (mut covered, mut after) = (root.start_unix_ns, "the start");
    for (index, (start, before)) in starts.chain([ends]).enumerate() {
        if start > covered {
            gaps.push(Gap { after: after.to_owned(), before: before.to_owned(), ns: start - covered });
        }
        if let Some(step) = steps.get(index).filter(|step| step.end_unix_ns > covered) {
            (covered, after) = (step.end_unix_ns.min(root.end_unix_ns), step.name.as_str());
        }
    }
    gaps
}

/// Creates a pod, waits until it is Ready, deletes it, and returns its UID.
async fn create_and_delete(node: &Node, name: &str) -> String {
    let api = node.cluster();
    let mut pod = pods::sleeper(name);
    pod["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["true"]}, "periodSeconds": 1, "timeoutSeconds": 10});
    let created = api.create_pod(pod).await;
    let uid = created["metadata"]["uid"].as_str().unwrap().to_owned();
    let is_ready = |pod: &Value| Seen::from_api(pod.clone()).is_ready();
    api.wait_for("pods", "default", name, LONG, is_ready).await;
    api.delete("pods", "default", name).await;
    api.wait_for("pods", "default", name, LONG, Value::is_null).await;
    uid
}

/// Waits until the trace of an operation is complete and has spans of these names.
async fn whole_trace(receiver: &Receiver, operation: &str, uid: &str, names: &[&str]) -> Vec<Span> {
    until(&format!("the whole trace of {operation:?} of {uid}"), LONG, async || {
        let spans = receiver.tree(operation, uid)?;
        let seen: BTreeSet<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        let are_seen = names.iter().all(|name| seen.contains(name));
        if are_seen { Ok(spans) } else { Err(format!("{seen:?}")) }
    })
    .await
}

/// Returns the spans whose parents were not received.
fn orphans(all: &[Span]) -> Vec<&Span> {
    let ids: BTreeSet<(&str, &str)> =
        all.iter().map(|span| (span.trace.as_str(), span.id.as_str())).collect();
    let is_lost =
        |span: &&Span| !span.parent.is_empty() && !ids.contains(&(span.trace.as_str(), span.parent.as_str()));
    all.iter().filter(is_lost).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_creations_and_deletions_are_complete_traces_whose_spans_explain_their_time() {
    let receiver = Receiver::start().await;
    let otlp_endpoint = Some(receiver.endpoint().to_owned());
    let node = Node::start(Options { otlp_endpoint, ..Options::with_api("traces") }).await;
    node.cluster()
        .wait_for("nodes", "", &node.cluster().node, LONG, |object| {
            let conditions = object["status"]["conditions"].as_array();
            conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
        })
        .await;

    let names: Vec<String> = (0..PODS).map(|number| format!("{PREFIX}-{number}")).collect();
    let mut uids = Vec::new();
    for names in names.chunks(AT_A_TIME) {
        uids.extend(join_all(names.iter().map(|name| create_and_delete(&node, name))).await);
    }

    let (mut total, mut unexplained) = (0, 0);
    for (name, uid) in names.iter().zip(&uids) {
        let steps = ["pass", "act", "inspect", "probe", "RunPodSandbox", "write status", "write event"];
        let created = whole_trace(&receiver, "create pod", uid, &steps).await;
        let services: BTreeSet<&str> = created.iter().map(|span| span.service.as_str()).collect();
        assert_eq!(services, BTreeSet::from(SERVICES), "{name}");
        let first = root(&created);
        let named = (first.attribute("k8s.namespace.name"), first.attribute("k8s.pod.name"));
        assert_eq!(named, ("default", name.as_str()));

        let steps = ["pass", "StopContainer", "write status"];
        let ended = whole_trace(&receiver, "terminate pod", uid, &steps).await;
        assert_eq!(root(&ended).links, [(first.trace.clone(), first.id.clone())], "{name}");

        let took = first.end_unix_ns - first.start_unix_ns;
        let gaps = gaps(&created);
        let gap: u64 = gaps.iter().map(|gap| gap.ns).sum();
        println!("{name}: {} ms, {} ms of it in no span", took / 1_000_000, gap / 1_000_000);
        for gap in gaps.iter().filter(|gap| gap.ns > LONG_GAP) {
            println!("  {} ms between {:?} and {:?}", gap.ns / 1_000_000, gap.after, gap.before);
        }
        total += took;
        unexplained += gap;
    }

    until("the parents of all spans", LONG, async || {
        let all = receiver.spans();
        let orphans = orphans(&all);
        if orphans.is_empty() { Ok(()) } else { Err(format!("{orphans:#?}")) }
    })
    .await;
    let all = receiver.spans();
    let names: BTreeSet<&str> = all.iter().map(|span| span.name.as_str()).collect();
    assert!(names.iter().all(|name| !name.contains(PREFIX) && !name.contains("default")), "{names:?}");
    for uid in &uids {
        for operation in ["create pod", "terminate pod"] {
            let roots = all.iter().filter(|s| s.name == operation && s.attribute("k8s.pod.uid") == uid);
            assert_eq!(roots.count(), 1, "{operation} of {uid}");
        }
    }
    for service in SERVICES {
        assert_eq!(node.counter(service, "quintlet_spans_dropped_total").await, 0, "{service}");
    }
    let explained = total - unexplained;
    println!("{} of {} ms of all creations are in spans", explained / 1_000_000, total / 1_000_000);
    assert!(explained * 100 >= total * LEAST_PERCENT, "{explained} of {total} ns are in spans");
    node.down().await;
}
