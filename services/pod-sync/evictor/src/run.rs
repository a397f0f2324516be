//! The loop of evictions.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use pod_sync_eviction::layout::{Layout, Reclaim};
use pod_sync_eviction::manager::{Decision, Eviction, EvictionManager, EvictionSettings, Snapshot};
use pod_sync_eviction::usage::{Observations, PodUsages};
use pod_sync_eviction::{PressureCondition, Resource};
use quintlet_model::ids::PodUid;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::metrics::EvictionMetrics;

/// Interval between rounds (`pkg/kubelet: evictionMonitoringPeriod`).
const PERIOD: Duration = Duration::from_secs(10);
/// Longest wait until evicted pods have given back their resources (`pkg/kubelet/eviction: podCleanupTimeout`).
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between checks whether they have (`podCleanupPollFreq`).
const CLEANUP_POLL: Duration = Duration::from_secs(1);

/// The node as evictions see it.
#[async_trait]
pub trait Node: Send + Sync {
    /// Returns which file systems are shared, or `None` if the runtime has not answered yet.
    async fn layout(&self) -> Option<Layout>;

    /// Measures the node and its pods. Returns `None` if that fails or takes too long.
    async fn snapshot(&self) -> Option<Snapshot>;

    /// Measures the node alone. Returns `None` if that fails or takes too long.
    async fn observations(&self) -> Option<Observations>;

    /// Measures the disk usage of pods again, volumes included, since the one in a snapshot may be a minute old. Returns `None` if that
    /// fails or takes too long.
    async fn disk_usage(&self, snapshot: &Snapshot) -> Option<PodUsages>;

    /// Deletes what belongs to the node. Failures are logged.
    async fn reclaim(&self, what: Reclaim);

    /// Evicts a pod: event, termination, status. Returns after its containers have stopped or its time is over.
    async fn evict(&self, eviction: &Eviction);

    /// Returns the pods that were evicted and still have containers or volumes, also by an earlier process.
    fn unfinished(&self) -> BTreeSet<PodUid>;

    /// Reports that the node begins to reclaim a resource.
    fn reclaiming(&self, resource: Resource);

    /// Returns the time on `CLOCK_BOOTTIME`.
    fn now(&self) -> Duration;
}

/// Carries out evictions until `stop`. `settings` has the layout of the node filled in once the runtime has answered. `conditions`
/// gets the pressure conditions that are true.
pub async fn run(
    node: impl Node,
    settings: EvictionSettings,
    conditions: watch::Sender<BTreeSet<PressureCondition>>,
    stop: CancellationToken,
) {
    // An eviction that has begun continues without this loop, and the next process waits for its end.
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow(&node, settings, &conditions) => {}
    }
}

async fn follow(
    node: &impl Node,
    mut settings: EvictionSettings,
    conditions: &watch::Sender<BTreeSet<PressureCondition>>,
) {
    let metrics = EvictionMetrics::default();
    // What an earlier process evicted must be gone before anything is measured, or another pod would be evicted for the same need.
    wait_for_cleanup(node, &node.unfinished()).await;
    settings.layout = loop {
        match node.layout().await {
            Some(layout) => break layout,
            None => sleep(PERIOD).await,
        }
    };
    let mut manager = EvictionManager::new(settings);
    loop {
        let evicted = round(node, &mut manager, conditions, &metrics).await;
        if evicted.is_empty() {
            sleep(PERIOD).await;
        } else {
            wait_for_cleanup(node, &evicted).await;
            manager.evicted(node.now());
        }
    }
}

async fn round(
    node: &impl Node,
    manager: &mut EvictionManager,
    conditions: &watch::Sender<BTreeSet<PressureCondition>>,
    metrics: &EvictionMetrics,
) -> BTreeSet<PodUid> {
    let Some(mut snapshot) = node.snapshot().await else { return BTreeSet::new() };
    let decision = manager.decide(&snapshot, node.now());
    conditions.send_if_modified(|known| {
        let changed = known != manager.conditions();
        known.clone_from(manager.conditions());
        changed
    });
    let evictions = match decision {
        Decision::Nothing => Vec::new(),
        Decision::EvictForLimits(evictions) => evictions,
        Decision::Reclaim(reclaiming) => {
            tracing::warn!(signal = %reclaiming.signal, resource = %reclaiming.resource(), "reclaiming resource");
            node.reclaiming(reclaiming.resource());
            for step in reclaiming.steps {
                node.reclaim(*step).await;
            }
            let after = if reclaiming.steps.is_empty() { None } else { node.observations().await };
            let is_disk = matches!(reclaiming.resource(), Resource::EphemeralStorage | Resource::Inodes);
            if is_disk && !manager.is_relieved(&reclaiming, after.as_ref()) {
                // Without the usage of now, the wrong pod could be evicted.
                let Some(usages) = node.disk_usage(&snapshot).await else { return BTreeSet::new() };
                snapshot.usages = usages;
            }
            let eviction = manager.after_reclaim(&reclaiming, &snapshot, after.as_ref());
            if eviction.is_some() {
                for (signal, at) in reclaiming.observed(&snapshot.observations) {
                    metrics.acted_on(signal.as_str(), node.now().saturating_sub(at));
                }
            }
            eviction.into_iter().collect()
        }
    };
    for eviction in &evictions {
        metrics.evicted(eviction.signal);
        tracing::warn!(pod.uid = %eviction.candidate.uid, signal = eviction.signal, text = eviction.message, "evicting pod");
        node.evict(eviction).await;
    }
    evictions.into_iter().map(|eviction| eviction.candidate.uid).collect()
}

async fn wait_for_cleanup(node: &impl Node, pods: &BTreeSet<PodUid>) {
    let began = Instant::now();
    while !node.unfinished().is_disjoint(pods) {
        if began.elapsed() >= CLEANUP_TIMEOUT {
            tracing::warn!(?pods, "evicted pods still hold resources, no longer waiting");
            return;
        }
        sleep(CLEANUP_POLL).await;
    }
}

#[cfg(test)]
mod tests;
