//! Bytes that a node at rest writes to its disk.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::budget;
use serde_json::json;

const DAY: Duration = Duration::from_hours(24);
/// Time at rest of the gate; a long run has a day.
const REST: Duration = Duration::from_mins(12);
const PODS: usize = 10;
/// Size of a block of the disk: what a write of one byte costs. The directory is written, too.
const BLOCK: u64 = 4096;
const MOST_PER_DAY: u64 = 1 << 20;

/// Returns `None` for a file that was renamed or removed meanwhile.
fn present<T>(found: io::Result<T>) -> Option<T> {
    match found {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        other => Some(other.unwrap()),
    }
}

/// Returns the time of the last change, and the size, of each file below a directory.
fn changes_below(dir: &Path) -> BTreeMap<PathBuf, (SystemTime, u64)> {
    let mut found = BTreeMap::new();
    for entry in present(std::fs::read_dir(dir)).into_iter().flatten() {
        let entry = entry.unwrap();
        let Some(seen) = present(entry.metadata()) else { continue };
        if seen.is_dir() {
            found.append(&mut changes_below(&entry.path()));
        } else {
            found.insert(entry.path(), (seen.modified().unwrap(), seen.len()));
        }
    }
    found
}

/// Returns the files that have changed and do not have the content that was recorded last.
fn written_in_place(
    before: &BTreeMap<PathBuf, (SystemTime, u64)>,
    now: BTreeMap<PathBuf, (SystemTime, u64)>,
    recorded: &BTreeMap<PathBuf, Vec<u8>>,
) -> Vec<PathBuf> {
    let changed = now.into_iter().filter(|(path, seen)| before.get(path) != Some(seen));
    changed
        .map(|(path, _)| path)
        .filter(|path| present(std::fs::read(path)).is_some_and(|bytes| recorded.get(path) != Some(&bytes)))
        .collect()
}

#[test]
fn a_file_that_is_written_in_place_is_found_even_if_it_was_replaced_before() {
    let dir = tempfile::tempdir().unwrap();
    let [replaced, both, alone, gone] =
        ["replaced", "both", "alone", "gone"].map(|name| dir.path().join(name));
    for path in [&replaced, &both, &gone] {
        std::fs::write(path, "new").unwrap();
    }
    let recorded = [&replaced, &both, &gone].map(|path| (path.clone(), b"new".to_vec())).into();
    std::fs::write(&both, "old").unwrap();
    std::fs::write(&alone, "").unwrap();
    let now = changes_below(dir.path());
    std::fs::remove_file(&gone).unwrap();
    assert_eq!(written_in_place(&BTreeMap::new(), now.clone(), &recorded), [alone, both]);
    assert_eq!(written_in_place(&now.clone(), now, &recorded), Vec::<PathBuf>::new());
    assert_eq!(changes_below(&dir.path().join("missing")), BTreeMap::new());
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
    let now = changes_below(&root);
    let mut files_written = sim.cuts().written_files().split_off(writes);
    files_written.retain(|write| write.path.starts_with(&root));
    let written: Vec<(PathBuf, u64)> =
        files_written.iter().map(|write| (write.path.clone(), write.bytes.len() as u64)).collect();
    let recorded = files_written.into_iter().map(|write| (write.path, write.bytes)).collect();
    let changed = written_in_place(&files, now, &recorded);
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
