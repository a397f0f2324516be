//! Registration of drivers, their updates, and the removal of their ResourceSlices.

use std::os::unix::fs::symlink;
use std::time::Duration;

use pod_sync_claims::WIPE_DELAY;
use quintlet_dra_driver::{Fault, Method, TestDriver};
use quintlet_testkit::wait::until;
use tonic::Code;

use crate::agent::{Agent, GPU, LONG, pod, wait_informed};

/// Waits until the first answer to a registration, which has failed with this text.
async fn refused(driver: &TestDriver, text: &str) {
    until("the refusal", LONG, async || {
        let informed = driver.informed();
        if informed.first() == Some(&Err(text.to_owned())) { Ok(()) } else { Err(informed) }
    })
    .await;
}

#[tokio::test]
async fn the_latest_version_that_a_driver_names_is_called() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    for (services, version) in [
        (&["v1beta1.DRAPlugin"][..], "v1beta1"),
        (&["v1beta1.DRAPlugin", "v1.DRAPlugin"], "v1"),
        (&["v1.DRAPlugin"], "v1"),
    ] {
        let driver = agent.driver_as(GPU, GPU, services).await;
        agent.prepare(&p).await.unwrap();
        assert_eq!(agent.cdi(&p), ["gpu.example.com/claim=c"]);
        agent.unprepare(&p).await.unwrap();
        let calls = ["Prepare", "Unprepare"].map(|name| format!("{version} Node{name}Resources c"));
        assert_eq!(driver.calls(), calls);
        std::fs::remove_file(driver.socket()).unwrap();
        agent.wait_endpoints(GPU, &[]).await;
        assert_eq!(agent.refused(&p).await, "DRA driver gpu.example.com is not registered");
    }
}

#[tokio::test]
async fn bad_registrations_are_refused_with_the_kubelets_texts() {
    let agent = Agent::start();
    let failed = "RegisterPlugin error -- plugin validation failed with err:";
    let socket = agent.socket("none");
    let none = TestDriver::start_as(&socket, GPU, &[]);
    let at = socket.display();
    let text = format!(
        "{failed} invalid supported gRPC versions of DRA driver plugin {GPU} at endpoint {at}: empty list of supported gRPC services (aka supported versions)"
    );
    refused(&none, &text).await;
    let socket = agent.socket("old");
    let old = TestDriver::start_as(&socket, GPU, &["v1alpha3.Node"]);
    let at = socket.display();
    let text = format!(
        r#"{failed} invalid supported gRPC versions of DRA driver plugin {GPU} at endpoint {at}: none of services supported by the plugin (["v1alpha3.Node"]) are supported by the kubelet (["v1.DRAPlugin" "v1beta1.DRAPlugin"])"#
    );
    refused(&old, &text).await;
    let nameless = TestDriver::start(&agent.socket("nameless"), "");
    refused(&nameless, &format!("{failed} DRA driver name is empty")).await;
    // An endpoint that is a link could lead to another process later.
    let far = agent.path("far.sock");
    let _far = TestDriver::start(&far, GPU);
    let link = agent.path("link.sock");
    symlink(&far, &link).unwrap();
    let linked = TestDriver::start(&agent.path("linked.sock"), GPU);
    linked.set_endpoint(&link.display().to_string());
    std::fs::rename(agent.path("linked.sock"), agent.socket("linked")).unwrap();
    let text = format!(
        "RegisterPlugin error -- plugin registration failed with err: endpoint of DRA driver plugin {GPU}: {} is a symbolic link",
        link.display()
    );
    refused(&linked, &text).await;
    assert!(agent.claims.drivers().is_empty());
}

#[tokio::test]
async fn a_failed_call_of_a_registration_is_repeated_and_the_driver_is_used_after_it() {
    for method in [Method::GetInfo, Method::NotifyRegistrationStatus] {
        for fault in [Fault::Fail(Code::Internal), Fault::Hang] {
            let agent = Agent::start();
            agent.claim("c", &[GPU], &["p"]);
            let driver = TestDriver::start(&agent.path("gpu.sock"), GPU);
            driver.set_fault(method, Some(fault));
            std::fs::rename(agent.path("gpu.sock"), agent.socket("gpu")).unwrap();
            until("two attempts", LONG, async || {
                let calls = driver.registration_calls();
                if calls.iter().filter(|call| **call == method).count() >= 2 { Ok(()) } else { Err(calls) }
            })
            .await;
            assert!(driver.informed().is_empty(), "{method:?}");
            driver.set_fault(method, None);
            wait_informed(&driver).await;
            agent.wait_endpoints(GPU, &[true]).await;
            agent.prepare(&pod("p", &["c"])).await.unwrap();
            assert_eq!(driver.prepared(), ["uid-c"], "{method:?}");
        }
    }
}

#[tokio::test]
async fn a_service_that_listens_after_the_registration_or_again_after_its_end_is_called() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    let unavailable = async || {
        let error = agent.refused(&p).await;
        assert!(error.starts_with("NodePrepareResources: rpc error: code = Unavailable"), "{error}");
    };
    let (registrar, socket) = agent.registrar(&["v1.DRAPlugin"]).await;
    unavailable().await;
    for _ in 0..2 {
        let service = TestDriver::start(&socket, GPU);
        agent.wait_endpoints(GPU, &[true]).await;
        agent.prepare(&p).await.unwrap();
        agent.unprepare(&p).await.unwrap();
        assert_eq!(service.calls(), ["v1 NodePrepareResources c", "v1 NodeUnprepareResources c"]);
        // The process ends, and leaves its socket.
        drop(service);
        agent.wait_endpoints(GPU, &[false]).await;
        unavailable().await;
        std::fs::remove_file(&socket).unwrap();
    }
    // The driver has not registered again.
    assert_eq!((registrar.informed(), registrar.calls().len()), (vec![Ok(())], 0));
}

#[tokio::test]
async fn a_service_at_the_socket_of_the_registration_that_listens_later_or_again_is_called() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    // A process that listens without the service of its driver.
    let mut earlier = agent.driver(GPU).await;
    earlier.set_fault(Method::NodePrepareResources, Some(Fault::Fail(Code::Unimplemented)));
    assert!(agent.refused(&p).await.contains("code = Unimplemented"));
    for _ in 0..2 {
        // The earlier process runs until another one listens at its path.
        std::fs::remove_file(earlier.socket()).unwrap();
        let service = TestDriver::start(&agent.socket(GPU), GPU);
        wait_informed(&service).await;
        drop(earlier);
        agent.wait_endpoints(GPU, &[true]).await;
        agent.prepare(&p).await.unwrap();
        agent.unprepare(&p).await.unwrap();
        assert_eq!(service.calls(), ["v1 NodePrepareResources c", "v1 NodeUnprepareResources c"]);
        earlier = service;
    }
}

#[tokio::test]
async fn the_latest_connected_plugin_of_an_update_is_called() {
    let agent = Agent::start();
    let old = agent.driver_as("old", GPU, &["v1.DRAPlugin"]).await;
    let new = agent.driver_as("new", GPU, &["v1.DRAPlugin"]).await;
    agent.wait_endpoints(GPU, &[true, true]).await;
    agent.claim("c", &[GPU], &["p", "q"]);
    let (p, q) = (pod("p", &["c"]), pod("q", &["c"]));
    agent.prepare(&p).await.unwrap();
    agent.unprepare(&p).await.unwrap();
    assert_eq!((old.calls().len(), new.calls().len()), (0, 2));
    // The new one crashes: the old one is there.
    drop(new);
    agent.wait_endpoints(GPU, &[true, false]).await;
    agent.prepare(&q).await.unwrap();
    assert_eq!(old.calls().len(), 1);
    // A second registration at one endpoint is refused.
    let twice = TestDriver::start(&agent.path("twice.sock"), GPU);
    twice.set_endpoint(&old.socket().display().to_string());
    std::fs::rename(agent.path("twice.sock"), agent.socket("twice")).unwrap();
    let at = old.socket().display();
    let text = format!(
        "RegisterPlugin error -- plugin registration failed with err: endpoint {at} already registered for DRA driver plugin {GPU}"
    );
    refused(&twice, &text).await;
}

#[tokio::test]
async fn a_driver_with_a_long_name_is_updated_by_sockets_with_short_ones() {
    // The helper of drivers in Go names the socket of an update by a hash, since a path has 107 bytes at most
    // (kubernetes/kubernetes#139623).
    let agent = Agent::start();
    let name = "a-driver-whose-name-has-the-longest-form-there-is.example.com";
    let old = agent.driver_as("0a1b2c3d-reg", name, &["v1.DRAPlugin"]).await;
    let new = agent.driver_as("4e5f6a7b-reg", name, &["v1.DRAPlugin"]).await;
    agent.wait_endpoints(name, &[true, true]).await;
    agent.claim("c", &[name], &["p"]);
    agent.prepare(&pod("p", &["c"])).await.unwrap();
    assert_eq!((old.calls().len(), new.calls().len()), (0, 1));
}

#[tokio::test]
async fn a_socket_with_the_longest_path_is_used_and_a_longer_path_fails_its_own_driver_only() {
    // The helper of drivers in Go made sockets of updates with paths of 108 bytes and more
    // (kubernetes/kubernetes#141815, #142003), at which no process can listen.
    let agent = Agent::start();
    let fill = 107 - agent.socket("").as_os_str().len();
    let long = agent.driver_as(&"n".repeat(fill), GPU, &["v1.DRAPlugin"]).await;
    assert_eq!(long.socket().as_os_str().len(), 107);
    let name = "nic.example.com";
    let unreachable = TestDriver::start(&agent.path("unreachable.sock"), name);
    unreachable.set_endpoint(&format!("{}x", long.socket().display()));
    std::fs::rename(agent.path("unreachable.sock"), agent.socket("unreachable")).unwrap();
    agent.wait_endpoints(name, &[false]).await;
    agent.claim("c", &[name], &["p"]);
    let error = agent.refused(&pod("p", &["c"])).await;
    assert!(error.starts_with("NodePrepareResources: rpc error: code = Unavailable"), "{error}");
    assert!(error.contains("path must be shorter than SUN_LEN"), "{error}");
    agent.claim("d", &[GPU], &["q"]);
    agent.prepare(&pod("q", &["d"])).await.unwrap();
    assert_eq!((long.calls().len(), unreachable.calls().len()), (1, 0));
}

#[tokio::test]
async fn all_calls_of_a_driver_use_one_connection() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    wait_informed(&driver).await;
    let before = driver.connections();
    for name in ["a", "b", "c"] {
        agent.claim(name, &[GPU], &["p"]);
        let p = pod("p", &[name]);
        agent.prepare(&p).await.unwrap();
        agent.unprepare(&p).await.unwrap();
    }
    assert_eq!((driver.calls().len(), driver.connections()), (6, before + 1));
}

#[tokio::test]
async fn a_driver_that_is_killed_in_a_call_fails_it_and_the_next_one_prepares_the_claim() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    driver.set_fault(Method::NodePrepareResources, Some(Fault::Hang));
    let (claims, same) = (agent.claims.clone(), p.clone());
    let prepared = quintlet_kit::task::spawn("prepare", async move {
        claims.prepare(&crate::agent::uid(&same), &same, &tokio_util::sync::CancellationToken::new()).await
    });
    crate::agent::wait_calls(&driver, "NodePrepareResources", 1).await;
    drop(driver);
    let error = prepared.await.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("NodePrepareResources: rpc error: code = Unavailable"), "{error}");
    let driver = agent.driver(GPU).await;
    agent.prepare(&p).await.unwrap();
    assert_eq!(driver.prepared(), ["uid-c"]);
}

async fn wait_slices(agent: &Agent, expected: &[&str]) {
    until("the slices", LONG, async || {
        let drivers: Vec<_> = agent.slices.drivers.lock().unwrap().iter().cloned().collect();
        if drivers == expected { Ok(()) } else { Err(drivers) }
    })
    .await;
}

#[tokio::test]
async fn the_slices_of_a_driver_that_stays_away_are_removed_and_those_of_one_that_returns_stay() {
    let agent = Agent::start();
    let slices = |agent: &Agent| agent.slices.drivers.lock().unwrap().clone();
    let driver = agent.driver(GPU).await;
    agent.slices.drivers.lock().unwrap().insert(GPU.to_owned());
    drop(driver);
    agent.wait_endpoints(GPU, &[false]).await;
    tokio::time::sleep(WIPE_DELAY - Duration::from_secs(5)).await;
    let driver = agent.driver(GPU).await;
    tokio::time::sleep(WIPE_DELAY * 2).await;
    assert_eq!(slices(&agent), [GPU.to_owned()].into());
    // The process ends, and its socket stays.
    drop(driver);
    agent.wait_endpoints(GPU, &[false]).await;
    *agent.slices.failures.lock().unwrap() = 2;
    tokio::time::sleep(WIPE_DELAY - Duration::from_secs(5)).await;
    assert_eq!(slices(&agent), [GPU.to_owned()].into());
    wait_slices(&agent, &[]).await;
}

#[tokio::test]
async fn after_a_restart_drivers_have_time_to_register_before_their_slices_are_removed() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    agent.slices.drivers.lock().unwrap().extend([GPU.to_owned(), "gone.example.com".to_owned()]);
    *agent.slices.failures.lock().unwrap() = 3;
    let agent = agent.restart();
    agent.wait_connected(&driver, GPU).await;
    wait_slices(&agent, &[GPU]).await;
    tokio::time::sleep(WIPE_DELAY * 2).await;
    wait_slices(&agent, &[GPU]).await;
}

#[tokio::test]
async fn a_driver_without_its_service_fails_the_call() {
    let agent = Agent::start();
    let driver = agent.driver(GPU).await;
    driver.set_fault(Method::NodePrepareResources, Some(Fault::Fail(Code::Unimplemented)));
    agent.claim("c", &[GPU], &["p"]);
    let text = "NodePrepareResources: rpc error: code = Unimplemented desc = NodePrepareResources fails";
    assert_eq!(agent.refused(&pod("p", &["c"])).await, text);
}
