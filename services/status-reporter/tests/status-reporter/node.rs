//! Node, lease, events and mirror pods with a test API server, and the whole service on its socket.

use std::time::Duration;

use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::rate::Rate;
use quintlet_kit::server::NODE;
use quintlet_proto::status::v1 as wire;
use quintlet_proto::status::v1::report_reply::Reply;
use quintlet_proto::status::v1::report_request::Request as Inbound;
use quintlet_testapi::{Failure, TestApi};
use serde_json::{Value, json};
use status_reporter::clients::Purpose;
use status_reporter::events::Occurrence;
use status_reporter::events::recorder::{EventOutcome, Recorder};
use status_reporter::lease;
use status_reporter::metrics::Metrics;
use status_reporter::node::cloud::CloudProvider;
use status_reporter::run::{Config, NodeReportSettings, run};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::common::{Running, TEST_TIMEOUT, ready};

#[tokio::test]
async fn the_node_is_registered_and_ready_soon_after_its_report() {
    let api = TestApi::start().await;
    // Writes that are not urgent would take an hour.
    let hour = Duration::from_secs(3600);
    let settings =
        NodeReportSettings { update_every: hour, report_every: hour, ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| !n.is_null()).await;
    assert_eq!(ready(&node).0, "False", "nothing is known yet: {node:#}");
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "n1");
    service.facts(&[]).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    assert_eq!(
        (ready(&node).1, &node["status"]["capacity"]["cpu"]),
        ("kubelet is posting ready status", &json!("2"))
    );
    service.facts(&["container runtime is down"]).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "False").await;
    assert_eq!(ready(&node).1, "container runtime is down");
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |_| {
        api.list("events").iter().any(|e| {
            e["reason"] == "NodeNotReady"
                && e["involvedObject"]["uid"] == api.get("nodes", "", "n1").unwrap()["metadata"]["uid"]
        })
    })
    .await;
    service.stop().await;
}

#[tokio::test]
async fn health_reports_a_node_that_the_api_server_rejects() {
    let api = TestApi::start().await;
    api.faults().fail("create nodes", usize::MAX, Failure::Forbidden);
    let service = Running::start(Some(&api)).await;
    let mut health = HealthClient::new(quintlet_kit::socket::channel(service.socket()));
    let mut reported = async |wanted: ServingStatus| {
        let until = async {
            let request = HealthCheckRequest { service: NODE.to_owned() };
            while health.check(request.clone()).await.map_or(ServingStatus::Unknown, |r| r.get_ref().status())
                != wanted
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, until).await.expect("health reports it");
    };
    reported(ServingStatus::NotServing).await;
    api.faults().clear();
    reported(ServingStatus::Serving).await;
    service.stop().await;
}

#[tokio::test]
async fn a_restart_changes_neither_ready_nor_foreign_conditions() {
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    service.facts(&[]).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    service.stop().await;
    // Of an administrator, of the node's maintenance and of a problem detector.
    let foreign = ["GracefulNodeShutdownInProgress", "Drained", "Maintenance", "KernelDeadlock"]
        .map(|name| json!({"type": name, "status": "True", "reason": "ByHand"}));
    // A change of Ready would set another transition time.
    let long_ago = "2020-01-01T00:00:00Z";
    api.edit("nodes/status", "", "n1", |n| {
        let conditions = n["status"]["conditions"].as_array_mut().unwrap();
        let ready = conditions.iter_mut().find(|c| c["type"] == "Ready").unwrap();
        ready["lastTransitionTime"] = json!(long_ago);
        conditions.extend(foreign.clone());
    })
    .unwrap();
    let since = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array().unwrap();
        conditions.iter().find(|c| c["type"] == "Ready").unwrap()["lastTransitionTime"].clone()
    };
    api.reset_counts();
    let settings =
        NodeReportSettings { update_every: Duration::from_millis(1), ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    // After its attempt to create the Node the service reads it, and has no facts yet: it must not write
    // Ready.
    api.wait_for_requests("create nodes", 1, TEST_TIMEOUT).await;
    let turned = async {
        while since(&api.get("nodes", "", "n1").unwrap()) == long_ago {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let turned = tokio::time::timeout(Duration::from_millis(500), turned).await;
    assert!(turned.is_err(), "Ready was turned without facts");
    service.facts_of("127.0.0.2", &[]).await;
    let node = api
        .wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| n["status"]["addresses"][0]["address"] == "127.0.0.2")
        .await;
    assert_eq!((ready(&node).0, &since(&node)), ("True", &json!(long_ago)), "{node:#}");
    service.facts(&["x"]).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "False").await;
    let conditions = node["status"]["conditions"].as_array().unwrap();
    assert!(foreign.iter().all(|condition| conditions.contains(condition)), "{node:#}");
    service.stop().await;
}

#[tokio::test]
async fn the_lease_is_created_with_an_owner_and_renewed_after_failures() {
    let api = TestApi::start().await;
    api.faults().fail("create leases", 3, Failure::Internal);
    api.faults().fail("get leases", 2, Failure::Unavailable);
    let mut service = Running::start(Some(&api)).await;
    service.facts(&[]).await;
    let lease = api.wait_for("leases", "kube-node-lease", "n1", TEST_TIMEOUT, |l| !l.is_null()).await;
    assert_eq!(
        (&lease["spec"]["holderIdentity"], &lease["spec"]["leaseDurationSeconds"]),
        (&json!("n1"), &json!(40))
    );
    service.stop().await;
    // The facts of the tests are those of another machine, whose lease would wait for pod-sync.
    let boot = quintlet_kit::boot::boot_id();
    api.edit("nodes/status", "", "n1", |node| node["status"]["nodeInfo"]["bootID"] = json!(boot)).unwrap();
    // The next process renews the existing lease and adds the owner.
    let service = Running::start(Some(&api)).await;
    let renewed = api
        .wait_for("leases", "kube-node-lease", "n1", TEST_TIMEOUT, |l| {
            l["spec"]["renewTime"] != lease["spec"]["renewTime"]
        })
        .await;
    let uid = &api.get("nodes", "", "n1").unwrap()["metadata"]["uid"];
    assert_eq!(renewed["metadata"]["ownerReferences"][0]["uid"], *uid, "{renewed:#}");
    service.stop().await;
}

#[tokio::test]
async fn no_lease_is_created_while_the_node_is_unknown_and_an_existing_one_is_renewed() {
    let api = TestApi::start().await;
    let keep = |api: &TestApi| {
        let (client, stop) = (status_reporter::api::ApiClient::new(api.client()), CancellationToken::new());
        let term = lease::Term { seconds: 40, every: Duration::from_millis(20) };
        tokio::spawn(lease::run(client, "n1".into(), Clock::system(), term, stop.clone()));
        stop.drop_guard()
    };
    let first = keep(&api);
    api.wait_for_requests("get nodes", 2, TEST_TIMEOUT).await;
    assert_eq!((api.counts().of("create leases"), api.list("leases").len()), (0, 0));
    let node = api.create("nodes", "", json!({"metadata": {"name": "n1"}})).unwrap();
    let lease = api.wait_for("leases", "kube-node-lease", "n1", TEST_TIMEOUT, |l| !l.is_null()).await;
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], node["metadata"]["uid"], "{lease:#}");
    drop(first);
    // The next process finds the lease, whose owner another client removed, and no Node.
    api.edit("leases", "kube-node-lease", "n1", |l| l["metadata"]["ownerReferences"] = json!([])).unwrap();
    api.faults().fail("get nodes", usize::MAX, Failure::Internal);
    let _second = keep(&api);
    let renewed = |l: &Value| l["spec"]["renewTime"] != lease["spec"]["renewTime"];
    api.wait_for("leases", "kube-node-lease", "n1", TEST_TIMEOUT, renewed).await;
}

#[tokio::test]
async fn a_deleted_lease_is_created_again() {
    let api = TestApi::start().await;
    api.create("nodes", "", json!({"metadata": {"name": "n1"}})).unwrap();
    let stop = CancellationToken::new();
    let client = status_reporter::api::ApiClient::new(api.client());
    let task = tokio::spawn(lease::run(
        client,
        "n1".into(),
        Clock::system(),
        lease::Term { seconds: 40, every: Duration::from_millis(20) },
        stop.clone(),
    ));
    api.wait_for_requests("update leases", 3, TEST_TIMEOUT).await;
    assert_eq!(api.counts().of("create leases"), 1);
    let before = api.counts().of("get leases");
    api.wait_for_requests("update leases", 6, TEST_TIMEOUT).await;
    assert_eq!(api.counts().of("get leases"), before, "a renewal reads nothing");
    // Another client changes the lease, then removes its holder.
    api.edit("leases", "kube-node-lease", "n1", |l| l["metadata"]["labels"] = json!({"a": "b"})).unwrap();
    let lease = api.get("leases", "kube-node-lease", "n1").unwrap();
    let renewed = |l: &Value| l["spec"]["renewTime"] != lease["spec"]["renewTime"];
    let live = api.wait_for("leases", "kube-node-lease", "n1", TEST_TIMEOUT, renewed).await;
    assert_eq!(live["metadata"]["labels"]["a"], "b", "what others wrote stays");
    api.delete("leases", "kube-node-lease", "n1", None).unwrap();
    api.wait_for("leases", "kube-node-lease", "n1", TEST_TIMEOUT, |l| !l.is_null()).await;
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn without_reports_of_pod_sync_the_node_is_not_ready_with_that_reason() {
    let api = TestApi::start().await;
    let clock = Clock::fixed(jiff::Timestamp::now(), Duration::from_secs(1000));
    let mut service = Running::start_at(Some(&api), clock.clone()).await;
    service.facts_at(Duration::from_secs(1000), &[]).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    clock.advance(Duration::from_secs(29));
    service.facts_at(Duration::from_secs(1000), &[]).await;
    clock.advance(Duration::from_secs(2));
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "False").await;
    assert!(ready(&node).1.contains("pod-sync has not reported for more than 30 s"), "{node:#}");
    service.stop().await;
}

#[tokio::test]
async fn events_are_created_counted_and_recreated_after_they_expired() {
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    let event = wire::RecordEventRequest {
        kind: "Pod".into(),
        namespace: "default".into(),
        name: "web".into(),
        uid: "u".into(),
        r#type: "Warning".into(),
        reason: "BackOff".into(),
        message: "Back-off restarting".into(),
        ..Default::default()
    };
    let has = |count: u64| api.list("events").iter().any(|e| e["reason"] == "BackOff" && e["count"] == count);
    api.faults().fail("create events", 2, Failure::Disconnect);
    for _ in 0..3 {
        assert!(service.client.record_event(event.clone()).await.unwrap().into_inner().queued);
    }
    assert!(has(3), "events are answered once they are written");
    let name = api.requests("patch events")[0].name.clone();
    api.delete("events", "default", &name, None).unwrap();
    service.client.record_event(event.clone()).await.unwrap();
    assert!(has(4));
    for id in [7, 7, 8, 7] {
        let again = wire::RecordEventRequest { id, ..event.clone() };
        assert!(service.client.record_event(again).await.unwrap().into_inner().queued);
    }
    let count = api.list("events").iter().find(|e| e["reason"] == "BackOff").unwrap()["count"].clone();
    assert_eq!(count, 6, "two of four were repetitions");
    let bad = service
        .client
        .record_event(wire::RecordEventRequest { r#type: "Odd".into(), ..event })
        .await
        .unwrap_err();
    assert_eq!(bad.code(), tonic::Code::InvalidArgument);
    service.stop().await;
}

#[tokio::test]
async fn a_cache_that_lags_behind_does_not_take_the_node_back() {
    let api = TestApi::start().await;
    let settings =
        NodeReportSettings { update_every: Duration::from_millis(50), ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    service.facts(&[]).await;
    let earlier = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    let cordon = |is: bool| {
        api.edit("nodes", "", "n1", move |node| node["spec"]["unschedulable"] = json!(is)).unwrap();
    };
    let seen = async |reason: &str| {
        let event = async || api.list("events").into_iter().find(|e| e["reason"] == reason).ok_or(());
        quintlet_testkit::wait::until(reason, TEST_TIMEOUT, event).await
    };
    let reads = async |more: u64| {
        let before = api.counts().of("get nodes");
        api.wait_for_requests("get nodes", before + more, TEST_TIMEOUT).await;
    };
    cordon(true);
    seen("NodeNotSchedulable").await;
    api.faults().lag(earlier);
    reads(3).await;
    api.faults().clear();
    reads(3).await;
    cordon(false);
    reads(3).await;
    for reason in ["NodeNotSchedulable", "NodeSchedulable"] {
        let event = seen(reason).await;
        assert_eq!(event["count"], 1, "{event}");
    }
    service.stop().await;
}

#[tokio::test]
async fn an_event_without_a_time_has_that_of_its_arrival_however_long_it_waits() {
    let api = TestApi::start().await;
    api.faults().block("create events");
    let stop = CancellationToken::new();
    let client = status_reporter::api::ApiClient::new(api.client());
    let clock = Clock::fixed(jiff::Timestamp::from_second(1_700_000_000).unwrap(), Duration::ZERO);
    let recorder = Recorder::start(client, "n1", clock.clone(), Metrics::register(), stop.clone());
    // The second event waits behind the first one.
    for name in ["first", "second"] {
        let event = Occurrence {
            kind: "Pod".into(),
            namespace: "default".into(),
            name: name.into(),
            event_type: "Normal".into(),
            reason: "Started".into(),
            ..Occurrence::default()
        };
        assert!(recorder.record(event));
    }
    api.wait_for_requests("create events", 1, TEST_TIMEOUT).await;
    clock.advance(Duration::from_secs(600));
    api.faults().clear();
    api.wait_for_requests("create events", 2, TEST_TIMEOUT).await;
    let both = async || {
        let all = api.list("events");
        if all.len() == 2 { Ok(all) } else { Err(all) }
    };
    for event in quintlet_testkit::wait::until("both events", TEST_TIMEOUT, both).await {
        assert_eq!(event["firstTimestamp"], "2023-11-14T22:13:20Z", "{event}");
    }
    stop.cancel();
}

#[tokio::test]
async fn an_event_that_waited_for_the_api_server_has_the_time_of_its_cause() {
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    let at_unix_ns = 1_700_000_000_000_000_000;
    let event = wire::RecordEventRequest {
        kind: "Pod".into(),
        namespace: "default".into(),
        name: "web".into(),
        uid: "u".into(),
        r#type: "Normal".into(),
        reason: "Started".into(),
        message: "Container started".into(),
        at_unix_ns,
        ..Default::default()
    };
    assert!(service.client.record_event(event).await.unwrap().into_inner().queued);
    let all = api.list("events");
    let seen = all.iter().find(|e| e["reason"] == "Started").unwrap();
    for field in ["firstTimestamp", "lastTimestamp"] {
        assert_eq!(seen[field], "2023-11-14T22:13:20Z", "{field}: {seen}");
    }
    service.stop().await;
}

#[tokio::test]
async fn an_event_that_is_not_written_when_status_reporter_stops_is_not_acknowledged() {
    let api = TestApi::start().await;
    let service = Running::start(Some(&api)).await;
    api.faults().block("create events");
    let event = wire::RecordEventRequest {
        kind: "Pod".into(),
        namespace: "default".into(),
        name: "web".into(),
        r#type: "Normal".into(),
        reason: "Started".into(),
        ..Default::default()
    };
    let mut client = service.client.clone();
    let answer = tokio::spawn(async move { client.record_event(event).await });
    api.wait_for_requests("create events", 1, TEST_TIMEOUT).await;
    assert!(!answer.is_finished());
    service.stop().await;
    assert_eq!(answer.await.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
}

#[tokio::test]
async fn a_full_event_queue_drops_events_without_blocking() {
    let api = TestApi::start().await;
    api.faults().block("create events");
    let stop = CancellationToken::new();
    let client = status_reporter::api::ApiClient::new(api.client());
    let recorder = Recorder::start(client, "n1", Clock::system(), Metrics::register(), stop.clone());
    let event = |n: usize| Occurrence {
        kind: "Pod".into(),
        namespace: "default".into(),
        name: format!("p{n}"),
        event_type: "Normal".into(),
        reason: "Started".into(),
        ..Occurrence::default()
    };
    let lost = (0..1100).filter(|n| !recorder.record(event(*n))).count();
    assert!((99..=100).contains(&lost), "a thousand wait and one may be on its way: {lost}");
    api.faults().clear();
    api.wait_for_requests("create events", 1000, TEST_TIMEOUT).await;
    stop.cancel();
}

#[tokio::test]
async fn a_mirror_pod_is_created_once_replaced_on_a_manifest_change_and_deleted_by_uid() {
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| !n.is_null()).await;
    let pod = |hash: &str| {
        let pod = json!({
            "metadata": {"name": "web-n1", "namespace": "default", "uid": "static", "annotations": {"kubernetes.io/config.mirror": hash, "kubernetes.io/config.hash": hash}},
            "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "busybox:1"}]},
        });
        wire::EnsureMirrorRequest { pod: pod.to_string().into_bytes() }
    };
    let first = service.client.ensure_mirror(pod("a")).await.unwrap().into_inner();
    assert!(first.created && first.uid != "static");
    let live = api.get("pods", "default", "web-n1").unwrap();
    assert_eq!(live["metadata"]["ownerReferences"][0]["kind"], "Node");
    let again = service.client.ensure_mirror(pod("a")).await.unwrap().into_inner();
    assert_eq!((again.created, &again.uid), (false, &first.uid));
    let second = service.client.ensure_mirror(pod("b")).await.unwrap().into_inner();
    assert!(second.created && second.uid != first.uid);
    let delete = |uid: &str| wire::DeleteMirrorRequest {
        namespace: "default".into(),
        name: "web-n1".into(),
        uid: uid.into(),
    };
    assert!(
        !service.client.delete_mirror(delete(&first.uid)).await.unwrap().into_inner().deleted,
        "another one by now"
    );
    assert!(service.client.delete_mirror(delete(&second.uid)).await.unwrap().into_inner().deleted);
    assert!(api.get("pods", "default", "web-n1").is_none());
    service.stop().await;
}

fn message(request: Inbound) -> wire::ReportRequest {
    wire::ReportRequest { request: Some(request), trace: None }
}

#[tokio::test]
async fn the_status_stream_acknowledges_and_replays() {
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    let pod = api.create_pod(json!({"metadata": {"name": "web"}, "spec": {"nodeName": "n1", "containers": [{"name": "a", "image": "b:1"}]}}));
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let update = |version: u64| wire::PodStatusUpdate {
        uid: uid.clone(),
        api_uid: uid.clone(),
        name: "web".into(),
        namespace: "default".into(),
        owner_epoch: 1,
        version,
        base_status: pod["status"].to_string().into_bytes(),
        base_resource_version: pod["metadata"]["resourceVersion"].as_str().unwrap().into(),
        desired_status: json!({"phase": "Running", "qosClass": "BestEffort"}).to_string().into_bytes(),
        could_run: true,
        ..Default::default()
    };
    let (send, receive) = tokio::sync::mpsc::channel(8);
    let mut replies = service.client.report(ReceiverStream::new(receive)).await.unwrap().into_inner();
    let mut next = async || {
        tokio::time::timeout(TEST_TIMEOUT, replies.message()).await.unwrap().unwrap().and_then(|r| r.reply)
    };
    assert!(matches!(next().await, Some(Reply::Hello(_))));
    assert!(matches!(next().await, Some(Reply::HeldEnd(_))));
    send.send(message(Inbound::Hello(quintlet_proto::hello()))).await.unwrap();
    send.send(message(Inbound::Update(wire::PodStatusUpdate { name: "../x".into(), ..update(1) })))
        .await
        .unwrap();
    let Some(Reply::Ack(refused)) = next().await else { panic!("no ack") };
    assert_eq!(
        (refused.kind(), refused.detail.as_str()),
        (wire::AckKind::Refused, "update.name: not a name of an object")
    );
    send.send(message(Inbound::Update(update(2)))).await.unwrap();
    let Some(Reply::Ack(written)) = next().await else { panic!("no ack") };
    assert_eq!((written.kind(), written.version), (wire::AckKind::Written, 2));
    let live = api.get("pods", "default", "web").unwrap();
    assert_eq!(
        (&live["status"]["phase"], live["metadata"]["resourceVersion"].as_str().unwrap()),
        (&json!("Running"), written.resource_version.as_str())
    );
    drop(send);
    assert!(next().await.is_none(), "the stream ends with its sender");
    service.stop().await;
}

#[tokio::test]
async fn a_caller_of_an_incompatible_schema_is_refused_before_its_first_status() {
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    let (send, receive) = tokio::sync::mpsc::channel(8);
    let hello = quintlet_proto::hello();
    let hello = quintlet_proto::common::v1::Hello { schema: hello.schema + 2, ..hello };
    send.send(message(Inbound::Hello(hello.clone()))).await.unwrap();
    let invalid = wire::PodStatusUpdate { uid: "u".into(), ..Default::default() };
    send.send(message(Inbound::Update(invalid))).await.unwrap();
    let mut replies = service.client.report(ReceiverStream::new(receive)).await.unwrap().into_inner();
    let end = loop {
        match tokio::time::timeout(TEST_TIMEOUT, replies.message()).await.unwrap() {
            Ok(Some(reply)) => assert!(!matches!(reply.reply, Some(Reply::Ack(_))), "{reply:?}"),
            end => break end,
        }
    };
    let refusal = end.unwrap_err();
    assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
    let want = format!("pod-sync {} is too new: its schema is {}", hello.build, hello.schema);
    assert!(refusal.message().starts_with(&want), "{refusal}");

    let (send, receive) = tokio::sync::mpsc::channel(8);
    let request = wire::NodeVolumesRequest { hello: Some(hello), generation: 1, ..Default::default() };
    send.send(request).await.unwrap();
    let mut replies = service.client.node_volumes(ReceiverStream::new(receive)).await.unwrap().into_inner();
    let refusal = loop {
        match tokio::time::timeout(TEST_TIMEOUT, replies.message()).await.unwrap() {
            Ok(reply) => assert!(reply.is_some(), "the stream ends with an error"),
            Err(refusal) => break refusal,
        }
    };
    assert!(refusal.message().starts_with(&want), "{refusal}");
    service.stop().await;
}

#[tokio::test]
async fn standalone_mode_serves_its_api_and_writes_nothing() {
    let mut service = Running::start(None).await;
    service.facts(&[]).await;
    let event = wire::RecordEventRequest {
        kind: "Pod".into(),
        name: "web".into(),
        r#type: "Normal".into(),
        ..Default::default()
    };
    assert!(service.client.record_event(event).await.unwrap().into_inner().queued);
    let mirror = wire::EnsureMirrorRequest {
        pod: json!({"metadata": {"name": "a", "namespace": "b"}}).to_string().into_bytes(),
    };
    assert_eq!(
        service.client.ensure_mirror(mirror).await.unwrap_err().code(),
        tonic::Code::FailedPrecondition
    );
    let update = wire::PodStatusUpdate {
        uid: "u".into(),
        name: "web".into(),
        namespace: "default".into(),
        version: 1,
        ..Default::default()
    };
    let requests = tokio_stream::iter([message(Inbound::Update(update))]);
    let (keep, open) = tokio::sync::mpsc::channel(1);
    let requests = tokio_stream::StreamExt::chain(requests, ReceiverStream::new(open));
    let mut replies = service.client.report(requests).await.unwrap().into_inner();
    let ack = loop {
        let reply = tokio::time::timeout(TEST_TIMEOUT, replies.message()).await.unwrap().unwrap().unwrap();
        if let Some(Reply::Ack(ack)) = reply.reply {
            break ack;
        }
    };
    assert_eq!(ack.kind(), wire::AckKind::NoApi);
    drop(keep);
    service.stop().await;
}

#[tokio::test]
async fn a_kubeconfig_may_be_created_after_the_start() {
    let api = TestApi::start().await;
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("late");
    let config = Config {
        paths: Paths::new(dir.path()),
        kubeconfig: Some(kubeconfig.clone()),
        node_name: "n1".into(),
        register_node: true,
        observers: Vec::new(),
        settings: NodeReportSettings::default(),
    };
    let stop = CancellationToken::new();
    let task = tokio::spawn(run(config, Clock::system(), stop.clone()));
    tokio::time::sleep(Duration::from_millis(50)).await;
    api.kubeconfig(&kubeconfig).unwrap();
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| !n.is_null()).await;
    stop.cancel();
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_node_is_registered_with_the_configured_labels_and_taints() {
    let taint = json!({"key": "a", "value": "b", "effect": "NoSchedule"});
    let settings = || NodeReportSettings {
        taints: vec![taint.clone()],
        labels: vec![("tier".into(), "edge".into())],
        provider_id: "x://1".into(),
        ..NodeReportSettings::default()
    };
    let api = TestApi::start().await;
    let service = Running::start_with(Some(&api), Clock::system(), true, settings()).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| !n.is_null()).await;
    // The API server adds its own taint to a new node.
    let tainted = |node: &Value| node["spec"]["taints"].as_array().is_some_and(|all| all.contains(&taint));
    assert!(tainted(&node), "{node:#}");
    assert_eq!(node["spec"]["providerID"], "x://1");
    assert_eq!(node["metadata"]["labels"]["tier"], "edge");
    service.stop().await;
    // An existing node keeps its taints.
    api.edit("nodes", "", "n1", |n| {
        n["spec"]["taints"] = json!([]);
        n["metadata"]["labels"]["tier"] = json!("core");
    })
    .unwrap();
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings()).await;
    service.facts(&[]).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    assert!(!tainted(&node), "{node:#}");
    assert_eq!(node["metadata"]["labels"]["tier"], "core", "labels of ours are for a node that is made");
    service.stop().await;
}

#[tokio::test]
async fn a_node_of_an_external_cloud_has_a_taint_and_keeps_the_addresses_of_the_cloud() {
    let cloud = CloudProvider::External { node_ips: vec!["10.0.0.1".parse().unwrap()] };
    let settings = || NodeReportSettings { cloud: cloud.clone(), ..NodeReportSettings::default() };
    let api = TestApi::start().await;
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings()).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| !n.is_null()).await;
    let taint = json!({"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"});
    assert!(node["spec"]["taints"].as_array().is_some_and(|all| all.contains(&taint)), "{node:#}");
    assert_eq!(node["metadata"]["annotations"]["alpha.kubernetes.io/provided-node-ip"], "10.0.0.1");
    let addresses = json!([{"type": "ExternalIP", "address": "192.0.2.1"}]);
    api.edit("nodes/status", "", "n1", |n| n["status"]["addresses"] = addresses.clone()).unwrap();
    service.facts(&[]).await;
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    assert_eq!(node["status"]["addresses"], addresses, "{node:#}");
    service.stop().await;
}

#[tokio::test]
async fn periodic_reads_of_the_node_are_answered_from_the_cache_of_the_api_server() {
    let api = TestApi::start().await;
    let settings =
        NodeReportSettings { update_every: Duration::from_millis(50), ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    service.facts(&[]).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    let before = api.counts().of("get nodes");
    api.wait_for_requests("get nodes", before + 2, TEST_TIMEOUT).await;
    for read in api.requests("get nodes").iter().skip(usize::try_from(before).unwrap()) {
        assert_eq!(read.query, "resourceVersion=0", "{read:?}");
    }
    service.stop().await;
}

#[tokio::test]
async fn without_registration_the_reporter_waits_for_the_node() {
    let api = TestApi::start().await;
    let mut service =
        Running::start_with(Some(&api), Clock::system(), false, NodeReportSettings::default()).await;
    service.facts(&[]).await;
    api.wait_for_requests("get nodes", 3, TEST_TIMEOUT).await;
    assert_eq!(api.counts().of("create nodes"), 0);
    api.create("nodes", "", json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})).unwrap();
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    assert_eq!(api.counts().of("create nodes"), 0);
    service.stop().await;
}

#[tokio::test]
async fn the_lease_has_the_configured_duration() {
    let api = TestApi::start().await;
    let settings = NodeReportSettings { lease_seconds: 1, ..NodeReportSettings::default() };
    let service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    let lease = api.wait_for("leases", "kube-node-lease", "n1", TEST_TIMEOUT, |l| !l.is_null()).await;
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 1);
    // Every 250 ms; the default interval of 10 s exceeds this timeout.
    api.wait_for_requests("update leases", 3, Duration::from_secs(8)).await;
    service.stop().await;
}

#[tokio::test]
async fn the_node_status_is_written_at_the_configured_intervals() {
    let api = TestApi::start().await;
    let every = Duration::from_millis(200);
    let settings = NodeReportSettings { report_every: every, ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    service.facts(&[]).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    let before = api.counts().of("patch nodes/status");
    // The unchanged status is written again; by default every five minutes.
    api.wait_for_requests("patch nodes/status", before + 3, TEST_TIMEOUT).await;
    service.stop().await;

    let settings =
        NodeReportSettings { update_every: Duration::from_millis(1), ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    service.facts(&[]).await;
    let address = |node: &Value| node["status"]["addresses"][0]["address"].clone();
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| address(n) == "127.0.0.1").await;
    let node = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.2"}]}});
    let request = wire::UpdateNodeRequest {
        source: "pod-sync".into(),
        node: node.to_string().into_bytes(),
        not_ready: vec![],
        observed_boottime_ns: u64::try_from(Clock::system().boot().as_nanos()).unwrap(),
    };
    service.client.update_node(request).await.unwrap();
    // No condition changed; by default such a write is delayed by 10 s.
    api.wait_for("nodes", "", "n1", Duration::from_secs(7), |n| address(n) == "127.0.0.2").await;
    service.stop().await;
}

#[tokio::test]
async fn pod_status_writes_observe_the_configured_rate() {
    let api = TestApi::start().await;
    // Without a rate the calls take a fraction of the time.
    let free = write_mirrors(&api, None).await;
    let spaced = write_mirrors(&api, Rate::new(2, 5)).await;
    let least = Duration::from_secs(1);
    assert!(spaced >= least, "five calls at once, at least two more half a second apart: {spaced:?}");
    assert!(free < least, "the same without a rate: {free:?}");
}

/// Creates seven mirror pods. Returns the duration.
async fn write_mirrors(api: &TestApi, pods: Option<Rate>) -> Duration {
    let settings = NodeReportSettings { pods, ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(api), Clock::system(), true, settings).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| !n.is_null()).await;
    let start = tokio::time::Instant::now();
    for n in 0..7 {
        let pod = json!({
            "metadata": {"name": format!("web-{}-{n}", pods.is_some()), "namespace": "default", "uid": "static",
                "annotations": {"kubernetes.io/config.mirror": "a", "kubernetes.io/config.hash": "a"}},
            "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "busybox:1"}]},
        });
        let request = wire::EnsureMirrorRequest { pod: pod.to_string().into_bytes() };
        assert!(service.client.ensure_mirror(request).await.unwrap().into_inner().created);
    }
    let took = start.elapsed();
    service.stop().await;
    took
}

#[tokio::test]
async fn event_writes_observe_the_configured_rate() {
    let api = TestApi::start().await;
    let stop = CancellationToken::new();
    let client = status_reporter::api::ApiClient::new(api.client()).limited(Rate::new(20, 5));
    let recorder = Recorder::start(client, "n1", Clock::system(), Metrics::register(), stop.clone());
    let start = tokio::time::Instant::now();
    for n in 0..15 {
        let event = Occurrence {
            kind: "Pod".into(),
            namespace: "default".into(),
            name: format!("p{n}"),
            event_type: "Normal".into(),
            reason: "Started".into(),
            ..Occurrence::default()
        };
        assert!(recorder.record(event));
    }
    api.wait_for_requests("create events", 15, TEST_TIMEOUT).await;
    let least = Duration::from_millis(10 * 50);
    assert!(start.elapsed() >= least, "five at once, ten more 50 ms apart: {:?}", start.elapsed());
    stop.cancel();
}

/// A call that the server takes while the process stops. Its client sends the event to the next process, if
/// it learns that this one stops.
#[tokio::test(start_paused = true)]
async fn an_event_after_the_stop_is_not_taken_for_one_beyond_a_full_queue() {
    let client = status_reporter::api::ApiClient::following(watch::channel(None).1, Purpose::Events);
    let stop = CancellationToken::new();
    let recorder = Recorder::start(client, "n1", Clock::system(), Metrics::register(), stop.clone());
    let waits = recorder.write(1, Occurrence::default());
    stop.cancel();
    assert_eq!(waits.await, EventOutcome::Stopped);
    assert_eq!(recorder.write(1, Occurrence::default()).await, EventOutcome::Stopped);
    assert!(!recorder.record(Occurrence::default()));
}

/// Tests run on one thread, and so do their tasks.
#[tokio::test]
async fn an_event_refused_by_a_terminating_namespace_is_no_warning() {
    for (failure, level) in [(Failure::NamespaceTerminating, "info"), (Failure::Forbidden, "warn")] {
        let lines = quintlet_testkit::logs::Lines::default();
        let log = quintlet_testkit::logs::capture("status-reporter", tracing::Level::INFO, &lines);
        let _of_this_thread = tracing::dispatcher::set_default(&log);
        let api = TestApi::start().await;
        api.faults().fail("create events", usize::MAX, failure.clone());
        let stop = CancellationToken::new();
        let client = status_reporter::api::ApiClient::new(api.client());
        let recorder = Recorder::start(client, "n1", Clock::system(), Metrics::register(), stop.clone());
        let event = Occurrence {
            kind: "Pod".into(),
            namespace: "default".into(),
            name: "ending".into(),
            event_type: "Warning".into(),
            reason: "Unhealthy".into(),
            ..Occurrence::default()
        };
        assert!(recorder.record(event));
        let reported = async {
            loop {
                let line = lines.all().into_iter().find(|line| line.contains("event dropped"));
                if let Some(line) = line {
                    return line;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let line = tokio::time::timeout(TEST_TIMEOUT, reported).await.expect("the event is given up");
        let line: Value = serde_json::from_str(&line).unwrap();
        let reported = line["level"].as_str().unwrap_or_default().to_lowercase();
        assert_eq!(reported, level, "{failure:?}: {line}");
        stop.cancel();
    }
}

fn in_use(generation: u64, names: &[&str]) -> wire::NodeVolumesRequest {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    wire::NodeVolumesRequest {
        generation,
        in_use: Some(wire::VolumesInUse { names }),
        ..wire::NodeVolumesRequest::default()
    }
}

#[tokio::test]
async fn volumes_in_use_are_written_at_once_and_attachments_are_read_back() {
    let api = TestApi::start().await;
    // A write that is not urgent would come in an hour.
    let hour = Duration::from_secs(3600);
    let settings =
        NodeReportSettings { update_every: hour, report_every: hour, ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    service.facts(&[]).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    let (send, receive) = tokio::sync::mpsc::channel(8);
    let mut replies = service.client.node_volumes(ReceiverStream::new(receive)).await.unwrap().into_inner();
    let mut until = async |wanted: &mut dyn FnMut(&wire::NodeVolumesReply) -> bool| {
        let seen = async {
            loop {
                let reply = replies.message().await.unwrap().expect("the stream is open");
                if wanted(&reply) {
                    return reply;
                }
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, seen).await.expect("the reply arrives")
    };
    let first = until(&mut |_| true).await;
    assert!(first.has_api && first.hello.is_some() && first.generation == 0, "{first:?}");
    send.send(in_use(1, &["kubernetes.io/csi/d^a"])).await.unwrap();
    let written = until(&mut |reply| reply.generation == 1).await;
    assert_eq!(written.volumes_in_use, ["kubernetes.io/csi/d^a"]);
    let live = api.get("nodes", "", "n1").unwrap();
    assert_eq!(live["status"]["volumesInUse"], json!(["kubernetes.io/csi/d^a"]));
    // The attach/detach controller reports the volume, and the write of the next one reads it.
    api.edit("nodes/status", "", "n1", |n| {
        n["status"]["volumesAttached"] = json!([{"name": "kubernetes.io/csi/d^a", "devicePath": "/dev/a"}]);
    })
    .unwrap();
    send.send(in_use(2, &["kubernetes.io/csi/d^a", "kubernetes.io/csi/d^b"])).await.unwrap();
    let attached = until(&mut |reply| reply.generation == 2).await;
    assert_eq!(attached.volumes_attached[0].device_path, "/dev/a");
    service.stop().await;
}

#[tokio::test]
async fn a_burst_of_volumes_that_come_into_use_causes_few_writes() {
    let api = TestApi::start().await;
    let mut service = Running::start(Some(&api)).await;
    service.facts(&[]).await;
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    let (send, receive) = tokio::sync::mpsc::channel(8);
    let mut replies = service.client.node_volumes(ReceiverStream::new(receive)).await.unwrap().into_inner();
    api.reset_counts();
    let names: Vec<String> = (0..100).map(|n| format!("kubernetes.io/csi/d^{n:02}")).collect();
    for at in 1..=names.len() {
        let names: Vec<&str> = names[..at].iter().map(String::as_str).collect();
        send.send(in_use(at.try_into().unwrap(), &names)).await.unwrap();
    }
    let all = |n: &Value| n["status"]["volumesInUse"].as_array().is_some_and(|all| all.len() == names.len());
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, all).await;
    assert!(api.counts().of("patch nodes/status") <= 3, "{:?}", api.counts());
    let written = async { while replies.message().await.unwrap().unwrap().generation != 100 {} };
    tokio::time::timeout(TEST_TIMEOUT, written).await.expect("the last request is acknowledged");
    service.stop().await;
}

#[tokio::test]
async fn without_an_api_server_the_volumes_stream_says_so() {
    let mut service = Running::start(None).await;
    let stream = ReceiverStream::new(tokio::sync::mpsc::channel(1).1);
    let mut replies = service.client.node_volumes(stream).await.unwrap().into_inner();
    let first = tokio::time::timeout(TEST_TIMEOUT, replies.message()).await.unwrap().unwrap().unwrap();
    assert!(!first.has_api && first.resource_version.is_empty());
    service.stop().await;
}
