//! The kubelet's Pods API on its socket.

use std::os::unix::fs::PermissionsExt as _;

use quintlet_kit::socket;
use quintlet_pods_api::v1alpha1::pods_client::PodsClient;
use quintlet_pods_api::v1alpha1::{
    EventType, GetPodRequest, ListPodsRequest, WatchPodsEvent, WatchPodsRequest,
};
use quintlet_simulation::{LONG, Options, Sim, pods};
use quintlet_testkit::wait::until;
use tonic::{Code, Streaming};

/// Returns whether a pod in protobuf has a text as the value of a string.
fn has(pod: &[u8], text: &str) -> bool {
    let value = [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    pod.windows(value.len()).any(|window| window == value)
}

/// Reads events until one of this type, and returns its pod.
async fn next(events: &mut Streaming<WatchPodsEvent>, kind: EventType) -> Vec<u8> {
    loop {
        let event = events.message().await.unwrap().expect("the watch goes on");
        if event.r#type() == kind {
            return event.pod;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_of_the_node_list_get_and_watch_pods_on_their_socket() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    let path = sim.root_dir().join("pods-api/pods-api.sock");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = PodsClient::new(socket::channel(path));

    let listed = client.list_pods(ListPodsRequest {}).await.unwrap().into_inner().pods;
    assert_eq!(listed.len(), 1);
    assert!(has(&listed[0], "first") && has(&listed[0], &uid) && has(&listed[0], "Running"));
    let got = client.get_pod(GetPodRequest { pod_uid: uid.clone() }).await.unwrap().into_inner().pod;
    assert!(has(&got, "first") && has(&got, "Running"));
    let unknown = client.get_pod(GetPodRequest { pod_uid: "unknown".to_owned() }).await.unwrap_err();
    assert_eq!((unknown.code(), unknown.message()), (Code::NotFound, "pod with UID unknown not found"));

    let mut events = client.watch_pods(WatchPodsRequest {}).await.unwrap().into_inner();
    let first = events.message().await.unwrap().unwrap();
    assert_eq!(first.r#type(), EventType::Added);
    assert!(has(&first.pod, "first"));
    assert_eq!(next(&mut events, EventType::InitialSyncComplete).await, b"");
    let second = sim.create(pods::single("second"));
    let added = next(&mut events, EventType::Added).await;
    assert!(has(&added, "second") && has(&added, &second));
    sim.delete("first", None);
    let deleted = next(&mut events, EventType::Deleted).await;
    assert!(has(&deleted, "first") && has(&deleted, &uid) && !has(&deleted, "Succeeded"));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_no_socket_of_the_pods_api_without_its_feature_gate() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--feature-gates=PodsAPI=false"]);
    sim.start_all();
    let _uid = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    assert!(!sim.root_dir().join("pods-api").exists());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pods_api_is_not_ready_while_the_api_server_has_not_delivered_the_pods() {
    let sim = Sim::prepare(Options::default()).await;
    sim.api.faults().set_down(true);
    sim.start_all();
    let mut client = PodsClient::new(socket::channel(sim.root_dir().join("pods-api/pods-api.sock")));
    let call = async |client: &mut PodsClient<_>| {
        client.list_pods(ListPodsRequest {}).await.map(|listed| listed.into_inner().pods.len())
    };
    until("the socket", LONG, async || match call(&mut client.clone()).await {
        Err(status) if status.code() == Code::FailedPrecondition => {
            assert_eq!(status.message(), "Kubelet is initializing");
            Ok(())
        }
        other => Err(other),
    })
    .await;
    sim.api.faults().set_down(false);
    let _uid = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    assert_eq!(call(&mut client).await.unwrap(), 1);
    sim.finish().await;
}
