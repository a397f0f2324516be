//! `quintctl logs`: prints the log of a container from the CRI log files on this machine.
//!
//! With `--follow` the command prints new lines, continues with the next file when the log is rotated or the
//! container restarts, and ends when the pod is removed or has terminated.

use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::Watcher as _;
use quintctl_text::Lines;
use quintlet_crilog::follow::{Followed, LINGER, ReadOutcome};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{GetPodRequest, PodView};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::client::Peer;
use crate::error::Error;
use crate::out::print;

/// Default directory of the containers' logs.
pub(crate) const POD_LOGS_DIR: &str = "/var/log/pods";

/// Interval of reads of a followed log without a file system event, since events may be lost.
const POLL: Duration = Duration::from_secs(1);

/// Print the log of a container.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LogsArgs {
    /// Pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: String,
    /// Container [default: the annotation kubectl.kubernetes.io/default-container, or the first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) container: Option<String>,
    /// Follow the log, also when the container restarts
    #[arg(short, long, conflicts_with = "previous")]
    pub(crate) follow: bool,
    /// Number of last lines to print [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) tail: Option<usize>,
    /// Print the log of the previous instance of the container
    #[arg(short, long)]
    pub(crate) previous: bool,
    /// Print the time of each line
    #[arg(long)]
    pub(crate) timestamps: bool,
    /// Directory of the containers' logs
    /// [default: pod-logs beside the run directory if it exists, or /var/log/pods]
    #[arg(long, value_name = "DIR", env = "QUINTLET_POD_LOGS_DIR")]
    pub(crate) pod_logs_dir: Option<PathBuf>,
}

/// Prints the log.
///
/// # Errors
/// The pod, container or log does not exist, pod-sync does not answer, or standard output is closed.
pub(crate) async fn run(args: LogsArgs, paths: &Paths) -> Result<(), Error> {
    let view = get(paths, &args.pod).await?;
    let object: Value = serde_json::from_slice(&view.pod)
        .map_err(|e| Error::InvalidResponse { service: "pod-sync", what: format!("an invalid pod: {e}") })?;
    let container = choose_container(&object, args.container.as_deref())?;
    let pod_logs_dir = pod_logs_dir(args.pod_logs_dir, paths.run());
    let dir = container_dir(&pod_logs_dir, &view, &container);
    let restarts = restart_count(&object, &container);
    let names = || Error::NotFound(no_log(&view, &container, args.previous, &dir));
    let number = choose_instance(&instances(&dir), restarts, args.previous);
    let mut lines = Lines::new(args.timestamps);
    if !args.follow {
        let path = dir.join(format!("{}.log", number.ok_or_else(names)?));
        let mut file = open(&path, args.tail)?;
        here(&mut file, &path, |bytes| print(lines.decode(bytes)))?;
        return print(lines.end());
    }
    let grown = std::sync::Arc::new(Notify::new());
    let _watcher = watch(&pod_logs_dir, &dir, &grown);
    let mut follower = Follower { dir, number: None, file: None, lines, tail: args.tail };
    follower.switch(number.or(Some(restarts)))?;
    let mut rotating = false;
    let mut terminated = false;
    let mut next_status = Instant::now() + POLL;
    loop {
        if terminated && !rotating {
            return print(follower.lines.end());
        }
        let wait = if rotating { LINGER } else { POLL };
        // Both arms only wait; the file is read after either.
        tokio::select! {
            () = grown.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
        // By time, not by events: a log that grows all the time must not delay the check of the pod.
        if Instant::now() >= next_status {
            terminated = is_terminated(paths, &view.uid).await;
            next_status = Instant::now() + POLL;
        }
        // The read follows the check of the pod: a terminated pod has written its last line by then.
        rotating = follower.print_new(Instant::now())?;
    }
}

/// Returns the directory of the containers' logs: `given`, or `pod-logs` beside a run directory of
/// `quintctl up --base`, or [`POD_LOGS_DIR`].
#[must_use]
pub(crate) fn pod_logs_dir(given: Option<PathBuf>, run_dir: &Path) -> PathBuf {
    let beside =
        || Some(run_dir.parent()?.join("pod-logs")).filter(|dir| run_dir.ends_with("run") && dir.is_dir());
    given.or_else(beside).unwrap_or_else(|| PathBuf::from(POD_LOGS_DIR))
}

/// Returns the names of a pod's containers, the default container first.
#[must_use]
pub(crate) fn containers(view: &PodView) -> Vec<String> {
    let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    let Ok(first) = choose_container(&object, None) else { return Vec::new() };
    let others = container_names(&object).into_iter().filter(|n| *n != first).map(str::to_owned);
    std::iter::once(first.clone()).chain(others).collect()
}

/// Returns the last lines of the newest log of a pod's container, without control characters.
///
/// # Errors
/// The log does not exist or cannot be read.
pub(crate) fn tail(
    pod_logs_dir: &Path,
    view: &PodView,
    container: Option<&str>,
    lines: usize,
) -> Result<String, Error> {
    let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    let container = choose_container(&object, container)?;
    let dir = container_dir(pod_logs_dir, view, &container);
    let number = choose_instance(&instances(&dir), restart_count(&object, &container), false)
        .ok_or_else(|| Error::NotFound(no_log(view, &container, false, &dir)))?;
    let mut decoder = Lines::default();
    let mut text = Vec::new();
    let path = dir.join(format!("{number}.log"));
    here(&mut open(&path, Some(lines))?, &path, |bytes| {
        text.extend(decoder.decode(bytes));
        Ok(())
    })?;
    text.extend(decoder.end());
    Ok(String::from_utf8_lossy(&text).lines().map(|l| quintctl_text::clean(l) + "\n").collect())
}

async fn get(paths: &Paths, pod: &str) -> Result<PodView, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    peer.call(client.get_pod(GetPodRequest { pod: pod.to_owned() })).await
}

/// Returns whether the pod was removed or has terminated. An unreachable pod-sync means no.
async fn is_terminated(paths: &Paths, uid: &str) -> bool {
    match get(paths, uid).await {
        Ok(view) => {
            let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
            matches!(object.pointer("/status/phase").and_then(Value::as_str), Some("Succeeded" | "Failed"))
        }
        Err(Error::NotFound(_)) => true,
        Err(_) => false,
    }
}

/// Returns `<pod-logs-dir>/<namespace>_<name>_<uid>/<container>`
/// (`pkg/kubelet/kuberuntime: BuildContainerLogsDirectory`).
#[must_use]
pub(crate) fn container_dir(pod_logs_dir: &Path, pod: &PodView, container: &str) -> PathBuf {
    pod_logs_dir.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid)).join(container)
}

fn no_log(pod: &PodView, container: &str, previous: bool, dir: &Path) -> String {
    let which = if previous { "no log of a previous instance" } else { "no log yet" };
    format!("container {container} of pod {}/{} has {which} in {}", pod.namespace, pod.name, dir.display())
}

/// Returns the names of all containers: regular, init and ephemeral.
fn container_names(pod: &Value) -> Vec<&str> {
    ["containers", "initContainers", "ephemeralContainers"]
        .iter()
        .filter_map(|list| pod.pointer(&format!("/spec/{list}"))?.as_array())
        .flatten()
        .filter_map(|c| c.get("name")?.as_str())
        .collect()
}

/// Returns the name of the container: `wanted`, the one that the annotation
/// `kubectl.kubernetes.io/default-container` names, or the first.
///
/// # Errors
/// The pod has no such container.
pub(crate) fn choose_container(pod: &Value, wanted: Option<&str>) -> Result<String, Error> {
    let names = container_names(pod);
    let default = || {
        let annotation = pod
            .get("metadata")?
            .get("annotations")?
            .get("kubectl.kubernetes.io/default-container")?
            .as_str()?;
        names.contains(&annotation).then_some(annotation)
    };
    let name = match wanted {
        Some(wanted) => names.iter().find(|n| **n == wanted).copied(),
        None => default().or(names.first().copied()),
    };
    name.map(str::to_owned).ok_or_else(|| {
        Error::NotFound(format!(
            "pod has no container {:?}; containers: {}",
            wanted.unwrap_or_default(),
            names.join(", ")
        ))
    })
}

/// Returns the restart count of a container, which is the number of its newest log.
#[must_use]
pub(crate) fn restart_count(pod: &Value, container: &str) -> u32 {
    ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"]
        .iter()
        .filter_map(|list| pod.pointer(&format!("/status/{list}"))?.as_array())
        .flatten()
        .find(|s| s.get("name").and_then(Value::as_str) == Some(container))
        .and_then(|s| s.get("restartCount")?.as_u64())
        .and_then(|n| u32::try_from(n).ok())
        .unwrap_or(0)
}

/// Returns the numbers of the logs in a container's directory, in ascending order.
fn instances(dir: &Path) -> Vec<u32> {
    let mut out: Vec<u32> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.strip_suffix(".log")?.parse().ok())
        .collect();
    out.sort_unstable();
    out
}

/// Returns the number of the log to read: that of the restart count, or the newest older one while the next
/// instance has no log yet.
#[must_use]
pub(crate) fn choose_instance(existing: &[u32], restarts: u32, previous: bool) -> Option<u32> {
    let newest = existing.iter().copied().filter(|n| *n <= restarts).max().or(existing.last().copied())?;
    if previous { existing.iter().copied().filter(|n| *n < newest).max() } else { Some(newest) }
}

/// Notifies `grown` on changes in the container's directory, or in its closest existing parent.
fn watch(top: &Path, dir: &Path, grown: &std::sync::Arc<Notify>) -> Option<notify::RecommendedWatcher> {
    let wake = std::sync::Arc::clone(grown);
    // Without a watcher, the log is read once per POLL.
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // The follower's own reads are access events, which must not wake it again.
        if !event.is_ok_and(|e| e.kind.is_access()) {
            wake.notify_one();
        }
    })
    .ok()?;
    let place = [Some(dir), dir.parent(), Some(top)].into_iter().flatten().find(|p| p.is_dir())?;
    watcher.watch(place, notify::RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}

fn reading(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    Error::os(format!("read {}", path.display()))
}

fn open(path: &Path, tail: Option<usize>) -> Result<Followed, Error> {
    Followed::open(path, tail.map(|lines| lines as u64)).map_err(reading(path))
}

/// Passes all unread data to `take`. Returns whether a rotation is in progress.
fn all(
    path: &Path,
    mut read: impl FnMut(&mut Vec<u8>) -> std::io::Result<ReadOutcome>,
    mut take: impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<bool, Error> {
    let mut block = Vec::new();
    loop {
        match read(&mut block).map_err(reading(path))? {
            ReadOutcome::Data => take(&block)?,
            ReadOutcome::Dry { rotating } => return Ok(rotating),
        }
    }
}

/// Passes the unread data of this open file to `take`, without following a rotation.
fn here(file: &mut Followed, path: &Path, take: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
    all(path, |block| file.read_here(block), take).map(drop)
}

struct Follower {
    dir: PathBuf,
    number: Option<u32>,
    file: Option<(Followed, PathBuf)>,
    lines: Lines,
    tail: Option<usize>,
}

impl Follower {
    /// Continues with the log of another instance, if the log exists.
    fn switch(&mut self, number: Option<u32>) -> Result<(), Error> {
        let Some(number) = number else { return Ok(()) };
        let path = self.dir.join(format!("{number}.log"));
        if !path.exists() {
            return Ok(());
        }
        print(self.lines.end())?;
        // --tail applies to the first file only.
        let mut file = open(&path, self.tail.take())?;
        let lines = &mut self.lines;
        here(&mut file, &path, |bytes| print(lines.decode(bytes)))?;
        self.file = Some((file, path));
        self.number = Some(number);
        Ok(())
    }

    /// Prints the new lines of the file and of newer instances. Returns whether a rotation is in progress,
    /// which the next read must follow after [`LINGER`].
    fn print_new(&mut self, now: Instant) -> Result<bool, Error> {
        // Listed before reading: the last lines of an instance are printed before those of the next one.
        let newer: Vec<u32> =
            instances(&self.dir).into_iter().filter(|n| self.number.is_none_or(|now| *n > now)).collect();
        let lines = &mut self.lines;
        let rotating = match &mut self.file {
            Some((file, path)) => {
                all(path, |block| file.read(now.into_std(), block), |bytes| print(lines.decode(bytes)))?
            }
            None => false,
        };
        if rotating {
            return Ok(true);
        }
        for number in newer {
            self.switch(Some(number))?;
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_instance_is_that_of_the_status_or_the_newest_older_one() {
        for (there, restarts, previous, want) in [
            (&[0, 1, 2][..], 2, false, Some(2)),
            (&[0, 1], 2, false, Some(1)),
            (&[0, 1, 2], 2, true, Some(1)),
            (&[3], 3, true, None),
            (&[3], 0, false, Some(3)),
            (&[], 0, false, None),
        ] {
            assert_eq!(choose_instance(there, restarts, previous), want, "{there:?} {restarts} {previous}");
        }
    }

    #[test]
    fn the_container_is_the_requested_the_annotated_or_the_first_one() {
        let mut pod = json!({
            "metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "b"}},
            "spec": {"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]},
            "status": {"containerStatuses": [{"name": "a", "restartCount": 4}]}
        });
        assert_eq!(choose_container(&pod, None).unwrap(), "b");
        assert_eq!(choose_container(&pod, Some("i")).unwrap(), "i");
        assert_eq!(
            choose_container(&pod, Some("x")).unwrap_err().to_string(),
            "pod has no container \"x\"; containers: a, b, i"
        );
        pod["metadata"] = json!({});
        assert_eq!(choose_container(&pod, None).unwrap(), "a");
        assert_eq!((restart_count(&pod, "a"), restart_count(&pod, "b")), (4, 0));
    }

    #[test]
    fn logs_of_a_node_in_one_directory_are_found_beside_its_run_directory() {
        let base = tempfile::tempdir().unwrap();
        let run = base.path().join("run");
        assert_eq!(pod_logs_dir(None, &run), Path::new(POD_LOGS_DIR));
        std::fs::create_dir(base.path().join("pod-logs")).unwrap();
        assert_eq!(pod_logs_dir(None, &run), base.path().join("pod-logs"));
        assert_eq!(pod_logs_dir(Some("/l".into()), &run), Path::new("/l"));
        assert_eq!(pod_logs_dir(None, Path::new("/run/quintlet")), Path::new(POD_LOGS_DIR));
    }
}
