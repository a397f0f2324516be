//! One round of eviction as decisions; the caller measures, reclaims and evicts
//! (`pkg/kubelet/eviction: synchronize`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pod_sync_node_decisions::admission::PressureCondition;
use quintlet_model::pod;

use crate::layout::{Layout, Reclaim};
use crate::limits;
use crate::message::{EvictionMessage, eviction_message};
use crate::pressure::{Pressure, is_relieved};
use crate::rank::rank;
use crate::signal::{Resource, Signal};
use crate::thresholds::{Threshold, with_container_fs};
use crate::usage::{Candidate, Observations, PodUsages};

/// Grace period of a pod that is evicted at once, in seconds.
const IMMEDIATE_GRACE: i64 = 1;

/// Settings that do not change while the agent runs.
#[derive(Debug, Clone, PartialEq)]
pub struct EvictionSettings {
    /// Thresholds, see [`crate::thresholds::parse`].
    pub thresholds: Vec<Threshold>,
    /// Sharing of the file systems.
    pub layout: Layout,
    /// `evictionPressureTransitionPeriod`.
    pub transition: Duration,
    /// `evictionMaxPodGracePeriod`, in seconds: longest grace period of an eviction for a soft threshold.
    pub max_grace: i64,
    /// `localStorageCapacityIsolation`: pods above their limits of local storage are evicted.
    pub enforces_limits: bool,
    /// InPlacePodVerticalScalingMemoryBackedVolumes: the kernel alone enforces the limits of memory-backed
    /// volumes, which may be changing.
    pub skips_memory_volumes: bool,
}

/// Input of a round: the state of the node and its pods.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Available amount of each signal that could be measured.
    pub observations: Observations,
    /// Usage of the measured pods, by UID.
    pub usages: PodUsages,
    /// Pods that have not terminated, measured or not.
    pub candidates: Vec<Candidate>,
}

/// A pod to evict.
#[derive(Debug, Clone)]
pub struct Eviction {
    /// The pod.
    pub candidate: Candidate,
    /// Longest grace period, in seconds.
    pub grace: i64,
    /// Message of the event and of the status.
    pub message: String,
    /// Annotations of the event.
    pub annotations: BTreeMap<String, String>,
    /// Whether the status gets the condition DisruptionTarget.
    pub is_disruption: bool,
    /// Label of `kubelet_evictions`.
    pub signal: &'static str,
}

/// Resource to reclaim before a pod is evicted.
#[derive(Debug, Clone, PartialEq)]
pub struct Reclaiming {
    /// Thresholds of this round. The first one is reclaimed for.
    thresholds: Vec<Threshold>,
    /// The signal that is reclaimed for.
    pub signal: Signal,
    /// Resources that the node reclaims first, in this order; may be empty.
    pub steps: &'static [Reclaim],
}

impl Reclaiming {
    /// Returns the resource that is reclaimed.
    #[must_use]
    pub fn resource(&self) -> Resource {
        self.signal.resource()
    }

    /// Returns when the signals of this round's thresholds were measured.
    pub fn observed<'a>(
        &self,
        observations: &'a Observations,
    ) -> impl Iterator<Item = (Signal, Duration)> + use<'a> {
        let signals: BTreeSet<_> = self.thresholds.iter().map(|t| t.signal).collect();
        signals.into_iter().filter_map(|signal| Some((signal, observations.get(&signal)?.at)))
    }
}

/// Actions of a round.
#[derive(Debug, Clone)]
pub enum Decision {
    /// No threshold is crossed, or what was reclaimed suffices.
    Nothing,
    /// Evict these pods for their own limits.
    EvictForLimits(Vec<Eviction>),
    /// Reclaim what belongs to the node, measure again, and ask [`EvictionManager::after_reclaim`].
    Reclaim(Reclaiming),
}

/// Decides round by round.
#[derive(Debug, Clone)]
pub struct EvictionManager {
    settings: EvictionSettings,
    pressure: Pressure,
    conditions: BTreeSet<PressureCondition>,
}

impl EvictionManager {
    /// Returns a manager that has seen nothing.
    #[must_use]
    pub fn new(settings: EvictionSettings) -> Self {
        let layout = settings.layout;
        let mut manager = Self { settings, pressure: Pressure::default(), conditions: BTreeSet::new() };
        manager.set_layout(layout);
        manager
    }

    /// Sets the sharing of the file systems, once it is known.
    pub fn set_layout(&mut self, layout: Layout) {
        self.settings.layout = layout;
        self.settings.thresholds = with_container_fs(&self.settings.thresholds, layout);
    }

    /// Returns whether observations cross a threshold, so that a pod may have to be chosen now or after a
    /// grace period.
    #[must_use]
    pub fn is_crossed(&self, observations: &Observations) -> bool {
        !self.pressure.crossed_by(&self.settings.thresholds, observations).is_empty()
    }

    /// Begins a round at `now`, on `CLOCK_BOOTTIME`.
    pub fn decide(&mut self, snapshot: &Snapshot, now: Duration) -> Decision {
        let EvictionSettings { thresholds, transition, .. } = &self.settings;
        let round = self.pressure.observe(thresholds, snapshot.observations.clone(), *transition, now);
        self.conditions = round.conditions;
        if self.settings.enforces_limits {
            let evictions = self.limit_evictions(snapshot);
            if !evictions.is_empty() {
                return Decision::EvictForLimits(evictions);
            }
        }
        let Some(first) = round.reclaim_for.first() else { return Decision::Nothing };
        let (signal, steps) = (first.signal, self.settings.layout.reclaims(first.signal));
        Decision::Reclaim(Reclaiming { thresholds: round.reclaim_for, signal, steps })
    }

    /// Returns the pod to evict after the node's own resources were reclaimed. `after`: the observations
    /// after that, `None` if nothing was to be reclaimed or the node could not be measured.
    #[must_use]
    pub fn after_reclaim(
        &self,
        reclaiming: &Reclaiming,
        snapshot: &Snapshot,
        after: Option<&Observations>,
    ) -> Option<Eviction> {
        if self.may_be_relieved(reclaiming, after) {
            return None;
        }
        let candidate = self.next(reclaiming.signal, snapshot)?;
        let EvictionMessage { text, annotations } = eviction_message(
            reclaiming.resource(),
            &candidate.pod,
            snapshot.usages.get(&candidate.uid),
            &reclaiming.thresholds,
            &snapshot.observations,
        );
        let is_hard = reclaiming.thresholds.first().is_some_and(Threshold::is_hard);
        let own = pod::spec(&candidate.pod).termination_grace_period_seconds;
        let soft = own.map_or(self.settings.max_grace, |own| own.min(self.settings.max_grace));
        Some(Eviction {
            grace: if is_hard { IMMEDIATE_GRACE } else { soft },
            candidate,
            message: text,
            annotations,
            is_disruption: true,
            signal: reclaiming.signal.as_str(),
        })
    }

    /// Returns the pod that is evicted next for a signal: the first in the order of [`rank`] that is not
    /// critical.
    #[must_use]
    pub fn next(&self, signal: Signal, snapshot: &Snapshot) -> Option<Candidate> {
        let mut pods: Vec<_> =
            snapshot.candidates.iter().filter(|c| !pod::is_critical(&c.pod)).cloned().collect();
        rank(&mut pods, &snapshot.usages, signal, self.settings.layout);
        pods.into_iter().next()
    }

    /// Returns whether reclaiming from the node sufficed, or may have sufficed since the node could not be
    /// measured after it. No pod is evicted then. `after`: as in [`Self::after_reclaim`].
    #[must_use]
    pub fn may_be_relieved(&self, reclaiming: &Reclaiming, after: Option<&Observations>) -> bool {
        let is_relieved = |after| is_relieved(&self.settings.thresholds, after);
        !reclaiming.steps.is_empty() && after.is_none_or(is_relieved)
    }

    /// Records at `now` that evicted pods have terminated, or that the wait for them was abandoned.
    pub fn evicted(&mut self, now: Duration) {
        self.pressure.evicted(now);
    }

    /// Returns the conditions of the node that are true.
    #[must_use]
    pub fn conditions(&self) -> &BTreeSet<PressureCondition> {
        &self.conditions
    }

    /// Returns the settings, with the thresholds of writable layers.
    #[must_use]
    pub fn settings(&self) -> &EvictionSettings {
        &self.settings
    }

    /// Returns the thresholds over time.
    #[must_use]
    pub fn pressure(&self) -> &Pressure {
        &self.pressure
    }

    fn limit_evictions(&self, snapshot: &Snapshot) -> Vec<Eviction> {
        let evictable = snapshot.candidates.iter().filter(|c| !pod::is_critical(&c.pod));
        let exceeding = evictable.filter_map(|candidate| {
            let usage = snapshot.usages.get(&candidate.uid)?;
            let EvictionSettings { layout, skips_memory_volumes, .. } = self.settings;
            let limit = limits::exceeded(&candidate.pod, usage, layout, skips_memory_volumes)?;
            Some(Eviction {
                candidate: candidate.clone(),
                grace: IMMEDIATE_GRACE,
                message: limit.message(),
                annotations: BTreeMap::new(),
                is_disruption: false,
                signal: limit.signal(),
            })
        });
        exceeding.collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::support::{MIB, candidate, free, hard, soft};
    use crate::usage::{FileUsage, PodUsage};

    fn settings(thresholds: Vec<Threshold>) -> EvictionSettings {
        EvictionSettings {
            thresholds,
            layout: Layout::Single,
            transition: Duration::from_secs(300),
            max_grace: 20,
            enforces_limits: true,
            skips_memory_volumes: false,
        }
    }

    fn full_disk(now: u64) -> Observations {
        free(Signal::NodeFsAvailable, 5, 1000, Duration::from_secs(now))
    }

    fn reclaiming(decision: Decision) -> Reclaiming {
        match decision {
            Decision::Reclaim(reclaiming) => reclaiming,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_is_evicted_only_if_reclaiming_from_the_node_does_not_suffice() {
        let mut manager = EvictionManager::new(settings(vec![hard(Signal::NodeFsAvailable, 100)]));
        let candidates =
            vec![candidate("critical", json!({ "priority": 2_000_000_000 })), candidate("p", json!({}))];
        let snapshot = Snapshot { observations: full_disk(1), candidates, ..Snapshot::default() };
        let first = reclaiming(manager.decide(&snapshot, Duration::from_secs(1)));
        assert_eq!(first.steps, [Reclaim::DeadContainers, Reclaim::UnusedImages]);
        assert_eq!(first.resource(), Resource::EphemeralStorage);
        let enough = free(Signal::NodeFsAvailable, 100, 1000, Duration::from_secs(2));
        // The same thresholds exist for writable layers, which have no observation here.
        assert!(manager.after_reclaim(&first, &snapshot, Some(&enough)).is_none());
        assert!(manager.after_reclaim(&first, &snapshot, None).is_none(), "it may have sufficed");
        let eviction = manager.after_reclaim(&first, &snapshot, Some(&full_disk(2))).unwrap();
        assert_eq!((eviction.candidate.uid.to_string().as_str(), eviction.grace), ("p", 1));
        assert_eq!((eviction.signal, eviction.is_disruption), ("nodefs.available", true));
    }

    #[test]
    fn no_pod_is_evicted_if_all_are_critical() {
        let mut manager = EvictionManager::new(settings(vec![hard(Signal::MemoryAvailable, 100)]));
        let observations = free(Signal::MemoryAvailable, 5, 1000, Duration::from_secs(1));
        let candidates = vec![candidate("critical", json!({ "priority": 2_000_000_000 }))];
        let snapshot = Snapshot { observations, candidates, ..Snapshot::default() };
        let memory = reclaiming(manager.decide(&snapshot, Duration::from_secs(1)));
        assert!(memory.steps.is_empty());
        assert!(manager.after_reclaim(&memory, &snapshot, None).is_none());
    }

    #[test]
    fn a_soft_threshold_gives_the_pod_the_shorter_grace_period() {
        for (own, want) in [(None, 20), (Some(5), 5), (Some(60), 20)] {
            let threshold = soft(Signal::MemoryAvailable, 100, Duration::from_secs(10));
            let mut manager = EvictionManager::new(settings(vec![threshold]));
            let spec = own.map_or(json!({}), |own| json!({ "terminationGracePeriodSeconds": own }));
            let candidates = vec![candidate("p", spec)];
            for now in [0, 9] {
                let observations = free(Signal::MemoryAvailable, 5, 1000, Duration::from_secs(now));
                let snapshot = Snapshot { observations, ..Snapshot::default() };
                assert!(matches!(manager.decide(&snapshot, Duration::from_secs(now)), Decision::Nothing));
            }
            let observations = free(Signal::MemoryAvailable, 5, 1000, Duration::from_secs(10));
            let snapshot = Snapshot { observations, candidates, ..Snapshot::default() };
            let due = reclaiming(manager.decide(&snapshot, Duration::from_secs(10)));
            assert_eq!(manager.after_reclaim(&due, &snapshot, None).unwrap().grace, want);
        }
    }

    #[test]
    fn pods_above_their_limits_go_before_thresholds_and_several_at_once() {
        let spec = || json!({ "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": "1Mi" } }] });
        let uses = |mib: i64| PodUsage {
            volumes: [("v".to_owned(), FileUsage { bytes: Some(mib * MIB), inodes: None })].into(),
            ..PodUsage::default()
        };
        let mut critical = spec();
        critical["priority"] = json!(2_000_000_000);
        let candidates = vec![
            candidate("a", spec()),
            candidate("b", spec()),
            candidate("fits", spec()),
            candidate("critical", critical),
        ];
        let amounts = [2, 3, 1, 9];
        let usages = candidates.iter().zip(amounts).map(|(c, mib)| (c.uid.clone(), uses(mib))).collect();
        let snapshot = Snapshot { observations: full_disk(1), candidates, usages };
        let thresholds = vec![hard(Signal::NodeFsAvailable, 100)];
        let mut manager = EvictionManager::new(settings(thresholds.clone()));
        let Decision::EvictForLimits(evictions) = manager.decide(&snapshot, Duration::from_secs(1)) else {
            panic!("no eviction for limits")
        };
        let uids: Vec<_> = evictions.iter().map(|e| e.candidate.uid.to_string()).collect();
        assert_eq!(uids, ["a", "b"]);
        assert!(evictions.iter().all(|e| e.grace == 1 && !e.is_disruption && e.signal == "emptydirfs.limit"));
        assert_eq!(manager.conditions().len(), 1, "the condition does not wait");

        let off = EvictionSettings { enforces_limits: false, ..settings(thresholds) };
        let mut manager = EvictionManager::new(off);
        assert!(matches!(manager.decide(&snapshot, Duration::from_secs(1)), Decision::Reclaim(_)));
    }
}
