//! Devices that a device plugin and a driver of claims name by the Container Device Interface (CDI), seen
//! from inside a container. `make test-runtimes` runs this with runtimes that support it.

use quintlet_device_plugin::TestPlugin;
use quintlet_dra_driver::TestDriver;
use quintlet_e2e::{LONG, NODE, Node, Seen, pods, until};
use serde_json::{Value, json};

use crate::devices::{DEVICE, start, wait_node};

const DRIVER: &str = "cdi.example.com";

/// Reports what the container has of both devices.
const REPORT: &str = r#"
    trap 'exit 0' TERM
    {
        echo "plugin ${DEVICES:-none} ${CDI_PLUGIN:-none} ${CDI_CLAIM:-none}"
        cat /cdi/file || echo no mount
    } > /out/seen.tmp 2>/dev/null
    mv /out/seen.tmp /out/seen
    while :; do sleep 1 & wait $!; done
"#;

/// Writes a CDI file whose only device has an environment variable.
fn describe(node: &Node, file: &str, kind: &str, device: &str, edits: &Value) {
    let spec = json!({
        "cdiVersion": "0.5.0", "kind": kind, "devices": [{"name": device, "containerEdits": edits}],
    });
    std::fs::write(node.containerd.cdi_dir().join(file), spec.to_string()).unwrap();
}

/// Creates a pod with a device of the plugin and a claim, whose allocation is that of a scheduler.
async fn create(node: &Node, name: &str) -> String {
    let mut pod = pods::script(name, REPORT);
    pod["spec"]["volumes"] = json!([{"name": "out", "emptyDir": {}}]);
    pod["spec"]["resourceClaims"] = json!([{"name": "device", "resourceClaimName": name}]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([{"name": "out", "mountPath": "/out"}]);
    let device = json!({DEVICE: "1"});
    main["resources"] = json!({"limits": device, "requests": device, "claims": [{"name": "device"}]});
    let made = node.cluster().create_pod(pod).await;
    let uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
    let api = node.api();
    api.create("resourceclaims", "default", json!({"metadata": {"name": name}, "spec": {"devices": {}}}))
        .unwrap();
    let results = json!([{"driver": DRIVER, "pool": "pool", "device": name, "request": "r"}]);
    let reserved = json!([{"resource": "pods", "name": name, "uid": uid}]);
    let status = json!({"reservedFor": reserved, "allocation": {"devices": {"results": results}}});
    let reserve = |claim: &mut Value| claim["status"] = status;
    api.edit("resourceclaims/status", "default", name, reserve).unwrap();
    api.edit("pods/binding", "default", name, |pod| pod["spec"]["nodeName"] = json!(NODE)).unwrap();
    uid
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_gets_what_the_cdi_files_of_its_devices_say() {
    let node = start("cdi").await;
    let shared = node.scratch().join("shared");
    std::fs::create_dir_all(&shared).unwrap();
    std::fs::write(shared.join("file"), "of the host\n").unwrap();
    let mount =
        json!({"hostPath": shared, "containerPath": "/cdi", "type": "bind", "options": ["bind", "ro"]});
    let edits = json!({"env": ["CDI_PLUGIN=first"], "mounts": [mount]});
    describe(&node, "plugin.json", DEVICE, "d1", &edits);
    let registry = node.root_dir().join("plugins_registry");
    let listens = async || if registry.is_dir() { Ok(()) } else { Err("no directory of plugins") };
    until("the directory of plugins", LONG, listens).await;
    let plugin = TestPlugin::start(&registry.join("device.sock"), &["d1"]);
    plugin.set_identity(DEVICE, "");
    let driver = TestDriver::start(&registry.join("claim.sock"), DRIVER);
    driver.describe_devices_in(&node.containerd.cdi_dir());
    until("plugin and driver are registered", LONG, async || {
        let informed = (plugin.informed(), driver.informed());
        if informed.0 == [Ok(())] && informed.1 == [Ok(())] { Ok(()) } else { Err(informed) }
    })
    .await;

    wait_node(&node, "1", "1").await;
    let uid = create(&node, "web").await;
    node.wait_ready("web").await;
    let supports_cdi = node.runtime_version().await >= (1, 7);
    // containerd 1.6 ignores CDI devices; what the plugin returns itself is there.
    let expected =
        if supports_cdi { "plugin d1 first web\nof the host\n" } else { "plugin d1 none none\nno mount\n" };
    until("the report of the container", LONG, async || {
        let seen = node.empty_dir_file(&uid, "out", "seen");
        if seen == expected { Ok(()) } else { Err(seen) }
    })
    .await;

    // No file describes the devices of the next pod.
    plugin.list(&["d1", "d2"]);
    wait_node(&node, "2", "2").await;
    create(&node, "other").await;
    if supports_cdi {
        let refused = |pod: &Seen| {
            pod.text("/status/containerStatuses/0/state/waiting/message").contains("unresolvable CDI devices")
        };
        node.wait_pod("other", "the runtime refuses its devices", LONG, refused).await;
    } else {
        node.wait_ready("other").await;
    }
    node.down().await;
}
