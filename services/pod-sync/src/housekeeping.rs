//! Removes orphaned pods of this node: containers, directories, cgroups, logs (`pkg/kubelet/kubelet_pods.go:
//! HandlePodCleanups`).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use pod_sync_clients::EventType;
use pod_sync_decisions::grace;
use pod_sync_decisions::worker::{Work, WorkOutcome};
use pod_sync_layout::paths;
use pod_sync_logs::sweep::{dangling_links, dead_directories};
use prometheus_client::metrics::counter::Counter;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::{task, tree};
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::{ContainerState, Known, PodRuntime, SharedPodRuntime};
use tokio::time::Instant;

use pod_sync_containment::PodWork;
use pod_sync_worker::context::{NodeConfig, PodDirs, PodEnvironment, WorkerContext};
use pod_sync_worker::{Halt, NextWork, stop_all_containers};

/// Containers of a pod whose spec is lost get this long, seconds (pkg/kubelet/pod_workers.go: grace 1, raised
/// to the least that any stop gets).
const ORPHAN_GRACE: i64 = grace::MINIMUM_STOP_SECONDS;
/// Interval of retries.
const RETRY: Duration = Duration::from_secs(1);
/// Number of tries; afterwards the next pass of housekeeping starts again.
const TRIES: u32 = 5;

/// Stops and removes a pod that only the runtime has.
pub(crate) async fn remove_orphan(ctx: Arc<WorkerContext>, pod: SharedPodRuntime) {
    let uid = &pod.pod.uid;
    let NextWork::Run(Work::Terminating, _) = ctx.control.pod_workers.next_work(uid) else { return };
    let removal = Box::pin(try_to_remove_orphan(&ctx, &pod));
    if ctx.faults.contained(&PodWork::of(&pod.pod), removal).await.is_none() {
        // Housekeeping tries again when the pod's wait is over.
        ctx.control.pod_workers.complete_work(uid, WorkOutcome::Failed(None));
    }
}

async fn try_to_remove_orphan(ctx: &WorkerContext, pod: &SharedPodRuntime) {
    let uid = &pod.pod.uid;
    for _ in 0..TRIES {
        let removed = match ctx.runtime.pleg.observe(uid, Known::of(pod), true).await.map(|o| o.pod) {
            // The worker of the pod has removed everything: the cache was stale.
            Ok(None) => {
                remove_logs(ctx, &pod.pod).await;
                let dir = ctx.node.pod_dir(uid);
                if !task::blocking(move || dir.exists()).await {
                    ctx.control.pod_workers.complete_work(uid, WorkOutcome::Advance);
                    return;
                }
                Ok(())
            }
            Ok(Some(now)) => remove(ctx, &now).await,
            Err(e) => Err(Halt::Interrupted(e.to_string())),
        };
        match removed {
            Ok(()) => {
                // Housekeeping finds a directory that stays.
                clear_dir(ctx, uid).await;
                ctx.control.pod_workers.complete_work(uid, WorkOutcome::Advance);
                return;
            }
            Err(e) => {
                if let Halt::Failed { error, .. } = &e {
                    let text = format!("error killing pod: {error}");
                    ctx.reporting.events.pod(&named(pod), EventType::Warning, "FailedKillPod", &text, "");
                } else {
                    let name = format!("{}/{}", pod.pod.namespace, pod.pod.name);
                    tracing::warn!(pod.name = name, pod.uid = %uid, error = ?e, "orphaned pod not removed, retrying");
                }
            }
        }
        tokio::time::sleep(RETRY).await;
    }
    ctx.control.pod_workers.complete_work(uid, WorkOutcome::Failed(None));
}

/// Returns a pod without a spec, for events.
fn named(pod: &PodRuntime) -> Pod {
    let metadata = ObjectMeta {
        name: Some(pod.pod.name.to_string()),
        namespace: Some(pod.pod.namespace.to_string()),
        uid: Some(pod.pod.uid.to_string()),
        ..ObjectMeta::default()
    };
    Pod { metadata, ..Pod::default() }
}

async fn remove(ctx: &WorkerContext, pod: &PodRuntime) -> Result<(), Halt> {
    let plan = grace::termination_plan(None, pod);
    stop_all_containers(&ctx.stop_context(), None, pod, &plan, Some(ORPHAN_GRACE), &BTreeMap::new()).await?;
    for container in &pod.containers {
        ctx.runtime
            .calls
            .remove_container(&container.id)
            .await
            .map_err(|e| Halt::Interrupted(e.to_string()))?;
    }
    for sandbox in &pod.sandboxes {
        ctx.runtime.calls.remove_sandbox(&sandbox.id).await.map_err(|e| Halt::Interrupted(e.to_string()))?;
    }
    remove_logs(ctx, &pod.pod).await;
    Ok(())
}

async fn remove_logs(ctx: &WorkerContext, pod: &PodRef) {
    let logs = paths::pod_log_dir(&ctx.node.settings.pod_logs_dir, pod);
    // The next sweep removes what is left.
    let _ = task::blocking(move || tree::remove(&logs)).await;
}

/// Duration from which a pass of housekeeping is slow
/// (`pkg/kubelet/kubelet.go: housekeepingWarningDuration`).
const SLOW: Duration = Duration::from_secs(1);

/// Counts slow passes of housekeeping.
#[derive(Debug)]
pub(crate) struct HousekeepingPace {
    slow_passes: Counter,
    is_slow: bool,
    last: Option<Instant>,
    requested: Option<Instant>,
}

impl Default for HousekeepingPace {
    fn default() -> Self {
        let help = "Passes of housekeeping that took more than a second";
        let slow_passes = quintlet_telemetry::metrics::counter("quintlet_housekeeping_slow_passes", help);
        Self { slow_passes, is_slow: false, last: None, requested: None }
    }
}

impl HousekeepingPace {
    /// Requests a pass: now, or 100 ms after the last one.
    pub(crate) fn request(&mut self) {
        let now = Instant::now();
        let earliest = self.last.map_or(now, |last| deadline_after(last, PAUSE).max(now));
        self.requested.get_or_insert(earliest);
    }

    /// Completes when a requested pass is due. Cancellation safety: the request stays until [`Self::begin`].
    pub(crate) fn due(&self) -> impl Future<Output = ()> + use<> {
        let requested = self.requested;
        async move {
            match requested {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Records the start of a pass, which serves the requests before it.
    pub(crate) fn begin(&mut self) {
        self.last = Some(Instant::now());
        self.requested = None;
    }

    /// Counts a pass. Returns true for the first slow pass in a row.
    pub(crate) fn is_newly_slow(&mut self, took: Duration) -> bool {
        let is_slow = took > SLOW;
        if is_slow {
            self.slow_passes.inc();
        }
        let was_slow = std::mem::replace(&mut self.is_slow, is_slow);
        is_slow && !was_slow
    }
}

/// Interval of passes that are requested again and again. In a burst of deletions, each pod requests passes,
/// and each pass looks at all pods.
const PAUSE: Duration = Duration::from_millis(100);

/// Interval of sweeps (`pkg/kubelet/kubelet.go: ContainerGCPeriod`).
const SWEEP: Duration = Duration::from_secs(60);

/// Removes log directories of pods that are gone, and links to logs that are gone.
#[derive(Debug, Default)]
pub(crate) struct LogSweeper {
    // Boottime of the last sweep.
    last: Option<Duration>,
}

impl LogSweeper {
    /// Sweeps once a minute. `known` has the pods of the pod manager and of the runtime.
    pub(crate) fn tick(&mut self, ctx: &Arc<WorkerContext>, known: &HashSet<PodUid>) {
        let now = ctx.clock.boot();
        if self.last.is_some_and(|last| now.saturating_sub(last) < SWEEP) {
            return;
        }
        self.last = Some(now);
        let (logs, known) = (ctx.node.settings.pod_logs_dir.clone(), known.clone());
        let ctx = Arc::clone(ctx);
        // Logs may be large.
        let sweep = task::blocking(move || {
            // The pod manager and the runtime may have learned of a pod after `known`, before or while this
            // task runs.
            let is_known = |uid: &PodUid| {
                known.contains(uid)
                    || ctx.control.pod_workers.read(|workers| workers.is_known(uid))
                    || ctx.runtime.pleg.all().iter().flatten().any(|pod| pod.pod.uid == *uid)
            };
            dead_directories(&logs, is_known, |uid, dir| {
                let removed = ctx.faults.unless_suspended(uid, || tree::remove(dir));
                if let Some(Err(e)) = removed {
                    tracing::warn!(dir = %dir.display(), error = %e, "logs of an orphaned pod not removed");
                }
            });
            let is_running = |id: &str| {
                let pods = ctx.runtime.pleg.all();
                let mut containers = pods.iter().flatten().flat_map(|pod| &pod.containers);
                containers.any(|c| c.id.as_str() == id && c.state != ContainerState::Exited)
            };
            for link in ctx.node.container_logs_dir.iter().flat_map(|dir| dangling_links(dir, is_running)) {
                let _ = std::fs::remove_file(link);
            }
        });
        drop(task::spawn("sweep-logs", sweep));
    }
}

/// Lists unknown pods that have a directory below the root directory, or a cgroup with the mark of this node.
/// A cgroup without the mark may belong to another agent.
pub(crate) async fn orphaned(
    node: Arc<NodeConfig>,
    environment: Arc<PodEnvironment>,
    known: HashSet<PodUid>,
) -> BTreeSet<PodUid> {
    task::blocking(move || {
        let marked = environment.cgroups.owned_pods(&known);
        unknown(&node.pod_dirs, &node.settings.root_dir, &known).into_iter().chain(marked).collect()
    })
    .await
}

fn unknown(dirs: &PodDirs, root_dir: &Path, known: &HashSet<PodUid>) -> Vec<PodUid> {
    dirs.list(root_dir).into_iter().filter(|uid| !known.contains(uid)).collect()
}

/// Removes the volumes and the cgroup of a pod, then its directory, by which an unfinished removal is found
/// again. Mounted content is never deleted.
pub(crate) async fn remove_dir(ctx: Arc<WorkerContext>, uid: PodUid) {
    let work = PodWork::unnamed(&uid);
    // After a panic, housekeeping tries again when the pod's wait is over.
    let _ = ctx.faults.contained(&work, Box::pin(clear_dir(&ctx, &uid))).await;
}

async fn clear_dir(ctx: &WorkerContext, uid: &PodUid) {
    match take_down(ctx, uid).await {
        Ok(()) => {
            ctx.checkpoints.records.remove(uid);
            ctx.faults.containment.forget(uid);
        }
        Err(error) => {
            tracing::warn!(pod.uid = %uid, error, "orphaned pod directory not removed, retrying")
        }
    }
}

async fn take_down(ctx: &WorkerContext, uid: &PodUid) -> Result<(), String> {
    ctx.environment.volume_tasks.unmount(uid).await.map_err(|e| e.to_string())?;
    let volumes = ctx.environment.volumes.clone();
    let cgroups = ctx.environment.cgroups.clone();
    let gone = uid.clone();
    let cleared = move || {
        volumes.tear_down_orphaned_volumes(&gone).map_err(|e| {
            // Until the volumes are removed, processes of the pod get the minimum of CPU shares.
            if let Err(e) = cgroups.reduce_cpu_limits(&gone) {
                tracing::info!(pod.uid = %gone, error = %e, "CPU shares of an orphaned pod not reduced");
            }
            e.to_string()
        })
    };
    task::blocking(cleared).await?;
    ctx.environment.cgroups.remove_by_uid(uid).await.map_err(|e| e.to_string())?;
    ctx.release_user_namespace(uid).await;
    let (volumes, gone) = (ctx.environment.volumes.clone(), uid.clone());
    task::blocking(move || volumes.remove_orphaned_pod_dir(&gone).map_err(|e| e.to_string())).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slow_pass_is_counted_and_the_first_in_a_row_is_logged() {
        let mut pace = HousekeepingPace::default();
        let before = pace.slow_passes.get();
        let newly_slow: Vec<bool> =
            [0, 1000, 1001, 5000, 3, 2000].map(|ms| pace.is_newly_slow(Duration::from_millis(ms))).to_vec();
        assert_eq!(newly_slow, [false, false, true, false, false, true]);
        assert_eq!(pace.slow_passes.get() - before, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn requested_passes_are_joined_unless_the_last_one_is_long_ago() {
        let mut pace = HousekeepingPace::default();
        let start = Instant::now();
        let mut passes = Vec::new();
        for wait in [0, 1, 30, 200, 0, 0] {
            tokio::time::sleep(Duration::from_millis(wait)).await;
            pace.request();
            pace.request();
            pace.due().await;
            pace.begin();
            passes.push(start.elapsed().as_millis());
        }
        assert_eq!(passes, [0, 100, 200, 400, 500, 600]);
        assert!(tokio::time::timeout(Duration::from_secs(9), pace.due()).await.is_err(), "none is requested");
    }

    #[test]
    fn only_directories_of_unknown_pods_are_orphaned() {
        let root = tempfile::tempdir().unwrap();
        for name in ["u1", "u2", ".hidden"] {
            std::fs::create_dir_all(paths::pods_dir(root.path()).join(name)).unwrap();
        }
        let (dirs, known) = (PodDirs::default(), [PodUid::parse("u1").unwrap()].into());
        assert_eq!(unknown(&dirs, root.path(), &known), [PodUid::parse("u2").unwrap()]);
        assert!(unknown(&dirs, &root.path().join("nowhere"), &known).is_empty());
    }
}
