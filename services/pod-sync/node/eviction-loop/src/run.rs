//! The loop of evictions.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pod_sync_eviction::contradictions::{WithoutEffect, without_effect};
use pod_sync_eviction::layout::{Layout, Reclaim};
use pod_sync_eviction::manager::{Decision, Eviction, EvictionManager, EvictionSettings, Snapshot};
use pod_sync_eviction::thresholds::Threshold;
use pod_sync_eviction::usage::{Observations, PodUsages};
use pod_sync_eviction::{PressureCondition, Resource, Signal};
use quintlet_model::ids::PodUid;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::metrics::EvictionMetrics;

/// Interval between rounds (`pkg/kubelet: evictionMonitoringPeriod`).
const PERIOD: Duration = Duration::from_secs(10);
/// Shortest interval between rounds when the kernel reports memory usage.
const SHORTEST_PERIOD: Duration = Duration::from_secs(1);
/// Longest wait until evicted pods have given back their resources
/// (`pkg/kubelet/eviction: podCleanupTimeout`).
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between checks whether they have (`podCleanupPollFreq`).
const CLEANUP_POLL: Duration = Duration::from_secs(1);

/// The pods that are measured in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Pods with a limit of local storage. The others matter only once a threshold is crossed.
    Limited,
    /// Each pod that may be evicted.
    All,
}

/// The node as evictions see it.
#[async_trait]
pub trait NodeControl: Send + Sync {
    /// Returns which file systems are shared, or `None` if the runtime has not answered yet, or a file system
    /// cannot be read.
    async fn layout(&self) -> Option<Layout>;

    /// Measures the node alone. Returns `None` if that fails or takes too long.
    async fn observations(&self) -> Option<Observations>;

    /// Adds the pods that may be evicted to the observations, and measures those in `scope`. Removes
    /// observations for which no pod can be chosen. Returns `None` if measuring fails or takes too long.
    async fn snapshot(&self, observations: Observations, scope: Scope) -> Option<Snapshot>;

    /// Measures the disk usage of pods again, volumes included, since the one in a snapshot may be a minute
    /// old. Returns `None` if that fails or takes too long.
    async fn disk_usage(&self, snapshot: &Snapshot) -> Option<PodUsages>;

    /// Deletes what belongs to the node. Failures are logged.
    async fn reclaim(&self, what: Reclaim);

    /// Evicts a pod: event, termination, status. Returns after its containers have stopped or its time is
    /// over.
    async fn evict(&self, eviction: &Eviction);

    /// Returns the pods that were evicted and still have containers or volumes, also by an earlier process.
    fn unfinished(&self) -> BTreeSet<PodUid>;

    /// Reports that the node begins to reclaim a resource.
    fn reclaiming(&self, resource: Resource);

    /// Returns when the kernel reports that memory usage has crossed a threshold since the observations were
    /// made. Never returns if the kernel does not report that.
    async fn memory_alarm(&self, thresholds: &[Threshold], observations: &Observations);

    /// Returns the time on `CLOCK_BOOTTIME`.
    fn now(&self) -> Duration;
}

/// A round as it is shown to the operator.
#[derive(Debug)]
pub struct LastRound {
    /// The measured node and pods.
    pub snapshot: Snapshot,
    /// The pods that the snapshot has figures of.
    pub scope: Scope,
    /// The manager after its decision on the snapshot.
    pub manager: EvictionManager,
    /// Time of the decision, on `CLOCK_BOOTTIME`.
    pub at: Duration,
}

/// Receivers of the results of each round, and requests for one.
#[derive(Debug)]
pub struct Published {
    /// The pressure conditions that are true.
    pub conditions: watch::Sender<BTreeSet<PressureCondition>>,
    /// The last round with a measurement; `None` before the first one.
    pub round: watch::Sender<Option<Arc<LastRound>>>,
    /// Requests a round in which all pods are measured.
    pub full_round: Arc<Notify>,
}

/// The layout while it is unknown: writable layers count for no limit of a container then.
const UNKNOWN_LAYOUT: Layout = Layout::SeparateImages;

/// Carries out evictions until `stop`. The layout in `settings` is replaced by that of the node once the
/// runtime has answered. Until then, no pod is evicted for disk space.
pub async fn run(
    node: impl NodeControl,
    settings: EvictionSettings,
    published: Published,
    stop: CancellationToken,
) {
    // An eviction that has begun continues without this loop, and the next process waits for its end.
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow(&node, settings, &published) => {}
    }
}

async fn follow(node: &impl NodeControl, mut settings: EvictionSettings, published: &Published) {
    let metrics = EvictionMetrics::default();
    // What an earlier process evicted must be gone before anything is measured, or another pod would be
    // evicted for the same need.
    wait_for_cleanup(node, &node.unfinished()).await;
    settings.layout = UNKNOWN_LAYOUT;
    let mut manager = EvictionManager::new(settings);
    let mut disks = Disks::NotRead;
    let mut is_compared = false;
    let mut scope = Scope::Limited;
    loop {
        disks = disks.ask(node, &mut manager).await;
        let evicted = round(node, &mut manager, disks, scope, published, &metrics).await;
        if !is_compared {
            is_compared = warn_of_contradictions(&manager);
        }
        scope = Scope::Limited;
        if evicted.is_empty() {
            scope = wait_for_next_round(node, &manager, published, &metrics).await;
        } else {
            wait_for_cleanup(node, &evicted).await;
            manager.evicted(node.now());
        }
    }
}

/// Waits for an interval, or less if the kernel reports that memory is short or a round is requested. Returns
/// which pods the next round measures at least.
async fn wait_for_next_round(
    node: &impl NodeControl,
    manager: &EvictionManager,
    published: &Published,
    metrics: &EvictionMetrics,
) -> Scope {
    let observations = manager.pressure().observations();
    // The kernel is asked at once. A usage that changes all the time does not cause one measurement after
    // another.
    let alarm = async {
        tokio::join!(sleep(SHORTEST_PERIOD), node.memory_alarm(&manager.settings().thresholds, observations))
    };
    // No arm changes anything, so that each may be dropped.
    tokio::select! {
        () = quintlet_kit::timers::pause(PERIOD) => Scope::Limited,
        () = published.full_round.notified() => Scope::All,
        _ = alarm => {
            tracing::info!("the kernel reports that memory usage has crossed a threshold");
            metrics.alarmed();
            Scope::Limited
        }
    }
}

/// Whether the layout of the node is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disks {
    NotRead,
    /// The runtime did not answer yet: at the start of a machine it may be later than this service.
    Late,
    Unknown,
    Known,
}

impl Disks {
    /// Asks for the layout until it is known.
    async fn ask(self, node: &impl NodeControl, manager: &mut EvictionManager) -> Self {
        if self == Self::Known {
            return self;
        }
        match node.layout().await {
            Some(layout) => {
                manager.set_layout(layout);
                tracing::info!(?layout, "file systems of the runtime are known");
                Self::Known
            }
            None if self == Self::NotRead => Self::Late,
            None => {
                if self == Self::Late {
                    tracing::warn!(
                        "file systems of the runtime are unknown, no pod is evicted for disk space"
                    );
                }
                Self::Unknown
            }
        }
    }
}

/// Logs the soft thresholds of the runtime's file systems without an effect. Returns false if these file
/// systems were not measured yet.
fn warn_of_contradictions(manager: &EvictionManager) -> bool {
    let Some(contradictions) = contradictions(manager) else { return false };
    for WithoutEffect { soft, hard, capacity } in contradictions {
        let [soft_text, hard_text] = [soft, hard].map(|threshold| threshold.value.text(capacity));
        tracing::warn!(signal = %soft.signal, soft = soft_text, hard = hard_text, "soft eviction threshold is not above the hard one, and has no effect");
    }
    true
}

/// Returns the soft thresholds without an effect on the file systems that only the runtime reports, or `None`
/// if these were not measured in the last round. At the start of the process their capacity is not known.
fn contradictions(manager: &EvictionManager) -> Option<Vec<WithoutEffect>> {
    let (settings, observations) = (manager.settings(), manager.pressure().observations());
    observations.get(&Signal::ImageFsAvailable)?;
    let is_compared = |signal: Signal| match signal {
        Signal::ImageFsAvailable | Signal::ImageFsInodesFree => true,
        // Otherwise these are copies of thresholds that are compared with the same capacity.
        Signal::ContainerFsAvailable | Signal::ContainerFsInodesFree => settings.layout == Layout::Split,
        Signal::MemoryAvailable
        | Signal::AllocatableMemoryAvailable
        | Signal::NodeFsAvailable
        | Signal::NodeFsInodesFree
        | Signal::PidAvailable => false,
    };
    let compared: Vec<_> = settings.thresholds.iter().filter(|t| is_compared(t.signal)).copied().collect();
    Some(without_effect(&compared, |signal| Some(observations.get(&signal)?.capacity)))
}

async fn round(
    node: &impl NodeControl,
    manager: &mut EvictionManager,
    disks: Disks,
    scope: Scope,
    published: &Published,
    metrics: &EvictionMetrics,
) -> BTreeSet<PodUid> {
    let Some(mut observations) = node.observations().await else { return BTreeSet::new() };
    if disks != Disks::Known {
        observations.retain(|signal, _| !signal.is_of_disk());
    }
    let scope = if manager.is_crossed(&observations) { Scope::All } else { scope };
    let Some(snapshot) = node.snapshot(observations, scope).await else { return BTreeSet::new() };
    let decision = manager.decide(&snapshot, node.now());
    let mut round = Arc::new(LastRound { snapshot, scope, manager: manager.clone(), at: node.now() });
    published.round.send_replace(Some(Arc::clone(&round)));
    metrics.set_pressure(manager.conditions());
    published.conditions.send_if_modified(|known| {
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
            if reclaiming.signal.is_of_disk() && !manager.may_be_relieved(&reclaiming, after.as_ref()) {
                // Without the usage of now, the wrong pod could be evicted.
                let Some(usages) = node.disk_usage(&round.snapshot).await else { return BTreeSet::new() };
                let snapshot = Snapshot { usages, ..round.snapshot.clone() };
                round = Arc::new(LastRound { snapshot, scope, manager: manager.clone(), at: round.at });
                published.round.send_replace(Some(Arc::clone(&round)));
            }
            let eviction = manager.after_reclaim(&reclaiming, &round.snapshot, after.as_ref());
            if eviction.is_some() {
                for (signal, at) in reclaiming.observed(&round.snapshot.observations) {
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

async fn wait_for_cleanup(node: &impl NodeControl, pods: &BTreeSet<PodUid>) {
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
mod properties;
#[cfg(test)]
mod tests;
