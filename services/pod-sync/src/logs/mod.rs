//! Containers' logs on disk: rotated by size, the older ones compressed, and linked where log collectors look.
//!
//! One task. Every interval it looks at the logs of all running containers, at most `workers` at a time, then puts the links
//! in order. Between a rename and the runtime's new file a log has no file: links are judged only when no rotation is under
//! way. What to rotate and to delete is decided in [`rotate`], without I/O.

pub mod links;
pub mod rotate;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use pod_sync_clients::{CallError, Runtime};
use quintlet_kit::beneath::Dir;
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use quintlet_model::ids::ContainerId;
use quintlet_model::runtime::{ContainerState, PodRuntime, SharedPodRuntime};
use tokio_util::sync::CancellationToken;

use crate::context::{Context, PodWork};
use links::Link;
use pod_sync_containment::Containment;
use pod_sync_cri_config::paths;

/// `containerLogMaxSize`, `containerLogMaxFiles`, `containerLogMaxWorkers` and `containerLogMonitorInterval` of a
/// KubeletConfiguration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Bytes from which a log is rotated; negative: never.
    pub container_log_max_size: i64,
    /// Files of one log, the one that is written to included; at least 2.
    pub container_log_max_files: usize,
    /// Logs looked at at once; at least 1.
    pub container_log_max_workers: usize,
    /// Between two looks; at least 3 s.
    pub container_log_monitor_interval: Duration,
}

/// Who writes the logs.
#[async_trait::async_trait]
pub trait Reopen: Send + Sync {
    /// Has a container's log written to a new file of the same name.
    ///
    /// # Errors
    /// See [`CallError`]: unless the runtime said no, it may have done it.
    async fn reopen(&self, id: &ContainerId) -> Result<(), CallError>;
}

#[async_trait::async_trait]
impl Reopen for Runtime {
    async fn reopen(&self, id: &ContainerId) -> Result<(), CallError> {
        self.reopen_container_log(id).await
    }
}

/// Looks after the logs of this node's pods until told to stop.
pub async fn run(ctx: Arc<Context>, settings: Settings, stop: CancellationToken) {
    loop {
        // Cutting a sleep loses nothing. A rotation runs to its end: half of one would leave a log without a file.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(settings.container_log_monitor_interval) => {}
        }
        let Some(pods) = ctx.pleg.all() else { continue };
        let pods: Vec<_> = pods.into_iter().filter(|pod| ctx.is_ours(pod)).collect();
        let logs: Vec<_> = pods.iter().flat_map(|pod| logs(pod, &ctx.node.pod_logs_dir)).collect();
        if settings.container_log_max_size >= 0 {
            look_at_all(&ctx.runtime, &ctx.clock, &ctx.containment, &settings, &logs).await;
        }
        if let Some(dir) = ctx.container_logs_dir.clone() {
            let ctx = Arc::clone(&ctx);
            task::blocking(move || keep_links(&ctx, &dir, &pods)).await;
        }
    }
}

// A failure of the file system is tried again at the next interval.
fn keep_links(ctx: &Context, dir: &Path, pods: &[SharedPodRuntime]) {
    let logs = &ctx.node.pod_logs_dir;
    let wanted: Vec<(&PodRuntime, Vec<Link>)> = pods.iter().map(|pod| (&**pod, wanted(pod, logs))).collect();
    let names = wanted.iter().flat_map(|(_, links)| links).map(|link| link.name.as_str()).collect();
    if links::remove_broken(dir, logs, &names).is_err() {
        return;
    }
    for (pod, links) in &wanted {
        ctx.unless_it_waits(&pod.pod.uid, || links::make(dir, links));
    }
}

/// The log of one running container.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Log {
    pod: PodWork,
    id: ContainerId,
    /// The directory of all pods' logs, beneath which nothing follows a link.
    root: PathBuf,
    path: PathBuf,
}

/// Logs of running containers. What a runtime reports outside of our directory is not touched.
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

/// The links that containers with a log are to have.
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

/// Why a log was not rotated.
#[derive(Debug, thiserror::Error)]
enum RotateError {
    #[error("{}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("the runtime does not open it again")]
    Reopen(#[source] CallError),
}

async fn look_at_all(
    runtime: &impl Reopen,
    clock: &Clock,
    containment: &Containment,
    settings: &Settings,
    logs: &[Log],
) {
    futures::stream::iter(logs)
        .for_each_concurrent(settings.container_log_max_workers, |log| async {
            let PodWork { uid, name } = &log.pod;
            if containment.wait(uid).is_some() {
                return;
            }
            let look = look(runtime, clock, settings, log);
            // After a panic, which has been logged, the log is looked at again at the next interval.
            if let Ok(Err(error)) = containment.contained(uid, name.clone(), look).await {
                tracing::warn!(
                    pod.name = name,
                    pod.uid = %uid,
                    container.id = %log.id,
                    log = %log.path.display(),
                    error = quintlet_kit::error_chain(&error),
                    "log not rotated"
                );
            }
        })
        .await;
}

/// Rotates a log if it is too large; has it made where it is missing.
async fn look(
    runtime: &impl Reopen,
    clock: &Clock,
    settings: &Settings,
    log: &Log,
) -> Result<(), RotateError> {
    let file = |source| RotateError::File { path: log.path.clone(), source };
    let size = match on_files(log, rotate::size).await {
        Ok(size) => i64::try_from(size).unwrap_or(i64::MAX),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            // Somebody removed it, or an earlier rotation was cut between the rename and the new file.
            return runtime.reopen(&log.id).await.map_err(RotateError::Reopen);
        }
        Err(e) => return Err(file(e)),
    };
    if size < settings.container_log_max_size {
        return Ok(());
    }
    let keep = settings.container_log_max_files.saturating_sub(2);
    let to = rotate::rotated(&log.path, clock.wall());
    let rotated = to.clone();
    let rotate = move |dir: &Dir, path: &Path| {
        rotate::make_room(dir, path, keep)?;
        dir.rename(path, &rotated)
    };
    on_files(log, rotate).await.map_err(file)?;
    match runtime.reopen(&log.id).await {
        Ok(()) => Ok(()),
        Err(error) => {
            // Without a verdict the new file may be there or come yet: it must not be replaced by the old one.
            if error.is_refused_by_runtime() {
                let put_back = move |dir: &Dir, path: &Path| match dir.stat(path) {
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => dir.rename(&to, path),
                    Ok(_) | Err(_) => Ok(()),
                };
                on_files(log, put_back).await.map_err(file)?;
            }
            Err(RotateError::Reopen(error))
        }
    }
}

/// Works on the files of a log, beneath the directory of all logs.
async fn on_files<T: Send + 'static>(
    log: &Log,
    work: impl FnOnce(&Dir, &Path) -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    let (root, path) = (log.root.clone(), log.path.clone());
    task::blocking(move || work(&Dir::open(&root)?, &path)).await
}

#[cfg(test)]
mod tests;
