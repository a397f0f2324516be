//! Volumes as the containers of a real runtime see them.

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use quintlet_e2e::claims::{bound_claim, start_driver};
use quintlet_e2e::{LONG, Node, Options, pods, until};
use serde_json::json;

/// Number of updates of the ConfigMap.
const UPDATES: u32 = 1000;

/// Waits until a file has a content that `wanted` accepts, and returns it.
async fn read_when(what: &str, path: &std::path::Path, wanted: impl Fn(&str) -> bool) -> String {
    until(what, LONG, async || {
        let content = std::fs::read_to_string(path).unwrap_or_default();
        if wanted(&content) { Ok(content) } else { Err(content) }
    })
    .await
}

/// A mount that is removed at the end.
struct Tmpfs(std::path::PathBuf);

impl Tmpfs {
    fn mount(path: std::path::PathBuf) -> Self {
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some("size=1m")).unwrap();
        Self(path)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_sees_modes_groups_subpaths_propagation_read_only_volumes_and_block_devices() {
    let node = Node::start(Options::with_api("volumes")).await;
    let driver = start_driver(&node);
    node.api()
        .create("configmaps", "default", json!({"metadata": {"name": "c"}, "data": {"k": "v"}}))
        .unwrap();
    bound_claim(&node, "data", |volume| {
        volume["metadata"]["annotations"] = json!({"pv.beta.kubernetes.io/gid": "4712"});
    });
    bound_claim(&node, "fixed", |_| {});
    bound_claim(&node, "disk", |volume| volume["spec"]["volumeMode"] = json!("Block"));
    // Mounts propagate below the root directory, which is a shared mount.
    let host = node.root_dir().join("plugins/propagation");
    std::fs::create_dir_all(host.join("mnt")).unwrap();
    let script = r#"
        trap 'exit 0' TERM
        {
            stat -L -c '%a %u %g' /conf/k
            for dir in conf fixed data; do
                touch /$dir/x 2>/dev/null && echo $dir writable || echo $dir read-only
            done
            stat -c 'data %g' /data
            echo part > /sub/f
            cat /all/part/f
            stat -c %F /dev/data
            for group in $(id -G); do case $group in 471*) echo group $group;; esac; done
        } > /data/seen.tmp
        mv /data/seen.tmp /data/seen
        until [ -e /host/mnt/f ]; do sleep 1; done
        { cat /host/mnt/f; ls /private/mnt | wc -l; } > /data/propagated.tmp
        mv /data/propagated.tmp /data/propagated
        sleep 100000 & wait
    "#;
    let mut pod = pods::script("web", script);
    pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
    pod["spec"]["volumes"] = json!([
        {"name": "conf", "configMap": {"name": "c", "defaultMode": 0o440}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "fixed", "persistentVolumeClaim": {"claimName": "fixed", "readOnly": true}},
        {"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}},
        {"name": "empty", "emptyDir": {}},
        {"name": "host", "hostPath": {"path": host.display().to_string(), "type": "Directory"}},
    ]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([
        {"name": "conf", "mountPath": "/conf"}, {"name": "data", "mountPath": "/data"},
        {"name": "fixed", "mountPath": "/fixed"}, {"name": "empty", "mountPath": "/all"},
        {"name": "empty", "mountPath": "/sub", "subPath": "part"},
        {"name": "host", "mountPath": "/host", "mountPropagation": "HostToContainer"},
        {"name": "host", "mountPath": "/private"},
    ]);
    main["volumeDevices"] = json!([{"name": "disk", "devicePath": "/dev/data"}]);
    let made = node.cluster().create_pod(pods::bound(pod)).await;
    let uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
    let data = driver.backing("vol-data");
    let seen = read_when("the container has looked", &data.join("seen"), |content| !content.is_empty()).await;
    let lines: Vec<&str> = seen.lines().collect();
    assert_eq!(
        lines,
        [
            "440 0 4711",
            "conf read-only",
            "fixed read-only",
            "data writable",
            "data 4711",
            "part",
            // The tests' driver publishes /dev/null as every block volume.
            "character special file",
            "group 4711",
            "group 4712",
        ]
    );
    let later = Tmpfs::mount(host.join("mnt"));
    std::fs::write(host.join("mnt/f"), "propagated\n").unwrap();
    let propagated = read_when("the mount has propagated", &data.join("propagated"), |c| !c.is_empty()).await;
    let lines: Vec<&str> = propagated.lines().map(str::trim).collect();
    assert_eq!(lines, ["propagated", "0"]);
    node.cluster().delete("pods", "default", "web").await;
    node.wait_gone(&uid).await;
    drop(later);
    std::fs::remove_dir_all(&host).unwrap();
    node.down().await;
    drop(driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_reads_a_config_map_in_a_loop_never_sees_a_mixture_or_an_older_version() {
    let node = Node::start(Options::with_api("updates")).await;
    let both = |value: u32| json!({"a": value.to_string(), "b": value.to_string()});
    let object = json!({"metadata": {"name": "c"}, "data": both(1)});
    node.api().create("configmaps", "default", object).unwrap();
    // A read of a version that is removed meanwhile fails, and is repeated.
    let script = format!(
        r#"
        trap 'exit 0' TERM
        last=0
        while [ $last -lt {UPDATES} ]; do
            cd -P /conf/..data 2>/dev/null || continue
            a=$(cat a 2>/dev/null)
            b=$(cat b 2>/dev/null)
            [ -n "$a" ] && [ -n "$b" ] || continue
            [ "$a" = "$b" ] || echo "mixed $a $b" >> /out/faults
            [ "$a" -ge "$last" ] || echo "$a after $last" >> /out/faults
            [ "$a" = "$last" ] || echo "$a" >> /out/versions
            last=$a
        done
        echo done > /out/done
        sleep 100000 & wait
        "#
    );
    let mut pod = pods::script("reader", &script);
    pod["spec"]["volumes"] = json!([{"name": "conf", "configMap": {"name": "c", "defaultMode": 0o644}}, {"name": "out", "emptyDir": {}}]);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "conf", "mountPath": "/conf"}, {"name": "out", "mountPath": "/out"}]);
    let made = node.cluster().create_pod(pods::bound(pod)).await;
    let uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
    let out = |file: &str| node.empty_dir_file(&uid, "out", file);
    until("the first version is read", LONG, async || {
        let versions = out("versions");
        if versions == "1\n" { Ok(()) } else { Err(versions) }
    })
    .await;
    for value in 2..=UPDATES {
        node.api().edit("configmaps", "default", "c", |object| object["data"] = both(value)).unwrap();
        // Ten writes a second reach the volume, at most.
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    until("the last version is read", LONG, async || {
        let versions = out("versions");
        if out("done").is_empty() { Err(versions) } else { Ok(()) }
    })
    .await;
    assert_eq!(out("faults"), "");
    let versions: Vec<u32> = out("versions").lines().map(|line| line.parse().unwrap()).collect();
    assert!(versions.is_sorted() && versions.last() == Some(&UPDATES), "{versions:?}");
    // The updates reach the container while they are made.
    assert!(versions.len() > 20, "{versions:?}");
    println!("{} of {UPDATES} versions were read", versions.len());
    node.cluster().delete("pods", "default", "reader").await;
    node.wait_gone(&uid).await;
    node.down().await;
}
