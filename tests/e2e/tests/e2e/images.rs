//! Images from a registry: pull policies, failures with their back-off, and an interrupted pull.

use quintlet_e2e::registry::Registry;
use quintlet_e2e::{LONG, Node, Options, pods};
use quintlet_kit::messages::whole;
use quintlet_proto::podsync::v1::ListEventsRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use serde_json::{Value, json};

fn pod(name: &str, image: &str, policy: &str) -> Value {
    let mut pod = pods::sleeper(name);
    let main = &mut pod["spec"]["containers"][0];
    main["image"] = json!(image);
    main["imagePullPolicy"] = json!(policy);
    pod
}

/// Messages of a pod's events, oldest first.
async fn events(node: &Node, name: &str) -> Vec<String> {
    let uid = node.pod(name).await.unwrap().uid().to_owned();
    let request = ListEventsRequest { uid, limit: 100 };
    let reply = whole(PodSyncClient::new(node.podsync()).list_events(request)).await.unwrap().into_inner();
    reply.events.into_iter().map(|e| e.message).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_interrupted_by_a_kill_is_repeated_and_its_pod_starts_once() {
    let registry = Registry::start().await;
    registry.push("slow:1");
    registry.close();
    let node = Node::start(Options::standalone("images-cut")).await;
    let recorder = node.record().await;
    node.pod_manifest(&pod("slow", &registry.reference("slow:1"), "IfNotPresent"));
    let held = registry.wait_held(1).await;
    let starts = node.kill9("cri-proxy");
    node.wait_back("cri-proxy", starts, LONG).await;
    // The pull is repeated while the registry still delays layers, so the pod is in a pull when the registry
    // opens.
    registry.wait_held(held + 1).await;
    registry.open();
    let seen = node.wait_ready("slow").await;
    let main = seen.container("main");
    assert_eq!((main.restarts, main.state.as_str()), (0, "running"), "{seen}");
    assert!(main.id.starts_with("containerd://"));
    node.assert_no_duplicates().await;
    assert_eq!(node.listed().await.attempts(seen.uid(), "main").len(), 1);
    let blamed: Vec<String> = recorder
        .records()
        .into_iter()
        .filter_map(|r| r.seen)
        .filter(|s| {
            s.pod["status"].to_string().contains("ErrImagePull")
                || ["ErrImagePull", "ImagePullBackOff"].contains(&s.waits_for())
        })
        .map(|s| s.to_string())
        .collect();
    assert!(blamed.is_empty(), "a pull that was cut is no failed one: {blamed:#?}");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pull_policies_and_the_back_off_of_a_failed_pull() {
    let registry = Registry::start().await;
    for image in ["if-not-present:1", "always:1"] {
        registry.push(image);
    }
    let node = Node::start(Options::standalone("images-policies")).await;
    let missing = registry.reference("missing:1");
    node.pod_manifest(&pod("missing", &missing, "IfNotPresent"));
    node.pod_manifest(&pod("never", &missing, "Never"));

    // The first pod pulls the image. The second one contacts the registry only if its policy requires it.
    for (policy, image, asks_again) in
        [("IfNotPresent", "if-not-present:1", false), ("Always", "always:1", true)]
    {
        let name = |n: u8| format!("{}-{n}", policy.to_lowercase());
        node.pod_manifest(&pod(&name(1), &registry.reference(image), policy));
        node.wait_ready(&name(1)).await;
        let before = registry.resolved(image);
        assert!(before > 0, "{policy}: the first pod did not pull");
        node.pod_manifest(&pod(&name(2), &registry.reference(image), policy));
        node.wait_ready(&name(2)).await;
        assert_eq!(registry.resolved(image) > before, asks_again, "{policy}: the image was there");
    }

    let never = node.wait_pod("never", "refused", LONG, |p| p.waits_for() == "ErrImageNeverPull").await;
    assert_eq!(never.phase(), "Pending");
    // The failure is reported, then the back-off. Once the image exists, the pod starts after its back-off.
    let waiting = |p: &quintlet_e2e::Seen| {
        p.containers().get("main").is_some_and(|c| c.state == "waiting: ImagePullBackOff")
    };
    node.wait_pod("missing", "backing off", LONG, waiting).await;
    let messages = events(&node, "missing").await;
    let place = |what: &str| messages.iter().position(|m| m.contains(what));
    let (failed, waits) = (place("Error: ErrImagePull"), place("Back-off pulling image"));
    assert!(failed.is_some() && failed < waits, "{messages:#?}");
    registry.push("missing:1");
    let seen = node.wait_ready("missing").await;
    assert_eq!(seen.container("main").restarts, 0);
    // An image that another pod pulled is available to a pod that never pulls.
    node.wait_ready("never").await;
    node.assert_no_duplicates().await;
    node.down().await;
}
