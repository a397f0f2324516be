//! Pods that read and write the volumes of their claims, on a real runtime.

use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_e2e::claims::{bound_claim, start_driver, with_claim};
use quintlet_e2e::{LONG, Node, Options, pods, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_reads_and_writes_its_claims_file_and_a_driver_that_hangs_delays_no_neighbour() {
    let node = Node::start(Options::with_api("claims")).await;
    let driver = start_driver(&node);
    bound_claim(&node, "data", |_| {});
    bound_claim(&node, "slow", |_| {});
    let work = "trap 'exit 0' TERM; cat /data/in > /data/out; stat -c %g /data/out > /data/group; sleep 100000 & wait";
    let backing = driver.backing("vol-data");
    std::fs::create_dir_all(&backing).unwrap();
    std::fs::write(backing.join("in"), "kept").unwrap();
    let made = node.cluster().create_pod(with_claim("web", "data", work)).await;
    let uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
    node.wait_ready("web").await;
    until("the pod has written", LONG, async || {
        let read = |name: &str| std::fs::read_to_string(backing.join(name)).unwrap_or_default();
        let written = (read("out"), read("group"));
        if written == ("kept".to_owned(), "4711\n".to_owned()) { Ok(()) } else { Err(written) }
    })
    .await;
    fault::set(driver.state(), &[("NodePublishVolume", Fault::Hang)]).unwrap();
    node.cluster().create_pod(with_claim("slow", "slow", "true")).await;
    until("the driver hangs", LONG, async || {
        let calls = fault::calls(driver.state());
        if calls.iter().any(|call| call == "NodePublishVolume vol-slow") { Ok(()) } else { Err(calls) }
    })
    .await;
    node.cluster().create_pod(pods::bound(pods::sleeper("neighbour"))).await;
    node.wait_ready("neighbour").await;
    // A killed pod-sync leaves the volume to the running pod, and its successor unmounts it at the end.
    fault::set(driver.state(), &[]).unwrap();
    let starts = node.kill9("pod-sync");
    node.wait_back("pod-sync", starts, LONG).await;
    node.cluster().delete("pods", "default", "web").await;
    node.wait_gone(&uid).await;
    until("no mount of the volume left", LONG, async || {
        let mounts = mounts_below(&node.root_dir()).unwrap();
        let left: Vec<_> = mounts.into_iter().filter(|m| m.to_string_lossy().contains(&uid)).collect();
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    assert!(driver.calls_of("NodeUnstageVolume vol-data") > 0, "{:?}", fault::calls(driver.state()));
    assert_eq!(std::fs::read_to_string(backing.join("out")).unwrap(), "kept");
    node.down().await;
    drop(driver);
}
