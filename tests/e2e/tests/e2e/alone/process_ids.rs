//! A lack of process IDs on the machine, whose number of processes the threshold is computed from.

use quintlet_e2e::{Node, pods};

use crate::pressure::{after, evicted_by_request, machine_processes, node_condition, now, options, ready};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lack_of_process_ids_costs_the_pod_with_the_most_processes() {
    // More than other programs on this machine start meanwhile.
    const MARGIN: i64 = 700;
    let free = {
        let most = machine_processes();
        let load = std::fs::read_to_string("/proc/loadavg").unwrap();
        most - load.split(['/', ' ']).nth(4).unwrap().parse::<i64>().unwrap()
    };
    let threshold = format!("--eviction-hard=pid.available<{}", free - MARGIN);
    let node = Node::start(options("pressure-pids", &[&threshold])).await;
    let api = node.api();
    api.create_pod(pods::bound(pods::sleeper("neighbour")));
    let neighbour = ready(&node, "neighbour").await;
    api.create_pod(after("forks", "i=0; while [ $i -lt 1500 ]; do sleep 1000 & i=$((i+1)); done"));
    let message = evicted_by_request(&node, "forks").await;
    assert!(message.starts_with("The node was low on resource: pids. Threshold quantity: "), "{message}");
    node_condition(&node, "PIDPressure", "True").await;
    node_condition(&node, "PIDPressure", "False").await;
    assert_eq!(now(&node, "neighbour").container("main"), neighbour.container("main"));
    let metrics = "kubelet_evictions{eviction_signal=\"pid.available\"}";
    assert_eq!(node.counter("pod-sync", metrics).await, 1);
    node.down().await;
}
