//! The CSINode, and what CSI drivers add to the Node, against a test API server.

use std::time::Duration;

use quintlet_kit::clock::Clock;
use quintlet_proto::status::v1 as wire;
use quintlet_testapi::{Failure, TestApi};
use serde_json::{Value, json};
use status_reporter::node::csi_node::CsiNodeKeeper;
use status_reporter::node::volumes::{Driver, Report, StorageCondition, VolumeBoard, Volumes};
use status_reporter::run::NodeReportSettings;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::common::{Running, TEST_TIMEOUT, ready};

const NODE_ID: &str = "csi.volume.kubernetes.io/nodeid";

fn driver(node_id: &str, topology: &[(&str, &str)], allocatable: Option<i32>) -> Driver {
    let topology = topology.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Driver { node_id: node_id.to_owned(), topology, allocatable, ..Driver::default() }
}

fn volumes<const N: usize>(drivers: [(&str, Driver); N], removed: &[&str]) -> Volumes {
    Volumes {
        drivers: drivers.into_iter().map(|(name, driver)| (name.to_owned(), driver)).collect(),
        removed: removed.iter().map(|name| (*name).to_owned()).collect(),
        in_use: None,
    }
}

/// A CSINode keeper of Node n1.
struct Kept {
    api: TestApi,
    board: VolumeBoard,
    stop: CancellationToken,
}

impl Kept {
    async fn start(check_every: Duration, prepare: impl FnOnce(&TestApi)) -> Self {
        let api = TestApi::start().await;
        api.create("nodes", "", json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}))
            .unwrap();
        prepare(&api);
        let (board, stop) = (VolumeBoard::default(), CancellationToken::new());
        let client = status_reporter::api::ApiClient::new(api.client());
        let keeper = CsiNodeKeeper {
            api: client,
            volumes: board.clone(),
            clock: Clock::system(),
            check_every,
            refused_pause: check_every,
        };
        tokio::spawn(keeper.run(stop.clone()));
        let kept = Self { api, board, stop };
        kept.publish();
        kept
    }

    /// Publishes the Node as it is, as the keeper of the Node does after each read.
    fn publish(&self) {
        self.board.publish(&self.node(), &Report::default());
    }

    fn node(&self) -> Value {
        self.api.get("nodes", "", "n1").unwrap()
    }

    async fn wait(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        self.api.wait_for("csinodes", "", "n1", TEST_TIMEOUT, wanted).await
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn names(csi_node: &Value) -> Vec<&str> {
    let drivers = csi_node["spec"]["drivers"].as_array().map(Vec::as_slice).unwrap_or_default();
    drivers.iter().filter_map(|driver| driver["name"].as_str()).collect()
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn drivers_are_added_to_the_node_and_its_csi_node_and_removed_from_both() {
    let kept = Kept::start(HOUR, |_| {}).await;
    let created = kept.wait(|csi_node| !csi_node.is_null()).await;
    assert_eq!(created["metadata"]["ownerReferences"][0]["uid"], kept.node()["metadata"]["uid"]);
    assert!(names(&created).is_empty());
    let d = driver("id-1", &[("d.csi/zone", "z1")], Some(3));
    let _number = kept.board.put(volumes([("d.csi", d), ("e.csi", driver("id-2", &[], None))], &[]));
    let both = kept.wait(|csi_node| names(csi_node) == ["d.csi", "e.csi"]).await;
    assert_eq!(
        both["spec"]["drivers"][0],
        json!({"name": "d.csi", "nodeID": "id-1", "topologyKeys": ["d.csi/zone"], "allocatable": {"count": 3}})
    );
    let node = kept.node();
    assert_eq!(node["metadata"]["annotations"][NODE_ID], r#"{"d.csi":"id-1","e.csi":"id-2"}"#);
    assert_eq!(node["metadata"]["labels"]["d.csi/zone"], "z1");
    // The Node that the keeper of the Node has read before the patches causes no further ones.
    kept.api.reset_counts();
    let _number = kept.board.put(volumes([("e.csi", driver("id-2", &[], None))], &["d.csi"]));
    kept.wait(|csi_node| names(csi_node) == ["e.csi"]).await;
    let left = |n: &Value| n["metadata"]["annotations"][NODE_ID] == r#"{"e.csi":"id-2"}"#;
    let node = kept.api.wait_for("nodes", "", "n1", TEST_TIMEOUT, left).await;
    assert_eq!(node["metadata"]["labels"]["d.csi/zone"], "z1", "labels stay");
    let counts = kept.api.counts();
    assert_eq!((counts.of("update csinodes"), counts.of("patch nodes/status")), (1, 1), "{counts:?}");
    assert_eq!(counts.of("get csinodes"), 0, "the written CSINode needs no read");
}

#[tokio::test]
async fn conflicts_and_failures_are_retried_and_fields_of_others_stay() {
    let kept = Kept::start(HOUR, |api| {
        api.faults().fail("get csinodes", 1, Failure::Unavailable);
        api.faults().fail("create csinodes", 1, Failure::LoseReply);
        api.faults().fail("patch nodes/status", 1, Failure::Internal);
    })
    .await;
    let created = kept.wait(|csi_node| !csi_node.is_null()).await;
    assert!(created["metadata"]["annotations"]["storage.alpha.kubernetes.io/migrated-plugins"].is_string());
    kept.api.edit("csinodes", "", "n1", |c| c["metadata"]["labels"] = json!({"a": "b"})).unwrap();
    kept.api.faults().fail("update csinodes", 1, Failure::Conflict);
    let _number = kept.board.put(volumes([("d.csi", driver("id-1", &[], None))], &[]));
    let written = kept.wait(|csi_node| names(csi_node) == ["d.csi"]).await;
    assert_eq!(written["metadata"]["labels"]["a"], "b");
    // An ID cannot be changed in place.
    let _number = kept.board.put(volumes([("d.csi", driver("id-9", &[], None))], &[]));
    kept.wait(|csi_node| csi_node["spec"]["drivers"][0]["nodeID"] == "id-9").await;
    assert_eq!(kept.node()["metadata"]["annotations"][NODE_ID], r#"{"d.csi":"id-9"}"#);
}

#[tokio::test]
async fn a_deleted_csi_node_is_created_again_with_its_drivers() {
    let kept = Kept::start(Duration::from_millis(20), |_| {}).await;
    let _number = kept.board.put(volumes([("d.csi", driver("id-1", &[], None))], &[]));
    kept.wait(|csi_node| names(csi_node) == ["d.csi"]).await;
    kept.api.delete("csinodes", "", "n1", None).unwrap();
    kept.wait(|csi_node| names(csi_node) == ["d.csi"]).await;
}

#[tokio::test]
async fn a_driver_whose_label_is_refused_does_not_keep_another_one_out() {
    let kept = Kept::start(HOUR, |api| {
        api.edit("nodes", "", "n1", |n| n["metadata"]["labels"] = json!({"d.csi/zone": "z2"})).unwrap();
    })
    .await;
    let d = driver("id-1", &[("d.csi/zone", "z1")], None);
    let _number = kept.board.put(volumes([("d.csi", d), ("e.csi", driver("id-2", &[], None))], &[]));
    let csi_node = kept.wait(|csi_node| !names(csi_node).is_empty()).await;
    assert_eq!(names(&csi_node), ["e.csi"]);
    let node = kept.node();
    assert_eq!(node["metadata"]["annotations"][NODE_ID], r#"{"e.csi":"id-2"}"#);
    assert_eq!(node["metadata"]["labels"]["d.csi/zone"], "z2");
    // The administrator corrects the label, and the keeper of the Node reads it.
    kept.api.edit("nodes", "", "n1", |n| n["metadata"]["labels"] = json!({})).unwrap();
    kept.publish();
    kept.wait(|csi_node| names(csi_node) == ["e.csi", "d.csi"]).await;
}

#[tokio::test]
async fn a_node_is_ready_once_its_csi_node_is_written() {
    let api = TestApi::start().await;
    api.faults().fail("* csinodes", usize::MAX, Failure::Forbidden);
    let settings =
        NodeReportSettings { update_every: HOUR, report_every: HOUR, ..NodeReportSettings::default() };
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings.clone()).await;
    service.facts(&[]).await;
    let text = "CSINode is not yet initialized";
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).1 == text).await;
    assert_eq!(ready(&node).0, "False");
    api.faults().clear();
    api.wait_for("nodes", "", "n1", TEST_TIMEOUT, |n| ready(n).0 == "True").await;
    // The drivers of the stream reach the CSINode.
    let driver =
        wire::CsiDriver { name: "d.csi".into(), node_id: "id-1".into(), ..wire::CsiDriver::default() };
    let request = wire::NodeVolumesRequest { generation: 1, drivers: vec![driver], ..Default::default() };
    let (send, receive) = tokio::sync::mpsc::channel(1);
    let _replies = service.client.node_volumes(ReceiverStream::new(receive)).await.unwrap();
    send.send(request).await.unwrap();
    api.wait_for("csinodes", "", "n1", TEST_TIMEOUT, |csi_node| names(csi_node) == ["d.csi"]).await;
    service.stop().await;
    // The next process leaves Ready as it is until it has read the CSINode.
    api.faults().fail("get csinodes", usize::MAX, Failure::Unavailable);
    let mut service = Running::start_with(Some(&api), Clock::system(), true, settings).await;
    service.facts_of("127.0.0.2", &[]).await;
    let written = |n: &Value| n["status"]["addresses"][0]["address"] == "127.0.0.2";
    let node = api.wait_for("nodes", "", "n1", TEST_TIMEOUT, written).await;
    assert_eq!(ready(&node).0, "True");
    service.stop().await;
}

/// A driver whose storage has conditions with these reasons.
fn sick(reasons: &[&str]) -> Driver {
    let condition = |reason: &&str| StorageCondition {
        status: "StorageDegraded".to_owned(),
        reason: (*reason).to_owned(),
        message: format!("{reason}!"),
        ..StorageCondition::default()
    };
    let storage_health = Some(reasons.iter().map(condition).collect());
    Driver { storage_health, ..driver("id-1", &[], None) }
}

/// The health of storage in a CSINode, as text.
fn storage_of(csi_node: &Value) -> String {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let entry = |entry: &Value| {
        let reasons: Vec<String> = list(&entry["healthConditions"])
            .iter()
            .map(|condition| {
                assert!(condition["lastTransitionTime"].is_string(), "{condition}");
                condition["reason"].as_str().unwrap().to_owned()
            })
            .collect();
        format!("{}={}", entry["name"].as_str().unwrap(), reasons.join(","))
    };
    list(&csi_node["status"]["storageHealth"]).iter().map(entry).collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn the_health_of_storage_is_the_status_of_the_csi_node() {
    let kept = Kept::start(HOUR, |_| {}).await;
    let _number = kept.board.put(volumes([("d.csi", sick(&["Slow"])), ("e.csi", sick(&[]))], &[]));
    kept.wait(|csi_node| storage_of(csi_node) == "d.csi=Slow").await;
    // Another client writes the object meanwhile.
    kept.api.edit("csinodes", "", "n1", |c| c["metadata"]["labels"] = json!({"a": "b"})).unwrap();
    let _number =
        kept.board.put(volumes([("d.csi", sick(&["Slow", "Full"])), ("e.csi", sick(&["Gone"]))], &[]));
    let written = kept.wait(|csi_node| storage_of(csi_node) == "d.csi=Slow,Full e.csi=Gone").await;
    assert_eq!((names(&written), &written["metadata"]["labels"]["a"]), (vec!["d.csi", "e.csi"], &json!("b")));
    // The same conditions with other messages, and drivers that were not asked yet, cause no write.
    kept.api.reset_counts();
    let mut same = sick(&["Full", "Slow"]);
    same.storage_health.as_mut().unwrap()[0].message = "other".to_owned();
    for drivers in [
        [("d.csi", same), ("e.csi", sick(&["Gone"]))],
        [("d.csi", driver("id-1", &[], None)), ("e.csi", driver("id-1", &[], None))],
    ] {
        let _number = kept.board.put(volumes(drivers, &[]));
    }
    let _number = kept.board.put(volumes([("d.csi", sick(&[]))], &["e.csi"]));
    let recovered = kept.wait(|csi_node| storage_of(csi_node).is_empty()).await;
    assert_eq!(names(&recovered), ["d.csi"]);
    assert_eq!(kept.api.counts().of("* csinodes/status"), 1, "{:?}", kept.api.counts());
}

#[tokio::test]
async fn an_api_server_without_the_health_of_storage_gets_it_again_after_a_pause() {
    const PAUSE: Duration = Duration::from_millis(500);
    for name in ["forbidden", "unserved", "dropped"] {
        let limit = |api: &TestApi| {
            let faults = api.faults();
            match name {
                "forbidden" => faults.fail("patch csinodes/status", usize::MAX, Failure::Forbidden),
                "unserved" => faults.set_unserved(&["storage.k8s.io/v1/csinodes/status"]),
                _ => faults.set_unknown_fields(&["csinodes /status/storageHealth"]),
            }
        };
        let began = tokio::time::Instant::now();
        let kept = Kept::start(PAUSE, limit).await;
        let _number = kept.board.put(volumes([("d.csi", sick(&["Slow"]))], &[]));
        if name == "unserved" {
            // Such a request is not counted.
            kept.wait(|csi_node| names(csi_node) == ["d.csi"]).await;
        } else {
            kept.api.wait_for_requests("patch csinodes/status", 1, TEST_TIMEOUT).await;
        }
        // Drivers are reported meanwhile.
        let more = [("d.csi", sick(&["Slow", "Full"])), ("e.csi", sick(&[]))];
        let _number = kept.board.put(volumes(more, &[]));
        kept.wait(|csi_node| names(csi_node) == ["d.csi", "e.csi"]).await;
        let _number = kept.board.put(volumes([("d.csi", sick(&["Slow"]))], &["e.csi"]));
        kept.wait(|csi_node| names(csi_node) == ["d.csi"]).await;
        let pauses = u64::try_from(began.elapsed().as_millis() / PAUSE.as_millis()).unwrap();
        let calls = kept.api.counts().of("patch csinodes/status");
        assert!(calls <= 1 + pauses, "{name}: {pauses} {:?}", kept.api.counts());
        kept.api.faults().clear();
        kept.api.faults().set_unserved(&[]);
        kept.api.faults().set_unknown_fields(&[]);
        kept.wait(|csi_node| storage_of(csi_node) == "d.csi=Slow").await;
    }
}
