//! Properties of eviction under any sequence of observations.

use std::time::Duration;

use pod_sync_node_decisions::admission::PressureCondition;
use proptest::prelude::*;
use serde_json::json;

use crate::layout::Layout;
use crate::manager::{Decision, EvictionManager, EvictionSettings, Snapshot};
use crate::pressure::is_relieved;
use crate::signal::Signal;
use crate::support::{candidate, hard, soft};
use crate::thresholds::Threshold;
use crate::usage::{Candidate, Observation, Observations, PodUsage};

/// Changes of the node in one round.
#[derive(Debug, Clone)]
struct Step {
    /// Time since the round before, in seconds.
    pause: u64,
    /// Whether the statistics are of this round, or those of the round before.
    is_measured: bool,
    /// Available amounts by signal, of 1,000.
    available: Vec<(Signal, i64)>,
    /// Available amounts after the node's own resources were reclaimed.
    after: Option<Vec<(Signal, i64)>>,
    /// Working sets of the pods.
    used: Vec<Option<i64>>,
}

fn amounts() -> impl Strategy<Value = Vec<(Signal, i64)>> {
    let signals =
        [Signal::MemoryAvailable, Signal::NodeFsAvailable, Signal::ImageFsAvailable, Signal::PidAvailable];
    // Below zero and above the capacity are implausible.
    let amount = prop_oneof![4 => 0_i64..300, 1 => -50_i64..1100];
    proptest::sample::subsequence(signals.to_vec(), 0..=4)
        .prop_flat_map(move |signals| {
            let count = signals.len();
            (Just(signals), proptest::collection::vec(amount.clone(), count))
        })
        .prop_map(|(signals, amounts)| signals.into_iter().zip(amounts).collect())
}

fn step() -> impl Strategy<Value = Step> {
    let used = proptest::collection::vec(proptest::option::of(0_i64..1000), 4);
    (1_u64..40, proptest::bool::weighted(0.8), amounts(), proptest::option::of(amounts()), used).prop_map(
        |(pause, is_measured, available, after, used)| Step { pause, is_measured, available, after, used },
    )
}

fn observations(amounts: &[(Signal, i64)], at: Duration) -> Observations {
    amounts
        .iter()
        .filter_map(|(s, available)| Some((*s, Observation::new(*s, *available, 1000, at)?)))
        .collect()
}

fn pods() -> Vec<Candidate> {
    vec![
        candidate("low", json!({ "priority": -5 })),
        candidate("critical", json!({ "priority": 2_000_000_000 })),
        candidate("plain", json!({})),
        candidate("high", json!({ "priority": 1000 })),
    ]
}

fn thresholds() -> Vec<Threshold> {
    vec![
        hard(Signal::MemoryAvailable, 100),
        soft(Signal::MemoryAvailable, 200, Duration::from_secs(30)),
        hard(Signal::NodeFsAvailable, 100),
        hard(Signal::ImageFsAvailable, 150),
        hard(Signal::PidAvailable, 50),
    ]
}

proptest! {
    #[test]
    fn an_observation_evicts_one_pod_at_most_and_never_a_critical_one_or_without_need(
        steps in proptest::collection::vec(step(), 1..40),
        layout in proptest::sample::select(vec![Layout::Single, Layout::SeparateImages, Layout::Split]),
    ) {
        let mut manager = EvictionManager::new(EvictionSettings {
            thresholds: thresholds(),
            layout,
            transition: Duration::from_secs(60),
            max_grace: 0,
            enforces_limits: false,
            skips_memory_volumes: false,
        });
        let mut now = Duration::from_secs(1000);
        let (mut measured_at, mut available) = (now, Vec::new());
        let mut last_crossed = std::collections::BTreeMap::<PressureCondition, Duration>::new();
        // When the observation of the last eviction was made, and when its pod was gone.
        let mut last_eviction: Option<(Duration, Duration)> = None;
        for step in steps {
            now += Duration::from_secs(step.pause);
            if step.is_measured {
                (measured_at, available) = (now, step.available.clone());
            }
            let candidates = pods();
            let usages = candidates.iter().zip(&step.used).filter_map(|(c, used)| {
                Some((c.uid.clone(), PodUsage { working_set: Some((*used)?), ..PodUsage::default() }))
            });
            let observed = observations(&available, measured_at);
            let snapshot = Snapshot { usages: usages.collect(), observations: observed.clone(), candidates };
            let decision = manager.decide(&snapshot, now);
            for (signal, observation) in &observed {
                let crosses = |t: &&Threshold| t.signal == *signal && observation.available < t.value.of(observation.capacity);
                if thresholds().iter().any(|t| crosses(&t)) {
                    last_crossed.insert(signal.condition(), now);
                }
            }
            for (condition, at) in &last_crossed {
                prop_assert_eq!(
                    manager.conditions().contains(condition),
                    now - *at < Duration::from_secs(60) || *at == now,
                    "{:?} at {:?}", condition, now
                );
            }
            let Decision::Reclaim(reclaiming) = decision else { continue };
            prop_assert!(observed.contains_key(&reclaiming.signal), "nothing was observed for {}", reclaiming.signal);
            let after = step.after.as_ref().map(|amounts| observations(amounts, now));
            let Some(eviction) = manager.after_reclaim(&reclaiming, &snapshot, after.as_ref()) else { continue };
            prop_assert_ne!(eviction.candidate.uid.to_string(), "critical");
            if !reclaiming.steps.is_empty() {
                let is_short = |after: &Observations| !is_relieved(&manager.settings().thresholds, after);
                prop_assert!(after.as_ref().is_some_and(is_short), "reclaiming may have sufficed");
            }
            let (measured, gone) = last_eviction.unwrap_or_default();
            prop_assert!(measured_at > measured && measured_at >= gone, "two evictions for one observation");
            manager.evicted(now);
            last_eviction = Some((measured_at, now));
        }
    }
}
