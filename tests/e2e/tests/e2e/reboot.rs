//! The node reboots: only the files of its pods remain.

use quintlet_csi_driver::fault;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_e2e::claims::{bound_claim, restart_driver, start_driver, with_claim};
use quintlet_e2e::{LONG, NODE, Node, Options, Seen, pods, until};
use serde_json::{Value, json};

/// Returns a pod that records its configuration at each start and appends a line to a file in each of its
/// volumes, the one on disk last. The first `failing` instances fail.
fn marks(name: &str, failing: u32) -> Value {
    let script = format!(
        "cat /config/colour >> /disk/colours; echo x >> /memory/starts; echo x >> /disk/starts
         [ $(wc -l < /disk/starts) -gt {failing} ] || exit 3
         trap 'exit 0' TERM; sleep 100000 & wait"
    );
    let mut pod = pods::script(name, &script);
    pod["spec"]["volumes"] = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "config", "configMap": {"name": "settings"}},
    ]);
    let at = |name: &str| json!({"name": name, "mountPath": format!("/{name}")});
    pod["spec"]["containers"][0]["volumeMounts"] = json!([at("disk"), at("memory"), at("config")]);
    pod
}

fn restarts(pod: &Seen) -> i64 {
    pod.container("main").restarts
}

/// Returns whether a tmpfs is mounted at the pod's volume `memory`.
fn is_mounted(uid: &str) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let volume = format!("{uid}/volumes/kubernetes.io~empty-dir/memory tmpfs ");
    mounts.contains(&volume)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_static_pods_start_first_and_pods_keep_their_identity() {
    let mut node = Node::start(Options::with_api("reboot")).await;
    let api = node.api().clone();
    let settings = json!({"metadata": {"name": "settings"}, "data": {"colour": "green\n"}});
    api.create("configmaps", "default", settings).unwrap();
    node.pod_manifest(&pods::sleeper("static"));
    for pod in [marks("web", 0), marks("stumbled", 1)] {
        api.create_pod(pods::bound(pod));
    }
    let fixed = node.wait_ready("static").await;
    let mut before = Vec::new();
    for (name, count) in [("web", 0), ("stumbled", 1)] {
        let runs = |p: &Seen| p.is_ready() && restarts(p) == count;
        let seen = node.wait_pod(name, "runs", LONG, runs).await;
        assert!(is_mounted(seen.uid()) && !seen.ip().is_empty(), "{seen}");
        before.push((seen, count));
    }
    let booted = |n: &Value| n["status"]["nodeInfo"]["bootID"].as_str().unwrap_or_default().to_owned();
    let first_boot = booted(&api.get("nodes", "", NODE).unwrap());

    node.power_off().await;
    let left = node.containerd.leftovers();
    let on_disk = |line: &String| line.starts_with("directory ") || line.starts_with("CNI result ");
    assert!(left.iter().all(on_disk), "a reboot would have taken it: {left:#?}");
    assert!(!is_mounted(before[0].0.uid()) && !node.paths().run().exists());
    api.faults().set_down(true);
    api.reset_counts();
    api.edit("configmaps", "default", "settings", |m| m["data"]["colour"] = json!("blue\n")).unwrap();
    node.boot().await;

    // Without the API server the static pod starts, and the files of the other pods are kept.
    let up = node.wait_pod("static", "Ready again", LONG, |p| p.is_ready() && restarts(p) == 1).await;
    assert_eq!(up.uid(), fixed.uid());
    assert!(up.ip() != fixed.ip() && !up.ip().is_empty(), "{up}");
    for (pod, _) in &before {
        assert_eq!(node.empty_dir_file(pod.uid(), "disk", "colours").lines().last(), Some("green"), "{pod}");
        assert!(node.listed().await.has_pod(pod.uid()), "{pod}");
    }

    api.faults().set_down(false);
    for (old, count) in &before {
        let again = |p: &Value| {
            let p = Seen::from_api(p.clone());
            p.is_ready() && restarts(&p) == count + 1
        };
        let new = Seen::from_api(api.wait_for("pods", "default", old.name(), LONG, again).await);
        assert_eq!(new.uid(), old.uid());
        assert!(new.ip() != old.ip() && !new.ip().is_empty(), "{new}");
        let file = |volume: &str, file: &str| node.empty_dir_file(old.uid(), volume, file);
        let starts = usize::try_from(count + 2).unwrap();
        until("the disk has kept it", LONG, async || {
            let written = file("disk", "starts");
            if written.lines().count() == starts { Ok(()) } else { Err(written) }
        })
        .await;
        assert_eq!(file("memory", "starts"), "x\n", "the memory has not");
        assert!(
            file("disk", "colours").ends_with("green\nblue\n"),
            "mounted again: {}",
            file("disk", "colours")
        );
        assert!(is_mounted(old.uid()));
        // No status report has an address of the previous boot.
        let reports = api.requests(format!("patch pods/status default/{}", old.name()).as_str());
        let address = format!("\"{}\"", old.ip());
        assert!(!reports.is_empty());
        assert!(reports.iter().all(|r| !r.body.to_string().contains(&address)), "{address}: {reports:#?}");
    }
    let mirror = format!("static-{NODE}");
    let again = |p: &Value| {
        let p = Seen::from_api(p.clone());
        p.is_ready() && restarts(&p) == 1
    };
    api.wait_for("pods", "default", &mirror, LONG, again).await;
    let new_boot = |n: &Value| ![String::new(), first_boot.clone()].contains(&booted(n));
    let object = api.wait_for("nodes", "", NODE, LONG, new_boot).await;
    until("the reboot is reported", LONG, async || {
        let text = format!("Node {NODE} has been rebooted, boot id: {}", booted(&object));
        let events = api.list("events");
        let reports = events.iter().any(|e| e["reason"] == "Rebooted" && e["message"] == text.as_str());
        if reports { Ok(()) } else { Err(events) }
    })
    .await;
    node.assert_no_duplicates().await;
    // Containers of the previous boot are garbage-collected like other dead containers.
    let uid = before[0].0.uid().to_owned();
    api.delete("pods", "default", "web", None).unwrap();
    node.wait_gone(&uid).await;
    node.down().await;
}

/// A reboot removes mounts, and keeps the directories of volumes with their metadata and the file behind the
/// device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_a_claim_is_staged_and_published_again_with_its_data_and_a_deleted_pod_leaves_nothing()
{
    let mut node = Node::start(Options::with_api("reboot-claims")).await;
    let api = node.api().clone();
    let driver = start_driver(&node);
    let script = "echo x >> /data/starts; trap 'exit 0' TERM; sleep 100000 & wait";
    let mut uids = Vec::new();
    for name in ["kept", "deleted"] {
        bound_claim(&node, name, |volume| {
            volume["spec"]["csi"]["volumeAttributes"] = json!({"medium": "loop"});
        });
        let made = api.create_pod(with_claim(name, name, script));
        uids.push(made["metadata"]["uid"].as_str().unwrap().to_owned());
        node.wait_ready(name).await;
    }
    let volume = |uid: &str, name: &str| {
        node.root_dir().join(format!("pods/{uid}/volumes/kubernetes.io~csi/pv-{name}/mount"))
    };
    let (kept, deleted) = (volume(&uids[0], "kept"), volume(&uids[1], "deleted"));
    let global_mounts =
        node.root_dir().join(format!("plugins/kubernetes.io/csi/{}", quintlet_e2e::claims::DRIVER));
    let has_started = async |times: usize| {
        until("the start is on the device", LONG, async || {
            let starts = std::fs::read_to_string(kept.join("starts")).unwrap_or_default();
            if starts == "x\n".repeat(times) { Ok(()) } else { Err(starts) }
        })
        .await;
    };
    has_started(1).await;
    let calls = |driver: &quintlet_csi_driver::thread::DriverThread, volume: &str| {
        ["Stage", "Publish", "Unpublish", "Unstage"]
            .map(|call| driver.calls_of(&format!("Node{call}Volume vol-{volume}")))
    };
    assert_eq!(calls(&driver, "kept"), [1, 1, 0, 0], "{:?}", fault::calls(driver.state()));

    node.power_off().await;
    drop(driver);
    assert_eq!(mounts_below(&node.root_dir()).unwrap(), Vec::<std::path::PathBuf>::new());
    for mount in [&kept, &deleted] {
        assert!(mount.is_dir() && !mount.join("starts").exists());
        assert!(mount.with_file_name("vol_data.json").exists());
    }
    api.delete("pods", "default", "deleted", Some(0)).unwrap();
    node.boot().await;
    // The driver starts after the node agent.
    let driver = restart_driver(&node);
    let again = |pod: &Value| {
        let pod = Seen::from_api(pod.clone());
        pod.is_ready() && restarts(&pod) == 1
    };
    let pod = Seen::from_api(api.wait_for("pods", "default", "kept", LONG, again).await);
    assert_eq!(pod.uid(), uids[0]);
    has_started(2).await;
    assert_eq!(calls(&driver, "kept"), [2, 2, 0, 0], "{:?}", fault::calls(driver.state()));

    // Neither mounts nor directories are left of a pod and its volume, and the device has its data.
    let is_gone = async |uid: &str, mounts: usize| {
        node.wait_gone(uid).await;
        until("nothing of the volume is left", LONG, async || {
            let left = mounts_below(&node.root_dir().join("pods").join(uid)).unwrap();
            let staged: Vec<_> = std::fs::read_dir(&global_mounts).into_iter().flatten().flatten().collect();
            let is_left = node.root_dir().join("pods").join(uid).exists() || !left.is_empty();
            if !is_left && staged.len() == mounts { Ok(()) } else { Err((left, staged)) }
        })
        .await;
    };
    is_gone(&uids[1], 1).await;
    let [stages, publishes, unpublishes, unstages] = calls(&driver, "deleted");
    assert_eq!((stages, publishes), (1, 1), "it is not mounted again");
    assert!(unpublishes > 0 && unstages > 0, "{:?}", fault::calls(driver.state()));
    node.cluster().delete("pods", "default", "kept").await;
    is_gone(&uids[0], 0).await;
    let device = node.scratch().join("device");
    std::fs::create_dir(&device).unwrap();
    let run = |program: &str, arguments: &[&std::path::Path]| {
        assert!(std::process::Command::new(program).args(arguments).status().unwrap().success(), "{program}");
    };
    run("mount", &["-o".as_ref(), "loop,ro".as_ref(), &driver.backing("vol-kept"), &device]);
    let starts = std::fs::read_to_string(device.join("starts"));
    run("umount", &[&device]);
    assert_eq!(starts.unwrap(), "x\nx\n");
    node.down().await;
    drop(driver);
}

/// The API server stays away: the pod starts from the offline cache, encrypted with a key from a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_without_the_api_server_a_pod_starts_from_the_encrypted_cache_with_its_secret() {
    let keys = tempfile::tempdir().unwrap();
    let key = keys.path().join("key");
    std::fs::write(&key, [7; 32]).unwrap();
    let extra = [
        "--offline-cache".to_owned(),
        "--offline-start-after=3s".to_owned(),
        format!("--offline-credential={}", key.display()),
    ];
    let extra = extra.map(|argument| ("pod-sync", argument)).to_vec();
    let mut node = Node::start(Options { extra, ..Options::with_api("reboot-offline") }).await;
    let api = node.api().clone();
    let secret = json!({"metadata": {"name": "password"}, "data": {"k": "Z3JlZW4K"}});
    api.create("secrets", "default", secret).unwrap();
    let script =
        "cat /secret/k >> /disk/lines; echo \"$K\" >> /disk/lines; trap 'exit 0' TERM; sleep 100000 & wait";
    let mut pod = pods::script("web", script);
    pod["spec"]["volumes"] = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "secret", "secret": {"secretName": "password"}},
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
    ]);
    let main = &mut pod["spec"]["containers"][0];
    let at = |name: &str| json!({"name": name, "mountPath": format!("/{name}")});
    main["volumeMounts"] = json!([at("disk"), at("secret"), at("token")]);
    main["env"] = json!([{"name": "K", "valueFrom": {"secretKeyRef": {"name": "password", "key": "k"}}}]);
    api.create_pod(pods::bound(pod));
    let before = node.wait_ready("web").await;
    let cached = node.root_dir().join(format!("quintlet-offline/pod-{}", before.uid()));
    until("the pod is in the cache with its Secret", LONG, async || {
        let length = std::fs::metadata(&cached).map(|found| found.len()).unwrap_or_default();
        if length > 2000 { Ok(()) } else { Err(length) }
    })
    .await;
    // Changes of a start are written a second later.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    let bytes = std::fs::read(&cached).unwrap();
    assert!(!bytes.windows(8).any(|part| part == b"Z3JlZW4K"), "the Secret is encrypted");

    node.power_off().await;
    api.faults().set_down(true);
    node.boot().await;
    until("the pod has started again", LONG, async || {
        let lines = node.empty_dir_file(before.uid(), "disk", "lines");
        if lines == "green\n".repeat(2) + "\n" + &"green\n".repeat(2) + "\n" { Ok(()) } else { Err(lines) }
    })
    .await;

    api.faults().set_down(false);
    let again = |pod: &Value| {
        let pod = Seen::from_api(pod.clone());
        pod.is_ready() && restarts(&pod) == 1
    };
    let after = Seen::from_api(api.wait_for("pods", "default", "web", LONG, again).await);
    assert_eq!(after.uid(), before.uid());
    assert_eq!(node.empty_dir_file(before.uid(), "disk", "lines").lines().count(), 6, "started twice in all");
    until("the event of the start", LONG, async || {
        let events = api.list("events");
        if events.iter().any(|event| event["reason"] == "StartedFromOfflineCache") {
            Ok(())
        } else {
            Err(events)
        }
    })
    .await;
    node.assert_no_duplicates().await;
    node.down().await;
}
