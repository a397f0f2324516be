//! Mirror pods: the API server's copies of static pods (pod-sync.md §2).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::{labels, pod as pods};
use quintlet_proto::status::v1 as wire;

use crate::context::Context;

/// Makes the mirror of a static pod what it should be. Errors are logged; the next pass tries again.
pub async fn reconcile(ctx: &Context, pod: &Pod, mirror: Option<&Pod>) {
    let hash = pods::annotation(pod, labels::CONFIG_HASH);
    let mut have = mirror;
    if let Some(m) = mirror {
        let matches =
            m.metadata.deletion_timestamp.is_none() && pods::annotation(m, labels::CONFIG_MIRROR) == hash;
        if !matches {
            if !delete(ctx, m).await {
                return;
            }
            have = None;
        }
    }
    if have.is_some() {
        return;
    }
    let copy = copy_of(pod);
    let Ok(json) = serde_json::to_vec(&copy) else { return };
    match ctx.statuses.client().ensure_mirror(wire::EnsureMirrorRequest { pod: json }).await {
        Ok(_) => {}
        Err(e) => tracing::info!(pod.uid = pod.metadata.uid, error = e.message(), "mirror pod not created"),
    }
}

/// Deletes a mirror, and only that one. False: it could not be asked for.
pub async fn delete(ctx: &Context, mirror: &Pod) -> bool {
    let meta = &mirror.metadata;
    let request = wire::DeleteMirrorRequest {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
    };
    let asked = ctx.statuses.client().delete_mirror(request).await;
    if let Err(e) = &asked {
        tracing::info!(mirror.uid = meta.uid, error = e.message(), "mirror pod not deleted");
    }
    asked.is_ok()
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
