//! Container logs on disk, written by a real runtime: rotated under load, followed across rotations, linked
//! and removed.

use std::time::Duration;

use quintlet_e2e::follow::Follower;
use quintlet_e2e::{LONG, Node, Options, pods, until};
use serde_json::json;

/// Lines of the pod. About 3,500 lines of 60 bytes each second exceed the size limit at every check.
const LINES: usize = 40_000;

/// Returns the number at the end of each line, in order.
fn numbers(text: &str) -> Vec<usize> {
    text.lines()
        .map(|l| l.rsplit(' ').next().unwrap().parse().unwrap_or_else(|e| panic!("{l:?}: {e}")))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_gets_every_line_once_while_the_log_is_rotated_and_compressed() {
    let flags = [
        "--container-log-max-size=20Ki",
        "--container-log-max-files=4",
        "--container-log-monitor-interval=3s",
    ];
    let extra = flags.map(|flag| ("pod-sync", flag.to_owned())).to_vec();
    let options = Options { extra, ..Options::standalone("logs") };
    let node = Node::start(options).await;
    let count = format!(
        "echo begin; until [ -e /go/follower ]; do sleep 0.1; done; seq 1 {LINES} | while read n; do echo \"a line of some length, with the number $n\"; [ $((n % 500)) -gt 0 ] || sleep 0.15; done"
    );
    let mut pod = pods::with_dir(pods::script("counter", &count), &node.scratch(), "/go");
    pod["spec"]["restartPolicy"] = json!("Never");
    node.pod_manifest(&pod);
    let seen = node.wait_pod("counter", "running", LONG, |p| p.phase() == "Running").await;
    let logs = node.pod_logs_dir().display().to_string();
    let follower = Follower::start(node.quintctl(&["logs", "counter", "-f", "--pod-logs-dir", &logs])).await;
    std::fs::write(node.scratch().join("follower"), "").unwrap();

    let dir = node.pod_logs_dir().join(format!("default_{}_{}", seen.name(), seen.uid())).join("main");
    let files = || -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let links = || -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(node.container_logs_dir()).unwrap().map(|e| e.unwrap().path());
        entries.filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with("counter-")).collect()
    };
    let rotations = async {
        until("two compressed files", LONG, async || {
            let there = files();
            let whole = there.iter().filter(|n| n.ends_with(".gz")).count();
            if whole >= 2 { Ok(()) } else { Err(there) }
        })
        .await;
        assert!(files().len() <= 4 + 1, "one may just be compressed: {:?}", files());
        assert_eq!(links().len(), 1, "{:?}", links());
        // A removed link is recreated.
        std::fs::remove_file(&links()[0]).unwrap();
        until("the link", LONG, async || if links().len() == 1 { Ok(()) } else { Err(links()) }).await;
        assert_eq!(std::fs::read_link(&links()[0]).unwrap(), dir.join("0.log"));
    };
    let ((), text) = tokio::join!(rotations, follower.rest(Duration::from_secs(120)));
    let got = numbers(&text);
    let wrong = got.iter().zip(1..).find(|(got, want)| **got != *want);
    assert_eq!((got.len(), wrong), (LINES, None), "lines are lost, doubled or out of order");

    assert!(files().len() <= 4, "{:?}", files());
    node.remove_manifest("counter.yaml");
    node.wait_gone(seen.uid()).await;
    assert!(links().is_empty(), "{:?}", links());
    node.down().await;
}
