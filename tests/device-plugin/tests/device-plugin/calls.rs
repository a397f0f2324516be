//! Admission of pods and starts of containers: the calls of plugins, and their faults.

use std::time::Duration;

use pod_sync_devices::DeviceAdmission;
use quintlet_device_plugin::{Fault, Method};
use quintlet_kit::task;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::agent::{Agent, GPU, codes, container, is_waiting, pod, pod_of, rejected, uid};

#[tokio::test]
async fn a_container_gets_what_its_plugin_returns_and_the_checkpoint_has_it_before() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1", "d2", "!d3"]).await;
    let first = pod("first", GPU, 1);
    assert_eq!(agent.admit(&first).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.recorded(&first), ["d1"]);
    assert_eq!(plugin.calls_of("Allocate"), 1);
    let options = agent.prepare(&first).await.unwrap();
    assert_eq!(options.envs, [("DEVICES".to_owned(), "d1".to_owned())].into());
    assert_eq!(options.annotations, [("example.com/devices".to_owned(), "d1".to_owned())].into());
    assert_eq!((options.mounts.len(), options.mounts[0].container_path.as_str()), (1, "/device"));
    assert_eq!((options.devices.len(), options.devices[0].container_path.as_str()), (1, "/dev/d1"));
    assert_eq!(options.cdi_devices, ["example.com/device=d1"]);
    // A second admission, or a restart of the container, keeps the device.
    assert_eq!(agent.admit(&first).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.prepare(&first).await.unwrap(), options);
    assert_eq!(plugin.calls_of("Allocate"), 1);
    assert_eq!(plugin.calls_of("PreStartContainer"), 0);
    let second = pod("second", GPU, 1);
    assert_eq!(agent.admit(&second).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.recorded(&second), ["d2"]);
    let third = pod("third", GPU, 1);
    let text = "requested number of devices unavailable for a.com/gpu. Requested: 1, Available: 0";
    assert_eq!(rejected(agent.admit(&third).await), text);
    agent.devices.release(&uid(&first)).await;
    assert_eq!(agent.recorded(&first), [""; 0]);
    assert_eq!(agent.admit(&third).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.recorded(&third), ["d1"]);
}

#[tokio::test]
async fn a_pod_without_devices_and_an_unknown_resource_need_no_plugin() {
    let agent = Agent::start();
    for pod in [pod("cpu", "cpu", 1), pod("other", "b.com/unknown", 1)] {
        assert_eq!(agent.admit(&pod).await, Ok(DeviceAdmission::Admitted));
        assert_eq!(agent.prepare(&pod).await.unwrap(), pod_sync_devices::DeviceOptions::default());
    }
}

#[tokio::test]
async fn init_containers_give_their_devices_on_and_a_sidecar_keeps_its_own() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1", "d2", "d3"]).await;
    let mut sidecar = container("sidecar", GPU, 1);
    sidecar["restartPolicy"] = json!("Always");
    let pod = pod_of(
        "p",
        json!({
            "initContainers": [container("init", GPU, 2), sidecar],
            "containers": [container("main", GPU, 1), container("more", GPU, 1)],
        }),
    );
    assert_eq!(agent.admit(&pod).await, Ok(DeviceAdmission::Admitted));
    let allocated: Vec<_> = plugin.calls().into_iter().filter(|call| call.starts_with("Allocate")).collect();
    assert_eq!(allocated, ["Allocate d1 d2", "Allocate d1", "Allocate d2", "Allocate d3"]);
}

#[tokio::test]
async fn the_preference_of_a_plugin_is_used_where_it_names_free_devices() {
    let agent = Agent::start();
    let plugin = agent.plugin("gpu.sock", &["d1", "d2", "d3"]);
    plugin.set_options(false, true);
    agent.register(&plugin, GPU, &["d1", "d2", "d3"]).await;
    plugin.prefer(&["d3", "unknown"]);
    let first = pod("first", GPU, 2);
    assert_eq!(agent.admit(&first).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.recorded(&first), ["d1", "d3"]);
    assert_eq!(plugin.calls_of("GetPreferredAllocation d1 d2 d3"), 1);
    // An answer without containers is no preference.
    plugin.set_fault(Method::GetPreferredAllocation, Some(Fault::Empty));
    let second = pod("second", GPU, 1);
    assert_eq!(agent.admit(&second).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(agent.recorded(&second), ["d2"]);
}

#[tokio::test]
async fn each_code_of_a_failed_call_is_the_text_of_the_rejection_and_the_devices_stay_free() {
    let agent = Agent::start();
    let plugin = agent.plugin("gpu.sock", &["d1"]);
    plugin.set_options(true, true);
    agent.register(&plugin, GPU, &["d1"]).await;
    let pod = pod("p", GPU, 1);
    // Method, and the text before that of the call.
    let methods = [
        (Method::GetPreferredAllocation, "device plugin GetPreferredAllocation rpc failed with err: "),
        (Method::Allocate, ""),
    ];
    for (method, prefix) in methods {
        for (code, name) in codes() {
            plugin.set_fault(method, Some(Fault::Fail(code)));
            let failed = format!("rpc error: code = {name} desc = {method:?} fails");
            assert_eq!(rejected(agent.admit(&pod).await), format!("{prefix}{failed}"));
            assert_eq!(agent.last_error(GPU), failed);
        }
        plugin.set_fault(method, None);
    }
    plugin.set_fault(Method::Allocate, Some(Fault::Empty));
    assert_eq!(rejected(agent.admit(&pod).await), "no containers return in allocation response of a.com/gpu");
    plugin.set_fault(Method::Allocate, None);
    assert_eq!(agent.admit(&pod).await, Ok(DeviceAdmission::Admitted));
    for (code, name) in codes() {
        plugin.set_fault(Method::PreStartContainer, Some(Fault::Fail(code)));
        let failed = format!("rpc error: code = {name} desc = PreStartContainer fails");
        let text = format!("device plugin PreStartContainer rpc failed with err: {failed}");
        assert_eq!(agent.prepare(&pod).await.unwrap_err().to_string(), text);
        assert_eq!(agent.last_error(GPU), failed);
        // The pod holds its device.
        assert_eq!(agent.recorded(&pod), ["d1"]);
    }
    plugin.set_fault(Method::PreStartContainer, None);
    assert!(agent.prepare(&pod).await.is_ok());
}

#[tokio::test]
async fn a_plugin_that_hangs_delays_its_own_pods_only_and_not_longer_than_its_time_limit() {
    let agent = Agent::start();
    let plugin = agent.plugin("gpu.sock", &["d1", "d2"]);
    plugin.set_options(true, true);
    agent.register(&plugin, GPU, &["d1", "d2"]).await;
    let _other = agent.serving("a.com/nic", &["n1"]).await;
    let slow = pod("slow", GPU, 1);
    // Time limit in seconds, and the text.
    let limits = [
        (
            Method::GetPreferredAllocation,
            10,
            "device plugin GetPreferredAllocation rpc failed with err: rpc error: code = DeadlineExceeded desc = context deadline exceeded",
        ),
        (Method::Allocate, 120, "rpc error: code = DeadlineExceeded desc = context deadline exceeded"),
    ];
    for (method, seconds, text) in limits {
        plugin.set_fault(method, Some(Fault::Hang));
        let began = Instant::now();
        let (devices, slow) = (agent.devices.clone(), slow.clone());
        let admission = task::spawn("slow", async move {
            devices.admit(&uid(&slow), &slow, None, &CancellationToken::new()).await
        });
        let fast = pod("fast", "a.com/nic", 1);
        assert_eq!(agent.admit(&fast).await, Ok(DeviceAdmission::Admitted));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(!admission.is_finished());
        assert_eq!(rejected(admission.await.unwrap()), text);
        let took = began.elapsed();
        assert!(took >= Duration::from_secs(seconds) && took < Duration::from_secs(seconds + 5), "{took:?}");
        plugin.set_fault(method, None);
    }
    assert_eq!(agent.admit(&slow).await, Ok(DeviceAdmission::Admitted));
    assert!(agent.prepare(&slow).await.is_ok());
    assert_eq!(plugin.calls_of("PreStartContainer d1"), 1);
    plugin.set_fault(Method::PreStartContainer, Some(Fault::Hang));
    let began = Instant::now();
    let text = "device plugin PreStartContainer rpc failed with err: rpc error: code = DeadlineExceeded desc = context deadline exceeded";
    assert_eq!(agent.prepare(&slow).await.unwrap_err().to_string(), text);
    assert!(began.elapsed() >= Duration::from_secs(30));
    plugin.set_fault(Method::PreStartContainer, Some(Fault::Fail(Code::Internal)));
    let text = "device plugin PreStartContainer rpc failed with err: rpc error: code = Internal desc = PreStartContainer fails";
    assert_eq!(agent.prepare(&slow).await.unwrap_err().to_string(), text);
    // The pod holds its device.
    assert_eq!(agent.recorded(&slow), ["d1"]);
}

#[tokio::test]
async fn a_pod_that_ends_does_not_wait_for_a_plugin_that_hangs() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1"]).await;
    plugin.set_fault(Method::Allocate, Some(Fault::Hang));
    let (cancel, slow) = (CancellationToken::new(), pod("slow", GPU, 1));
    let (devices, canceled) = (agent.devices.clone(), cancel.clone());
    let admission =
        task::spawn("slow", async move { devices.admit(&uid(&slow), &slow, None, &canceled).await });
    quintlet_testkit::wait::until("the call", crate::agent::LONG, async || {
        if plugin.calls_of("Allocate") == 1 { Ok(()) } else { Err(plugin.calls()) }
    })
    .await;
    // While the call is in flight, its device is not free.
    let text = "requested number of devices unavailable for a.com/gpu. Requested: 1, Available: 0";
    assert_eq!(rejected(agent.admit(&pod("late", GPU, 1)).await), text);
    let began = Instant::now();
    cancel.cancel();
    assert_eq!(admission.await.unwrap(), Ok(DeviceAdmission::Cancelled));
    assert!(began.elapsed() < Duration::from_secs(5));
    plugin.set_fault(Method::Allocate, None);
    assert_eq!(agent.admit(&pod("next", GPU, 1)).await, Ok(DeviceAdmission::Admitted));
}

#[tokio::test]
async fn a_pod_waits_for_a_plugin_that_is_killed_in_a_call_and_gets_a_device_of_the_next_one() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1"]).await;
    plugin.set_fault(Method::Allocate, Some(Fault::Hang));
    let pod = pod("p", GPU, 1);
    let (devices, same) = (agent.devices.clone(), pod.clone());
    let admission = task::spawn("admission", async move {
        devices.admit(&uid(&same), &same, None, &CancellationToken::new()).await
    });
    quintlet_testkit::wait::until("the call", crate::agent::LONG, async || {
        if plugin.calls_of("Allocate") == 1 { Ok(()) } else { Err(plugin.calls()) }
    })
    .await;
    drop(plugin);
    let waits = admission.await.unwrap();
    assert!(is_waiting(&waits), "{waits:?}");
    agent.wait_count(GPU, 1, 0).await;
    let wakeup = agent.wakeups.register(&uid(&pod));
    assert!(is_waiting(&agent.admit(&pod).await));
    let _plugin = agent.serving(GPU, &["d1"]).await;
    tokio::time::timeout(crate::agent::LONG, wakeup.notified()).await.expect("the pod is woken");
    assert_eq!(agent.admit(&pod).await, Ok(DeviceAdmission::Admitted));
}

#[tokio::test]
async fn a_plugin_that_ends_between_allocate_and_start_is_needed_for_pre_start_only() {
    let agent = Agent::start();
    for (pre_start, name) in [(false, "plain"), (true, "careful")] {
        let plugin = agent.plugin(&format!("{name}.sock"), &["d1"]);
        plugin.set_options(pre_start, false);
        let resource = format!("a.com/{name}");
        agent.register(&plugin, &resource, &["d1"]).await;
        let pod = pod(name, &resource, 1);
        assert_eq!(agent.admit(&pod).await, Ok(DeviceAdmission::Admitted));
        drop(plugin);
        agent.wait_count(&resource, 1, 0).await;
        let prepared = agent.prepare(&pod).await;
        if pre_start {
            let text = "device plugin PreStartContainer rpc failed with err: endpoint of a.com/careful has been stopped";
            assert_eq!(prepared.unwrap_err().to_string(), text);
        } else {
            assert_eq!(prepared.unwrap().envs["DEVICES"], "d1");
        }
    }
}
