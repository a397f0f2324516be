//! Claims of pods: the calls of drivers, and their faults.

use std::time::Duration;

use pod_sync_claims::ClaimError;
use quintlet_dra_driver::{Fault, Method};
use quintlet_kit::task;
use quintlet_plugin_api::dra::v1::Device;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::agent::{Agent, GPU, codes, pod, uid, wait_calls};

const NIC: &str = "nic.example.com";

#[tokio::test]
async fn a_claim_is_recorded_before_its_call_and_unprepared_after_the_end_of_its_pod() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let pod = pod("p", &["c"]);
    driver.set_fault(Method::NodePrepareResources, Some(Fault::Wait));
    let (claims, same) = (agent.claims.clone(), pod.clone());
    let prepared =
        task::spawn(
            "prepare",
            async move { claims.prepare(&uid(&same), &same, &CancellationToken::new()).await },
        );
    wait_calls(&driver, "v1 NodePrepareResources c", 1).await;
    let record = agent.recorded("c").unwrap();
    assert_eq!((record.uid.as_str(), record.pods), ("uid-c", ["uid-p".to_owned()].into()));
    assert!(record.drivers[GPU].is_empty());
    assert!(!prepared.is_finished());
    driver.set_fault(Method::NodePrepareResources, None);
    prepared.await.unwrap().unwrap();
    assert_eq!(agent.cdi(&pod), ["gpu.example.com/claim=c"]);
    assert_eq!(agent.recorded("c").unwrap().drivers[GPU][0].cdi, ["gpu.example.com/claim=c"]);
    // Another sandbox of the pod needs no call.
    agent.prepare(&pod).await.unwrap();
    assert_eq!(driver.calls(), ["v1 NodePrepareResources c"]);
    agent.unprepare(&pod).await.unwrap();
    assert_eq!((agent.recorded("c"), driver.prepared().len()), (None, 0));
    agent.unprepare(&pod).await.unwrap();
    assert_eq!(driver.calls(), ["v1 NodePrepareResources c", "v1 NodeUnprepareResources c"]);
}

#[tokio::test]
async fn the_claims_of_a_driver_are_in_one_call_and_a_shared_claim_outlives_its_first_pod() {
    let agent = Agent::start();
    let (gpu, nic) = (agent.driver(GPU).await, agent.driver(NIC).await);
    agent.claim("a", &[GPU], &["p", "q"]);
    agent.claim("b", &[GPU, NIC], &["p"]);
    let (p, q) = (pod("p", &["a", "b"]), pod("q", &["a"]));
    agent.prepare(&p).await.unwrap();
    agent.prepare(&q).await.unwrap();
    assert_eq!(gpu.calls(), ["v1 NodePrepareResources a b"]);
    assert_eq!(nic.calls(), ["v1 NodePrepareResources b"]);
    let all = ["gpu.example.com/claim=a", "gpu.example.com/claim=b", "nic.example.com/claim=b"];
    assert_eq!(agent.cdi(&p), all);
    agent.unprepare(&p).await.unwrap();
    assert_eq!(gpu.calls().last().unwrap(), "v1 NodeUnprepareResources b");
    assert_eq!((gpu.prepared(), nic.prepared().len()), (vec!["uid-a".to_owned()], 0));
    assert_eq!(agent.cdi(&q), ["gpu.example.com/claim=a"]);
    agent.unprepare(&q).await.unwrap();
    assert_eq!(gpu.calls().last().unwrap(), "v1 NodeUnprepareResources a");
    assert!(gpu.prepared().is_empty());
}

#[tokio::test]
async fn a_container_gets_the_devices_of_the_chosen_subrequest() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let device = |name: &str, request: &str| Device {
        request_names: vec![request.to_owned()],
        pool_name: "pool".to_owned(),
        device_name: name.to_owned(),
        cdi_device_ids: vec![format!("{GPU}/gpu={name}"), format!("{GPU}/gpu=common")],
        share_id: Some("share".to_owned()),
    };
    driver.set_devices("c", vec![device("d1", "first/large"), device("d2", "second")]);
    let mut p = pod("p", &["c"]);
    agent.prepare(&p).await.unwrap();
    assert_eq!(agent.recorded("c").unwrap().drivers[GPU][0].share.as_deref(), Some("share"));
    for (request, expected) in [
        (json!("first"), vec!["gpu.example.com/gpu=d1", "gpu.example.com/gpu=common"]),
        (json!("second"), vec!["gpu.example.com/gpu=d2", "gpu.example.com/gpu=common"]),
        (json!(null), vec!["gpu.example.com/gpu=d1", "gpu.example.com/gpu=common", "gpu.example.com/gpu=d2"]),
    ] {
        let resources = json!({"claims": [{"name": "c", "request": request}]});
        p.spec.as_mut().unwrap().containers[0].resources = Some(serde_json::from_value(resources).unwrap());
        assert_eq!(agent.cdi(&p), expected);
    }
}

#[tokio::test]
async fn a_claim_with_a_part_of_a_device_a_share_and_tolerations_is_prepared_as_any_other() {
    // What the scheduler and controllers need in the result of an allocation.
    let details = json!({
        "adminAccess": false,
        "bindingConditions": ["example.com/attached"],
        "bindingFailureConditions": ["example.com/failed"],
        "consumedCapacity": {"memory": "1Gi"},
        "shareID": "a671734a-e8e5-11e4-8fde-42010af09327",
        "tolerations": [{"key": "example.com/broken", "operator": "Exists", "effect": "NoExecute"}],
    });
    let mut seen = Vec::new();
    for details in [json!({}), details] {
        let agent = Agent::start();
        let driver = agent.driver(GPU).await;
        let mut result = json!({"driver": GPU, "pool": "pool", "device": "gpu-0-part-1", "request": "r"});
        result.as_object_mut().unwrap().extend(details.as_object().unwrap().clone());
        agent.allocated_claim("c", "uid-c", vec![result], &["p"]);
        let p = pod("p", &["c"]);
        agent.prepare(&p).await.unwrap();
        seen.push((agent.recorded("c").unwrap(), agent.cdi(&p)));
        agent.unprepare(&p).await.unwrap();
        assert_eq!(driver.calls(), ["v1 NodePrepareResources c", "v1 NodeUnprepareResources c"]);
        assert!(driver.prepared().is_empty());
    }
    assert_eq!(seen[0], seen[1]);
}

#[tokio::test]
async fn a_pod_that_may_not_use_its_claim_is_refused_and_nothing_is_recorded() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["other"]);
    let p = pod("p", &["c"]);
    assert_eq!(agent.refused(&p).await, "pod p (uid-p) is not allowed to use ResourceClaim c (uid-c)");
    agent.claim("c", &[GPU], &["p"]);
    assert_eq!(agent.refused(&p).await, "DRA driver gpu.example.com is not registered");
    agent.claim("c", &[""], &["p"]);
    assert_eq!(agent.refused(&p).await, "DRA driver name is empty");
    let absent = pod("p", &["absent"]);
    let text = r#"fetch ResourceClaim absent: resourceclaims.resource.k8s.io "absent" not found"#;
    assert_eq!(agent.refused(&absent).await, text);
    assert!(agent.claims.pods().is_empty());
    agent.unprepare(&p).await.unwrap();
    let message = ClaimError::NotRegistered(GPU.to_owned()).prepare_message();
    let text = "Failed to prepare dynamic resources: prepare dynamic resources: DRA driver gpu.example.com is not registered";
    assert_eq!(message, text);
}

#[tokio::test]
async fn each_code_of_a_failed_call_is_in_the_text_and_the_claim_is_prepared_by_a_later_attempt() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    for (code, name) in codes() {
        driver.set_fault(Method::NodePrepareResources, Some(Fault::Fail(code)));
        let text =
            format!("NodePrepareResources: rpc error: code = {name} desc = NodePrepareResources fails");
        assert_eq!(agent.refused(&p).await, text);
        assert_eq!(agent.claims.drivers()[GPU].error.as_ref(), Some(&text));
        // The driver may have prepared the claim.
        assert!(agent.recorded("c").is_some());
    }
    driver.set_fault(Method::NodePrepareResources, None);
    agent.prepare(&p).await.unwrap();
    assert_eq!(agent.claims.drivers()[GPU].error, None);
    for (code, name) in codes() {
        driver.set_fault(Method::NodeUnprepareResources, Some(Fault::Fail(code)));
        let text =
            format!("NodeUnprepareResources: rpc error: code = {name} desc = NodeUnprepareResources fails");
        assert_eq!(agent.unprepare(&p).await.unwrap_err().to_string(), text);
        assert!(agent.claims.holds_any(&uid(&p)));
    }
    driver.set_fault(Method::NodeUnprepareResources, None);
    agent.unprepare(&p).await.unwrap();
    assert!(driver.prepared().is_empty() && agent.recorded("c").is_none());
}

#[tokio::test]
async fn errors_of_single_claims_and_lies_have_the_kubelets_texts() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("a", &[GPU], &["p"]);
    agent.claim("b", &[GPU], &["p"]);
    let p = pod("p", &["a", "b"]);
    let faults = [
        (Fault::FailClaim("b".to_owned()), "failed for ResourceClaim b: on fire"),
        (Fault::Skip("b".to_owned()), "skipped 1 ResourceClaims"),
        (Fault::Add("uid-x".to_owned()), "returned result for unknown claim UID uid-x"),
    ];
    for (fault, text) in &faults {
        driver.set_fault(Method::NodePrepareResources, Some(fault.clone()));
        assert_eq!(agent.refused(&p).await, format!("NodePrepareResources {text}"));
    }
    driver.set_fault(Method::NodePrepareResources, None);
    let device = |cdi: &str| Device { cdi_device_ids: vec![cdi.to_owned()], ..Device::default() };
    driver.set_devices("b", vec![device(&"x".repeat(1 << 20))]);
    let text = "NodePrepareResources returned an unusable device for ResourceClaim b: name of a CDI device with 1048576 bytes";
    assert_eq!(agent.refused(&p).await, text);
    driver.set_devices("b", vec![device(&"x".repeat(5 << 20))]);
    assert!(agent.refused(&p).await.starts_with("NodePrepareResources: rpc error: code = "));
    driver.set_devices("b", vec![device("a.com/d=1"), device("a.com/d=1")]);
    agent.prepare(&p).await.unwrap();
    assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=a", "a.com/d=1"]);
    for (fault, text) in &faults[..2] {
        driver.set_fault(Method::NodeUnprepareResources, Some(fault.clone()));
        let error = agent.unprepare(&p).await.unwrap_err().to_string();
        assert_eq!(error, format!("NodeUnprepareResources {text}"));
        // The other claim is unprepared already.
        assert_eq!((agent.recorded("a"), driver.prepared()), (None, vec!["uid-b".to_owned()]));
    }
    driver.set_fault(Method::NodeUnprepareResources, Some(faults[2].0.clone()));
    agent.unprepare(&p).await.unwrap();
    assert!(agent.claims.pods().is_empty());
}

#[tokio::test]
async fn a_driver_that_fails_leaves_the_other_ones_part_to_be_unprepared() {
    let agent = Agent::start();
    let (gpu, nic) = (agent.driver(GPU).await, agent.driver(NIC).await);
    agent.claim("c", &[GPU, NIC], &["p"]);
    let p = pod("p", &["c"]);
    nic.set_fault(Method::NodePrepareResources, Some(Fault::Fail(Code::Internal)));
    for _ in 0..2 {
        assert!(agent.refused(&p).await.starts_with("NodePrepareResources: rpc error: code = Internal"));
    }
    nic.set_fault(Method::NodePrepareResources, None);
    agent.prepare(&p).await.unwrap();
    // No device twice.
    assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c", "nic.example.com/claim=c"]);
    assert_eq!(agent.recorded("c").unwrap().drivers[GPU].len(), 1);
    nic.set_fault(Method::NodeUnprepareResources, Some(Fault::Fail(Code::Internal)));
    assert!(agent.unprepare(&p).await.is_err());
    assert_eq!((gpu.prepared().len(), nic.prepared().len()), (0, 1));
    nic.set_fault(Method::NodeUnprepareResources, None);
    agent.unprepare(&p).await.unwrap();
    assert!(nic.prepared().is_empty() && agent.recorded("c").is_none());
}

#[tokio::test]
async fn a_driver_that_hangs_delays_its_own_pods_only_and_not_longer_than_its_time_limit() {
    let agent = Agent::start();
    let (gpu, _nic) = (agent.driver(GPU).await, agent.driver(NIC).await);
    agent.claim("slow", &[GPU], &["slow"]);
    agent.claim("fast", &[NIC], &["fast"]);
    let (slow, fast) = (pod("slow", &["slow"]), pod("fast", &["fast"]));
    for method in [Method::NodePrepareResources, Method::NodeUnprepareResources] {
        let is_prepare = method == Method::NodePrepareResources;
        gpu.set_fault(method, Some(Fault::Hang));
        let began = Instant::now();
        let (claims, same) = (agent.claims.clone(), slow.clone());
        let operation = task::spawn("slow", async move {
            match is_prepare {
                true => claims.prepare(&uid(&same), &same, &CancellationToken::new()).await,
                false => claims.unprepare(&uid(&same), &[]).await,
            }
        });
        agent.prepare(&fast).await.unwrap();
        agent.unprepare(&fast).await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(!operation.is_finished());
        let text = format!("{method:?}: rpc error: code = DeadlineExceeded desc = context deadline exceeded");
        assert_eq!(operation.await.unwrap().unwrap_err().to_string(), text);
        let took = began.elapsed();
        assert!(took >= Duration::from_secs(45) && took < Duration::from_secs(50), "{took:?}");
        gpu.set_fault(method, None);
        if is_prepare {
            agent.prepare(&slow).await.unwrap();
        }
    }
    agent.unprepare(&slow).await.unwrap();
    assert!(gpu.prepared().is_empty());
}

#[tokio::test]
async fn a_pod_that_ends_during_a_call_is_unprepared_after_it_and_not_beside_it() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    driver.set_fault(Method::NodePrepareResources, Some(Fault::Wait));
    let cancel = CancellationToken::new();
    let (claims, same) = (agent.claims.clone(), p.clone());
    let canceled = cancel.clone();
    let prepared = task::spawn("prepare", async move { claims.prepare(&uid(&same), &same, &canceled).await });
    wait_calls(&driver, "NodePrepareResources", 1).await;
    cancel.cancel();
    assert_eq!(prepared.await.unwrap(), Err(ClaimError::Ending));
    let (claims, same) = (agent.claims.clone(), p.clone());
    let unprepared = task::spawn("unprepare", async move { claims.unprepare(&uid(&same), &[]).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!unprepared.is_finished() && driver.calls_of("NodeUnprepareResources") == 0);
    driver.set_fault(Method::NodePrepareResources, None);
    unprepared.await.unwrap().unwrap();
    assert!(driver.prepared().is_empty() && driver.overlaps().is_empty());
    // A pod that ends before its claims are recorded needs no call.
    let canceled = CancellationToken::new();
    canceled.cancel();
    assert_eq!(agent.claims.prepare(&uid(&p), &p, &canceled).await, Err(ClaimError::Ending));
    tokio::time::sleep(Duration::from_secs(1)).await;
    agent.unprepare(&p).await.unwrap();
    assert!(driver.prepared().is_empty(), "{:?}", driver.calls());
}

#[tokio::test]
async fn a_pod_that_comes_while_its_shared_claim_is_unprepared_waits_and_prepares_it_again() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p", "q"]);
    let (p, q) = (pod("p", &["c"]), pod("q", &["c"]));
    agent.prepare(&p).await.unwrap();
    driver.set_fault(Method::NodeUnprepareResources, Some(Fault::Wait));
    let (claims, same) = (agent.claims.clone(), p.clone());
    let unprepared = task::spawn("unprepare", async move { claims.unprepare(&uid(&same), &[]).await });
    wait_calls(&driver, "NodeUnprepareResources", 1).await;
    let (claims, same) = (agent.claims.clone(), q.clone());
    let prepared =
        task::spawn(
            "prepare",
            async move { claims.prepare(&uid(&same), &same, &CancellationToken::new()).await },
        );
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!prepared.is_finished());
    driver.set_fault(Method::NodeUnprepareResources, None);
    unprepared.await.unwrap().unwrap();
    prepared.await.unwrap().unwrap();
    assert_eq!(driver.prepared(), ["uid-c"]);
    assert_eq!(driver.calls_of("NodePrepareResources"), 2);
    assert!(driver.overlaps().is_empty());
    assert_eq!(agent.recorded("c").unwrap().pods, ["uid-q".to_owned()].into());
}

#[tokio::test]
async fn a_claim_that_was_deleted_and_created_again_is_prepared_after_the_earlier_one() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    agent.prepare(&p).await.unwrap();
    agent.claim_with("c", "uid-later", &[GPU], &["q"]);
    let q = pod("q", &["c"]);
    let text = "old ResourceClaim with same name c and different UID uid-c still exists (previous pod force-deleted?!)";
    assert_eq!(agent.refused(&q).await, text);
    let held = agent.claims.pods();
    agent.claims.reconcile(&held, &["uid-q".to_owned()].into(), &[]).await;
    agent.prepare(&q).await.unwrap();
    assert_eq!(driver.prepared(), ["uid-later"]);
}
