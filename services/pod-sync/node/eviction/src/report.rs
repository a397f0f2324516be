//! Report about the pressure of the node: each signal with its thresholds, and the pod that is evicted next.

use std::time::Duration;

use pod_sync_node_decisions::admission::PressureCondition;

use crate::layout::Reclaim;
use crate::manager::{EvictionManager, Snapshot};
use crate::rank::{RankFacts, facts};
use crate::signal::Signal;
use crate::thresholds::Threshold;
use crate::usage::{Candidate, Observation};

/// The pressure of the node. Times are those of `CLOCK_BOOTTIME`.
#[derive(Debug, Clone)]
pub struct Report {
    /// The three conditions of pressure.
    pub conditions: Vec<ConditionReport>,
    /// All signals, in the order in which they are relieved.
    pub signals: Vec<SignalReport>,
}

/// A condition of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConditionReport {
    /// Type of the condition of the Node.
    pub condition: PressureCondition,
    /// When one of its thresholds was crossed last; `None` for a condition that is false.
    pub last_crossed: Option<Duration>,
    /// When a true condition becomes false if no threshold is crossed again; `None` while one is crossed.
    pub until: Option<Duration>,
}

/// A signal with its thresholds.
#[derive(Debug, Clone)]
pub struct SignalReport {
    /// The measured signal.
    pub signal: Signal,
    /// `None` if it could not be measured.
    pub observation: Option<Observation>,
    /// Configured thresholds of the signal, hard ones and soft ones.
    pub thresholds: Vec<ThresholdReport>,
    /// Resources that the node reclaims before it evicts a pod.
    pub reclaims: &'static [Reclaim],
    /// The pod that is evicted next; `None` if no pod can be evicted.
    pub next: Option<(Candidate, RankFacts)>,
}

/// A threshold over time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ThresholdReport {
    /// The threshold as it is configured.
    pub threshold: Threshold,
    /// Start of the crossing; `None` if the threshold is not crossed.
    pub since: Option<Duration>,
    /// End of the grace period; `None` if the threshold is not crossed.
    pub due: Option<Duration>,
}

impl Report {
    /// Reports the state of `manager` after it decided on `snapshot`.
    #[must_use]
    pub fn of(manager: &EvictionManager, snapshot: &Snapshot) -> Self {
        let all = [PressureCondition::Memory, PressureCondition::Disk, PressureCondition::Pid];
        let conditions = all.into_iter().map(|condition| condition_report(manager, condition)).collect();
        let signals = Signal::ALL.into_iter().map(|signal| signal_report(manager, snapshot, signal));
        Self { conditions, signals: signals.collect() }
    }
}

fn condition_report(manager: &EvictionManager, condition: PressureCondition) -> ConditionReport {
    let last_crossed = manager.pressure().seen().get(&condition).copied();
    let is_crossed = manager.pressure().crossed().iter().any(|(t, _)| t.signal.condition() == condition);
    let end = |at: Duration| at.saturating_add(manager.settings().transition);
    ConditionReport { condition, last_crossed, until: last_crossed.filter(|_| !is_crossed).map(end) }
}

fn signal_report(manager: &EvictionManager, snapshot: &Snapshot, signal: Signal) -> SignalReport {
    let settings = manager.settings();
    let report = |threshold: &Threshold| {
        let crossed = manager.pressure().crossed();
        let since = crossed.iter().find(|(t, _)| t.is_same(threshold)).map(|(_, since)| *since);
        let due = since.map(|since| since.saturating_add(threshold.grace));
        ThresholdReport { threshold: *threshold, since, due }
    };
    let thresholds = settings.thresholds.iter().filter(|t| t.signal == signal).map(report).collect();
    let next = manager.next(signal, snapshot).map(|candidate| {
        let usage = snapshot.usages.get(&candidate.uid);
        let facts = facts(&candidate, usage, signal, settings.layout);
        (candidate, facts)
    });
    SignalReport {
        signal,
        observation: snapshot.observations.get(&signal).copied(),
        thresholds,
        reclaims: settings.layout.reclaims(signal),
        next,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::layout::Layout;
    use crate::manager::EvictionSettings;
    use crate::support::{MIB, candidate, free, hard, soft};
    use crate::usage::PodUsage;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn snapshot(free_mib: i64, now: u64) -> Snapshot {
        let uses = |mib: i64| PodUsage { working_set: Some(mib * MIB), ..PodUsage::default() };
        let resources = json!({ "requests": { "memory": "10Mi" } });
        let spec = json!({ "containers": [{ "name": "c", "resources": resources }], "priority": 7 });
        let candidates = vec![
            candidate("small", json!({})),
            candidate("critical", json!({ "priority": 2_000_000_000 })),
            candidate("large", spec),
        ];
        let usages = candidates.iter().zip([0, 900, 64]).map(|(c, mib)| (c.uid.clone(), uses(mib)));
        let usages = usages.collect();
        let observations = free(Signal::MemoryAvailable, free_mib * MIB, 1024 * MIB, at(now));
        Snapshot { observations, candidates, usages }
    }

    fn manager() -> EvictionManager {
        EvictionManager::new(EvictionSettings {
            thresholds: vec![
                hard(Signal::MemoryAvailable, 100 * MIB),
                soft(Signal::MemoryAvailable, 200 * MIB, at(30)),
                hard(Signal::PidAvailable, 5),
            ],
            layout: Layout::Single,
            transition: at(300),
            max_grace: 0,
            enforces_limits: true,
            skips_memory_volumes: false,
        })
    }

    fn crossings(report: &Report) -> Vec<(Option<Duration>, Option<Duration>)> {
        report.signals[0].thresholds.iter().map(|t| (t.since, t.due)).collect()
    }

    #[test]
    fn a_crossed_threshold_has_its_beginning_and_the_end_of_its_grace_period() {
        let mut manager = manager();
        for (now, free_mib, crossed) in [
            (10, 500, [(None, None), (None, None)]),
            (20, 150, [(None, None), (Some(at(20)), Some(at(50)))]),
            (30, 50, [(Some(at(30)), Some(at(30))), (Some(at(20)), Some(at(50)))]),
            (40, 500, [(None, None), (None, None)]),
        ] {
            let snapshot = snapshot(free_mib, now);
            manager.decide(&snapshot, at(now));
            let report = Report::of(&manager, &snapshot);
            assert_eq!(crossings(&report), crossed, "at {now}");
            let names: Vec<_> = report.signals.iter().map(|s| s.signal).collect();
            assert_eq!(names, Signal::ALL, "also signals that are not measured or have no threshold");
            let pids = &report.signals[8];
            assert_eq!((pids.observation, pids.thresholds.len()), (None, 1));
        }
    }

    #[test]
    fn a_true_condition_ends_a_transition_period_after_the_last_crossing() {
        let mut manager = manager();
        for (now, free_mib, last_crossed, until) in [
            (10, 500, None, None),
            (20, 150, Some(at(20)), None),
            (30, 500, Some(at(20)), Some(at(320))),
            (319, 500, Some(at(20)), Some(at(320))),
            (320, 500, None, None),
        ] {
            let snapshot = snapshot(free_mib, now);
            manager.decide(&snapshot, at(now));
            let memory = Report::of(&manager, &snapshot).conditions[0];
            assert_eq!((memory.last_crossed, memory.until), (last_crossed, until), "at {now}");
        }
    }

    #[test]
    fn the_reported_pod_is_the_one_that_is_evicted() {
        let mut manager = manager();
        let snapshot = snapshot(50, 10);
        let crate::manager::Decision::Reclaim(reclaiming) = manager.decide(&snapshot, at(10)) else {
            panic!("nothing is reclaimed")
        };
        let evicted = manager.after_reclaim(&reclaiming, &snapshot, None).unwrap();
        let report = Report::of(&manager, &snapshot);
        let (next, facts) = report.signals[0].next.clone().unwrap();
        assert_eq!((next.uid.to_string(), &next.uid), ("large".to_owned(), &evicted.candidate.uid));
        assert!(facts.exceeds_request && facts.is_measured);
        assert_eq!(
            (facts.used.to_string(), facts.request.to_string(), facts.priority),
            ("64Mi".into(), "10Mi".into(), 7)
        );
    }
}
