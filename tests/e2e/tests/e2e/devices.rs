//! A pod with a device of a device plugin, on a real runtime.

use quintlet_device_plugin::TestPlugin;
use quintlet_e2e::{LONG, NODE, Node, Options, Seen, pods, until};
use quintlet_pod_resources_api::v1::pod_resources_lister_client::PodResourcesListerClient;
use quintlet_pod_resources_api::v1::{ContainerDevices, ListPodResourcesRequest};
use serde_json::{Value, json};
use tokio::net::UnixStream;

pub(crate) const DEVICE: &str = "example.com/device";

/// Reports what the container has of its device, and exits once a file says so.
const WORK: &str = r#"
    trap 'exit 0' TERM
    {
        echo "env $DEVICES"
        stat -c '%F %t:%T' /dev/d1
        echo gone > /dev/d1 && echo writable
        [ -d /device ] && echo mounted
        touch /device/x 2>/dev/null || echo read-only
    } > /out/seen.tmp 2>&1
    cat /out/seen.tmp >> /out/seen
    until [ -e /out/exit ]; do sleep 1 & wait $!; done
    rm /out/exit
    exit 1
"#;

/// The report of one start.
const SEEN: &str = "env d1\ncharacter special file 1:3\nwritable\nmounted\nread-only\n";

/// Starts the plugin of the node, and registers it once pod-sync listens.
async fn start_plugin(node: &Node) -> TestPlugin {
    let dir = node.root_dir().join("device-plugins");
    let (agent, socket) = (dir.join("kubelet.sock"), dir.join("test.sock"));
    until("the socket of device plugins", LONG, async || {
        UnixStream::connect(&agent).await.map(drop).map_err(|error| error.to_string())
    })
    .await;
    let _ = std::fs::remove_file(&socket);
    let plugin = TestPlugin::start(&socket, &["d1"]);
    plugin.leave_out_cdi_devices();
    plugin.register(&agent, DEVICE).await.unwrap();
    plugin
}

/// Starts a node whose devices are in the Node within a second. The default is 10 s.
pub(crate) async fn start(name: &'static str) -> Node {
    let mut options = Options::with_api(name);
    options.extra.push(("status-reporter", "--node-status-update-frequency=1s".to_owned()));
    Node::start(options).await
}

/// Waits until the Node shows this number of devices.
pub(crate) async fn wait_node(node: &Node, capacity: &str, allocatable: &str) {
    until("the devices of the Node", LONG, async || {
        let status = node.api().get("nodes", "", NODE).map(|node| node["status"].clone()).unwrap_or_default();
        let seen = ["capacity", "allocatable"].map(|field| status[field][DEVICE].clone());
        if seen == [json!(capacity), json!(allocatable)] { Ok(()) } else { Err(seen) }
    })
    .await;
}

fn with_device(name: &str, script: &str) -> Value {
    let mut pod = pods::script(name, script);
    pod["spec"]["volumes"] = json!([{"name": "out", "emptyDir": {}}]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([{"name": "out", "mountPath": "/out"}]);
    main["resources"] = json!({"limits": {DEVICE: "1"}, "requests": {DEVICE: "1"}});
    pods::bound(pod)
}

async fn wait_report(node: &Node, uid: &str, expected: &str) {
    until("the report of the container", LONG, async || {
        let seen = node.empty_dir_file(uid, "out", "seen");
        if seen == expected { Ok(()) } else { Err(seen) }
    })
    .await;
}

/// Waits until the node rejects a pod, and returns reason and message.
async fn rejection(node: &Node, name: &str) -> (String, String) {
    let pod = node.wait_pod(name, "it is rejected", LONG, |pod| pod.phase() == "Failed").await;
    (pod.text("/status/reason").to_owned(), pod.text("/status/message").to_owned())
}

async fn quintctl(node: &Node, args: &[&str]) -> String {
    let output = node.quintctl(args).output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the devices of containers, as an agent of the node lists them.
async fn listed(node: &Node) -> Vec<String> {
    let socket = node.root_dir().join("pod-resources/kubelet.sock");
    let mut client = PodResourcesListerClient::new(quintlet_kit::socket::channel(socket));
    let listed = client.list(ListPodResourcesRequest {}).await.unwrap().into_inner();
    let mut lines = Vec::new();
    for pod in &listed.pod_resources {
        for container in &pod.containers {
            let devices = container.devices.iter();
            let line = |held: &ContainerDevices| {
                format!(
                    "{}/{} {} {}",
                    pod.name,
                    container.name,
                    held.resource_name,
                    held.device_ids.join("+")
                )
            };
            lines.extend(devices.map(line));
        }
    }
    lines
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_has_its_device_and_keeps_it_over_kills_of_pod_sync_and_of_the_plugin() {
    let node = start("devices").await;
    let plugin = start_plugin(&node).await;
    wait_node(&node, "1", "1").await;
    node.cluster().create_pod(with_device("web", WORK)).await;
    let web = node.wait_ready("web").await;
    let uid = web.uid().to_owned();
    wait_report(&node, &uid, SEEN).await;
    println!("{}", quintctl(&node, &["devices"]).await);
    let held = [format!("web/main {DEVICE} d1")];
    assert_eq!(listed(&node).await, held);

    // The plugin is killed, and registers again.
    drop(plugin);
    wait_node(&node, "1", "0").await;
    let plugin = start_plugin(&node).await;
    wait_node(&node, "1", "1").await;

    // pod-sync is killed, and the plugin does not come back.
    drop(plugin);
    let starts = node.kill9("pod-sync");
    node.wait_back("pod-sync", starts, LONG).await;
    wait_node(&node, "0", "0").await;
    assert_eq!(node.wait_ready("web").await.steady(), web.steady());
    assert_eq!(listed(&node).await, held);
    node.cluster().create_pod(with_device("late", WORK)).await;
    let waits = "DevicesNotAllocated";
    node.wait_pod("late", "it waits for the plugin", LONG, |pod| pod.waits_for() == waits).await;
    let explanation = quintctl(&node, &["explain", "late"]).await;
    assert!(explanation.contains("device plugin of example.com/device (not registered)"), "{explanation}");
    println!("{explanation}\n{}", quintctl(&node, &["devices"]).await);
    node.cluster().create_pod(pods::bound(pods::sleeper("neighbour"))).await;
    node.wait_ready("neighbour").await;

    // A container that starts again has the device of the checkpoint.
    std::fs::write(node.empty_dir(&uid, "out").join("exit"), "").unwrap();
    wait_report(&node, &uid, &SEEN.repeat(2)).await;
    let restarted = |pod: &Seen| pod.is_ready() && pod.container("main").restarts == 1;
    let again = node.wait_pod("web", "it is Ready again", LONG, restarted).await;

    // The plugin is back: its device still belongs to the first pod.
    let _plugin = start_plugin(&node).await;
    wait_node(&node, "1", "1").await;
    let shortage =
        "requested number of devices unavailable for example.com/device. Requested: 1, Available: 0";
    let text = format!("Pod was rejected: Allocate failed due to {shortage}, which is unexpected");
    assert_eq!(rejection(&node, "late").await, ("UnexpectedAdmissionError".to_owned(), text));
    node.cluster().create_pod(with_device("third", WORK)).await;
    let shortage = "Node didn't have enough resource: example.com/device, requested: 1, used: 1, capacity: 1";
    let text = format!("Pod was rejected: {shortage}");
    assert_eq!(rejection(&node, "third").await, (format!("OutOf{DEVICE}"), text));
    assert_eq!(node.wait_ready("web").await.steady(), again.steady());

    node.cluster().delete("pods", "default", "web").await;
    node.wait_gone(&uid).await;
    node.cluster().create_pod(with_device("next", WORK)).await;
    let next = node.wait_ready("next").await;
    wait_report(&node, next.uid(), SEEN).await;
    let devices = quintctl(&node, &["devices"]).await;
    assert!(devices.contains("next") && !devices.contains("web"), "{devices}");
    assert_eq!(listed(&node).await, [format!("next/main {DEVICE} d1")]);
    node.down().await;
}
