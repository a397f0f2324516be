//! Pods with five volumes each, beside the same pods without volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use quintlet_csi_driver::thread::DriverThread;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_e2e::cost::{Agent, Cost};
use quintlet_e2e::work::LIMIT;
use quintlet_e2e::{Node, Seen, pods};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::figures::medians;

/// The driver of the CSI volumes.
const DRIVER: &str = "test.csi.quintlet.dev";

/// Name of the objects that all pods refer to.
const SHARED: &str = "bench-volumes";

/// Mounts of a pod with volumes below the root directory of pod-sync: Secret, projected and CSI volume, and
/// the emptyDir in memory.
const MOUNTS: usize = 4;

/// Interval between checks for leftovers.
const STEP: Duration = Duration::from_millis(50);

/// Returns seconds and costs of pods with and without volumes.
///
/// # Errors
/// Fails if the pods with volumes leave a mount or a directory.
pub(crate) async fn compare(node: &Node, count: usize, rounds: usize) -> anyhow::Result<Value> {
    let _driver = DriverThread::start(&node.root_dir(), &node.scratch().join("driver"), &[]);
    make_objects(node)?;
    // The first pod waits for the driver's registration, and creates directories that stay.
    let first = [pod("volumes-first", true)];
    let (_, state, _) = life(node, &first).await;
    state?;
    wait_no_pod(&node.root_dir()).await?;
    let before = State::of(node)?;
    let mut figures: BTreeMap<&str, BTreeMap<String, Vec<f64>>> = BTreeMap::new();
    for _ in 0..rounds {
        for (name, with_volumes) in [("without", false), ("with", true)] {
            let all: Vec<Value> = (0..count).map(|i| pod(&format!("volumes-{i}"), with_volumes)).collect();
            let cost = Cost::of(&Agent::of(node)?).await?;
            let (made, mounted, gone) = life(node, &all).await;
            let expected = if with_volumes { count.saturating_mul(MOUNTS) } else { 0 };
            let mounted = mounted?.below_root.len().saturating_sub(before.below_root.len());
            ensure!(mounted == expected, "{mounted} mounts of {count} pods, not {expected}");
            let figures = figures.entry(name).or_default();
            figures.entry("create_to_ready_seconds".to_owned()).or_default().push(made);
            figures.entry("delete_to_gone_seconds".to_owned()).or_default().push(gone);
            for (figure, per_pod) in Cost::of(&Agent::of(node)?).await?.since(&cost).per_pod(count) {
                figures.entry(format!("per pod: {figure}")).or_default().push(per_pod);
            }
            before.wait_again(node).await?;
        }
    }
    let figures: BTreeMap<&str, _> = figures.iter().map(|(name, all)| (*name, medians(all))).collect();
    Ok(json!(figures))
}

/// Waits until no pod has a directory. Directories are removed after the API server has deleted the pod.
async fn wait_no_pod(root: &Path) -> anyhow::Result<()> {
    let end = Instant::now() + LIMIT;
    while std::fs::read_dir(root.join("pods"))?.next().is_some() {
        ensure!(Instant::now() < end, "directories of pods stay below {}", root.display());
        tokio::time::sleep(STEP).await;
    }
    Ok(())
}

fn make_objects(node: &Node) -> anyhow::Result<()> {
    let meta = json!({"name": SHARED});
    let objects = [
        ("configmaps", "default", json!({"metadata": meta, "data": {"key": "value"}})),
        ("secrets", "default", json!({"metadata": meta, "stringData": {"key": "value"}})),
        (
            "csidrivers",
            "",
            json!({
                "metadata": {"name": DRIVER},
                "spec": {"attachRequired": false, "volumeLifecycleModes": ["Ephemeral"]},
            }),
        ),
    ];
    for (resource, namespace, object) in objects {
        let made = node.api().create(resource, namespace, object);
        made.map_err(|error| anyhow::anyhow!("{resource}: {error:?}"))?;
    }
    Ok(())
}

fn pod(name: &str, with_volumes: bool) -> Value {
    let mut pod = pods::bound(pods::sleeper(name));
    // The projected volume is one of the five.
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    if with_volumes {
        let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}});
        pod["spec"]["volumes"] = json!([
            {"name": "config", "configMap": {"name": SHARED}},
            {"name": "secret", "secret": {"secretName": SHARED}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            {"name": "projected", "projected": {"sources": [token, {"configMap": {"name": SHARED}}]}},
            {"name": "driver", "csi": {"driver": DRIVER, "volumeAttributes": {"medium": "tmpfs"}}},
        ]);
        let mount = |name: &str| json!({"name": name, "mountPath": format!("/volumes/{name}")});
        let mounts = ["config", "secret", "memory", "projected", "driver"].map(mount);
        pod["spec"]["containers"][0]["volumeMounts"] = json!(mounts);
    }
    pod
}

/// Creates the pods, waits until all are Ready, and deletes them. Returns the seconds of both and the state
/// in between.
async fn life(node: &Node, all: &[Value]) -> (f64, anyhow::Result<State>, f64) {
    let name = |pod: &Value| pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let began = Instant::now();
    for pod in all {
        node.api().create_pod(pod.clone());
    }
    for pod in all {
        let is_ready = |p: &Value| Seen::from_api(p.clone()).is_ready();
        node.api().wait_for("pods", "default", &name(pod), LIMIT, is_ready).await;
    }
    let made = began.elapsed().as_secs_f64();
    let state = State::of(node);
    let began = Instant::now();
    for pod in all {
        // The pod was created before. If it does not exist, it is gone, which is what is measured.
        let _gone = node.api().delete("pods", "default", &name(pod), None);
    }
    for pod in all {
        node.api().wait_for("pods", "default", &name(pod), LIMIT, Value::is_null).await;
    }
    (made, state, began.elapsed().as_secs_f64())
}

/// The mounts of the node, and the directories of pods and plugins.
#[derive(Debug, PartialEq, Eq)]
struct State {
    /// Mounts below the root directory of pod-sync.
    below_root: BTreeSet<PathBuf>,
    /// Mounts of the whole node, including those of the runtime.
    mounts: BTreeSet<PathBuf>,
    paths: BTreeSet<PathBuf>,
}

impl State {
    fn of(node: &Node) -> anyhow::Result<Self> {
        let root = node.root_dir();
        let base = root.parent().context("the root directory has a parent")?;
        let mut paths = BTreeSet::new();
        for dir in ["pods", "plugins"] {
            collect(&root.join(dir), &mut paths)?;
        }
        Ok(Self {
            below_root: mounts_below(&root)?.into_iter().collect(),
            mounts: mounts_below(base)?.into_iter().collect(),
            paths,
        })
    }

    /// Waits until the node is in this state again.
    async fn wait_again(&self, node: &Node) -> anyhow::Result<()> {
        let end = Instant::now() + LIMIT;
        loop {
            let now = Self::of(node)?;
            if now == *self {
                return Ok(());
            }
            let mounts: Vec<_> = now.mounts.symmetric_difference(&self.mounts).collect();
            let paths: Vec<_> = now.paths.symmetric_difference(&self.paths).collect();
            ensure!(Instant::now() < end, "not as before: mounts {mounts:?}, paths {paths:?}");
            tokio::time::sleep(STEP).await;
        }
    }
}

/// Adds all paths below a directory, without following links. A directory that is removed meanwhile has none.
fn collect(dir: &Path, into: &mut BTreeSet<PathBuf>) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), into)?;
        }
        into.insert(entry.path());
    }
    Ok(())
}
