//! Mirror pods: the API server's copies of static pods (`pkg/kubelet/pod: MirrorClient`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::{labels, pod as pods};
use quintlet_proto::status::v1 as wire;
use tokio::sync::watch;

use crate::context::Context;
use pod_sync_containment::PodWork;

/// While a mirror cannot be made: the Node or the API server may be there any moment.
const RETRY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq)]
struct Wanted {
    pod: Arc<Pod>,
    // As the API server's watch has it.
    mirror: Option<Arc<Pod>>,
}

/// Keeps the mirror of one static pod in a task of its own, since the pod itself waits for no API server. The task ends
/// with this.
#[derive(Debug)]
pub struct MirrorReconciler(watch::Sender<Wanted>);

impl MirrorReconciler {
    /// Begins to keep the mirror of `pod`.
    #[must_use]
    pub fn start(ctx: Arc<Context>, pod: Arc<Pod>, mirror: Option<Arc<Pod>>) -> Self {
        let (wanted, seen) = watch::channel(Wanted { pod, mirror });
        quintlet_kit::task::spawn("mirror", keep(ctx, seen));
        Self(wanted)
    }

    /// What the pod and its mirror are now.
    pub fn set(&self, pod: &Arc<Pod>, mirror: Option<&Arc<Pod>>) {
        let new = Wanted { pod: Arc::clone(pod), mirror: mirror.cloned() };
        self.0.send_if_modified(|old| {
            let changed = *old != new;
            *old = new;
            changed
        });
    }
}

async fn keep(ctx: Arc<Context>, mut wanted: watch::Receiver<Wanted>) {
    let mut failing = String::new();
    loop {
        let Wanted { pod, mirror } = wanted.borrow_and_update().clone();
        let Ok(work) = pods::pod_ref(&pod).map(|pod| PodWork::of(&pod)) else { return };
        let done = match ctx.containment.wait(&work.uid) {
            Some(wait) => Err((wait.message, wait.until.saturating_sub(ctx.clock.boot()))),
            None => match ctx.contained(&work, Box::pin(reconcile(&ctx, &pod, mirror.as_deref()))).await {
                Some(done) => done.map_err(|why| (why, RETRY)),
                None => continue,
            },
        };
        let wait = match done {
            // It may be deleted before any watch has brought it.
            Ok(()) => {
                failing.clear();
                ctx.sync_frequency
            }
            Err((why, again)) => {
                if failing != why {
                    tracing::info!(pod.uid = pod.metadata.uid, error = why, "no mirror pod yet");
                }
                failing = why;
                again
            }
        };
        // Either only says "look".
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(wait) => {}
        }
    }
}

// Makes the mirror of a static pod what it should be.
async fn reconcile(ctx: &Context, pod: &Pod, mirror: Option<&Pod>) -> Result<(), String> {
    let hash = pods::annotation(pod, labels::CONFIG_HASH);
    if let Some(m) = mirror {
        if m.metadata.deletion_timestamp.is_none() && pods::annotation(m, labels::CONFIG_MIRROR) == hash {
            return Ok(());
        }
        delete(ctx, m).await?;
    }
    let copy = copy_of(pod);
    let json = serde_json::to_vec(&copy).map_err(|e| e.to_string())?;
    let made = ctx.statuses.client().ensure_mirror(wire::EnsureMirrorRequest { pod: json }).await;
    made.map(|_| ()).map_err(|e| format!("mirror pod not created: {}", e.message()))
}

/// Deletes a mirror, and only that one.
///
/// # Errors
/// It could not be asked for, in words.
pub async fn delete(ctx: &Context, mirror: &Pod) -> Result<(), String> {
    let meta = &mirror.metadata;
    let request = wire::DeleteMirrorRequest {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
    };
    let asked = ctx.statuses.client().delete_mirror(request).await;
    asked.map(|_| ()).map_err(|e| format!("mirror pod not deleted: {}", e.message()))
}

/// The object to create: the static pod with its hash as mirror annotation. status-reporter adds the owner reference.
#[must_use]
pub fn copy_of(pod: &Pod) -> Pod {
    let mut copy = pod.clone();
    let annotations = copy.metadata.annotations.get_or_insert_with(BTreeMap::new);
    let hash = annotations.get(labels::CONFIG_HASH).cloned().unwrap_or_default();
    annotations.insert(labels::CONFIG_MIRROR.to_owned(), hash);
    copy.metadata.uid = None;
    copy.metadata.resource_version = None;
    copy.metadata.owner_references = None;
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_bears_the_hash_and_no_uid_of_its_own() {
        let pod: Pod = serde_json::from_value(serde_json::json!({"metadata": {"name": "a", "uid": "u",
            "annotations": {"kubernetes.io/config.hash": "h", "kubernetes.io/config.source": "file"}}}))
        .unwrap();
        let copy = copy_of(&pod);
        assert_eq!(pods::annotation(&copy, labels::CONFIG_MIRROR), Some("h"));
        assert_eq!(copy.metadata.uid, None);
    }
}
