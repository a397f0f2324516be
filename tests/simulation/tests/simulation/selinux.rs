//! SELinux labels with which volumes are mounted.

use quintlet_csi_driver::thread::DriverThread;
use quintlet_simulation::{Options, Sim};
use serde_json::{Value, json};

use super::claims::{bound_claim, csi_driver, nothing_left, start_driver, with_claim};

/// Returns a pod with a claim whose containers have an SELinux level.
fn labelled(name: &str, level: &str) -> Value {
    let mut pod = with_claim(name, "data");
    pod["spec"]["securityContext"] = json!({"seLinuxOptions": {"level": level}});
    pod
}

/// Returns the method and the mount options of each request to mount a volume.
fn mounts(driver: &DriverThread) -> Vec<(String, String)> {
    let log = std::fs::read_to_string(driver.state().join("contexts.log")).unwrap();
    let requests = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    requests
        .map(|request| {
            let access = request["access"].as_str().unwrap();
            let options = access.split_once("mount_flags: [").unwrap().1.split_once(']').unwrap().0;
            (request["method"].as_str().unwrap().to_owned(), options.replace('\\', ""))
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_of_read_write_once_is_mounted_with_the_label_of_its_pod_by_the_feature_gate() {
    // The default of the gate, and the gate switched off.
    for arguments in [&[][..], &["--feature-gates=SELinuxMount=false"]] {
        let is_on = arguments.is_empty();
        let mut sim = Sim::prepare(Options::default()).await;
        sim.set_selinux();
        sim.set_pod_sync_args(arguments);
        sim.start_all();
        let driver = start_driver(&sim);
        csi_driver(&sim, json!({"attachRequired": false, "seLinuxMount": true}));
        bound_claim(&sim, "data", |_| {});
        let uid = sim.create(labelled("first", "s0:c1,c2"));
        sim.wait_ready("first").await;
        let option = if is_on { r#""context="system_u:object_r:container_file_t:s0:c1,c2"""# } else { "" };
        let expected =
            ["NodeStageVolume", "NodePublishVolume"].map(|method| (method.to_owned(), option.to_owned()));
        assert_eq!(mounts(&driver), expected, "{arguments:?}");
        // A volume with the label needs no other one on each of its files.
        let relabelled: Vec<bool> = {
            let container = sim.runtime.newest(&uid, "c-first").unwrap();
            let of_claim = container.config.mounts.iter().filter(|mount| mount.container_path == "/data");
            of_claim.map(|mount| mount.selinux_relabel).collect()
        };
        assert_eq!(relabelled, [!is_on], "{arguments:?}");
        let other = sim.create(labelled("second", "s0:c3,c4"));
        if is_on {
            let text = "conflicting SELinux labels of volume";
            let is_refused = |message: &str| message.contains(text) && message.contains("s0:c3,c4");
            sim.wait_event("second", text, |e| e.reason == "FailedMount" && is_refused(&e.message)).await;
        } else {
            sim.wait_ready("second").await;
        }
        for (name, uid) in [("first", &uid), ("second", &other)] {
            sim.delete(name, None);
            sim.wait_gone(name).await;
            sim.wait_nothing_left(uid).await;
        }
        nothing_left(&sim, &uid).await;
        sim.finish().await;
    }
}
