//! In-place resizes of a container and of a pod on a real runtime.

use std::path::{Path, PathBuf};

use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use serde_json::{Value, json};

fn both(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
}

/// Returns the cgroup directory of a process for a controller.
fn group(pid: u32, controller: &str) -> PathBuf {
    let root = Path::new("/sys/fs/cgroup");
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let line = text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let v2 = controllers.is_empty() && root.join("cgroup.controllers").exists();
        (v2 || controllers.split(',').any(|c| c == controller)).then(|| (v2, path.to_owned()))
    });
    let (v2, path) = line.unwrap_or_else(|| panic!("no {controller} in {text}"));
    let mount = if v2 { root.to_owned() } else { root.join(controller) };
    mount.join(path.trim_start_matches('/'))
}

/// Returns memory limit and CPU quota of the container and of its pod's cgroup.
fn limits(pid: u32) -> [(String, String); 2] {
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let (memory, cpu) = (group(pid, "memory"), group(pid, "cpu"));
    let read = |dir: &Path, v1: &str, name: &str| {
        let file = dir.join(if v2 { name } else { v1 });
        std::fs::read_to_string(&file).unwrap_or_else(|e| e.to_string()).trim().to_owned()
    };
    let limits_of = |memory: &Path, cpu: &Path| {
        let quota = read(cpu, "cpu.cfs_quota_us", "cpu.max");
        (
            read(memory, "memory.limit_in_bytes", "memory.max"),
            quota.split(' ').next().unwrap_or_default().to_owned(),
        )
    };
    [limits_of(&memory, &cpu), limits_of(memory.parent().unwrap(), cpu.parent().unwrap())]
}

fn condition(pod: &Value, kind: &str) -> Value {
    let all = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|c| c["type"] == kind).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_is_resized_without_a_restart() {
    const MIB: u64 = 1 << 20;
    let node = Node::start(Options::with_api("resize")).await;
    let api = node.api();
    // Prints its PID on the node, and uses memory, below which its limit must not fall.
    let mut pod = pods::script(
        "web",
        "dd if=/dev/zero of=/held/bytes bs=1M count=24 2>/dev/null
         cut -d ' ' -f 4 /proc/self/stat > /held/pid
         trap 'exit 0' TERM; sleep 100000 & wait",
    );
    pod["spec"]["hostPID"] = json!(true);
    pod["spec"]["volumes"] = json!([{"name": "held", "emptyDir": {"medium": "Memory"}}]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([{"name": "held", "mountPath": "/held"}]);
    main["resources"] = both("200m", "64Mi");
    let created = api.create_pod(pods::bound(pod));
    let uid = created["metadata"]["uid"].as_str().unwrap().to_owned();
    let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
    let before = Seen::from_api(api.wait_for("pods", "default", "web", LONG, is_ready).await);
    let pid: u32 = until("its pid", LONG, async || {
        let text = node.empty_dir_file(&uid, "held", "pid");
        text.trim().parse().map_err(|_| text.clone())
    })
    .await;
    let limits_for =
        |memory: u64, quota: u64| [(); 2].map(|()| ((memory * MIB).to_string(), quota.to_string()));
    assert_eq!(limits(pid), limits_for(64, 20_000));

    let resize = |cpu: &str, memory: &str| {
        let wanted = both(cpu, memory);
        let edit = |pod: &mut Value| pod["spec"]["containers"][0]["resources"] = wanted.clone();
        api.edit("pods/resize", "default", "web", edit).unwrap();
        wanted
    };
    let shows = |wanted: Value| {
        move |p: &Value| {
            let status = &p["status"]["containerStatuses"][0];
            status["resources"] == wanted
                && status["allocatedResources"] == wanted["requests"]
                && condition(p, "PodResizeInProgress").is_null()
        }
    };
    for (cpu, memory, mib, quota) in [("400m", "96Mi", 96, 40_000), ("100m", "48Mi", 48, 10_000)] {
        let wanted = resize(cpu, memory);
        let seen = api.wait_for("pods", "default", "web", LONG, shows(wanted)).await;
        assert_eq!(limits(pid), limits_for(mib, quota), "{seen:#}");
    }

    // A limit below the usage is refused, and nothing changes.
    resize("100m", "8Mi");
    let refused = |p: &Value| {
        let shown = condition(p, "PodResizeInProgress");
        let text = shown["message"].as_str().unwrap_or_default();
        shown["reason"] == "Error"
            && text
                .starts_with("cannot decrease memory limits: [attempting to set pod memory limit (8388608)")
    };
    api.wait_for("pods", "default", "web", LONG, refused).await;
    assert_eq!(limits(pid), limits_for(48, 10_000));
    let wanted = resize("100m", "48Mi");
    api.wait_for("pods", "default", "web", LONG, shows(wanted)).await;

    let after = node.pod("web").await.unwrap();
    assert_eq!(after.container("main"), before.container("main"), "the same container, never restarted");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_resized_at_pod_level_and_an_impossible_resize_is_reported() {
    const MIB: u64 = 1 << 20;
    let node = Node::start(Options::with_api("resize-pod")).await;
    let api = node.api();
    let mut pod = pods::script(
        "whole",
        "dd if=/dev/zero of=/held/bytes bs=1M count=24 2>/dev/null
         cut -d ' ' -f 4 /proc/self/stat > /held/pid
         trap 'exit 0' TERM; sleep 100000 & wait",
    );
    pod["spec"]["hostPID"] = json!(true);
    pod["spec"]["volumes"] = json!([{"name": "held", "emptyDir": {"medium": "Memory"}}]);
    let whole = |cpu: &str, memory: &str| json!({"requests": {"cpu": "50m", "memory": "8Mi"}, "limits": {"cpu": cpu, "memory": memory}});
    pod["spec"]["resources"] = whole("300m", "96Mi");
    // The container has no limits, so those of the pod apply to it.
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "held", "mountPath": "/held"}]);
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "50m", "memory": "8Mi"}});
    let created = api.create_pod(pods::bound(pod));
    let uid = created["metadata"]["uid"].as_str().unwrap().to_owned();
    let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
    let before = Seen::from_api(api.wait_for("pods", "default", "whole", LONG, is_ready).await);
    let pid: u32 = until("its pid", LONG, async || {
        let text = node.empty_dir_file(&uid, "held", "pid");
        text.trim().parse().map_err(|_| text.clone())
    })
    .await;
    let limits_for =
        |memory: u64, quota: u64| [(); 2].map(|()| ((memory * MIB).to_string(), quota.to_string()));
    assert_eq!(limits(pid), limits_for(96, 30_000));

    let resize = |cpu: &str, memory: &str| {
        let wanted = whole(cpu, memory);
        api.edit("pods/resize", "default", "whole", |pod| pod["spec"]["resources"] = wanted.clone()).unwrap();
        wanted
    };
    let shows = |wanted: Value| {
        move |p: &Value| {
            p["status"]["resources"] == wanted
                && p["status"]["allocatedResources"] == wanted["requests"]
                && condition(p, "PodResizeInProgress").is_null()
                && condition(p, "PodResizePending").is_null()
        }
    };
    for (cpu, memory, mib, quota) in [("600m", "128Mi", 128, 60_000), ("200m", "80Mi", 80, 20_000)] {
        let wanted = resize(cpu, memory);
        let seen = api.wait_for("pods", "default", "whole", LONG, shows(wanted)).await;
        assert_eq!(limits(pid), limits_for(mib, quota), "{seen:#}");
    }

    // A limit below the usage is refused, and nothing changes.
    resize("200m", "8Mi");
    let refused = |p: &Value| {
        let shown = condition(p, "PodResizeInProgress");
        let text = shown["message"].as_str().unwrap_or_default();
        let why = "cannot decrease memory limits: [attempting to set pod memory limit (8388608) below";
        shown["reason"] == "Error" && text.starts_with(why)
    };
    let seen = api.wait_for("pods", "default", "whole", LONG, refused).await;
    assert_eq!(limits(pid), limits_for(80, 20_000));
    assert_eq!(
        seen["status"]["resources"]["limits"]["memory"], "80Mi",
        "the actual resources, not the allocation"
    );
    resize("200m", "80Mi");

    // A request above the node's resources is deferred and reported, and the resources stay.
    let edit = |pod: &mut Value| {
        pod["spec"]["resources"]["requests"]["cpu"] = json!("1000");
        pod["spec"]["resources"]["limits"]["cpu"] = json!("1000");
    };
    api.edit("pods/resize", "default", "whole", edit).unwrap();
    let deferred = |p: &Value| {
        let shown = condition(p, "PodResizePending");
        let text = shown["message"].as_str().unwrap_or_default();
        shown["reason"] == "Deferred"
            && text.starts_with("Node didn't have enough resource: cpu, requested: 1000000")
    };
    let seen = api.wait_for("pods", "default", "whole", LONG, deferred).await;
    assert_eq!(seen["status"]["allocatedResources"]["cpu"], "50m", "{seen:#}");
    assert_eq!(limits(pid), limits_for(80, 20_000));
    let wanted = resize("200m", "80Mi");
    api.wait_for("pods", "default", "whole", LONG, shows(wanted)).await;

    let after = node.pod("whole").await.unwrap();
    assert_eq!(after.container("main"), before.container("main"), "the same container, never restarted");
    node.down().await;
}
