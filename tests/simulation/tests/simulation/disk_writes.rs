//! Bytes that a node at rest writes to its disk.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::budget;
use serde_json::json;

const DAY: Duration = Duration::from_hours(24);
/// Time at rest of the gate; a long run has a day.
const REST: Duration = Duration::from_mins(30);
const PODS: usize = 10;
/// Size of a block of the disk: what a write of one byte costs. The directory is written, too.
const BLOCK: u64 = 4096;
const MOST_PER_DAY: u64 = 1 << 20;

/// Returns the time of the last change, and the size, of each file below a directory.
fn changes_below(dir: &Path) -> BTreeMap<PathBuf, (SystemTime, u64)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let seen = entry.metadata().unwrap();
        if seen.is_dir() {
            found.append(&mut changes_below(&entry.path()));
        } else {
            found.insert(entry.path(), (seen.modified().unwrap(), seen.len()));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_at_rest_writes_less_than_a_mebibyte_to_its_disk_in_a_day() {
    let sim = Sim::prepare(Options::default()).await;
    sim.cuts().record_files();
    sim.manifest("static", &pods::manifest("static"));
    sim.start_all();
    for number in 0..PODS {
        let mut pod = pods::single(&format!("pod-{number}"));
        let probe = json!({"exec": {"command": ["probe"]}, "periodSeconds": 10});
        pod["spec"]["containers"][0]["readinessProbe"] = probe.clone();
        pod["spec"]["containers"][0]["livenessProbe"] = probe;
        let _uid = sim.create(pod);
    }
    for number in 0..PODS {
        sim.wait_ready(&format!("pod-{number}")).await;
    }
    sim.wait_ready("static-sim-node").await;
    // What the starts have changed is written.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let root = sim.root_dir();
    let (files, writes) = (changes_below(&root), sim.cuts().written_files().len());
    let rest = if budget::is_long_run() { DAY } else { REST };
    tokio::time::sleep(rest).await;
    let written: Vec<(PathBuf, u64)> = sim.cuts().written_files()[writes..]
        .iter()
        .filter(|write| write.path.starts_with(&root))
        .map(|write| (write.path.clone(), write.bytes.len() as u64))
        .collect();
    let recorded: BTreeSet<PathBuf> = written.iter().map(|(path, _)| path.clone()).collect();
    let mut changed = changes_below(&root);
    changed.retain(|path, now| files.get(path) != Some(&*now) && !recorded.contains(path));
    assert!(changed.is_empty(), "files that were changed without atomic_file: {changed:?}");
    let total: u64 = written.iter().map(|(_, bytes)| bytes.div_ceil(BLOCK) * BLOCK + BLOCK).sum();
    let per_day = total * DAY.as_secs() / rest.as_secs();
    eprintln!("{total} bytes in {rest:?}, {per_day} a day: {written:?}");
    assert!(per_day < MOST_PER_DAY, "{per_day} bytes a day: {written:?}");
    for number in 0..PODS {
        assert_eq!(sim.pod(&format!("pod-{number}")).restarts(), 0);
    }
    sim.finish().await;
}
