//! Mirror pods: the API server's copies of static pods (`pkg/kubelet/pod: MirrorClient`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use pod_sync_clients::{MirrorError, Statuses};
use pod_sync_containment::PodWork;
use quintlet_kit::clock::Clock;
use quintlet_model::ids::PodRef;
use quintlet_model::{labels, pod as pods};
use quintlet_proto::common::v1::Trace;
use quintlet_telemetry::propagate;
use tokio::sync::watch;
use tracing::{Instrument as _, Span};

use crate::context::{FaultIsolation, NodeConfig, Reporting, WorkerContext};

/// Interval of retries while a mirror cannot be made: the Node or the API server may become available.
const RETRY: Duration = Duration::from_secs(1);

/// The groups that the reconciler of a mirror pod uses.
#[derive(Debug, Clone)]
pub(crate) struct MirrorContext {
    /// Wall time and CLOCK_BOOTTIME.
    pub clock: Clock,
    /// Settings of this node.
    pub node: Arc<NodeConfig>,
    /// Statuses, events, views and metrics.
    pub reporting: Arc<Reporting>,
    /// Containment of panics and crashes.
    pub faults: Arc<FaultIsolation>,
}

impl From<&WorkerContext> for MirrorContext {
    fn from(ctx: &WorkerContext) -> Self {
        Self {
            clock: ctx.clock.clone(),
            node: Arc::clone(&ctx.node),
            reporting: Arc::clone(&ctx.reporting),
            faults: Arc::clone(&ctx.faults),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Wanted {
    pod: Arc<Pod>,
    // The mirror in the API server's watch.
    mirror: Option<Arc<Pod>>,
}

/// Reconciles the mirror of one static pod in a task of its own, since the pod itself does not wait for the
/// API server. The task ends when the reconciler is dropped.
#[derive(Debug)]
pub(crate) struct MirrorReconciler(watch::Sender<Wanted>);

impl MirrorReconciler {
    /// Starts the task.
    #[must_use]
    pub(crate) fn start(ctx: MirrorContext, pod: Arc<Pod>, mirror: Option<Arc<Pod>>) -> Self {
        let (wanted, seen) = watch::channel(Wanted { pod, mirror });
        quintlet_kit::task::spawn("mirror", keep(ctx, seen, propagate::current_trace()));
        Self(wanted)
    }

    /// Sets the newest pod and mirror.
    pub(crate) fn set(&self, pod: &Arc<Pod>, mirror: Option<&Arc<Pod>>) {
        let new = Wanted { pod: Arc::clone(pod), mirror: mirror.cloned() };
        self.0.send_if_modified(|old| {
            let changed = *old != new;
            *old = new;
            changed
        });
    }
}

/// `trace`: the operation that needs the mirror pod. Writes up to the first success are in this trace.
async fn keep(ctx: MirrorContext, mut wanted: watch::Receiver<Wanted>, mut trace: Option<Trace>) {
    let mut failing = String::new();
    loop {
        let Wanted { pod, mirror } = wanted.borrow_and_update().clone();
        let Ok(pod_ref) = pods::pod_ref(&pod) else { return };
        let work = PodWork::of(&pod_ref);
        let attempt = MirrorTrace { pod: &pod_ref, trace: trace.as_ref(), is_retry: !failing.is_empty() };
        let done = match ctx.faults.containment.suspension(&work.uid) {
            Some(wait) => Err((wait.message, wait.until.saturating_sub(ctx.clock.boot()))),
            None => match ctx
                .faults
                .contained(
                    &work,
                    Box::pin(reconcile(&ctx.reporting.statuses, &pod, mirror.as_deref(), attempt)),
                )
                .await
            {
                Some(done) => done.map_err(|error| (error.to_string(), RETRY)),
                None => continue,
            },
        };
        let wait = match done {
            // A mirror may be deleted before the watch has delivered it.
            Ok(()) => {
                failing.clear();
                trace = None;
                ctx.node.sync_frequency
            }
            Err((why, again)) => {
                if failing != why {
                    tracing::info!(
                        pod.uid = pod.metadata.uid,
                        error = why,
                        "failed to update the mirror pod, retrying"
                    );
                }
                failing = why;
                again
            }
        };
        // Either outcome leads to another pass.
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// The trace of an attempt to write a mirror pod.
#[derive(Debug, Clone, Copy)]
struct MirrorTrace<'a> {
    pod: &'a PodRef,
    trace: Option<&'a Trace>,
    is_retry: bool,
}

impl MirrorTrace<'_> {
    /// Returns the span of the attempt. A retry has none: spans of one each second would displace others.
    fn span(self) -> Span {
        if self.is_retry {
            return Span::none();
        }
        let span = tracing::info_span!(
            parent: None,
            "reconcile mirror pod",
            k8s.pod.uid = %self.pod.uid,
            k8s.namespace.name = &*self.pod.namespace,
            k8s.pod.name = &*self.pod.name,
        );
        propagate::set_parent(&span, &self.trace.cloned());
        span
    }
}

/// Creates the mirror of a static pod, and replaces an outdated one.
async fn reconcile(
    statuses: &Statuses,
    pod: &Pod,
    mirror: Option<&Pod>,
    trace: MirrorTrace<'_>,
) -> Result<(), MirrorError> {
    let hash = pods::annotation(pod, labels::CONFIG_HASH);
    if let Some(m) = mirror
        && m.metadata.deletion_timestamp.is_none()
        && pods::annotation(m, labels::CONFIG_MIRROR) == hash
    {
        return Ok(());
    }
    let span = trace.span();
    let outdated = mirror.map(|mirror| &mirror.metadata);
    let done = replace(statuses, pod, outdated).instrument(span.clone()).await;
    if let Err(error) = &done {
        propagate::record_error(&span, &quintlet_kit::error_chain(error));
    }
    done
}

async fn replace(statuses: &Statuses, pod: &Pod, outdated: Option<&ObjectMeta>) -> Result<(), MirrorError> {
    if let Some(outdated) = outdated {
        statuses.delete_mirror(outdated).await?;
    }
    statuses.ensure_mirror(&mirror_of(pod)).await
}

/// Returns the mirror to create: the static pod with its hash as mirror annotation. status-reporter adds the
/// owner reference.
#[must_use]
pub(crate) fn mirror_of(pod: &Pod) -> Pod {
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
        let copy = mirror_of(&pod);
        assert_eq!(pods::annotation(&copy, labels::CONFIG_MIRROR), Some("h"));
        assert_eq!(copy.metadata.uid, None);
    }
}
