//! The health of devices.

use std::time::Duration;

use quintlet_dra_driver::{Fault, Method, TestDriver};
use quintlet_plugin_api::dra::v1::Device;
use quintlet_plugin_api::dra_health::v1::HealthStatus::{Healthy, Unhealthy};
use quintlet_testkit::wait::until;
use tonic::Code;

use crate::agent::{Agent, GPU, LONG, codes, pod, uid, wait_calls};

const UNKNOWN: &str = "claim:c gpu.example.com/claim=c Unknown";
const HEALTHY: &str = "claim:c gpu.example.com/claim=c Healthy";

#[tokio::test]
async fn the_health_of_a_device_is_in_the_status_and_wakes_its_pods() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    for version in ["v1", "v1alpha1"] {
        let services = ["v1.DRAPlugin", &format!("{version}.DRAResourceHealth")];
        let driver = agent.driver_as(GPU, GPU, &services).await;
        wait_calls(&driver, &format!("{version} NodeWatchResources"), 1).await;
        agent.prepare(&p).await.unwrap();
        agent.wait_health(&p, &[UNKNOWN]).await;
        let wakeup = agent.wakeups.register(&uid(&p));
        driver.report_health(&[("pool", "c", Healthy, "", 0), ("pool", "other", Unhealthy, "", 0)]);
        agent.wait_health(&p, &[HEALTHY]).await;
        tokio::time::timeout(LONG, wakeup.notified()).await.expect("the pod is woken");
        driver.report_health(&[("pool", "c", Unhealthy, "ECC errors", 5)]);
        agent.wait_health(&p, &["claim:c gpu.example.com/claim=c Unhealthy ECC errors"]).await;
        tokio::time::timeout(LONG, wakeup.notified()).await.expect("the pod is woken");
        // Without another report, the health becomes unknown.
        tokio::time::sleep(Duration::from_secs(5)).await;
        agent.wait_health(&p, &[UNKNOWN]).await;
        tokio::time::timeout(LONG, wakeup.notified()).await.expect("the pod is woken");
        agent.unprepare(&p).await.unwrap();
        std::fs::remove_file(driver.socket()).unwrap();
        agent.wait_endpoints(GPU, &[]).await;
    }
    assert!(agent.health(&p).is_empty());
}

#[tokio::test]
async fn a_stream_that_ends_is_opened_again_and_one_that_does_not_exist_is_not() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    let driver = agent.driver_as(GPU, GPU, &["v1.DRAPlugin", "v1.DRAResourceHealth"]).await;
    agent.prepare(&p).await.unwrap();
    driver.report_health(&[("pool", "c", Healthy, "", 600)]);
    agent.wait_health(&p, &[HEALTHY]).await;
    driver.set_fault(Method::NodeWatchResources, Some(Fault::Fail(Code::Internal)));
    driver.end_health();
    agent.wait_health(&p, &[UNKNOWN]).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    driver.set_fault(Method::NodeWatchResources, None);
    agent.wait_health(&p, &[HEALTHY]).await;
    driver.set_fault(Method::NodeWatchResources, Some(Fault::Fail(Code::Unimplemented)));
    driver.end_health();
    agent.wait_health(&p, &[UNKNOWN]).await;
    let before = driver.calls_of("NodeWatchResources");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(driver.calls_of("NodeWatchResources"), before + 1);
}

#[tokio::test]
async fn a_stream_that_fails_with_any_code_but_unimplemented_is_opened_again() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    let driver = agent.driver_as(GPU, GPU, &["v1.DRAPlugin", "v1.DRAResourceHealth"]).await;
    agent.prepare(&p).await.unwrap();
    driver.report_health(&[("pool", "c", Healthy, "", 600)]);
    agent.wait_health(&p, &[HEALTHY]).await;
    for (code, _) in codes().filter(|(code, _)| *code != Code::Unimplemented) {
        let before = driver.calls_of("NodeWatchResources");
        driver.set_fault(Method::NodeWatchResources, Some(Fault::Fail(code)));
        driver.end_health();
        agent.wait_health(&p, &[UNKNOWN]).await;
        until("two failed calls", LONG, async || {
            let calls = driver.calls_of("NodeWatchResources");
            if calls >= before + 2 { Ok(()) } else { Err(calls) }
        })
        .await;
        driver.set_fault(Method::NodeWatchResources, None);
        agent.wait_health(&p, &[HEALTHY]).await;
    }
}

#[tokio::test]
async fn a_service_that_listens_after_the_registration_reports_the_health_of_its_devices() {
    // Shares of the device.
    for shares in [&[None][..], &[Some("one")], &[Some("one"), Some("two")]] {
        let agent = Agent::start();
        agent.claim("c", &[GPU], &["p"]);
        let p = pod("p", &["c"]);
        let (_registrar, socket) = agent.registrar(&["v1.DRAPlugin", "v1.DRAResourceHealth"]).await;
        let error = agent.refused(&p).await;
        assert!(error.starts_with("NodePrepareResources: rpc error: code = Unavailable"), "{error}");
        let service = TestDriver::start(&socket, GPU);
        let name = |share: Option<&str>| format!("{GPU}/share={}", share.unwrap_or("none"));
        let device = |share: Option<&str>| Device {
            request_names: vec!["r".to_owned()],
            pool_name: "pool".to_owned(),
            device_name: "d".to_owned(),
            cdi_device_ids: vec![name(share)],
            share_id: share.map(str::to_owned),
        };
        service.set_devices("c", shares.iter().copied().map(device).collect());
        agent.wait_endpoints(GPU, &[true]).await;
        agent.prepare(&p).await.unwrap();
        assert_eq!(agent.cdi(&p), shares.iter().copied().map(name).collect::<Vec<_>>());
        for (status, health) in [(Healthy, "Healthy"), (Unhealthy, "Unhealthy")] {
            service.report_health(&[("pool", "d", status, "", 600)]);
            let entries: Vec<_> =
                shares.iter().map(|share| format!("claim:c {} {health}", name(*share))).collect();
            agent.wait_health(&p, &entries.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
        let record = agent.recorded("c").unwrap();
        let recorded: Vec<_> = record.drivers[GPU].iter().map(|device| device.share.as_deref()).collect();
        assert_eq!(recorded, shares);
        agent.unprepare(&p).await.unwrap();
        assert!(service.prepared().is_empty());
    }
}

#[tokio::test]
async fn a_driver_without_health_is_not_followed_and_one_that_hangs_is_called() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    let plain = agent.driver(GPU).await;
    agent.prepare(&p).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(plain.calls_of("NodeWatchResources"), 0);
    assert_eq!(agent.health(&p), [UNKNOWN]);
    let hanging = agent.driver_as("hanging", GPU, &["v1.DRAPlugin", "v1.DRAResourceHealth"]).await;
    hanging.set_fault(Method::NodeWatchResources, Some(Fault::Hang));
    agent.unprepare(&p).await.unwrap();
    assert_eq!(hanging.calls_of("NodeUnprepareResources"), 1);
}

#[tokio::test]
async fn the_end_of_the_old_plugin_of_an_update_keeps_the_health_that_the_new_one_reports() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    let services = ["v1.DRAPlugin", "v1.DRAResourceHealth"];
    let old = agent.driver_as("old", GPU, &services).await;
    let new = agent.driver_as("new", GPU, &services).await;
    agent.prepare(&p).await.unwrap();
    new.report_health(&[("pool", "c", Healthy, "", 600)]);
    agent.wait_health(&p, &[HEALTHY]).await;
    old.report_health(&[("pool", "c", Unhealthy, "", 600)]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(agent.health(&p), [HEALTHY]);
    std::fs::remove_file(old.socket()).unwrap();
    agent.wait_endpoints(GPU, &[true]).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(agent.health(&p), [HEALTHY]);
}

#[tokio::test]
async fn the_shares_of_a_device_are_prepared_and_have_its_health() {
    let agent = Agent::start();
    agent.claim("c", &[GPU], &["p"]);
    let p = pod("p", &["c"]);
    let driver = agent.driver_as(GPU, GPU, &["v1.DRAPlugin", "v1.DRAResourceHealth"]).await;
    let share = |id: &str| Device {
        request_names: vec!["r".to_owned()],
        pool_name: "pool".to_owned(),
        device_name: "d".to_owned(),
        cdi_device_ids: vec![format!("{GPU}/share={id}")],
        share_id: Some(id.to_owned()),
    };
    driver.set_devices("c", vec![share("one"), share("two")]);
    agent.prepare(&p).await.unwrap();
    assert_eq!(agent.cdi(&p), ["gpu.example.com/share=one", "gpu.example.com/share=two"]);
    let entries = |health: &str| ["one", "two"].map(|id| format!("claim:c {GPU}/share={id} {health}"));
    for (status, health) in [(Healthy, "Healthy"), (Unhealthy, "Unhealthy"), (Healthy, "Healthy")] {
        driver.report_health(&[("pool", "d", status, "", 600)]);
        agent.wait_health(&p, &entries(health).each_ref().map(String::as_str)).await;
    }
    let agent = agent.restart();
    agent.wait_connected(&driver, GPU).await;
    let record = agent.recorded("c").unwrap();
    let shares: Vec<_> = record.drivers[GPU].iter().map(|device| device.share.as_deref().unwrap()).collect();
    assert_eq!(shares, ["one", "two"]);
    agent.unprepare(&p).await.unwrap();
    assert_eq!((agent.recorded("c"), driver.prepared().len()), (None, 0));
}

#[tokio::test]
async fn the_kubelets_file_of_health_is_neither_read_nor_changed() {
    // A kubelet crashed at the next report of a driver (kubernetes/kubernetes#140904).
    for content in ["null", r#"{"gpu.example.com":{"Devices":null}}"#, "{"] {
        let agent = Agent::start();
        std::fs::write(agent.path("dra_health_state"), content).unwrap();
        let agent = agent.restart();
        agent.claim("c", &[GPU], &["p"]);
        let p = pod("p", &["c"]);
        let driver = agent.driver_as(GPU, GPU, &["v1.DRAPlugin", "v1.DRAResourceHealth"]).await;
        agent.prepare(&p).await.unwrap();
        driver.report_health(&[("pool", "c", Healthy, "", 600)]);
        agent.wait_health(&p, &[HEALTHY]).await;
        assert_eq!(std::fs::read_to_string(agent.path("dra_health_state")).unwrap(), content);
    }
}
