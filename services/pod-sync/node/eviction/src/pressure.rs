//! Thresholds over time: which are crossed, since when, and which conditions of the node follow
//! (`pkg/kubelet/eviction: synchronize`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pod_sync_node_decisions::admission::PressureCondition;

use crate::thresholds::Threshold;
use crate::usage::{Observation, Observations};

/// Longest usual time from the removal of a container to that of its files. containerd collects them later,
/// and waits up to 50 times as long as its last collection took.
const DISK_RELEASE: Duration = Duration::from_secs(5);

/// Result of one round of observations.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Round {
    /// Conditions of the node that are true.
    pub conditions: BTreeSet<PressureCondition>,
    /// Thresholds for which something must be reclaimed now. The first one decides what.
    pub reclaim_for: Vec<Threshold>,
}

/// The pressure on the node, carried from round to round. Times are on `CLOCK_BOOTTIME`.
#[derive(Debug, Clone, Default)]
pub struct Pressure {
    /// Thresholds that are crossed, and since when.
    crossed: Vec<(Threshold, Duration)>,
    /// Thresholds that are crossed for longer than their grace period.
    reclaiming: Vec<Threshold>,
    /// Conditions that are true, and when a threshold of each was crossed last.
    seen: BTreeMap<PressureCondition, Duration>,
    /// The observations of the last round.
    last: Observations,
    /// Time at which the resources of evicted pods were released.
    evicted: Option<Duration>,
}

impl Pressure {
    /// Evaluates the observations of one round at `now`, on `CLOCK_BOOTTIME`. `transition`: how long a
    /// condition stays true after its last threshold was crossed (`evictionPressureTransitionPeriod`).
    pub fn observe(
        &mut self,
        thresholds: &[Threshold],
        observations: Observations,
        transition: Duration,
        now: Duration,
    ) -> Round {
        let crossed = self.crossed_by(thresholds, &observations);
        let since = |threshold: &Threshold| {
            let known = self.crossed.iter().find(|(t, _)| t.is_same(threshold));
            known.map_or(now, |(_, since)| *since)
        };
        self.crossed = crossed.into_iter().map(|t| (t, since(&t))).collect();
        for (threshold, _) in &self.crossed {
            self.seen.insert(threshold.signal.condition(), now);
        }
        // A crossed threshold sets its condition even with a transition period of zero.
        self.seen.retain(|_, at| *at == now || now.saturating_sub(*at) < transition);
        let is_due =
            |(threshold, since): &&(Threshold, Duration)| now.saturating_sub(*since) >= threshold.grace;
        self.reclaiming = self.crossed.iter().filter(is_due).map(|(threshold, _)| *threshold).collect();
        let mut reclaim_for: Vec<_> =
            self.reclaiming.iter().filter(|t| self.is_new(observations.get(&t.signal), t)).copied().collect();
        reclaim_for.sort_by_key(|t| (t.signal, t.grace));
        self.last = observations;
        Round { conditions: self.seen.keys().copied().collect(), reclaim_for }
    }

    /// Returns the thresholds that observations cross, after those of earlier rounds.
    pub(crate) fn crossed_by(&self, thresholds: &[Threshold], observations: &Observations) -> Vec<Threshold> {
        let mut crossed = crossed(thresholds, observations, false);
        // A reclaim in progress continues until the minimum reclaim is available, too.
        for threshold in crossed_with_reclaim(&self.reclaiming, observations) {
            if !crossed.iter().any(|t| t.is_same(&threshold)) {
                crossed.push(threshold);
            }
        }
        crossed
    }

    // An observation decides once, and only if its measurement began after the last eviction had an effect.
    fn is_new(&self, observation: Option<&Observation>, threshold: &Threshold) -> bool {
        let Some(observation) = observation else { return false };
        let is_later = self.last.get(&threshold.signal).is_none_or(|last| observation.at > last.at);
        let effect = if threshold.signal.is_of_disk() { DISK_RELEASE } else { Duration::ZERO };
        is_later && self.evicted.is_none_or(|evicted| observation.at >= evicted.saturating_add(effect))
    }

    /// Records that the resources of evicted pods were released at `now`, or that the wait was abandoned.
    /// Observations before that evict no further pod; those of a file system none for five seconds more, in
    /// which the runtime removes the files of the pod.
    pub fn evicted(&mut self, now: Duration) {
        self.evicted = Some(now);
    }

    /// Returns the crossed thresholds, and since when.
    #[must_use]
    pub fn crossed(&self) -> &[(Threshold, Duration)] {
        &self.crossed
    }

    /// Returns the conditions that are true, and when a threshold of each was crossed last.
    #[must_use]
    pub fn seen(&self) -> &BTreeMap<PressureCondition, Duration> {
        &self.seen
    }

    /// Returns the observations of the last round.
    #[must_use]
    pub fn observations(&self) -> &Observations {
        &self.last
    }
}

/// Returns whether the observations after node-level reclaim make evictions unnecessary: no threshold is
/// crossed, minimum reclaims included (`reclaimNodeLevelResources`).
#[must_use]
pub(crate) fn is_relieved(thresholds: &[Threshold], observations: &Observations) -> bool {
    crossed_with_reclaim(thresholds, observations).is_empty()
}

fn crossed_with_reclaim(thresholds: &[Threshold], observations: &Observations) -> Vec<Threshold> {
    crossed(thresholds, observations, true)
}

// A signal without an observation crosses nothing.
fn crossed(thresholds: &[Threshold], observations: &Observations, with_reclaim: bool) -> Vec<Threshold> {
    let is_crossed = |threshold: &&Threshold| {
        observations.get(&threshold.signal).is_some_and(|observed| {
            let mut limit = threshold.value.of(observed.capacity);
            if let Some(reclaim) = threshold.minimum_reclaim.filter(|_| with_reclaim) {
                limit = limit + reclaim.of(observed.capacity);
            }
            observed.available < limit
        })
    };
    thresholds.iter().filter(is_crossed).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signal::Signal;
    use crate::support::{MIB, free, hard, soft};

    const TRANSITION: Duration = Duration::from_secs(300);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    struct Node {
        pressure: Pressure,
        thresholds: Vec<Threshold>,
    }

    impl Node {
        fn new(thresholds: Vec<Threshold>) -> Self {
            Self { pressure: Pressure::default(), thresholds }
        }

        // Conditions and signals to reclaim for, with so much memory free.
        fn with(&mut self, seconds: u64, mib: i64) -> (Vec<String>, Vec<Signal>) {
            let observations = free(Signal::MemoryAvailable, mib * MIB, 1024 * MIB, at(seconds));
            let round = self.pressure.observe(&self.thresholds, observations, TRANSITION, at(seconds));
            let conditions = round.conditions.iter().map(|c| c.as_str().to_owned()).collect();
            (conditions, round.reclaim_for.iter().map(|t| t.signal).collect())
        }
    }

    fn pressure() -> Vec<String> {
        vec!["MemoryPressure".to_owned()]
    }

    #[test]
    fn a_hard_threshold_acts_at_once_and_its_condition_stays_for_the_transition_period() {
        let mut node = Node::new(vec![hard(Signal::MemoryAvailable, 100 * MIB)]);
        assert_eq!(node.with(0, 100), (vec![], vec![]), "the threshold itself is enough");
        assert_eq!(node.with(10, 99), (pressure(), vec![Signal::MemoryAvailable]));
        assert_eq!(node.with(20, 500), (pressure(), vec![]));
        assert_eq!(node.with(309, 500), (pressure(), vec![]));
        assert_eq!(node.with(310, 500), (vec![], vec![]));
    }

    #[test]
    fn a_soft_threshold_acts_after_its_grace_period_without_interruption() {
        let mut node = Node::new(vec![soft(Signal::MemoryAvailable, 200 * MIB, at(30))]);
        assert_eq!(node.with(0, 150), (pressure(), vec![]));
        assert_eq!(node.with(29, 150), (pressure(), vec![]));
        assert_eq!(node.with(29, 250), (pressure(), vec![]), "it ends");
        assert_eq!(node.with(30, 150), (pressure(), vec![]), "it begins again");
        assert_eq!(node.with(59, 150), (pressure(), vec![]));
        assert_eq!(node.with(60, 150), (pressure(), vec![Signal::MemoryAvailable]));
    }

    #[test]
    fn a_reclaim_continues_until_the_minimum_reclaim_is_available() {
        let mut node = Node::new(vec![Threshold {
            minimum_reclaim: Some(crate::support::bytes(50 * MIB)),
            ..hard(Signal::MemoryAvailable, 100 * MIB)
        }]);
        assert_eq!(node.with(0, 120), (vec![], vec![]), "it only counts once reclaiming began");
        assert_eq!(node.with(10, 90), (pressure(), vec![Signal::MemoryAvailable]));
        assert_eq!(node.with(20, 149), (pressure(), vec![Signal::MemoryAvailable]));
        assert_eq!(node.with(30, 150), (pressure(), vec![]));
        assert_eq!(node.with(40, 120), (pressure(), vec![]));
    }

    #[test]
    fn an_observation_decides_once_and_only_if_it_is_later_than_the_last_eviction() {
        let mut node = Node::new(vec![hard(Signal::MemoryAvailable, 100 * MIB)]);
        assert_eq!(node.with(10, 50).1, [Signal::MemoryAvailable]);
        let again = free(Signal::MemoryAvailable, 50 * MIB, 1024 * MIB, at(10));
        let round = node.pressure.observe(&node.thresholds, again, TRANSITION, at(20));
        assert_eq!(round.reclaim_for, [], "the same observation");
        node.pressure.evicted(at(30));
        let before = free(Signal::MemoryAvailable, 50 * MIB, 1024 * MIB, at(29));
        let round = node.pressure.observe(&node.thresholds, before, TRANSITION, at(30));
        assert_eq!(round.reclaim_for, [], "observed before the pod was gone");
        assert_eq!(node.with(31, 50).1, [Signal::MemoryAvailable]);
    }

    #[test]
    fn an_observation_of_a_disk_decides_only_if_the_runtime_had_time_to_remove_the_files_of_an_evicted_pod() {
        let thresholds = vec![hard(Signal::ImageFsAvailable, 100)];
        let mut pressure = Pressure::default();
        let decided = |pressure: &mut Pressure, seconds| {
            let full = free(Signal::ImageFsAvailable, 50, 1000, at(seconds));
            pressure.observe(&thresholds, full, TRANSITION, at(seconds)).reclaim_for.len()
        };
        assert_eq!(decided(&mut pressure, 10), 1);
        pressure.evicted(at(12));
        assert_eq!([12, 16, 17].map(|seconds| decided(&mut pressure, seconds)), [0, 0, 1]);
    }

    #[test]
    fn without_an_observation_nothing_is_reclaimed_and_the_condition_runs_out() {
        let mut node = Node::new(vec![hard(Signal::MemoryAvailable, 100 * MIB)]);
        node.with(0, 50);
        let round = node.pressure.observe(&node.thresholds, Observations::new(), TRANSITION, at(10));
        assert_eq!(round.reclaim_for, []);
        assert_eq!(round.conditions.len(), 1);
        let round = node.pressure.observe(&node.thresholds, Observations::new(), TRANSITION, at(300));
        assert_eq!(round, Round::default());
    }

    #[test]
    fn memory_is_reclaimed_before_disks_and_process_ids() {
        let signals = [Signal::PidAvailable, Signal::NodeFsAvailable, Signal::AllocatableMemoryAvailable];
        let thresholds = signals.map(|signal| hard(signal, 100));
        let observed = signals.map(|signal| (signal, free(signal, 50, 1000, at(1))[&signal]));
        let round = Pressure::default().observe(&thresholds, observed.into(), TRANSITION, at(1));
        let order: Vec<_> = round.reclaim_for.iter().map(|t| t.signal).collect();
        assert_eq!(
            order,
            [Signal::AllocatableMemoryAvailable, Signal::NodeFsAvailable, Signal::PidAvailable]
        );
        assert_eq!(round.conditions.len(), 3);
    }

    #[test]
    fn a_condition_shows_while_its_threshold_is_crossed_even_without_a_transition_period() {
        let thresholds = [hard(Signal::MemoryAvailable, 100)];
        let mut pressure = Pressure::default();
        let mut look = |available, now| {
            let observations = free(Signal::MemoryAvailable, available, 1000, now);
            pressure.observe(&thresholds, observations, Duration::ZERO, now).conditions.len()
        };
        assert_eq!([look(50, at(1)), look(50, at(2)), look(100, at(3))], [1, 1, 0]);
    }

    #[test]
    fn node_level_reclaim_suffices_when_no_threshold_is_crossed_any_more() {
        let threshold = Threshold {
            minimum_reclaim: Some(crate::support::bytes(50)),
            ..hard(Signal::NodeFsAvailable, 100)
        };
        for (available, want) in [(100, false), (149, false), (150, true)] {
            let observations = free(Signal::NodeFsAvailable, available, 1000, at(1));
            assert_eq!(is_relieved(&[threshold], &observations), want, "{available}");
        }
        assert!(is_relieved(&[threshold], &Observations::new()), "as the kubelet: no figure, no pod");
    }
}
