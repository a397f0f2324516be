//! cri-proxy is killed during the calls that start and stop pods: nothing is created twice or left behind.

use std::time::Duration;

use quintlet_e2e::{LONG, Node, Options, pods};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// Pods created at once.
const PODS: usize = 5;

/// Number of rounds, each with other moments of the kills.
const ROUNDS: u64 = 6;

/// Most rounds, if fewer kills than [`MET`] have met a call: on a busy machine calls begin later than a kill
/// expects.
const MOST_ROUNDS: u64 = 24;

/// Approximate time to start five pods, and to stop them.
const SPREAD_MS: u64 = 1200;

/// Least number of kills that interrupt a call, of two per round. A call is in flight during most of a round.
const MET: usize = 4;

/// Metric of calls that pod-sync sent and whose outcome is unknown.
const UNKNOWN: &str = "quintlet_runtime_calls_unknown_total";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cri_proxy_killed_during_calls_duplicates_nothing() {
    let seed: u64 = std::env::var("QUINTLET_E2E_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(42);
    println!("QUINTLET_E2E_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let node = Node::start(Options::standalone("races")).await;
    // The first pod gives the bridge of the node its address. Later, the CNI plugin cannot do so if the other
    // pods of the bridge have just been removed ("could not set bridge's mac"), and that is a fault.
    node.pod_manifest(&pods::sleeper("first"));
    let first = node.wait_ready("first").await;
    let mut met = 0;
    let mut rounds = 0..MOST_ROUNDS;
    while let Some(round) = rounds.next().filter(|round| *round < ROUNDS || met < MET) {
        let names: Vec<String> = (0..PODS).map(|i| format!("race-{round}-{i}")).collect();
        for name in &names {
            node.pod_manifest(&pods::probed(name));
        }
        met += usize::from(kill_after(&node, rng.random_range(20..SPREAD_MS)).await);
        let mut uids = Vec::new();
        for name in &names {
            let pod = node.wait_ready(name).await;
            let main = pod.container("main");
            assert_eq!((main.restarts, main.state.as_str()), (0, "running"), "round {round}: {pod}");
            uids.push(pod.uid().to_owned());
        }
        node.assert_no_duplicates().await;
        for name in &names {
            node.remove_manifest(&format!("{name}.yaml"));
        }
        met += usize::from(kill_after(&node, rng.random_range(20..SPREAD_MS)).await);
        for uid in &uids {
            node.wait_gone(uid).await;
        }
    }
    assert!(met >= MET, "only {met} of {} kills cut a call", 2 * MOST_ROUNDS);
    assert_eq!(node.wait_ready("first").await.steady(), first.steady());
    let log = node.log("pod-sync");
    let is_expected = |reason: &str| ["Unhealthy", "MissingClusterDNS"].contains(&reason);
    let reasons = log.lines().filter_map(|l| l.split_once("warning event reason=")?.1.split(' ').next());
    let faults: Vec<&str> = reasons.filter(|reason| !is_expected(reason)).collect();
    assert!(faults.is_empty(), "an interrupted call is reported as a fault of its pod: {faults:?}");
    node.down().await;
}

/// Kills cri-proxy after `ms`. Returns whether the kill interrupted a call.
async fn kill_after(node: &Node, ms: u64) -> bool {
    let before = node.counter("pod-sync", UNKNOWN).await;
    tokio::time::sleep(Duration::from_millis(ms)).await;
    let starts = node.kill9("cri-proxy");
    node.wait_back("cri-proxy", starts, LONG).await;
    // `kill` limits the time until a service is back. The counter is up to date: the connection broke before
    // the new process served.
    let cut = node.counter("pod-sync", UNKNOWN).await.saturating_sub(before);
    println!("killed after {ms} ms: {cut} calls cut");
    cut > 0
}
