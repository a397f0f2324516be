//! A pod with a CPU of its own and with memory of one NUMA node, on a real runtime.

use quintlet_e2e::{LONG, NODE, Node, Options, pods, until};
use quintlet_model::cpu_list::CpuList;
use serde_json::{Value, json};

/// Reports the CPUs, the NUMA nodes and the quota of the container, as it sees them, once a second.
const WORK: &str = r#"
    trap 'exit 0' TERM
    while :; do
        {
            echo "cpuset $(cat /sys/fs/cgroup/cpuset/cpuset.cpus 2>/dev/null || cat /sys/fs/cgroup/cpuset.cpus)"
            echo "allowed $(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)"
            echo "nodes $(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' /proc/self/status)"
            echo "quota $(cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cut -d' ' -f1 /sys/fs/cgroup/cpu.max)"
        } > /out/seen.tmp
        mv /out/seen.tmp /out/seen
        sleep 1 & wait $!
    done
"#;

fn pod(name: &str, resources: &Value) -> Value {
    let mut pod = pods::script(name, WORK);
    pod["spec"]["volumes"] = json!([{"name": "out", "emptyDir": {}}]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([{"name": "out", "mountPath": "/out"}]);
    main["resources"] = resources.clone();
    pods::bound(pod)
}

/// Waits until the container of a pod reports these CPUs and NUMA nodes, and this quota or that of cgroup v2.
async fn wait_report(node: &Node, uid: &str, cpus: &str, nodes: &str, quota: [&str; 2]) {
    let report = |quota: &str| format!("cpuset {cpus}\nallowed {cpus}\nnodes {nodes}\nquota {quota}\n");
    let expected = quota.map(report);
    until("the report of the container", LONG, async || {
        let seen = node.empty_dir_file(uid, "out", "seen");
        if expected.contains(&seen) { Ok(()) } else { Err(seen) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_sees_a_cpu_of_its_own_and_others_no_longer_run_on_it() {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let online: Vec<u32> = CpuList::parse(online.trim()).unwrap().iter().collect();
    let (last, reserved) = online.split_last().unwrap();
    assert!(!reserved.is_empty(), "the test needs two CPUs");
    let own = last.to_string();
    let [shared, all] = [reserved, &online].map(|cpus| cpus.iter().copied().collect::<CpuList>().to_string());
    // A kernel without NUMA nodes shows all memory as node 0.
    let nodes = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or("0".to_owned());
    let (nodes, own_node) = (nodes.trim(), "0");
    let reserved = format!("--reserved-cpus={shared}");
    let extra = [
        "--cpu-manager-policy=static",
        &reserved,
        "--memory-manager-policy=Static",
        "--kube-reserved=memory=100Mi",
        "--reserved-memory=0:memory=100Mi",
    ];
    let extra = extra.map(|argument| ("pod-sync", argument.to_owned())).to_vec();
    let node = Node::start(Options { extra, ..Options::with_api("cpus") }).await;
    let amounts = json!({"cpu": "1", "memory": "32Mi"});
    let guaranteed = json!({"limits": amounts, "requests": amounts});
    let no_quota = ["-1", "max"];

    node.cluster().create_pod(pod("other", &json!({"requests": {"memory": "16Mi"}}))).await;
    let other = node.wait_ready("other").await;
    wait_report(&node, other.uid(), &all, nodes, no_quota).await;
    node.cluster().create_pod(pod("web", &guaranteed)).await;
    let web = node.wait_ready("web").await;
    wait_report(&node, web.uid(), &own, own_node, no_quota).await;
    wait_report(&node, other.uid(), &shared, nodes, no_quota).await;
    let allocatable = node.api().get("nodes", "", NODE).unwrap()["status"]["allocatable"]["cpu"].clone();
    assert_eq!(allocatable, json!("1"));
    let output = node.quintctl(&["cpus"]).output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    println!("{text}");
    let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(row, ["web", "main", own.as_str(), own_node]);

    // No CPU is left.
    node.cluster().create_pod(pod("late", &guaranteed)).await;
    let late = node.wait_pod("late", "it is rejected", LONG, |pod| pod.phase() == "Failed").await;
    assert_eq!(late.text("/status/reason"), "OutOfcpu");
    let text = "Node didn't have enough resource: cpu, requested: 1000, used: 1000, capacity: 1000";
    assert_eq!(late.text("/status/message"), format!("Pod was rejected: {text}"));

    let starts = node.kill9("pod-sync");
    node.wait_back("pod-sync", starts, LONG).await;
    assert_eq!(node.wait_ready("web").await.steady(), web.steady());
    wait_report(&node, web.uid(), &own, own_node, no_quota).await;
    wait_report(&node, other.uid(), &shared, nodes, no_quota).await;

    node.cluster().delete("pods", "default", "web").await;
    wait_report(&node, other.uid(), &all, nodes, no_quota).await;
    assert_eq!(node.wait_ready("other").await.steady(), other.steady());
    node.cluster().create_pod(pod("next", &guaranteed)).await;
    let next = node.wait_ready("next").await;
    wait_report(&node, next.uid(), &own, own_node, no_quota).await;
    node.down().await;
}
