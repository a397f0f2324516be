//! Devices across restarts of the agent and of plugins.

use pod_sync_devices::checkpoint::CHECKPOINT;
use pod_sync_devices::{DeviceAdmission, GRACE};

use crate::agent::{Agent, GPU, is_waiting, pod, rejected, uid};

#[tokio::test]
async fn a_pod_of_the_checkpoint_waits_for_its_plugin_while_others_are_admitted() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1", "d2"]).await;
    let _nic = agent.serving("a.com/nic", &["n1"]).await;
    let pods = ["before", "after"].map(|name| pod(name, GPU, 1));
    assert_eq!(agent.admit(&pods[0]).await, Ok(DeviceAdmission::Admitted));
    let held = agent.recorded(&pods[0]);
    // The machine restarts: no container runs, and the plugins come back one after the other.
    drop(plugin);
    let agent = agent.restart();
    assert!(!agent.devices.dir().join("gpu.sock").exists(), "plugins find out by their sockets");
    agent.wait_count(GPU, 0, 0).await;
    let wakeup = agent.wakeups.register(&uid(&pods[0]));
    for pod in &pods {
        assert!(is_waiting(&agent.admit(pod).await));
    }
    let _nic = agent.serving("a.com/nic", &["n1"]).await;
    assert_eq!(agent.admit(&pod("other", "a.com/nic", 1)).await, Ok(DeviceAdmission::Admitted));
    assert!(is_waiting(&agent.admit(&pods[0]).await));
    let plugin = agent.serving(GPU, &["d1", "d2"]).await;
    tokio::time::timeout(crate::agent::LONG, wakeup.notified()).await.expect("the pod is woken");
    // The new pod is first, and gets the other device.
    assert_eq!(agent.admit(&pods[1]).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.admit(&pods[0]).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.recorded(&pods[0]), held);
    assert_ne!(agent.recorded(&pods[1]), held);
    assert_eq!(plugin.calls_of("Allocate"), 1);
}

#[tokio::test]
async fn a_running_pod_keeps_its_devices_whatever_becomes_of_its_plugin() {
    let agent = Agent::start();
    let _plugin = agent.serving(GPU, &["d1"]).await;
    let running = pod("running", GPU, 1);
    assert_eq!(agent.admit(&running).await, Ok(DeviceAdmission::Admitted));
    let agent = agent.restart();
    // Its container can start again with the recorded response.
    let again = async || agent.prepare(&running).await.map(|options| options.envs["DEVICES"].clone());
    assert_eq!(again().await, Ok("d1".to_owned()));
    tokio::time::sleep(GRACE * 2).await;
    agent.wait_count(GPU, 0, 0).await;
    assert_eq!(again().await, Ok("d1".to_owned()));
    // The plugin returns without the device, and then with another one. No other pod gets the one that is
    // held.
    let plugin = agent.serving(GPU, &["!d1"]).await;
    assert_eq!(again().await, Ok("d1".to_owned()));
    plugin.list(&["d1", "d2"]);
    agent.wait_count(GPU, 2, 2).await;
    let new = pod("new", GPU, 1);
    assert_eq!(agent.admit(&new).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.recorded(&new), ["d2"]);
    assert_eq!(agent.recorded(&running), ["d1"]);
}

#[tokio::test]
async fn a_device_whose_holder_runs_is_not_given_away_after_its_checkpoint_was_torn_or_lost() {
    let agent = Agent::start();
    let _plugin = agent.serving(GPU, &["d1", "d2", "d3"]).await;
    let running = pod("running", GPU, 1);
    assert_eq!(agent.admit(&running).await, Ok(DeviceAdmission::Admitted));
    let path = agent.devices.dir().join(CHECKPOINT);
    let mut agent = agent;
    for (name, tear) in [("torn", true), ("lost", false)] {
        match tear {
            true => std::fs::write(&path, "torn").unwrap(),
            false => std::fs::remove_file(&path).unwrap(),
        }
        agent = agent.restart();
        assert_eq!(agent.recorded(&running), ["d1"], "the file is restored for a kubelet, too");
        let _plugin = agent.serving(GPU, &["d1", "d2", "d3"]).await;
        let new = pod(name, GPU, 1);
        assert_eq!(agent.admit(&new).await, Ok(DeviceAdmission::Admitted));
        assert_ne!(agent.recorded(&new), ["d1"]);
        let response = agent.prepare(&running).await.map(|options| options.envs["DEVICES"].clone());
        assert_eq!(response, Ok("d1".to_owned()));
    }
}

#[tokio::test]
async fn a_pod_whose_device_is_gone_is_rejected_once_its_plugin_has_listed_the_others() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1", "d2"]).await;
    let pod = pod("p", GPU, 1);
    assert_eq!(agent.admit(&pod).await, Ok(DeviceAdmission::Admitted));
    drop(plugin);
    let agent = agent.restart();
    assert!(is_waiting(&agent.admit(&pod).await));
    let _plugin = agent.serving(GPU, &["d2"]).await;
    let text =
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices a.com/gpu";
    assert_eq!(rejected(agent.admit(&pod).await), text);
    assert!(!agent.checkpoint().held.has_pod(uid(&pod).as_str()));
}

#[tokio::test]
async fn a_pod_is_rejected_if_its_plugin_stays_away_for_longer_than_the_grace_period() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1"]).await;
    let pod = pod("p", GPU, 1);
    assert_eq!(agent.admit(&pod).await, Ok(DeviceAdmission::Admitted));
    drop(plugin);
    let agent = agent.restart();
    let waits = agent.admit(&pod).await;
    assert!(is_waiting(&waits));
    tokio::time::sleep(GRACE).await;
    assert_eq!(rejected(agent.admit(&pod).await), "cannot allocate unregistered device a.com/gpu");
}

#[tokio::test]
async fn the_devices_of_pods_that_are_gone_are_freed() {
    let agent = Agent::start();
    let _plugin = agent.serving(GPU, &["d1", "d2"]).await;
    let pods = ["kept", "gone"].map(|name| pod(name, GPU, 1));
    for pod in &pods {
        assert_eq!(agent.admit(pod).await, Ok(DeviceAdmission::Admitted));
    }
    let kept = uid(&pods[0]);
    let is_known = |pod: &str| pod == kept.as_str();
    assert!(agent.devices.retain(is_known) && !agent.devices.retain(is_known));
    agent.devices.write_checkpoint().await;
    assert_eq!((agent.recorded(&pods[0]).len(), agent.recorded(&pods[1]).len()), (1, 0));
    assert_eq!(agent.admit(&pod("new", GPU, 1)).await, Ok(DeviceAdmission::Admitted));
}
