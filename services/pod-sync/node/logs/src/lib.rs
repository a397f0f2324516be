//! Container logs on disk: rotated by size, compressed, and linked in `/var/log/containers` for log
//! collectors (pkg/kubelet/logs/container_log_manager.go).
//!
//! [`run`] is a future that the caller spawns. At every interval it checks the logs of all running
//! containers, at most `workers` at a time, and then updates the links. Between a rename and the runtime's
//! new file a log has no file, so links are updated only when no rotation is in progress. The module `rotate`
//! decides which files to delete and to compress. A log whose file system hangs delays the others only once
//! ([`Stalls`]). There are no channels.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod links;
mod rotate;
pub mod sweep;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use pod_sync_clients::{CallError, Runtime};
use pod_sync_containment::{Containment, PodWork};
use pod_sync_layout::paths;
use quintlet_kit::beneath::Dir;
use quintlet_kit::clock::Clock;
use quintlet_kit::stalls::{Pass, Stalls};
use quintlet_model::ids::ContainerId;
use quintlet_model::runtime::{ContainerState, PodRuntime, SharedPodRuntime};
use tokio_util::sync::CancellationToken;

use links::Link;

/// Time without progress after which an operation on a log counts as hanging.
const STALL: Duration = Duration::from_secs(5);
/// Longest rotation of a log. Compressing a large file may take longer; the rotation continues at a later
/// interval then.
const ROTATION: Duration = Duration::from_secs(10);

fn stalls() -> Stalls {
    Stalls::new("container log", STALL)
}

/// Settings of a KubeletConfiguration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogSettings {
    /// Size in bytes from which a log is rotated. A negative size disables rotation.
    pub container_log_max_size: i64,
    /// Files of one log, including the current one; at least 2.
    pub container_log_max_files: usize,
    /// Logs that are checked concurrently; at least 1.
    pub container_log_max_workers: usize,
    /// Interval between checks; at least 3 s.
    pub container_log_monitor_interval: Duration,
}

/// Reopens logs; the container runtime.
#[async_trait::async_trait]
trait Reopen: Send + Sync {
    /// Makes the runtime write a container's log to a new file with the same name. After an error that the
    /// runtime did not return, the outcome is unknown.
    async fn reopen(&self, id: &ContainerId) -> Result<(), CallError>;
}

#[async_trait::async_trait]
impl Reopen for Runtime {
    async fn reopen(&self, id: &ContainerId) -> Result<(), CallError> {
        self.reopen_container_log(id).await
    }
}

/// The pods whose logs are managed.
pub trait Pods: Send + Sync + 'static {
    /// Returns the runtime state of the pods of this node, or `None` if it is not known yet.
    fn pods(&self) -> Option<Vec<SharedPodRuntime>>;

    /// Returns the containment of panics and crashes in work for a pod.
    fn containment(&self) -> &Containment;
}

/// Directories of logs.
#[derive(Debug, Clone)]
pub struct LogDirs {
    /// Directory of pod logs, `/var/log/pods`.
    pub pods: PathBuf,
    /// Directory of links to container logs, `/var/log/containers`, if links are wanted.
    pub containers: Option<PathBuf>,
}

/// Rotates and links the logs of pods until `stop`.
pub async fn run<P: Pods>(
    pods: Arc<P>,
    runtime: Runtime,
    clock: Clock,
    dirs: LogDirs,
    settings: LogSettings,
    stop: CancellationToken,
) {
    let stalls = stalls();
    loop {
        // Dropping the sleep loses nothing. A rotation is never dropped, since that could leave a log without
        // a file.
        tokio::select! {
            () = stop.cancelled() => return,
            () = quintlet_kit::timers::pause(settings.container_log_monitor_interval) => {}
        }
        let Some(running) = pods.pods() else { continue };
        let logs: Vec<_> = running.iter().flat_map(|pod| logs(pod, &dirs.pods)).collect();
        if settings.container_log_max_size >= 0 {
            check_logs(&runtime, &clock, pods.containment(), &settings, &stalls, &logs).await;
        }
        if let Some(dir) = dirs.containers.clone() {
            let (pods, logs_dir) = (Arc::clone(&pods), dirs.pods.clone());
            let update = move |pass: &Pass| update_links(pass, pods.containment(), &dir, &logs_dir, &running);
            // Links are updated at a later interval if too many logs hang.
            let _updated = stalls.run(update).await;
        }
    }
}

// An error of the file system is retried at the next interval.
fn update_links(
    pass: &Pass,
    containment: &Containment,
    dir: &Path,
    logs_dir: &Path,
    pods: &[SharedPodRuntime],
) {
    let wanted: Vec<(&PodRuntime, Vec<Link>)> =
        pods.iter().map(|pod| (&**pod, wanted(pod, logs_dir))).collect();
    let names = wanted.iter().flat_map(|(_, links)| links).map(|link| link.name.as_str()).collect();
    let exists = |log: &Path| pass.touch(log, || log.exists());
    if links::remove_broken(dir, logs_dir, &names, exists).is_err() {
        return;
    }
    for (pod, links) in &wanted {
        containment.unless_suspended(&pod.pod.uid, || links::make(dir, links, exists));
    }
}

/// The log of one running container.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Log {
    pod: PodWork,
    id: ContainerId,
    /// Directory of all pod logs; no link below it is followed.
    root: PathBuf,
    path: PathBuf,
}

/// Returns the logs of running containers. A log path outside of the log directory is ignored.
fn logs(pod: &PodRuntime, pod_logs_dir: &Path) -> Vec<Log> {
    pod.containers
        .iter()
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| Log {
            pod: PodWork::of(&pod.pod),
            id: c.id.clone(),
            root: pod_logs_dir.to_owned(),
            path: PathBuf::from(&c.log_path),
        })
        .filter(|log| is_within(&log.path, pod_logs_dir))
        .collect()
}

/// Returns the links of all containers with a log.
fn wanted(pod: &PodRuntime, pod_logs_dir: &Path) -> Vec<Link> {
    pod.containers
        .iter()
        .map(|c| Link {
            name: paths::legacy_log_name(&pod.pod, &c.name, c.id.as_str()),
            target: PathBuf::from(&c.log_path),
        })
        .filter(|link| is_within(&link.target, pod_logs_dir))
        .collect()
}

fn is_within(path: &Path, dir: &Path) -> bool {
    path.starts_with(dir) && !path.components().any(|c| c == std::path::Component::ParentDir)
}

/// A log was not rotated.
#[derive(Debug, thiserror::Error)]
enum RotateError {
    #[error("failed to access {}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("files of {} are still being compressed, or their file system does not answer", path.display())]
    Hangs { path: PathBuf },
    #[error("the runtime did not reopen the log")]
    Reopen(#[source] CallError),
}

async fn check_logs(
    runtime: &impl Reopen,
    clock: &Clock,
    containment: &Containment,
    settings: &LogSettings,
    stalls: &Stalls,
    logs: &[Log],
) {
    let due = due(settings.container_log_max_size, stalls, logs).await;
    futures::stream::iter(&due)
        .for_each_concurrent(settings.container_log_max_workers, |log| async {
            let PodWork { uid, name, .. } = &log.pod;
            if containment.suspension(uid).is_some() {
                return;
            }
            let check = check_log(runtime, clock, settings, stalls, log);
            // A panic has been logged, and the log is checked again at the next interval.
            if let Ok(Err(error)) = containment.contained(&log.pod, check).await {
                tracing::warn!(
                    pod.name = name,
                    pod.uid = %uid,
                    container.id = %log.id,
                    log = %log.path.display(),
                    error = quintlet_kit::error_chain(&error),
                    "failed to rotate log"
                );
            }
        })
        .await;
}

/// Returns the logs that are too large or have no readable size. All sizes are read in one blocking task, so
/// that logs at rest cost one wake-up together. A log whose file system hangs is left out.
async fn due(max_size: i64, stalls: &Stalls, logs: &[Log]) -> Vec<Log> {
    let logs = logs.to_vec();
    let read = move |pass: &Pass| {
        let size = |log: &Log| Dir::open(&log.root).and_then(|root| rotate::size(&root, &log.path));
        let is_small = |size: u64| i64::try_from(size).is_ok_and(|size| size < max_size);
        let is_due =
            |log: &&Log| pass.touch(&log.path, || size(log)).is_some_and(|size| !size.is_ok_and(is_small));
        logs.iter().filter(is_due).cloned().collect()
    };
    stalls.run(read).await.unwrap_or_default()
}

/// Rotates a log if it is too large. Reopens it if it is missing.
async fn check_log(
    runtime: &impl Reopen,
    clock: &Clock,
    settings: &LogSettings,
    stalls: &Stalls,
    log: &Log,
) -> Result<(), RotateError> {
    let size = match on_files(stalls, log, rotate::size).await {
        Ok(size) => i64::try_from(size).unwrap_or(i64::MAX),
        Err(RotateError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            // The log was removed, or an earlier rotation was interrupted between the rename and the new
            // file.
            return runtime.reopen(&log.id).await.map_err(RotateError::Reopen);
        }
        Err(e) => return Err(e),
    };
    if size < settings.container_log_max_size {
        return Ok(());
    }
    let keep = settings.container_log_max_files.saturating_sub(2);
    on_files(stalls, log, move |dir, path| rotate::make_room(dir, path, keep)).await?;
    // Compressing may take longer than this caller waits, and is completed nevertheless. A rename that
    // followed it would leave the log without a file until the next interval.
    let rotated_path = rotate::rotated(&log.path, clock.wall());
    let rotated = rotated_path.clone();
    on_files(stalls, log, move |dir, path| dir.rename(path, &rotated)).await?;
    match runtime.reopen(&log.id).await {
        Ok(()) => Ok(()),
        Err(error) => {
            // If the outcome is unknown, the runtime may have created the new file, which must not be
            // replaced by the old one.
            if error.is_refused_by_runtime() {
                let put_back = move |dir: &Dir, path: &Path| match dir.stat(path) {
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => dir.rename(&rotated_path, path),
                    Ok(_) | Err(_) => Ok(()),
                };
                on_files(stalls, log, put_back).await?;
            }
            Err(RotateError::Reopen(error))
        }
    }
}

/// Runs file operations on a log, confined to the directory of all logs.
async fn on_files<T: Send + 'static>(
    stalls: &Stalls,
    log: &Log,
    work: impl FnOnce(&Dir, &Path) -> std::io::Result<T> + Send + 'static,
) -> Result<T, RotateError> {
    let (root, path) = (log.root.clone(), log.path.clone());
    let done = stalls.run_one(&log.path, ROTATION, move || work(&Dir::open(&root)?, &path)).await;
    let done = done.ok_or_else(|| RotateError::Hangs { path: log.path.clone() })?;
    done.map_err(|source| RotateError::File { path: log.path.clone(), source })
}

#[cfg(test)]
mod tests;
