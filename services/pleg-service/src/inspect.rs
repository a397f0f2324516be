//! Inspects one pod: reads the status of its sandboxes and containers.

use std::collections::{BTreeSet, HashMap};

use futures::{StreamExt as _, TryStreamExt as _};
use quintlet_model::ids::PodUid;

use crate::entry::InspectedPod;
use crate::traits::{ContainerRuntime, Filter, ReadError};

/// Concurrent status calls for one pod.
const PARALLEL: usize = 8;

#[derive(Debug, Default, Clone)]
pub(crate) struct Targets {
    pub(crate) sandboxes: BTreeSet<String>,
    /// Container IDs, with those of their sandboxes.
    pub(crate) containers: HashMap<String, String>,
    /// Whether to list the pod by its label first.
    pub(crate) list: bool,
}

/// Reads the sandboxes and containers of a pod, and leaves out IDs that the runtime does not have.
///
/// With a list, only what it has is read: each ID in `targets` is older than the list. The pod is listed
/// before it counts as gone.
pub(crate) async fn inspect(
    runtime: &dyn ContainerRuntime,
    uid: &PodUid,
    mut targets: Targets,
) -> Result<InspectedPod, ReadError> {
    loop {
        let listed = targets.list;
        if listed {
            let (sandboxes, containers) = tokio::try_join!(
                runtime.sandboxes(Filter::Pod(uid.clone())),
                runtime.containers(Filter::Pod(uid.clone()))
            )?;
            targets.sandboxes = sandboxes.into_iter().map(|s| s.id).collect();
            targets.containers = containers.into_iter().map(|c| (c.id, c.sandbox_id)).collect();
        }
        let found = statuses(runtime, uid, &targets).await?;
        if listed || !found.sandboxes.is_empty() || !found.containers.is_empty() {
            return Ok(found);
        }
        targets.list = true;
    }
}

async fn statuses(
    runtime: &dyn ContainerRuntime,
    uid: &PodUid,
    targets: &Targets,
) -> Result<InspectedPod, ReadError> {
    let sandboxes = futures::stream::iter(targets.sandboxes.clone())
        .map(|id| async move { runtime.sandbox(&id).await })
        .buffer_unordered(PARALLEL)
        .try_filter_map(|found| std::future::ready(Ok(found)))
        .try_collect::<Vec<_>>();
    let containers = futures::stream::iter(targets.containers.clone())
        .map(|(id, sandbox)| async move { runtime.container(&id, &sandbox).await })
        .buffer_unordered(PARALLEL)
        .try_filter_map(|found| std::future::ready(Ok(found)))
        .try_collect::<Vec<_>>();
    let (mut sandboxes, mut containers) = tokio::try_join!(sandboxes, containers)?;
    // A caller may pass an ID of another pod by mistake.
    sandboxes.retain(|(pod, _)| pod.uid == *uid);
    containers.retain(|c| c.labels.get(quintlet_model::labels::POD_UID).is_none_or(|l| l == uid.as_str()));
    let newest = sandboxes.iter().max_by_key(|(_, s)| (s.attempt, s.created_unix_ns));
    let pod = newest.map(|(pod, _)| pod.clone());
    Ok(InspectedPod { pod, sandboxes: sandboxes.into_iter().map(|(_, s)| s).collect(), containers })
}
