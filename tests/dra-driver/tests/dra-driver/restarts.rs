//! Claims across restarts of the agent, of drivers and of the machine.

use std::sync::Arc;

use pod_sync_claims::checkpoint::CHECKPOINT;
use quintlet_dra_driver::{Fault, Method};
use quintlet_kit::task;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::agent::{Agent, GPU, pod, uid, wait_calls};

#[tokio::test]
async fn a_pod_keeps_its_devices_over_a_restart_and_a_new_sandbox_prepares_them_again() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    agent.prepare(&p).await.unwrap();
    let agent = agent.restart();
    // A container of the pod starts again, before the driver has registered.
    assert!(agent.claims.holds_all(&uid(&p), &p));
    assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c"]);
    agent.wait_connected(&driver, GPU).await;
    // The machine may have restarted, and the driver has lost its files (kubernetes/kubernetes#141433).
    for _ in 0..2 {
        agent.prepare(&p).await.unwrap();
        assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c"]);
        assert_eq!(driver.calls_of("NodePrepareResources"), 2);
    }
    assert_eq!(agent.recorded("c").unwrap().drivers[GPU].len(), 1);
    let agent = agent.restart();
    agent.wait_connected(&driver, GPU).await;
    agent.unprepare(&p).await.unwrap();
    assert!(driver.prepared().is_empty());
}

#[tokio::test]
async fn a_claim_whose_pod_went_during_the_restart_is_unprepared_once_its_driver_is_there() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    agent.claim("d", &[GPU], &["q"]);
    for p in [pod("p", &["c"]), pod("q", &["d"])] {
        agent.prepare(&p).await.unwrap();
    }
    driver.set_fault(Method::NodeUnprepareResources, Some(Fault::Fail(Code::Internal)));
    let agent = agent.restart();
    let (held, known) = (agent.claims.pods(), ["uid-q".to_owned()].into());
    assert_eq!(held.len(), 2);
    // The driver is away, and then fails.
    agent.claims.reconcile(&held, &known, &[]).await;
    agent.wait_connected(&driver, GPU).await;
    agent.claims.reconcile(&held, &known, &[]).await;
    assert_eq!(driver.prepared(), ["uid-c", "uid-d"]);
    driver.set_fault(Method::NodeUnprepareResources, None);
    agent.claims.reconcile(&held, &known, &[]).await;
    assert_eq!(driver.prepared(), ["uid-d"]);
    assert_eq!((agent.recorded("c"), agent.claims.pods()), (None, known));
}

#[tokio::test]
async fn a_claim_whose_call_the_end_of_the_agent_cut_is_unprepared_by_the_next_one() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    driver.set_fault(Method::NodePrepareResources, Some(Fault::Wait));
    let (claims, same) = (agent.claims.clone(), p.clone());
    drop(task::spawn("prepare", async move {
        claims.prepare(&uid(&same), &same, &CancellationToken::new()).await
    }));
    wait_calls(&driver, "NodePrepareResources", 1).await;
    // The file as it is now is what the next agent finds.
    let record = std::fs::read(agent.path(CHECKPOINT)).unwrap();
    driver.set_fault(Method::NodePrepareResources, None);
    quintlet_testkit::wait::until("the claim is prepared", crate::agent::LONG, async || {
        if agent.claims.read(|claims| claims.in_use().get(GPU) == Some(&1)) {
            Ok(())
        } else {
            Err(driver.calls())
        }
    })
    .await;
    std::fs::write(agent.path(CHECKPOINT), record).unwrap();
    let agent = agent.restart();
    agent.wait_connected(&driver, GPU).await;
    let held = agent.claims.pods();
    agent.claims.reconcile(&held, &[].into(), &[]).await;
    assert!(driver.prepared().is_empty());
}

#[tokio::test]
async fn a_torn_or_lost_checkpoint_is_restored_from_its_copy() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    agent.prepare(&p).await.unwrap();
    std::fs::write(agent.path(CHECKPOINT), "torn").unwrap();
    let agent = agent.restart();
    // Another agent may be the next one.
    assert_eq!(agent.recorded("c").unwrap().drivers[GPU].len(), 1);
    assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c"]);
    std::fs::remove_file(agent.path(CHECKPOINT)).unwrap();
    let agent = agent.restart();
    assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c"]);
    // The claim is gone from the API server, and with it the pod.
    agent.source.remove("c");
    agent.wait_connected(&driver, GPU).await;
    agent.claims.reconcile(&agent.claims.pods(), &[].into(), &[]).await;
    assert!(driver.prepared().is_empty());
}

#[tokio::test]
async fn a_checkpoint_with_null_in_the_place_of_maps_and_lists_is_read() {
    // Go writes null for a map or list that was never made. A kubelet crashes over such a file of the health
    // of devices (kubernetes/kubernetes#140904).
    const NO_CLAIMS: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":null}","Checksum":4010664294}"#;
    const NO_PODS: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"uid-c\",\"ClaimName\":\"c\",\"Namespace\":\"default\",\"PodUIDs\":null,\"DriverState\":null}]}","Checksum":36710264}"#;
    const NO_DEVICES: &str = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":[{\"ClaimUID\":\"uid-c\",\"ClaimName\":\"c\",\"Namespace\":\"default\",\"PodUIDs\":{\"uid-p\":{}},\"DriverState\":{\"gpu.example.com\":{\"Devices\":null}}}]}","Checksum":404900453}"#;
    for (file, pods) in [(NO_CLAIMS, &[][..]), (NO_PODS, &[]), (NO_DEVICES, &["uid-p"])] {
        let agent = Agent::start();
        std::fs::write(agent.path(CHECKPOINT), file).unwrap();
        let agent = agent.restart();
        assert!(!agent.path("dra_manager_state.corrupt").exists(), "{file}");
        assert_eq!(agent.claims.pods(), pods.iter().map(|pod| (*pod).to_owned()).collect(), "{file}");
        let driver = agent.driver(GPU).await;
        agent.claim("c", &[GPU], &["p"]);
        let p = pod("p", &["c"]);
        agent.prepare(&p).await.unwrap();
        assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c"]);
        agent.unprepare(&p).await.unwrap();
        assert!(driver.prepared().is_empty());
    }
}

#[tokio::test]
async fn without_any_record_a_pod_that_runs_is_recorded_again() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    assert!(agent.claims.lacks_pods(), "a new node");
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    agent.prepare(&p).await.unwrap();
    let agent = agent.restart();
    assert!(!agent.claims.lacks_pods());
    let torn = agent.lose_records();
    let agent = agent.restart();
    assert_eq!(std::fs::read(agent.path("dra_manager_state.corrupt")).unwrap(), torn);
    agent.wait_connected(&driver, GPU).await;
    assert!(agent.claims.lacks_pods() && !agent.claims.holds_all(&uid(&p), &p));
    let text = "internal error: unable to get claim info for ResourceClaim c in namespace default";
    let container = &p.spec.as_ref().unwrap().containers[0];
    assert_eq!(agent.claims.cdi_devices(&uid(&p), &p, container).unwrap_err().to_string(), text);
    agent.prepare(&p).await.unwrap();
    assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c"]);
    agent.unprepare(&p).await.unwrap();
    assert!(driver.prepared().is_empty());
}

#[tokio::test]
async fn without_any_record_a_pod_that_ends_is_unprepared_once_its_claim_can_be_read() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    for claim in ["c", "gone"] {
        agent.claim(claim, &[GPU], &["p"]);
    }
    let p = pod("p", &["c", "gone"]);
    agent.prepare(&p).await.unwrap();
    agent.lose_records();
    let agent = agent.restart();
    agent.wait_connected(&driver, GPU).await;
    agent.source.set_away(true);
    let refused = agent.claims.recover(&uid(&p), &p).await.unwrap_err().to_string();
    assert_eq!(refused, "fetch ResourceClaim c: the server is down");
    agent.source.set_away(false);
    // A claim that no longer exists does not keep the pod.
    agent.source.remove("gone");
    agent.claims.recover(&uid(&p), &p).await.unwrap();
    assert_eq!(driver.calls_of("NodePrepareResources"), 1);
    agent.unprepare(&p).await.unwrap();
    assert_eq!(driver.prepared(), ["uid-gone"]);
    assert_eq!((agent.recorded("c"), agent.claims.pods()), (None, [].into()));
}

#[tokio::test]
async fn without_any_record_a_shared_claim_is_not_unprepared_under_a_pod_that_runs() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p", "q"]);
    let (p, q) = (pod("p", &["c"]), pod("q", &["c"]));
    for pod in [&p, &q] {
        agent.prepare(pod).await.unwrap();
    }
    agent.lose_records();
    let agent = agent.restart();
    agent.wait_connected(&driver, GPU).await;
    // The first pod ends before anything has recorded the second one.
    agent.claims.recover(&uid(&p), &p).await.unwrap();
    agent.claims.unprepare(&uid(&p), &[Arc::new(p.clone()), Arc::new(q.clone())]).await.unwrap();
    assert_eq!(driver.prepared(), ["uid-c"]);
    assert_eq!(agent.recorded("c").unwrap().pods, ["uid-q".to_owned()].into());
    agent.unprepare(&q).await.unwrap();
    assert!(driver.prepared().is_empty());
}

#[tokio::test]
async fn no_call_is_made_while_the_record_cannot_be_written() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    agent.claim("d", &[GPU], &["q"]);
    let (p, q) = (pod("p", &["c"]), pod("q", &["d"]));
    agent.prepare(&q).await.unwrap();
    // A directory cannot be replaced by a file.
    std::fs::remove_file(agent.path(CHECKPOINT)).unwrap();
    std::fs::create_dir(agent.path(CHECKPOINT)).unwrap();
    assert!(agent.refused(&p).await.starts_with("checkpoint ResourceClaim state: "));
    assert_eq!(driver.calls_of("NodePrepareResources c"), 0);
    let failed = agent.unprepare(&q).await.unwrap_err().to_string();
    assert!(failed.starts_with("checkpoint ResourceClaim state: "), "{failed}");
    // The pod has ended only when the record does not have it.
    assert!(agent.unprepare(&q).await.is_err());
    std::fs::remove_dir(agent.path(CHECKPOINT)).unwrap();
    agent.unprepare(&q).await.unwrap();
    agent.unprepare(&p).await.unwrap();
    assert_eq!((agent.recorded("c"), agent.recorded("d"), driver.prepared().len()), (None, None, 0));
}
