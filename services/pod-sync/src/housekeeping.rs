//! What is left of pods that nobody wants any more, where it is ours (pod-sync.md §9.1, §9.2).

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use quintlet_model::ids::PodUid;
use quintlet_model::runtime::{PodRuntime, SharedPodRuntime};

use crate::build::paths;
use crate::context::Context;
use crate::decide::grace;
use crate::decide::worker::{Outcome, Work};
use crate::fleet::Told;
use crate::worker::{Halt, stop_all};

/// Containers of a pod whose spec is lost get this long, seconds (pkg/kubelet/pod_workers.go: grace 1, raised to the
/// least that any stop gets).
const ORPHAN_GRACE: i64 = grace::MINIMUM_STOP;
/// Wait after a failed try.
const RETRY: Duration = Duration::from_secs(1);
/// Tries before housekeeping finds it again.
const TRIES: u32 = 5;

/// Stops and removes a pod that is in the runtime and nowhere else.
pub async fn remove_orphan(ctx: Arc<Context>, pod: SharedPodRuntime) {
    let uid = &pod.pod.uid;
    let Told::Work(Work::Terminating, _) = ctx.fleet.take(uid) else { return };
    for _ in 0..TRIES {
        let removed = match ctx.pleg.observe(uid, pod.ids(), true).await {
            Ok(None) => Ok(()),
            Ok(Some(now)) => remove(&ctx, &now).await,
            Err(e) => Err(Halt::Cut(e.to_string())),
        };
        match removed {
            Ok(()) => {
                remove_dir(Arc::clone(&ctx), uid.clone()).await;
                ctx.fleet.done(uid, Outcome::Advance);
                return;
            }
            Err(e) => tracing::info!(pod.uid = %uid, error = ?e, "orphaned pod not removed yet"),
        }
        tokio::time::sleep(RETRY).await;
    }
    ctx.fleet.done(uid, Outcome::Failed(None));
}

async fn remove(ctx: &Context, pod: &PodRuntime) -> Result<(), Halt> {
    let plan = grace::termination_plan(None, pod);
    stop_all(ctx, None, pod, &plan, Some(ORPHAN_GRACE), &BTreeMap::new()).await?;
    for container in &pod.containers {
        ctx.runtime.remove_container(&container.id).await.map_err(|e| Halt::Cut(e.to_string()))?;
    }
    for sandbox in &pod.sandboxes {
        ctx.runtime.remove_sandbox(&sandbox.id).await.map_err(|e| Halt::Cut(e.to_string()))?;
    }
    let logs = paths::pod_log_dir(&ctx.node.pod_logs_dir, &pod.pod);
    let _ = std::fs::remove_dir_all(logs);
    Ok(())
}

/// Pod directories under our root that belong to no known pod. Cgroups are not gone by: under a shared root they may be
/// those of another agent.
#[must_use]
pub fn orphaned_dirs(ctx: &Context, known: &HashSet<PodUid>) -> Vec<PodUid> {
    list(&paths::pods_dir(&ctx.node.root_dir), known)
}

fn list(dir: &Path, known: &HashSet<PodUid>) -> Vec<PodUid> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| PodUid::parse(e.file_name().to_str()?).ok())
        .filter(|uid| !known.contains(uid))
        .collect()
}

/// Takes down what is left of a pod's volumes and cgroup, then its directory. Mounted content is never deleted.
pub async fn remove_dir(ctx: Arc<Context>, uid: PodUid) {
    let result = async {
        let (volumes, gone) = (ctx.volumes.clone(), uid.clone());
        let cleaned =
            tokio::task::spawn_blocking(move || volumes.clean_orphan(&gone).map_err(|e| e.to_string())).await;
        cleaned.map_err(|e| e.to_string())??;
        ctx.cgroups.remove_by_uid(&uid).await.map_err(|e| e.to_string())
    }
    .await;
    match result {
        Ok(()) => ctx.state.remove(&uid),
        Err(error) => {
            tracing::info!(pod.uid = %uid, error, "directory of a pod that is gone not removed yet")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_unknown_pods_are_orphaned() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["u1", "u2", ".hidden"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let known = [PodUid::parse("u1").unwrap()].into();
        assert_eq!(list(dir.path(), &known), [PodUid::parse("u2").unwrap()]);
        assert!(list(&dir.path().join("nowhere"), &known).is_empty());
    }
}
