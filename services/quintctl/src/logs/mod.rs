//! `quintctl logs`: the log of a container, from the CRI log files on this machine.
//!
//! With `--follow` the file is read on as it grows, the next file when the log is rotated or the container restarts, until
//! the pod is gone or done.

mod lines;

use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::Watcher as _;
use quintlet_crilog::follow::{Followed, LINGER, Step};
use quintlet_kit::paths::Paths;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{GetPodRequest, PodView};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::client::{MAX_ANSWER, Peer};
use crate::error::Error;
use crate::out::print;
pub use lines::Lines;

/// Where containers' logs are, unless told otherwise.
pub const POD_LOGS_DIR: &str = "/var/log/pods";

/// How often a followed log is looked at without being told: events of the file system may be lost.
const POLL: Duration = Duration::from_secs(1);

/// The log of a container.
#[derive(Debug, Clone, clap::Args)]
pub struct LogsArgs {
    /// Name, NAMESPACE/NAME or UID
    pub pod: String,
    /// Container [default: the annotation kubectl.kubernetes.io/default-container, or the first]
    #[arg(short, long, value_name = "NAME")]
    pub container: Option<String>,
    /// Go on as the log grows, and when the container restarts
    #[arg(short, long, conflicts_with = "previous")]
    pub follow: bool,
    /// Only so many of the last lines
    #[arg(long, value_name = "N")]
    pub tail: Option<usize>,
    /// Of the instance before this one
    #[arg(short, long)]
    pub previous: bool,
    /// With the time of each line
    #[arg(long)]
    pub timestamps: bool,
    /// Directory of the containers' logs [default: /var/log/pods, or that of the quintctl up whose run directory is given]
    #[arg(long, value_name = "DIR", env = "QUINTLET_POD_LOGS_DIR")]
    pub pod_logs_dir: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// No such pod, container or log; pod-sync does not answer; nobody reads.
pub async fn run(args: LogsArgs, paths: &Paths) -> Result<(), Error> {
    let view = get(paths, &args.pod).await?;
    let object: Value = serde_json::from_slice(&view.pod).map_err(|e| Error::Answer {
        service: "pod-sync",
        what: format!("a pod that cannot be read: {e}"),
    })?;
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
    let mut soon = false;
    let mut done = false;
    let mut ask = Instant::now() + POLL;
    loop {
        if done && !soon {
            return print(follower.lines.end());
        }
        let wait = if soon { LINGER } else { POLL };
        // Told or not, the file is looked at; waiting loses nothing when dropped.
        tokio::select! {
            () = grown.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
        // However much there is to read: one that writes for ever must not keep the end of another from being seen.
        if Instant::now() >= ask {
            done = is_done(paths, &view.uid).await;
            ask = Instant::now() + POLL;
        }
        // Looked at after the pod was: what it wrote last is in the file by then.
        soon = follower.look(Instant::now())?;
    }
}

/// Where the containers' logs are: as given, beside the run directory where `quintctl up --base` puts both, or the usual
/// place.
#[must_use]
pub fn pod_logs_dir(given: Option<PathBuf>, run_dir: &Path) -> PathBuf {
    let beside =
        || Some(run_dir.parent()?.join("pod-logs")).filter(|dir| run_dir.ends_with("run") && dir.is_dir());
    given.or_else(beside).unwrap_or_else(|| PathBuf::from(POD_LOGS_DIR))
}

/// The containers of a pod, the one that is meant without a name first.
#[must_use]
pub fn containers(view: &PodView) -> Vec<String> {
    let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
    let Ok(first) = choose_container(&object, None) else { return Vec::new() };
    let others = container_names(&object).into_iter().filter(|n| *n != first).map(str::to_owned);
    std::iter::once(first.clone()).chain(others).collect()
}

/// The last lines of the newest log of a pod's container, each cut of what would command the terminal.
///
/// # Errors
/// There is no log, or it cannot be read.
pub fn tail(
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
    Ok(String::from_utf8_lossy(&text).lines().map(|l| crate::text::clean(l) + "\n").collect())
}

async fn get(paths: &Paths, pod: &str) -> Result<PodView, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?).max_decoding_message_size(MAX_ANSWER);
    peer.answer(client.get_pod(GetPodRequest { pod: pod.to_owned() })).await
}

/// Nothing more will be written. A pod-sync that is away says nothing of that.
async fn is_done(paths: &Paths, uid: &str) -> bool {
    match get(paths, uid).await {
        Ok(view) => {
            let object: Value = serde_json::from_slice(&view.pod).unwrap_or_default();
            matches!(object.pointer("/status/phase").and_then(Value::as_str), Some("Succeeded" | "Failed"))
        }
        Err(Error::NotFound(_)) => true,
        Err(_) => false,
    }
}

/// `<pod-logs-dir>/<namespace>_<name>_<uid>/<container>`, the kubelet's place.
#[must_use]
pub fn container_dir(pod_logs_dir: &Path, pod: &PodView, container: &str) -> PathBuf {
    pod_logs_dir.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid)).join(container)
}

fn no_log(pod: &PodView, container: &str, previous: bool, dir: &Path) -> String {
    let which = if previous { "no previous instance" } else { "no log yet" };
    format!("container {container} of {}/{} has {which} in {}", pod.namespace, pod.name, dir.display())
}

/// The names of all containers, regular ones first.
fn container_names(pod: &Value) -> Vec<&str> {
    ["containers", "initContainers", "ephemeralContainers"]
        .iter()
        .filter_map(|list| pod.pointer(&format!("/spec/{list}"))?.as_array())
        .flatten()
        .filter_map(|c| c.get("name")?.as_str())
        .collect()
}

/// The container that is meant.
///
/// # Errors
/// There is none of that name.
pub fn choose_container(pod: &Value, wanted: Option<&str>) -> Result<String, Error> {
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
            "no container {:?}; there are: {}",
            wanted.unwrap_or_default(),
            names.join(", ")
        ))
    })
}

/// How often a container was started again, which is the number of its newest log.
#[must_use]
pub fn restart_count(pod: &Value, container: &str) -> u32 {
    ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"]
        .iter()
        .filter_map(|list| pod.pointer(&format!("/status/{list}"))?.as_array())
        .flatten()
        .find(|s| s.get("name").and_then(Value::as_str) == Some(container))
        .and_then(|s| s.get("restartCount")?.as_u64())
        .and_then(|n| u32::try_from(n).ok())
        .unwrap_or(0)
}

/// The numbers of the logs in a container's directory.
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

/// Which log to read: that of the newest status, or the newest before it while the next instance is not created yet.
#[must_use]
pub fn choose_instance(there: &[u32], restarts: u32, previous: bool) -> Option<u32> {
    let newest = there.iter().copied().filter(|n| *n <= restarts).max().or(there.last().copied())?;
    if previous { there.iter().copied().filter(|n| *n < newest).max() } else { Some(newest) }
}

/// Wakes on changes in the container's directory, or above it while it does not exist.
fn watch(top: &Path, dir: &Path, grown: &std::sync::Arc<Notify>) -> Option<notify::RecommendedWatcher> {
    let wake = std::sync::Arc::clone(grown);
    // Without a watcher the log is looked at every second.
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Looking opens files and directories itself: that must not wake the next look.
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

/// Gives what there is to read to `take`. Whether a rotation is under way.
fn all(
    path: &Path,
    mut read: impl FnMut(&mut Vec<u8>) -> std::io::Result<Step>,
    mut take: impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<bool, Error> {
    let mut block = Vec::new();
    loop {
        match read(&mut block).map_err(reading(path))? {
            Step::Data => take(&block)?,
            Step::Dry { rotating } => return Ok(rotating),
        }
    }
}

/// The same in one file, whatever has its name by now.
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
    /// Goes on with the log of another instance, if it is there already.
    fn switch(&mut self, number: Option<u32>) -> Result<(), Error> {
        let Some(number) = number else { return Ok(()) };
        let path = self.dir.join(format!("{number}.log"));
        if !path.exists() {
            return Ok(());
        }
        print(self.lines.end())?;
        // Only the first file is cut: what comes later is new.
        let mut file = open(&path, self.tail.take())?;
        let lines = &mut self.lines;
        here(&mut file, &path, |bytes| print(lines.decode(bytes)))?;
        self.file = Some((file, path));
        self.number = Some(number);
        Ok(())
    }

    /// Prints what is new, wherever it is. Whether a rotation is under way: look again soon.
    fn look(&mut self, now: Instant) -> Result<bool, Error> {
        // Asked before reading: what an instance wrote before the next one came is read first.
        let newer: Vec<u32> =
            instances(&self.dir).into_iter().filter(|n| self.number.is_none_or(|now| *n > now)).collect();
        let lines = &mut self.lines;
        let soon = match &mut self.file {
            Some((file, path)) => {
                all(path, |block| file.read(now.into_std(), block), |bytes| print(lines.decode(bytes)))?
            }
            None => false,
        };
        if soon {
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
    fn the_instance_is_that_of_the_status_or_the_newest_before_it() {
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
    fn the_container_is_the_one_asked_for_the_annotated_or_the_first() {
        let mut pod = json!({
            "metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "b"}},
            "spec": {"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]},
            "status": {"containerStatuses": [{"name": "a", "restartCount": 4}]}
        });
        assert_eq!(choose_container(&pod, None).unwrap(), "b");
        assert_eq!(choose_container(&pod, Some("i")).unwrap(), "i");
        assert_eq!(
            choose_container(&pod, Some("x")).unwrap_err().to_string(),
            "no container \"x\"; there are: a, b, i"
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
