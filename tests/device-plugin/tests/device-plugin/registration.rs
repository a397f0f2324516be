//! Registration of plugins: at the agent's socket, and in the directory of all plugins.

use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use pod_sync_devices::{DeviceAdmission, GRACE, PLUGIN_TYPE};
use pod_sync_plugins::PluginManager;
use quintlet_device_plugin::{Fault, Method, TestPlugin, register};
use quintlet_testkit::wait::until;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::agent::{Agent, GPU, LONG, codes, is_waiting, pod, rejected, uid};

#[tokio::test]
async fn the_capacity_follows_the_lists_and_stays_for_the_grace_period_of_a_stopped_plugin() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1", "d2"]).await;
    plugin.list(&["d1", "!d2", "d3"]);
    agent.wait_count(GPU, 3, 2).await;
    plugin.list(&[]);
    agent.wait_count(GPU, 0, 0).await;
    let text = "no healthy devices present; cannot allocate unhealthy devices a.com/gpu";
    assert_eq!(rejected(agent.admit(&pod("p", GPU, 1)).await), text);
    plugin.list(&["d1", "d2"]);
    agent.wait_count(GPU, 2, 2).await;
    drop(plugin);
    agent.wait_count(GPU, 2, 0).await;
    assert!(agent.last_error(GPU).starts_with("ListAndWatch ended: rpc error: code = Unavailable"));
    tokio::time::sleep(GRACE).await;
    agent.wait_count(GPU, 0, 0).await;
    until("a checkpoint without the resource", LONG, async || {
        let registered = agent.checkpoint().registered;
        if registered.is_empty() { Ok(()) } else { Err(registered) }
    })
    .await;
    let _plugin = agent.serving(GPU, &["d1"]).await;
}

#[tokio::test]
async fn a_plugin_whose_stream_ends_is_stopped_until_it_registers_again() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1"]).await;
    plugin.end_lists();
    agent.wait_count(GPU, 1, 0).await;
    assert!(is_waiting(&agent.admit(&pod("p", GPU, 1)).await));
    agent.register(&plugin, GPU, &["d1"]).await;
    assert_eq!(agent.admit(&pod("p", GPU, 1)).await, Ok(DeviceAdmission::Admitted));
}

#[tokio::test]
async fn each_code_of_a_failed_list_stops_the_plugin_until_it_registers_again() {
    let agent = Agent::start();
    let plugin = agent.serving(GPU, &["d1"]).await;
    for (code, name) in codes() {
        plugin.set_fault(Method::ListAndWatch, Some(Fault::Fail(code)));
        plugin.register(&agent.socket(), GPU).await.unwrap();
        let text = format!("ListAndWatch ended: rpc error: code = {name} desc = ListAndWatch fails");
        until("the error", LONG, async || {
            let error = agent.last_error(GPU);
            if error == text { Ok(()) } else { Err(error) }
        })
        .await;
        agent.wait_count(GPU, 1, 0).await;
        assert!(is_waiting(&agent.admit(&pod("p", GPU, 1)).await), "{name}");
        plugin.set_fault(Method::ListAndWatch, None);
        agent.register(&plugin, GPU, &["d1"]).await;
        assert_eq!(agent.admit(&pod("p", GPU, 1)).await, Ok(DeviceAdmission::Admitted), "{name}");
        agent.devices.release(&uid(&pod("p", GPU, 1))).await;
    }
}

/// Returns the registrations and the measured allocations of a resource, as metrics.
fn counted(resource: &str) -> [Option<u64>; 2] {
    let text = quintlet_telemetry::metrics::text();
    ["registration_total", "alloc_duration_seconds_count"].map(|name| {
        let prefix = format!("kubelet_device_plugin_{name}{{resource_name=\"{resource}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&prefix));
        value.map(|value| value.parse().unwrap())
    })
}

#[tokio::test]
async fn registrations_and_allocations_are_counted_under_the_names_of_the_kubelet() {
    const COUNTED: &str = "a.com/counted";
    let agent = Agent::start();
    assert_eq!(counted(COUNTED), [None, None]);
    let plugin = agent.plugin("counted.sock", &["d1", "d2"]);
    // The kubelet counts registrations whose plugin cannot be used, too.
    plugin.set_fault(Method::GetDevicePluginOptions, Some(Fault::Fail(Code::Internal)));
    plugin.register(&agent.socket(), COUNTED).await.unwrap_err();
    assert_eq!(counted(COUNTED), [Some(1), None]);
    plugin.set_fault(Method::GetDevicePluginOptions, None);
    agent.register(&plugin, COUNTED, &["d1", "d2"]).await;
    assert_eq!(agent.admit(&pod("p", COUNTED, 1)).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(counted(COUNTED), [Some(2), Some(1)]);
    // A pod that has its device needs no call.
    assert_eq!(agent.admit(&pod("p", COUNTED, 1)).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(counted(COUNTED), [Some(2), Some(1)]);
    plugin.set_fault(Method::Allocate, Some(Fault::Fail(Code::Internal)));
    assert!(rejected(agent.admit(&pod("q", COUNTED, 1)).await).contains("Internal"));
    assert_eq!(counted(COUNTED), [Some(2), Some(2)]);
}

#[tokio::test]
async fn a_plugin_that_registers_twice_is_called_once_and_another_one_replaces_it() {
    let agent = Agent::start();
    let first = agent.serving(GPU, &["d1"]).await;
    agent.register(&first, GPU, &["d1"]).await;
    assert_eq!(agent.admit(&pod("p", GPU, 1)).await, Ok(DeviceAdmission::Admitted));
    assert_eq!(first.calls_of("Allocate"), 1);
    let second = agent.plugin("second.sock", &["d1", "e1"]);
    agent.register(&second, GPU, &["d1", "e1"]).await;
    first.list(&[]);
    assert_eq!(agent.admit(&pod("q", GPU, 1)).await, Ok(DeviceAdmission::Admitted));
    assert_eq!((first.calls_of("Allocate"), second.calls_of("Allocate e1")), (1, 1));
    // The end of the first one changes nothing.
    drop(first);
    second.list(&["d1", "e1", "e2"]);
    agent.wait_count(GPU, 3, 3).await;
}

#[tokio::test]
async fn bad_registrations_are_refused_with_the_kubelets_texts() {
    let agent = Agent::start();
    let dir = agent.devices.dir().to_owned();
    let plugin = agent.plugin("gpu.sock", &["d1"]);
    let outside = agent.path("outside.sock");
    let _outside = TestPlugin::start(&outside, &["d1"]);
    symlink(&outside, dir.join("link.sock")).unwrap();
    std::fs::write(dir.join("file.sock"), "").unwrap();
    let closed = UnixListener::bind(dir.join("closed.sock")).unwrap();
    drop(closed);
    let link =
        format!("failed to dial device plugin: {} is a symbolic link", dir.join("link.sock").display());
    let file = format!("failed to dial device plugin: {} is not a socket", dir.join("file.sock").display());
    let climbs =
        r#"endpoint "../outside.sock" is not the name of a socket below the directory of device plugins"#;
    // Version, endpoint, resource, text.
    let table = [
        (
            "v1alpha",
            "gpu.sock",
            GPU,
            r#"requested API version "v1alpha" is not supported by kubelet. Supported version is ["v1beta1"]"#,
        ),
        ("v1beta1", "gpu.sock", "gpu", r#"the ResourceName "gpu" is invalid"#),
        ("v1beta1", "gpu.sock", "kubernetes.io/gpu", r#"the ResourceName "kubernetes.io/gpu" is invalid"#),
        ("v1beta1", "../outside.sock", GPU, climbs),
        ("v1beta1", "link.sock", GPU, &link),
        ("v1beta1", "file.sock", GPU, &file),
        ("v1beta1", "closed.sock", GPU, "failed to dial device plugin: Connection refused (os error 111)"),
        ("v1beta1", "none.sock", GPU, "failed to dial device plugin: No such file or directory (os error 2)"),
    ];
    for (version, endpoint, resource, text) in table {
        let refused = register(&agent.socket(), version, endpoint, resource).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::Unknown, text));
    }
    let options = "failed to get device plugin options: rpc error: code =";
    let hangs = (Fault::Hang, format!("{options} DeadlineExceeded desc = context deadline exceeded"));
    let fails = |(code, name): (Code, &str)| {
        (Fault::Fail(code), format!("{options} {name} desc = GetDevicePluginOptions fails"))
    };
    for (fault, text) in std::iter::once(hangs).chain(codes().map(fails)) {
        plugin.set_fault(Method::GetDevicePluginOptions, Some(fault));
        assert_eq!(plugin.register(&agent.socket(), GPU).await.unwrap_err().message(), text);
    }
    assert!(agent.devices.capacity().borrow().is_empty());
    plugin.set_fault(Method::GetDevicePluginOptions, None);
    agent.register(&plugin, GPU, &["d1"]).await;
}

#[tokio::test]
async fn a_pod_waits_while_its_plugin_hangs_before_the_first_list() {
    let agent = Agent::start();
    let plugin = agent.plugin("gpu.sock", &["d1"]);
    plugin.set_fault(Method::ListAndWatch, Some(Fault::Hang));
    plugin.register(&agent.socket(), GPU).await.unwrap();
    assert!(is_waiting(&agent.admit(&pod("p", GPU, 1)).await));
    tokio::time::sleep(GRACE).await;
    let text = "cannot allocate unregistered device a.com/gpu";
    assert_eq!(rejected(agent.admit(&pod("p", GPU, 1)).await), text);
    plugin.set_fault(Method::ListAndWatch, None);
    agent.register(&plugin, GPU, &["d1"]).await;
    assert_eq!(agent.admit(&pod("p", GPU, 1)).await, Ok(DeviceAdmission::Admitted));
}

#[tokio::test]
async fn a_device_with_an_id_of_a_megabyte_is_ignored_and_the_others_are_used() {
    let agent = Agent::start();
    let huge = "x".repeat(1 << 20);
    let plugin = agent.plugin("gpu.sock", &[&huge, "", "d1", "d1"]);
    plugin.register(&agent.socket(), GPU).await.unwrap();
    agent.wait_count(GPU, 1, 1).await;
    until("the error", LONG, async || {
        let error = agent.last_error(GPU);
        if error == "a device with an ID of 1048576 bytes is ignored" { Ok(()) } else { Err(error) }
    })
    .await;
    // A list of more than 4 MiB breaks the stream.
    plugin.list(&[&"y".repeat(5 << 20)]);
    agent.wait_count(GPU, 1, 0).await;
    assert!(agent.last_error(GPU).starts_with("ListAndWatch ended"), "{}", agent.last_error(GPU));
}

#[tokio::test]
async fn a_plugin_registers_through_the_directory_of_all_plugins_too() {
    let agent = Agent::start();
    let (dir, stop) = (agent.path("plugins_registry"), CancellationToken::new());
    std::fs::create_dir(&dir).unwrap();
    let handlers = HashMap::from([(PLUGIN_TYPE.to_owned(), agent.devices.handler())]);
    let _manager = PluginManager::start(dir.clone(), handlers, stop.clone());
    let plugin = TestPlugin::start(&dir.join("gpu-reg.sock"), &["d1"]);
    plugin.set_identity(GPU, "");
    agent.wait_count(GPU, 1, 1).await;
    assert_eq!(agent.admit(&pod("p", GPU, 1)).await, Ok(DeviceAdmission::Admitted));
    until("the plugin is informed", LONG, async || {
        let informed = plugin.informed();
        if informed == [Ok(())] { Ok(()) } else { Err(informed) }
    })
    .await;
    let bad = TestPlugin::start(&agent.path("bad.sock"), &["d1"]);
    bad.set_identity("gpu", "");
    std::fs::rename(agent.path("bad.sock"), dir.join("bad.sock")).unwrap();
    until("the refusal", LONG, async || {
        let informed = bad.informed();
        let text = r#"RegisterPlugin error -- plugin validation failed with err: invalid name of device plugin socket: the ResourceName "gpu" is invalid"#;
        if informed.first() == Some(&Err(text.to_owned())) { Ok(()) } else { Err(informed) }
    })
    .await;
    std::fs::remove_file(dir.join("gpu-reg.sock")).unwrap();
    agent.wait_count(GPU, 1, 0).await;
    stop.cancel();
}
